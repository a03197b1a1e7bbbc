//! NUMA nodes of memory and of CPUs.
//!
//! The CPU that populates writes the page table entries, and the kernel allocates page tables on that
//! CPU's node. On machines with several nodes, a worker therefore runs on the node of the pages that it
//! maps. With one node, or where the kernel reports none, this module does nothing.

use std::collections::BTreeMap;
use std::fs;
use std::ptr;

use pagetide_memory::HostAddress;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const NODES: &str = "/sys/devices/system/node";

/// This machine's nodes with CPUs that this thread may use. Empty if there are fewer than two.
#[derive(Clone, Debug, Default)]
pub(super) struct Nodes(BTreeMap<u32, Vec<usize>>);

impl Nodes {
    /// Reads the nodes from sysfs.
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

    /// Whether there are fewer than two nodes.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The node on which the worker with number `index` begins.
    pub(super) fn home(&self, index: usize) -> Option<u32> {
        let count = self.0.len().max(1);
        self.0.keys().nth(index % count).copied()
    }

    /// Restricts the calling thread to the CPUs of `node`. A failure is ignored, because it only costs
    /// speed.
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

    /// The node of the page at `address` of this process; None if there is no page, or fewer than two
    /// nodes.
    pub(super) fn of_page(&self, address: HostAddress) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        let page = ptr::without_provenance_mut::<libc::c_void>(address.0);
        let mut status: libc::c_int = -1;
        // SAFETY: without target nodes, move_pages moves nothing and reports the pages' nodes. It reads
        // one address, which it does not dereference, and writes one status; both are local variables.
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
        // For an absent page the status is a negative errno.
        (result == 0).then(|| u32::try_from(status).ok()).flatten()
    }
}

/// Parses the kernel's list format: `0-3,8`.
fn parse_list(text: &str) -> Vec<usize> {
    let parts = text.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        // Bounds the size of the result for invalid lists.
        (first <= last && last < CpuSet::MAX_CPU).then_some(first..=last)
    });
    parts.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_parsed() {
        assert_eq!(parse_list("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(parse_list("5\n"), [5]);
        for nothing in ["", "\n", "x", "3-1", "0-99999999999"] {
            assert!(parse_list(nothing).is_empty(), "{nothing}");
        }
    }

    #[test]
    fn one_node_needs_no_choice() {
        let one = Nodes::of([(0, vec![0, 1])].into());
        assert!(one.is_empty() && one.home(3).is_none());
        // A node with memory but without CPUs does not count.
        assert!(Nodes::of([(0, vec![0]), (1, vec![])].into()).is_empty());
    }

    #[test]
    fn workers_begin_on_all_nodes() {
        let two = Nodes::of([(0, vec![0]), (2, vec![1])].into());
        let homes: Vec<_> = (0..4).map(|index| two.home(index).unwrap()).collect();
        assert_eq!(homes, [0, 2, 0, 2]);
    }

    #[test]
    fn a_page_of_this_process_has_a_node() {
        let two = Nodes::of([(0, vec![0]), (1, vec![0])].into());
        let page = Box::new([1_u8; 8192]);
        let address = HostAddress((&raw const page[4096]).addr());
        // None only where the kernel has no NUMA support.
        assert!(two.of_page(address).is_none_or(|node| node < 1024));
        assert_eq!(two.of_page(HostAddress(0)), None);
        assert_eq!(Nodes::default().of_page(address), None);
    }
}
