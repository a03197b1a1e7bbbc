//! How make is called on a kernel tree: the compiler cache, and nothing that differs between runs.

use std::path::Path;

use anyhow::Result;
use fs_err as fs;

use super::{Arch, lock};
use crate::command::{Run, on_path};
use crate::paths::Paths;

/// The directory of a checkout's locks, beside those of its kernel trees.
pub(super) const LOCKS: &str = "locks";

/// ccache's limit: room for about four kernels.
const CCACHE_SIZE: &str = "5G";

/// What is put before a compiler's name to use ccache.
const CACHED_COMPILER: &str = "xtask/src/kernel/cached-compiler.sh";

/// Headers are compared by content; a fresh tree's are all new.
const SLOPPINESS: &str = "include_file_mtime,include_file_ctime,time_macros";

/// Starts a make command in a source tree, building in `output`, a directory directly below it.
///
/// Directly below, because kbuild then calls the source ".." and no path of this machine gets into a
/// compiler's arguments, so that the cache serves every tree.
pub(crate) fn make(paths: &Paths, arch: Arch, tree: &Path, output: &str) -> Run {
    let run = in_directory(tree).arg(format!("O={output}"));
    settings(run, paths, arch, tree)
        // The release string must not say which commits are on top: that would rebuild everything.
        .arg("LOCALVERSION=")
        .words("KBUILD_BUILD_TIMESTAMP=@0 KBUILD_BUILD_USER=pagetide")
        .words("KBUILD_BUILD_HOST=localhost KBUILD_BUILD_VERSION=1")
}

/// Starts a make command for a directory's makefile.
pub(super) fn in_directory(directory: &Path) -> Run {
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // Tests that run meanwhile, in VMs above all, shall not wait for compilers.
    Run::new("nice")
        .words("-n 10 make -C")
        .arg(directory)
        .arg(format!("-j{jobs}"))
}

/// Compiler and cache for any makefile of the tree.
pub(crate) fn settings(run: Run, paths: &Paths, arch: Arch, tree: &Path) -> Run {
    let cross = arch.cross_compile();
    let cached = if on_path("ccache") {
        format!("{} ", paths.in_root(CACHED_COMPILER).display())
    } else {
        String::new()
    };
    run.arg(format!("ARCH={}", arch.name()))
        .arg(format!("CROSS_COMPILE={cross}"))
        .arg(format!("CC={cached}{cross}gcc"))
        .arg(format!("HOSTCC={cached}gcc"))
        .env("CCACHE_DIR", paths.cache().join("ccache"))
        .env("CCACHE_MAXSIZE", CCACHE_SIZE)
        .env("CCACHE_BASEDIR", tree)
        .env("CCACHE_NOHASHDIR", "1")
        // Recognize a file by its headers, which the compiler names. To look at what the preprocessor
        // makes of them as well would cost a third more for each miss, and hits little: the series changes
        // headers that nearly everything includes.
        .env("CCACHE_DEPEND", "1")
        .env("CCACHE_SLOPPINESS", SLOPPINESS)
        .env("LC_ALL", "C")
        // A make that called us must not lend its jobs or its variables.
        .env("MAKEFLAGS", "")
        .env("MAKELEVEL", "0")
}

/// Whether a line of make's output tells of one thing made.
pub(crate) fn is_object(line: &str) -> bool {
    const STEPS: &str = "CC AS LD AR HOSTCC OBJCOPY GEN HDRINST";
    let is_step = |word| STEPS.split(' ').any(|step| step == word);
    line.starts_with("  ") && line.split_whitespace().next().is_some_and(is_step)
}

/// An error if a log has compiler warnings from a place in it on. That a fragment overrides tinyconfig,
/// which kconfig warns of as well, is what it is for.
pub(super) fn no_warnings(log: &Path, from: usize) -> Result<()> {
    let text = fs::read(log)?;
    let text = String::from_utf8_lossy(text.get(from..).unwrap_or_default());
    let warnings: Vec<_> = text
        .lines()
        .filter(|line| line.contains("warning: ") && !line.contains(": override: "))
        .collect();
    anyhow::ensure!(
        warnings.is_empty(),
        "compiler warnings:\n  {}",
        warnings.join("\n  ")
    );
    Ok(())
}

/// Keeps every other user of this checkout off the kernel tree of that name.
pub(crate) fn lock_tree(paths: &Paths, name: &str) -> Result<lock::Lock> {
    lock::take(&paths.work().join(LOCKS).join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_found_from_a_place_on() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let old = "mm/x.c:1:1: warning: unused variable\n";
        let rest = "  CC      mm/y.o\n.config:1:warning: override: reassigning to symbol SMP\n";
        std::fs::write(&log, format!("{old}{rest}")).unwrap();
        let error = no_warnings(&log, 0).unwrap_err().to_string();
        assert!(error.contains("unused variable"), "{error}");
        no_warnings(&log, old.len()).unwrap();
        assert!(no_warnings(&dir.path().join("none"), 0).is_err());
    }

    #[test]
    fn a_file_that_is_included_as_it_is_is_never_an_older_one() {
        if !on_path("ccache") || !on_path("gcc") {
            println!("SKIP: there is no ccache, or no gcc");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::find().unwrap();
        std::fs::write(dir.path().join("a.S"), ".incbin \"included\"\n").unwrap();
        let compile = |content: &str| {
            std::fs::write(dir.path().join("included"), content).unwrap();
            let status = std::process::Command::new(paths.in_root(CACHED_COMPILER))
                .args(["gcc", "-MMD", "-c", "a.S"])
                .current_dir(dir.path())
                .env("CCACHE_DIR", dir.path().join("cache"))
                .env("CCACHE_DEPEND", "1")
                .status();
            assert!(status.unwrap().success());
            std::fs::read(dir.path().join("a.o")).unwrap()
        };
        assert_ne!(compile("one"), compile("two"));
    }

    #[test]
    fn steps_of_kbuild_are_counted() {
        assert!(is_object("  CC      kernel/fork.o"));
        assert!(is_object("  LD      vmlinux.o"));
        assert!(!is_object("make[1]: Entering directory"));
        assert!(!is_object("  CALL    scripts/checksyscalls.sh"));
    }
}
