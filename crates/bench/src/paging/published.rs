//! Figures that others published for the same experiment, to stand beside ours.
//!
//! Source: cover letter of the kernel series "Improve scalability of KVM + userfaultfd live
//! migration via annotated memory faults"; the kernel selftest `demand_paging_test`, 64 MiB per
//! vCPU, shmem, MINOR, as many reader threads as vCPUs, on an x86 machine with 256 cores, averages
//! of five runs. Their hardware, their kernel: compare shapes and ratios, not rates.

use pagetide_memory::Backing;
use serde::{Deserialize, Serialize};

use super::plan::{Access, Mode, Order, Plan, Uffds};

/// Where the figures come from, in a sentence.
pub const SOURCE: &str = "cover letter of the kernel series \u{201c}Improve scalability of KVM + \
     userfaultfd live migration via annotated memory faults\u{201d}: demand_paging_test, 64 MiB \
     per vCPU, shmem, MINOR, as many readers as vCPUs, x86 with 256 cores, average of five runs";

/// Published rates at one number of vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedRate {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Blocking on the userfaultfd, thousand pages per second.
    pub uffd_kpages_per_s: u32,
    /// With exits, thousand pages per second.
    pub exit_kpages_per_s: u32,
}

impl PublishedRate {
    /// Exit over uffd.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        f64::from(self.exit_kpages_per_s) / f64::from(self.uffd_kpages_per_s)
    }
}

/// A published table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// Where it was published, and for what hardware and parameters.
    pub source: String,
    /// Whether the rates are for each vCPU (one userfaultfd per vCPU) or for all of them together
    /// (one userfaultfd for all of memory).
    pub per_vcpu: bool,
    /// By number of vCPUs, ascending.
    pub rates: Vec<PublishedRate>,
}

const fn rate(vcpus: u32, uffd_kpages_per_s: u32, exit_kpages_per_s: u32) -> PublishedRate {
    PublishedRate {
        vcpus,
        uffd_kpages_per_s,
        exit_kpages_per_s,
    }
}

/// One userfaultfd for all of memory; all vCPUs together.
const SINGLE: [PublishedRate; 9] = [
    rate(1, 150, 340),
    rate(2, 191, 477),
    rate(4, 210, 809),
    rate(8, 155, 1239),
    rate(16, 130, 1595),
    rate(32, 108, 2299),
    rate(64, 86, 3482),
    rate(128, 62, 4134),
    rate(256, 36, 4012),
];

/// One userfaultfd per vCPU; each vCPU.
const PER_VCPU: [PublishedRate; 9] = [
    rate(1, 180, 307),
    rate(2, 85, 220),
    rate(4, 80, 206),
    rate(8, 39, 163),
    rate(16, 18, 104),
    rate(32, 8, 73),
    rate(64, 4, 57),
    rate(128, 1, 37),
    rate(256, 1, 16),
];

impl Published {
    /// The table that belongs beside a plan: there is one for shmem MINOR with separate ranges,
    /// written in the order of addresses, for each arrangement of userfaultfds. It may have other
    /// numbers of readers, which has to be said beside it.
    #[must_use]
    pub fn beside(plan: &Plan) -> Option<Self> {
        let same = plan.backing == Backing::Shmem
            && plan.mode == Mode::Minor
            && plan.order == Order::Sequential
            && plan.access == Access::Write
            && !plan.overlap
            && !plan.pre_fault;
        if !same {
            return None;
        }
        let (per_vcpu, rates) = match plan.uffds {
            Uffds::Single => (false, SINGLE.to_vec()),
            Uffds::PerVcpu => (true, PER_VCPU.to_vec()),
        };
        Some(Self {
            source: SOURCE.to_owned(),
            per_vcpu,
            rates,
        })
    }

    /// The figures for one number of vCPUs.
    #[must_use]
    pub fn at(&self, vcpus: u32) -> Option<&PublishedRate> {
        self.rates.iter().find(|rate| rate.vcpus == vcpus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_fits_the_plan() {
        let mut plan = Plan::default();
        let single = Published::beside(&plan).unwrap();
        assert!(!single.per_vcpu);
        assert_eq!(single.at(2).unwrap().exit_kpages_per_s, 477);
        assert_eq!(single.at(3), None);
        plan.uffds = Uffds::PerVcpu;
        let per_vcpu = Published::beside(&plan).unwrap();
        assert!(per_vcpu.per_vcpu);
        assert_eq!(per_vcpu.at(8).unwrap().uffd_kpages_per_s, 39);
        assert!((per_vcpu.at(64).unwrap().ratio() - 14.25).abs() < 1e-9);
    }

    #[test]
    fn other_experiments_have_no_published_table() {
        let changes: [fn(&mut Plan); 6] = [
            |plan| plan.order = Order::Random,
            |plan| plan.access = Access::Read,
            |plan| plan.pre_fault = true,
            |plan| plan.backing = Backing::Hugetlb2M,
            |plan| plan.mode = Mode::Missing,
            |plan| plan.overlap = true,
        ];
        for change in changes {
            let mut plan = Plan::default();
            change(&mut plan);
            assert_eq!(Published::beside(&plan), None);
        }
    }

    #[test]
    fn tables_ascend_by_vcpus() {
        for table in [SINGLE, PER_VCPU] {
            assert!(table.is_sorted_by_key(|rate| rate.vcpus));
        }
    }
}
