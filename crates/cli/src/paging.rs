//! `pagetide bench paging`.

use clap::Args;
use pagetide_base::units::ByteSize;
use pagetide_bench::paging::{Access, Delivery, Mode, Order, Plan, Uffds};
use pagetide_memory::Backing;

use crate::args::{BACKINGS, one_of};
use crate::measuring::{BenchArguments, ResultArguments};

pub(crate) const EXAMPLES: &str = "\
Examples:
  What this kernel has, and then the whole comparison:
    pagetide probe
    pagetide bench paging --delivery none,uffd,exit --fault-around 1,16

  On an unchanged kernel, which has no exits:
    pagetide bench paging --delivery uffd

  A quick look:
    pagetide bench paging --vcpus 1,2 --per-vcpu 16M --runs 3

  Pages from reserved 2M huge pages, one userfaultfd per vCPU, random order:
    pagetide bench paging --backing hugetlb-2m --per-vcpu 1G --uffds per-vcpu --order random

Exit status: 0; 1 if a run failed or memory did not hold what it should; 2 if the command line makes \
no sense or this machine lacks something that it asks for.";

/// Everything has a default; a plain `pagetide bench paging` is the published experiment.
#[derive(Debug, Args)]
pub(crate) struct PagingArguments {
    /// Numbers of vCPUs to measure with, one after the other
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,4,8"
    )]
    vcpus: Vec<u32>,

    /// Memory of each vCPU: bytes, or a number with K, M, G or T (powers of 1024); a multiple of
    /// the backing's page size
    #[arg(long, value_name = "SIZE", default_value_t = Plan::default().per_vcpu)]
    per_vcpu: ByteSize,

    /// How faults are delivered; each is a series of the result
    ///
    /// none: there are none, the memory is present and only stage-2 tables are filled (the
    /// floor). uffd: as userfaultfd messages to reader threads. exit: as exits from KVM_RUN to the
    /// vCPU's own thread; needs a kernel with KVM_CAP_ABSENT_MAPPING_FAULT.
    #[arg(
        long, value_name = "LIST", value_delimiter = ',', default_value = "uffd,exit",
        value_parser = one_of::<Delivery>(Delivery::NAMES),
    )]
    delivery: Vec<Delivery>,

    /// Pages that one exit makes present: an aligned block around the fault; a power of two. Each
    /// value is a series of its own
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1")]
    fault_around: Vec<u32>,

    /// What guest memory is made of
    ///
    /// shmem: a memfd of 4K pages. thp: the same with transparent huge pages, where
    /// /sys/kernel/mm/transparent_hugepage/shmem_enabled allows them. hugetlb-2m, hugetlb-1g:
    /// reserved huge pages. anonymous: private memory, --mode missing only.
    #[arg(
        long, value_name = "KIND", default_value_t = Plan::default().backing,
        value_parser = one_of::<Backing>(&BACKINGS),
    )]
    backing: Backing,

    /// What is absent at first: minor: the mapping, the content is in the page cache; missing: the
    /// page itself
    #[arg(
        long, default_value_t = Plan::default().mode, value_parser = one_of::<Mode>(Mode::NAMES),
    )]
    mode: Mode,

    /// One userfaultfd for all of memory, or one for each vCPU's part
    #[arg(
        long, value_name = "WHICH", default_value_t = Plan::default().uffds,
        value_parser = one_of::<Uffds>(Uffds::NAMES),
    )]
    uffds: Uffds,

    /// Threads that read the userfaultfds [default: as many as vCPUs]
    #[arg(long, value_name = "N")]
    readers: Option<u32>,

    /// Let every vCPU touch all of memory instead of its own part, so that they meet
    #[arg(long)]
    overlap: bool,

    /// The order in which a vCPU touches its pages
    #[arg(
        long, default_value_t = Plan::default().order, value_parser = one_of::<Order>(Order::NAMES),
    )]
    order: Order,

    /// What a touch is
    #[arg(
        long, value_name = "KIND", default_value_t = Plan::default().access,
        value_parser = one_of::<Access>(Access::NAMES),
    )]
    access: Access,

    /// After each install by exit, fill the stage-2 tables for it (KVM_PRE_FAULT_MEMORY), so
    /// that the pages around a fault cost none of their own
    #[arg(long)]
    pre_fault: bool,

    /// Measure each --fault-around above 1 twice: as it is, and with the vCPU's thread mapping what it
    /// installed in the stage-2 tables before the guest goes on (KVM_POPULATE_MEMORY)
    #[arg(long)]
    populate: bool,

    /// Measured rounds, after one that warms up; a round is one run of each series at each number
    /// of vCPUs
    #[arg(long, value_name = "N", default_value_t = Plan::default().runs)]
    runs: u32,

    /// Pin each vCPU's thread to a host CPU, in turn
    #[arg(long)]
    pin: bool,

    #[command(flatten)]
    result: ResultArguments,
}

impl BenchArguments for PagingArguments {
    type Plan = Plan;

    fn plan(&self) -> Plan {
        Plan {
            vcpus: self.vcpus.clone(),
            per_vcpu: self.per_vcpu,
            deliveries: self.delivery.clone(),
            fault_around: self.fault_around.clone(),
            backing: self.backing,
            mode: self.mode,
            uffds: self.uffds,
            readers: self.readers,
            overlap: self.overlap,
            order: self.order,
            access: self.access,
            pre_fault: self.pre_fault,
            populate: self.populate,
            runs: self.runs,
            pin: self.pin,
        }
    }
    fn result(&self) -> &ResultArguments {
        &self.result
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Arguments;
    use crate::measuring::tests::{assert_understood, plan};

    #[test]
    fn nothing_given_is_the_default_plan() {
        assert_eq!(plan::<PagingArguments>([]), Plan::default());
    }

    #[test]
    fn everything_given_arrives() {
        let given = plan::<PagingArguments>([
            "--vcpus",
            "1,3",
            "--per-vcpu",
            "16M",
            "--delivery",
            "exit,none",
            "--fault-around",
            "1,16",
            "--backing",
            "hugetlb-2m",
            "--mode",
            "missing",
            "--uffds",
            "per-vcpu",
            "--readers",
            "5",
            "--overlap",
            "--order",
            "random",
            "--access",
            "read",
            "--pre-fault",
            "--populate",
            "--runs",
            "9",
            "--pin",
        ]);
        let wanted = Plan {
            vcpus: vec![1, 3],
            per_vcpu: ByteSize(16 << 20),
            deliveries: vec![Delivery::Exit, Delivery::None],
            fault_around: vec![1, 16],
            backing: Backing::Hugetlb2M,
            mode: Mode::Missing,
            uffds: Uffds::PerVcpu,
            readers: Some(5),
            overlap: true,
            order: Order::Random,
            access: Access::Read,
            pre_fault: true,
            populate: true,
            runs: 9,
            pin: true,
        };
        assert_eq!(given, wanted);
    }

    #[test]
    fn the_reports_command_line_is_understood() {
        assert_understood::<PagingArguments>(&Plan {
            readers: Some(3),
            pin: true,
            vcpus: vec![2, 5],
            ..Plan::default()
        });
    }

    #[test]
    fn help_names_every_option_with_its_default() {
        let mut command = Arguments::command();
        let bench = command.find_subcommand_mut("bench").unwrap();
        let help = bench
            .find_subcommand_mut("paging")
            .unwrap()
            .render_long_help()
            .to_string();
        for wanted in [
            "[default: 1,2,4,8]",
            "[default: 64M]",
            "[default: uffd,exit]",
            "hugetlb-1g",
            "[default: as many as vCPUs]",
            "--pre-fault",
            "Examples:",
            "Exit status:",
        ] {
            assert!(help.contains(wanted), "{wanted} in\n{help}");
        }
    }
}
