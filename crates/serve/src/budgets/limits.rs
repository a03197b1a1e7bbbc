//! What there is to take, and how much of it one user may have.

use std::fmt;
use std::fs::read_to_string;
use std::path::Path;

use rustix::process::{Resource as Limited, getrlimit};

/// What a client takes of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    Connections,
    Threads,
    Descriptors,
    Mappings,
    Regions,
    /// Of its memory: a byte in a page map for each.
    Pages,
    /// Of its messages that are held: until they are complete, and page maps of a predecessor until its VM is served.
    Bytes,
    /// Messages whose descriptors are being closed, by a process each. Not in [`Amounts`]: a client that has left does not end
    /// them.
    Closings,
}

impl Resource {
    pub(super) const ALL: [Self; 7] = [
        Self::Connections,
        Self::Threads,
        Self::Descriptors,
        Self::Mappings,
        Self::Regions,
        Self::Pages,
        Self::Bytes,
    ];

    /// What an operator whose VMs need more can do.
    pub(super) fn remedy(self) -> &'static str {
        match self {
            Self::Connections => "raise --max-vms-per-user",
            Self::Threads => "raise the server's limit of processes (ulimit -u, TasksMax=)",
            Self::Descriptors => {
                "raise the server's limit of descriptors (ulimit -n, LimitNOFILE=)"
            }
            Self::Mappings => "raise the sysctl vm.max_map_count",
            Self::Bytes => "attach fewer VMs at a time",
            Self::Closings => "they end with the file systems whose files were sent",
            Self::Regions | Self::Pages => "serve some of the VMs by another server",
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connections => "connections",
            Self::Threads => "threads",
            Self::Descriptors => "descriptors",
            Self::Mappings => "mappings",
            Self::Regions => "regions",
            Self::Pages => "pages of memory",
            Self::Bytes => "bytes of messages and page maps",
            Self::Closings => {
                "messages with descriptors that are no userfaultfds and not closed yet"
            }
        })
    }
}

/// An amount of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amounts([u64; Resource::ALL.len()]);

impl Amounts {
    pub(super) const NONE: Self = Self([0; Resource::ALL.len()]);

    pub(super) const fn with(mut self, resource: Resource, amount: u64) -> Self {
        // Each resource has its place: no index is out of bounds.
        #[allow(
            clippy::indexing_slicing,
            reason = "a constant function; as many as there are"
        )]
        {
            self.0[resource as usize] = amount;
        }
        self
    }

    /// With so much more of one.
    pub(super) fn and(self, resource: Resource, amount: u64) -> Self {
        self.plus(&Self::NONE.with(resource, amount))
    }

    pub(crate) fn of(&self, resource: Resource) -> u64 {
        self.0.get(resource as usize).copied().unwrap_or(0)
    }

    pub(super) fn plus(&self, other: &Self) -> Self {
        self.each(other, u64::saturating_add)
    }

    pub(super) fn minus(&self, other: &Self) -> Self {
        self.each(other, u64::saturating_sub)
    }

    fn each(&self, other: &Self, of: impl Fn(u64, u64) -> u64) -> Self {
        let mut all = *self;
        for (mine, theirs) in all.0.iter_mut().zip(other.0) {
            *mine = of(*mine, theirs);
        }
        all
    }
}

/// How much the clients of one user may take together, beside connections ([`crate::Options::max_vms_per_user`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserLimits {
    /// Threads.
    pub threads: u64,
    /// Descriptors.
    pub descriptors: u64,
    /// Mappings.
    pub mappings: u64,
    /// Regions of VMs: each takes some 10 KiB.
    pub regions: u64,
    /// Pages of VMs' memory: each takes a byte once it was touched.
    pub pages: u64,
    /// Bytes of messages that are not complete, and of page maps of predecessors until their VMs are served, decoded.
    pub bytes: u64,
}

impl UserLimits {
    /// All but an eighth of what this process may have.
    #[must_use]
    pub fn of_this_process() -> Self {
        let most_of = |limit: u64| limit - limit / 8;
        let allowed = |resource| getrlimit(resource).current.unwrap_or(u64::MAX);
        let setting = |name: &str| number(Path::new("/proc/sys").join(name).as_path());
        // The kernel's default where it does not say.
        let mappings = setting("vm/max_map_count").unwrap_or(65_530);
        let threads = [
            Some(allowed(Limited::Nproc)),
            setting("kernel/threads-max"),
            tasks_of_group(),
        ];
        Self {
            threads: most_of(threads.into_iter().flatten().min().unwrap_or(u64::MAX)),
            descriptors: most_of(allowed(Limited::Nofile)),
            mappings: most_of(mappings),
            ..Self::default()
        }
    }

    /// `None` for what has its limit elsewhere.
    pub(super) fn of(&self, resource: Resource) -> Option<u64> {
        Some(match resource {
            Resource::Connections | Resource::Closings => return None,
            Resource::Threads => self.threads,
            Resource::Descriptors => self.descriptors,
            Resource::Mappings => self.mappings,
            Resource::Regions => self.regions,
            Resource::Pages => self.pages,
            Resource::Bytes => self.bytes,
        })
    }
}

impl Default for UserLimits {
    /// What does not depend on the process: 32 768 regions, 2^32 pages (16 TiB of small ones), and 512 MiB.
    fn default() -> Self {
        Self {
            threads: u64::MAX,
            descriptors: u64::MAX,
            mappings: u64::MAX,
            regions: 32_768,
            pages: 1 << 32,
            bytes: 512 << 20,
        }
    }
}

fn number(path: &Path) -> Option<u64> {
    read_to_string(path).ok()?.trim().parse().ok()
}

/// The most tasks of this process's control group (version 2), or of one above it.
fn tasks_of_group() -> Option<u64> {
    let groups = read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let limits = Path::new(path).ancestors().map(|group| {
        let directory = Path::new("/sys/fs/cgroup").join(group);
        number(&directory.join("pids.max"))
    });
    limits.flatten().min()
}
