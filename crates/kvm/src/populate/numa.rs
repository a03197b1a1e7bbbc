//! Where memory is, and which CPUs are near it.
//!
//! A page table entry is written from the CPU that populates, and the entry's table is allocated on
//! that CPU's node. So on machines with several nodes a worker runs on the node of the pages that
//! it maps. With one node, or where the kernel does not say, nothing is done.

use std::collections::BTreeMap;
use std::fs;
use std::ptr;

use pagetide_memory::HostAddress;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const NODES: &str = "/sys/devices/system/node";

/// The nodes of this machine that have CPUs which this thread may use. Empty where there is nothing
/// to choose.
#[derive(Clone, Debug, Default)]
pub(super) struct Nodes(BTreeMap<u32, Vec<usize>>);

impl Nodes {
    /// Asks the system.
    pub(super) fn here() -> Self {
        let Ok(allowed) = sched_getaffinity(None) else {
            return Self::default();
        };
        let list = |file: &str| {
            let text = fs::read_to_string(format!("{NODES}/{file}")).unwrap_or_default();
            parse_list(&text)
        };
        let nodes = list("online").into_iter().filter_map(|node| {
            let mut cpus = list(&format!("node{node}/cpulist"));
            cpus.retain(|cpu| *cpu < CpuSet::MAX_CPU && allowed.is_set(*cpu));
            Some((u32::try_from(node).ok()?, cpus))
        });
        Self::of(nodes.collect())
    }

    fn of(mut nodes: BTreeMap<u32, Vec<usize>>) -> Self {
        nodes.retain(|_, cpus| !cpus.is_empty());
        if nodes.len() < 2 {
            nodes.clear();
        }
        Self(nodes)
    }

    /// Whether there is nothing to choose.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A node for the `index`th worker to begin with.
    pub(super) fn home(&self, index: usize) -> Option<u32> {
        let count = self.0.len().max(1);
        self.0.keys().nth(index % count).copied()
    }

    /// Keeps the calling thread on the CPUs of `node`. What cannot be done is left: it would only be
    /// faster.
    pub(super) fn stay_on(&self, node: u32) {
        let Some(cpus) = self.0.get(&node) else {
            return;
        };
        let mut set = CpuSet::new();
        for cpu in cpus {
            set.set(*cpu);
        }
        let _ = sched_setaffinity(None, &set);
    }

    /// The node that the page at `address` of this process is on; None if there is no page, or
    /// nothing to choose.
    pub(super) fn of_page(&self, address: HostAddress) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        let page = ptr::without_provenance_mut::<libc::c_void>(address.0);
        let mut status: libc::c_int = -1;
        // SAFETY: with no nodes given, move_pages moves nothing and says where pages are. It reads
        // one address, which it does not follow, and writes one status, both of which are here.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                1_usize,
                &raw const page,
                ptr::null::<libc::c_int>(),
                &raw mut status,
                0,
            )
        };
        // A page that is not there has a negative errno for a node.
        (result == 0).then(|| u32::try_from(status).ok()).flatten()
    }
}

/// The numbers of a list as the kernel writes it: `0-3,8`.
fn parse_list(text: &str) -> Vec<usize> {
    let parts = text.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        // A list that makes no sense must not cost more than it is worth.
        (first <= last && last < CpuSet::MAX_CPU).then_some(first..=last)
    });
    parts.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        assert_eq!(parse_list("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(parse_list("5\n"), [5]);
        for nothing in ["", "\n", "x", "3-1", "0-99999999999"] {
            assert!(parse_list(nothing).is_empty(), "{nothing}");
        }
    }

    #[test]
    fn one_node_is_nothing_to_choose() {
        let one = Nodes::of([(0, vec![0, 1])].into());
        assert!(one.is_empty() && one.home(3).is_none());
        // A node of memory only has no CPUs.
        assert!(Nodes::of([(0, vec![0]), (1, vec![])].into()).is_empty());
    }

    #[test]
    fn workers_begin_on_all_nodes() {
        let two = Nodes::of([(0, vec![0]), (2, vec![1])].into());
        let homes: Vec<_> = (0..4).map(|index| two.home(index).unwrap()).collect();
        assert_eq!(homes, [0, 2, 0, 2]);
    }

    #[test]
    fn a_page_of_this_process_is_on_some_node() {
        let two = Nodes::of([(0, vec![0]), (1, vec![0])].into());
        let page = Box::new([1_u8; 8192]);
        let address = HostAddress((&raw const page[4096]).addr());
        // None only where the kernel knows no nodes.
        assert!(two.of_page(address).is_none_or(|node| node < 1024));
        assert_eq!(two.of_page(HostAddress(0)), None);
        assert_eq!(Nodes::default().of_page(address), None);
    }
}
