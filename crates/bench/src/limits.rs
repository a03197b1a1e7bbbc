//! What this process may use of the machine: file descriptors and memory.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open files as far as this process may, and returns what it is then; `None`
/// if there is none.
pub fn raise_descriptors() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        // What is too little is told by whoever compares.
        Err(_) => limit.current,
    }
}

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

    #[test]
    fn the_limit_of_descriptors_is_the_hard_one() {
        let most = raise_descriptors();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!((most, limit.current), (limit.maximum, limit.maximum));
    }
}
