//! Names for addresses: of the kernel, of pagetide, and of what has none.

use std::path::Path;

use anyhow::{Context, Result};

use crate::command::Run;

/// Where Linux loads a position-independent program without address randomisation (`norandmaps`).
const PROGRAM: u64 = 0x5555_5555_4000;
/// Libraries and the vDSO are above this then, and below the kernel's half.
const LIBRARIES: std::ops::Range<u64> = 0x7fff_0000_0000..0x8000_0000_0000;
/// The testbed's guest: see crates/testbed/src/layout.rs.
const GUEST: std::ops::Range<u64> = 0x1000..0x5000;
const KERNEL: u64 = 0xffff_8000_0000_0000;

/// The functions of one program, by address.
#[derive(Debug, Default)]
struct Functions {
    /// Sorted.
    starts: Vec<(u64, String)>,
}

impl Functions {
    /// Reads what nm printed: `address type name`, name to the end of the line.
    fn parse(text: &str) -> Self {
        let mut starts: Vec<_> = text.lines().filter_map(function).collect();
        starts.sort();
        Self { starts }
    }

    fn name(&self, address: u64) -> Option<&str> {
        let behind = self.starts.partition_point(|(start, _)| *start <= address);
        let (_, name) = self.starts.get(behind.checked_sub(1)?)?;
        Some(name)
    }
}

fn function(line: &str) -> Option<(u64, String)> {
    let mut words = line.splitn(3, ' ');
    let start = u64::from_str_radix(words.next()?, 16).ok()?;
    let code = matches!(words.next()?, "t" | "T" | "w" | "W" | "i");
    let name = words.next()?.trim();
    // The assembler's names of jump targets inside a function.
    let inner = name.starts_with(".L") || name == "_stext" || name == "_text";
    (code && !inner).then(|| (start, name.to_owned()))
}

/// All names.
#[derive(Debug, Default)]
pub(super) struct Symbols {
    kernel: Functions,
    program: Functions,
}

impl Symbols {
    /// Has nm list the functions of the kernel and of pagetide.
    pub(super) fn load(vmlinux: &Path, pagetide: &Path) -> Result<Self> {
        let nm = |file: &Path| {
            let text = Run::new("nm").args(["--demangle"]).arg(file).text();
            let functions = Functions::parse(&text?);
            (!functions.starts.is_empty())
                .then_some(functions)
                .with_context(|| format!("{} has no symbols", file.display()))
        };
        Ok(Self {
            kernel: nm(vmlinux)?,
            program: nm(pagetide)?,
        })
    }

    /// What the code at `address` is called: a kernel function by its name, without what the compiler
    /// appended; a function of pagetide as `user:NAME`; else a word in brackets.
    pub(super) fn name(&self, address: u64) -> String {
        if address >= KERNEL {
            let name = self.kernel.name(address).unwrap_or("[kernel]");
            return plain(name).to_owned();
        }
        if LIBRARIES.contains(&address) {
            return "[libraries]".to_owned();
        }
        if GUEST.contains(&address) {
            return "[guest]".to_owned();
        }
        let name = address
            .checked_sub(PROGRAM)
            .and_then(|offset| self.program.name(offset));
        name.map_or_else(|| "[userspace]".to_owned(), |name| format!("user:{name}"))
    }
}

/// `name` without the compiler's `.isra.0`, `.constprop.0`, `.part.0` and `.cold`.
fn plain(name: &str) -> &str {
    match name.find('.') {
        Some(dot) if dot > 0 => &name[..dot],
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols() -> Symbols {
        let kernel = "ffffffff81000010 T first\nffffffff81000020 t second.isra.0\n\
                      ffffffff81000028 d data\n                 U nothing\n";
        let program = "0000000000001000 t <a::B as c::D>::run\n0000000000001100 t main\n";
        Symbols {
            kernel: Functions::parse(kernel),
            program: Functions::parse(program),
        }
    }

    #[test]
    fn a_block_belongs_to_the_function_that_begins_before_it() {
        let symbols = symbols();
        for (address, name) in [
            (0xffff_ffff_8100_0000, "[kernel]"),
            (0xffff_ffff_8100_0010, "first"),
            (0xffff_ffff_8100_001f, "first"),
            (0xffff_ffff_8100_0030, "second"),
            (PROGRAM + 0x10ff, "user:<a::B as c::D>::run"),
            (PROGRAM + 0x1100, "user:main"),
            (0x40_0000, "[userspace]"),
            (0x1200, "[guest]"),
            (0x7fff_f7e0_0000, "[libraries]"),
        ] {
            assert_eq!(symbols.name(address), name, "{address:x}");
        }
    }
}
