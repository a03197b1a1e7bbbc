//! `pagetide bench populate`.

use clap::Args;
use pagetide_base::units::ByteSize;
use pagetide_bench::populate::{Method, Plan};
use pagetide_memory::Backing;

use crate::args::{BACKINGS, one_of};
use crate::measuring::{BenchArguments, ResultArguments};

pub(crate) const EXAMPLES: &str = "\
Examples:
  What this kernel has, and then the whole comparison:
    pagetide probe
    pagetide bench populate

  A quick look:
    pagetide bench populate --vcpus 1,2 --memory 64M --runs 3

  Huge pages as well, which have to be there:
    echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled
    echo 128 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages
    pagetide bench populate --backing shmem,thp,hugetlb-2m

Exit status: 0; 1 if a run failed or memory did not hold what it should; 2 if the command line makes \
no sense or this machine lacks something that it asks for.";

/// Everything has a default.
#[derive(Debug, Args)]
pub(crate) struct PopulateArguments {
    /// Numbers of vCPUs to measure with, one after the other
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,4,8"
    )]
    vcpus: Vec<u32>,

    /// Memory of all vCPUs together, each of which writes to an equal part: bytes, or a number with
    /// K, M, G or T (powers of 1024); the parts are multiples of the backing's page size
    #[arg(long, value_name = "SIZE", default_value_t = Plan::default().memory)]
    memory: ByteSize,

    /// What guest memory is made of; each is a series of its own
    ///
    /// shmem: a memfd of 4K pages. thp: the same with transparent huge pages, where
    /// /sys/kernel/mm/transparent_hugepage/shmem_enabled allows them. hugetlb-2m, hugetlb-1g:
    /// reserved huge pages.
    #[arg(
        long, value_name = "LIST", value_delimiter = ',', default_value = "shmem",
        value_parser = one_of::<Backing>(&BACKINGS),
    )]
    backing: Vec<Backing>,

    /// What fills the stage-2 tables before all vCPUs write to all memory
    ///
    /// none: nothing, each vCPU faults. pre-fault: KVM_PRE_FAULT_MEMORY on idle vCPUs, each on a
    /// thread of its own. populate: KVM_POPULATE_MEMORY; needs a kernel with
    /// KVM_CAP_POPULATE_MEMORY. one-reader: one vCPU reads everything first. prefetch: nothing, and
    /// a pager's prefetch installs the memory while the vCPUs write. prefetch-populate: the same,
    /// and each page is mapped as it is installed. [default: all of them, without what the kernel
    /// lacks]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = one_of::<Method>(Method::NAMES))]
    method: Option<Vec<Method>>,

    /// Threads that fill them (pre-fault, populate); each number is a series of its own
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2"
    )]
    threads: Vec<u32>,

    /// Measured rounds, after one that warms up; a round is one run of each series at each number
    /// of vCPUs
    #[arg(long, value_name = "N", default_value_t = Plan::default().runs)]
    runs: u32,

    #[command(flatten)]
    result: ResultArguments,
}

impl BenchArguments for PopulateArguments {
    type Plan = Plan;

    fn plan(&self) -> Plan {
        Plan {
            vcpus: self.vcpus.clone(),
            memory: self.memory,
            backings: self.backing.clone(),
            methods: self.method.clone().unwrap_or(Plan::default().methods),
            threads: self.threads.clone(),
            runs: self.runs,
        }
    }
    fn methods_asked(&self) -> bool {
        self.method.is_some()
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
        assert_eq!(plan::<PopulateArguments>([]), Plan::default());
    }

    #[test]
    fn the_reports_command_line_is_understood() {
        assert_understood::<PopulateArguments>(&Plan {
            vcpus: vec![2, 5],
            memory: ByteSize(320 << 20),
            backings: vec![Backing::Thp, Backing::Hugetlb2M],
            methods: vec![Method::OneReader, Method::PreFault],
            threads: vec![4],
            runs: 3,
        });
    }
}
