//! `pagetide bench memcycler`.

use clap::Args;
use pagetide_base::units::ByteSize;
use pagetide_bench::memcycler::Plan;
use pagetide_memory::{Backing, FailurePolicy};

use crate::args::{BACKINGS, POLICIES, one_of};
use crate::measuring::{BenchArguments, ResultArguments};

pub(crate) const EXAMPLES: &str = "\
Examples:
  What this kernel has, and then the comparison with transparent huge pages, as root:
    pagetide probe
    echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled
    pagetide bench memcycler

  A quick look at what an unchanged kernel does:
    pagetide bench memcycler --memory 64M --poison 25 --policy default --seconds 2 --runs 3

  Pages from a pool, which has to be there; a page that had an error does not come back to it:
    echo 512 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages
    pagetide bench memcycler --memory 64M --backing hugetlb-2m --runs 3

Exit status: 0; 1 if a run failed or memory did not hold what it should; 2 if the command line makes \
no sense or this machine lacks something that it asks for.";

/// Everything has a default.
#[derive(Debug, Args)]
pub(crate) struct MemcyclerArguments {
    /// Numbers of vCPUs to measure with, one after the other
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2")]
    vcpus: Vec<u32>,

    /// Memory of all vCPUs together, each of which cycles through an equal part: bytes, or a number
    /// with K, M, G or T (powers of 1024); the parts are multiples of 2M
    #[arg(long, value_name = "SIZE", default_value_t = Plan::default().memory)]
    memory: ByteSize,

    /// What guest memory is made of; each is a series of its own
    ///
    /// thp: a memfd with transparent huge pages, where
    /// /sys/kernel/mm/transparent_hugepage/shmem_enabled allows them. hugetlb-2m, hugetlb-1g:
    /// reserved huge pages.
    #[arg(
        long, value_name = "LIST", value_delimiter = ',', default_value = "thp",
        value_parser = one_of::<Backing>(&BACKINGS),
    )]
    backing: Vec<Backing>,

    /// How many percent of the memory's 2M pieces get an error, in 4 KiB of each; 0, which the others
    /// are compared with, is always measured. More than 0 needs root
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "0,5,25"
    )]
    poison: Vec<u32>,

    /// What the kernel does at an error
    ///
    /// keep: it takes the 4 KiB and leaves the rest mapped as it is; needs a kernel with
    /// MFD_MF_KEEP_UE_MAPPED. default: what Linux does, which takes a whole hugetlb page, or splits a
    /// transparent one. [default: keep,default, without keep where the kernel lacks it]
    #[arg(
        long, value_name = "LIST", value_delimiter = ',',
        value_parser = one_of::<FailurePolicy>(POLICIES),
    )]
    policy: Option<Vec<FailurePolicy>>,

    /// How long a run is measured for, after the errors, in seconds; in the lab's instruction timing
    /// a second is 10^9 instructions
    #[arg(long, value_name = "N", default_value_t = Plan::default().seconds)]
    seconds: u32,

    /// Measured rounds, after one that warms up; a round is one run of each series at each number
    /// of vCPUs
    #[arg(long, value_name = "N", default_value_t = Plan::default().runs)]
    runs: u32,

    #[command(flatten)]
    result: ResultArguments,
}

impl BenchArguments for MemcyclerArguments {
    type Plan = Plan;

    fn plan(&self) -> Plan {
        Plan {
            vcpus: self.vcpus.clone(),
            memory: self.memory,
            backings: self.backing.clone(),
            poison_percent: self.poison.clone(),
            policies: self.policy.clone().unwrap_or(Plan::default().policies),
            seconds: self.seconds,
            runs: self.runs,
        }
    }

    fn methods_asked(&self) -> bool {
        self.policy.is_some()
    }

    fn result(&self) -> &ResultArguments {
        &self.result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measuring::tests::{assert_understood, plan};

    #[test]
    fn nothing_given_is_the_default_plan() {
        assert_eq!(plan::<MemcyclerArguments>([]), Plan::default());
    }

    #[test]
    fn the_reports_command_line_is_understood() {
        assert_understood::<MemcyclerArguments>(&Plan {
            vcpus: vec![1, 4],
            memory: ByteSize(320 << 20),
            backings: vec![Backing::Hugetlb2M, Backing::Thp],
            poison_percent: vec![50, 1],
            policies: vec![FailurePolicy::KernelDefault],
            seconds: 2,
            runs: 3,
        });
    }
}
