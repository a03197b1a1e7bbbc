//! Which function belongs to which group: groups.txt, read and applied.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};

/// The group of what no pattern matches.
pub(super) const OTHER: &str = "other";

/// The table of groups.
#[derive(Debug)]
pub(super) struct Groups {
    names: Vec<String>,
    exact: HashMap<String, usize>,
    /// Longest first: the more a pattern says, the earlier it is asked.
    globs: Vec<(String, usize)>,
}

impl Groups {
    /// The repository's table.
    pub(super) fn ours() -> Result<Self> {
        Self::parse(include_str!("groups.txt")).context("xtask/src/profile/groups.txt")
    }

    /// Reads a table: `[group]`, then patterns, which `*` makes globs; `#` begins a comment line.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (mut names, mut exact, mut globs) = (Vec::<String>::new(), HashMap::new(), Vec::new());
        for (number, line) in (1u32..).zip(text.lines().map(str::trim)) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let header = line.strip_prefix("[group ");
            if let Some(name) = header.and_then(|rest| rest.strip_suffix(']')) {
                if name == OTHER || names.iter().any(|known| known == name) {
                    bail!("line {number}: a second group {name:?}");
                }
                names.push(name.to_owned());
                continue;
            }
            let group = names
                .len()
                .checked_sub(1)
                .with_context(|| format!("line {number}: a pattern without a group"))?;
            // A demangled name may have spaces: one such pattern a line.
            let patterns: Vec<_> = if line.starts_with("user:") {
                vec![line]
            } else {
                line.split_whitespace().collect()
            };
            for pattern in patterns {
                if pattern.contains('*') {
                    globs.push((pattern.to_owned(), group));
                } else if exact.insert(pattern.to_owned(), group).is_some() {
                    bail!("line {number}: {pattern:?} is in the table twice");
                }
            }
        }
        globs.sort_by_key(|(pattern, _)| std::cmp::Reverse(pattern.len()));
        Ok(Self {
            names,
            exact,
            globs,
        })
    }

    /// The groups, in the table's order.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// The group of a function: an exact name before a glob, a longer glob before a shorter one.
    pub(super) fn group(&self, function: &str) -> &str {
        let found = self.exact.get(function).or_else(|| {
            let mut globs = self.globs.iter();
            globs
                .find(|(glob, _)| matches(glob, function))
                .map(|(_, group)| group)
        });
        found.map_or(OTHER, |&group| &self.names[group])
    }
}

/// Whether a glob, in which `*` is any text, matches all of `name`.
fn matches(glob: &str, name: &str) -> bool {
    let Some((first, rest)) = glob.split_once('*') else {
        return glob == name;
    };
    let Some(mut left) = name.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<_> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_exact_pattern_decides() {
        let table = "[group KVM]\nkvm_*\n# a comment\n[group MMU]\nkvm_mmu_* kvm_tdp*fault\n\
                     [group locks]\nkvm_lock\n[group crate]\nuser:*<a::B as c>::*\n";
        let groups = Groups::parse(table).unwrap();
        for (name, group) in [
            ("kvm_run", "KVM"),
            ("kvm_mmu_load", "MMU"),
            ("kvm_tdp_page_fault", "MMU"),
            ("kvm_tdp_page", "KVM"),
            ("kvm_lock", "locks"),
            ("my_kvm_lock", OTHER),
            ("user:<a::B as c>::d", "crate"),
        ] {
            assert_eq!(groups.group(name), group, "{name}");
        }
    }

    #[test]
    fn a_table_that_contradicts_itself_is_refused() {
        for table in [
            "lonely\n",
            "[group a]\n[group a]\n",
            "[group other]\n",
            "[group a]\nx\n[group b]\nx\n",
        ] {
            assert!(Groups::parse(table).is_err(), "{table:?}");
        }
    }

    #[test]
    fn globs_match_whole_names() {
        assert!(matches("a*b*c", "a12b3c"));
        assert!(matches("*", ""));
        assert!(!matches("a*b", "ab1"));
        assert!(!matches("ab*b", "ab"));
    }

    #[test]
    fn our_table_is_read() {
        assert!(Groups::ours().unwrap().names().len() > 10);
    }
}
