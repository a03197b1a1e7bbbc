//! How much of the memory this process may use.

use std::fs;
use std::path::Path;

/// The bytes of memory that this process's control group, and those around it, allow
/// (`memory.max`, cgroup v2); `None` if they set no limit.
pub(crate) fn group_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    least(Path::new("/sys/fs/cgroup"), v2_group(&groups)?)
}

/// The group's path below the hierarchy's root: the line `0::PATH`.
fn v2_group(groups: &str) -> Option<&Path> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new(path))
}

/// The smallest `memory.max` on the way up from `group`.
fn least(root: &Path, group: &Path) -> Option<u64> {
    let limit = |group: &Path| {
        let text = fs::read_to_string(root.join(group).join("memory.max")).ok()?;
        // "max" is no number, and no limit.
        text.trim().parse::<u64>().ok()
    };
    group.ancestors().filter_map(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_on_the_way_up_counts() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("machine/job");
        fs::create_dir_all(&inner).unwrap();
        let group = v2_group("4:memory:/elsewhere\n0::/machine/job\n").unwrap();
        assert_eq!(least(root.path(), group), None);
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        assert_eq!(least(root.path(), group), None);
        fs::write(root.path().join("machine/memory.max"), "4096\n").unwrap();
        assert_eq!(least(root.path(), group), Some(4096));
        fs::write(inner.join("memory.max"), "8192\n").unwrap();
        assert_eq!(least(root.path(), group), Some(4096));
        // In a namespace of its own, a group is the root, and has its limit there.
        fs::write(root.path().join("memory.max"), "1024\n").unwrap();
        assert_eq!(least(root.path(), v2_group("0::/\n").unwrap()), Some(1024));
        assert_eq!(v2_group("4:memory:/elsewhere\n"), None);
    }
}
