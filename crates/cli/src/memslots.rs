//! `pagetide bench memslots`.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use pagetide_bench::memslots::{Guest, Method, Op, Plan};

use crate::args::one_of;
use crate::measuring::{BenchArguments, ResultArguments};

pub(crate) const EXAMPLES: &str = "\
Examples:
  What this kernel has, and then the whole comparison:
    pagetide probe
    pagetide bench memslots

  A quick look at splitting a slot, and at the 86 updates of a boot:
    pagetide bench memslots --vcpus 1,4 --ops split,boot --runs 3

  Stop the vCPUs, or show the hole; any kernel does both:
    pagetide bench memslots --method quiesce,delete-create

Exit status: 0; 1 if a run failed, memory did not hold what it should, or list or quiesce let a guest \
see a hole; 2 if the command line makes no sense or this machine lacks something that it asks for.";

/// Everything has a default.
#[derive(Debug, Args)]
pub(crate) struct MemslotsArguments {
    /// Numbers of vCPUs to measure with, one after the other
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,4,8,16"
    )]
    vcpus: Vec<u32>,

    /// What is changed
    ///
    /// split: one slot becomes two. merge: two become one. resize: a slot becomes smaller or larger.
    /// flags: dirty logging is switched on or off. boot: 86 updates as a PC's firmware and operating
    /// system make them while it boots.
    #[arg(
        long, value_name = "LIST", value_delimiter = ',',
        default_value = "split,merge,resize,flags,boot", value_parser = one_of::<Op>(Op::NAMES),
    )]
    ops: Vec<Op>,

    /// How it is changed
    ///
    /// list: one ioctl for all slots while vCPUs run; needs a kernel with
    /// KVM_CAP_SET_USER_MEMORY_REGION_LIST. quiesce: every vCPU is stopped outside KVM_RUN, slots
    /// are deleted and created, vCPUs go on. delete-create (or plain): slots are deleted and created while vCPUs run,
    /// which shows guests a hole. [default: list,quiesce,delete-create, without list where the kernel
    /// lacks it]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = method())]
    method: Option<Vec<Method>>,

    /// What the guest does: touch: it reads and writes the memory whose slots change; spin: it only
    /// reads the clock
    #[arg(long, value_name = "WHAT", default_value_t = Plan::default().guest, value_parser = one_of::<Guest>(Guest::NAMES))]
    guest: Guest,

    /// Measured commits of a run, some milliseconds apart; boot makes whole traces of 86
    #[arg(long, value_name = "N", default_value_t = Plan::default().commits)]
    commits: u32,

    /// Measured rounds, after one that warms up; a round is one run of each change by each method,
    /// and one without commits, at each number of vCPUs
    #[arg(long, value_name = "N", default_value_t = Plan::default().runs)]
    runs: u32,

    #[command(flatten)]
    result: ResultArguments,
}

/// Takes a method by its name; `plain` is what earlier versions called `delete-create`.
fn method() -> impl TypedValueParser<Value = Method> {
    let names = Method::NAMES.iter().map(|name| match *name {
        "delete-create" => PossibleValue::new("delete-create").alias("plain"),
        name => PossibleValue::new(name),
    });
    PossibleValuesParser::new(names).try_map(|name| match name.as_str() {
        "plain" => Ok(Method::DeleteCreate),
        name => name.parse(),
    })
}

impl BenchArguments for MemslotsArguments {
    type Plan = Plan;

    fn plan(&self) -> Plan {
        Plan {
            vcpus: self.vcpus.clone(),
            ops: self.ops.clone(),
            methods: self.method.clone().unwrap_or(Plan::default().methods),
            guest: self.guest,
            commits: self.commits,
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
        assert_eq!(plan::<MemslotsArguments>([]), Plan::default());
    }

    #[test]
    fn the_former_name_of_a_method_is_understood() {
        let given = plan::<MemslotsArguments>(["--method", "plain,list"]);
        assert_eq!(given.methods, [Method::DeleteCreate, Method::List]);
        let given = plan::<MemslotsArguments>(["--method", "delete-create,list"]);
        assert_eq!(given.methods, [Method::DeleteCreate, Method::List]);
    }

    #[test]
    fn the_reports_command_line_is_understood() {
        assert_understood::<MemslotsArguments>(&Plan {
            vcpus: vec![2, 5],
            ops: vec![Op::Boot, Op::Flags],
            methods: vec![Method::DeleteCreate, Method::Quiesce],
            guest: Guest::Spin,
            commits: 7,
            runs: 3,
        });
    }
}
