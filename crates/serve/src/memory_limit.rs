//! How much more memory a process may get: the limits of its control groups.
//!
//! The kernel charges a page to the process in whose memory it is installed. At the limit of the process's group it kills
//! the process, so that pages which nobody has touched could end a VM.

use std::fs::read_to_string;
use std::path::{Component, Path, PathBuf};

/// Where the kernel's file systems usually are.
const GROUPS: &str = "/sys/fs/cgroup";

/// A control group with a limit of memory, of one of the kernel's two versions.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    limit: PathBuf,
    usage: PathBuf,
    stat: PathBuf,
    /// The field of `stat` with the pages of files that the kernel drops before it kills.
    droppable: &'static str,
}

/// The control groups of a process, from its own to the root.
#[derive(Debug, Default)]
pub(crate) struct MemoryLimit {
    groups: Vec<Group>,
}

impl MemoryLimit {
    /// The limit of a process; none if its groups are not to be seen.
    pub(crate) fn of(pid: i32) -> Self {
        let path = format!("/proc/{pid}/cgroup");
        match read_to_string(path) {
            Ok(text) => Self::parse(&text, Path::new(GROUPS)),
            Err(_) => Self::default(),
        }
    }

    /// The limit of a process whose groups are these lines of `/proc/PID/cgroup`.
    fn parse(text: &str, root: &Path) -> Self {
        let mut groups = Vec::new();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let Some(path) = inside(path) else {
                continue;
            };
            let is_of_memory = controllers.split(',').any(|name| name == "memory");
            match controllers {
                // With version 1 beside it, version 2 is below a directory of its own, and has no memory.
                "" => add(&mut groups, root, path, second),
                _ if is_of_memory => add(&mut groups, &root.join("memory"), path, first),
                _ => {}
            }
        }
        Self { groups }
    }

    /// The bytes that the process may get until a limit is reached; `None` without a limit.
    pub(crate) fn room(&self) -> Option<u64> {
        self.groups.iter().filter_map(Group::room).min()
    }
}

/// A group's path below the root of its file system; `None` if it is outside of what this process sees.
fn inside(path: &str) -> Option<&Path> {
    let path = Path::new(path.strip_prefix('/')?);
    let is_plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    path.components().all(is_plain).then_some(path)
}

/// Adds a group and all above it.
fn add(groups: &mut Vec<Group>, root: &Path, path: &Path, of: fn(&Path) -> Group) {
    groups.extend(path.ancestors().map(|path| of(&root.join(path))));
}

/// A group of version 1.
fn first(directory: &Path) -> Group {
    Group {
        limit: directory.join("memory.limit_in_bytes"),
        usage: directory.join("memory.usage_in_bytes"),
        stat: directory.join("memory.stat"),
        droppable: "total_inactive_file",
    }
}

/// A group of version 2.
fn second(directory: &Path) -> Group {
    Group {
        limit: directory.join("memory.max"),
        usage: directory.join("memory.current"),
        stat: directory.join("memory.stat"),
        droppable: "inactive_file",
    }
}

impl Group {
    fn room(&self) -> Option<u64> {
        let number = |path: &Path| read_to_string(path).ok()?.trim().parse::<u64>().ok();
        // "max", or a number that no machine has, is no limit.
        let limit = number(&self.limit).filter(|&limit| limit < 1 << 60)?;
        let used = number(&self.usage)?.saturating_sub(self.droppable());
        Some(limit.saturating_sub(used))
    }

    fn droppable(&self) -> u64 {
        let text = read_to_string(&self.stat).unwrap_or_default();
        let mut fields = text.lines().filter_map(|line| line.split_once(' '));
        let field = fields.find(|(name, _)| *name == self.droppable);
        field
            .and_then(|(_, bytes)| bytes.trim().parse().ok())
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups of a process: a directory, its limit, its usage, and what can be dropped of that.
    fn room(lines: &str, files: &[(&str, &str, u64, u64)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (directory, limit, used, droppable) in files {
            let directory = root.path().join(directory);
            std::fs::create_dir_all(&directory).unwrap();
            for group in [first(&directory), second(&directory)] {
                std::fs::write(&group.limit, limit).unwrap();
                std::fs::write(&group.usage, format!("{used}\n")).unwrap();
            }
            let stat =
                format!("cache 7\ninactive_file {droppable}\ntotal_inactive_file {droppable}\n");
            std::fs::write(directory.join("memory.stat"), stat).unwrap();
        }
        MemoryLimit::parse(lines, root.path()).room()
    }

    #[test]
    fn the_narrowest_group_counts() {
        let version_2 = "0::/vms/vm-1\n";
        assert_eq!(room(version_2, &[("vms/vm-1", "max\n", 5, 0)]), None);
        let groups = [("vms/vm-1", "1000\n", 600, 100), ("vms", "900\n", 850, 0)];
        assert_eq!(room(version_2, &groups[..1]), Some(500));
        assert_eq!(room(version_2, &groups), Some(50));
        assert_eq!(room(version_2, &[("", "10\n", 20, 0)]), Some(0));
        let version_1 = "9:cpu,memory:/vm\n4:pids:/other\n0::/\n";
        let groups = [
            ("memory/vm", "1000\n", 600, 0),
            ("memory", "9223372036854771712\n", 9, 0),
        ];
        assert_eq!(room(version_1, &groups), Some(400));
    }

    #[test]
    fn what_is_not_to_be_seen_is_no_limit() {
        let groups = [("vm", "1000\n", 600, 0)];
        for lines in [
            "",
            "0::/../vm",
            "0::vm",
            "nonsense",
            "3:pids:/vm",
            "0::/none",
        ] {
            assert_eq!(room(lines, &groups), None, "{lines}");
        }
        assert_eq!(room("0::/vm", &[("vm", "many\n", 600, 0)]), None);
        assert_eq!(MemoryLimit::of(-1).room(), None);
    }
}
