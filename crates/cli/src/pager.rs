//! `pagetide bench pager`.

use clap::Args;
use pagetide_base::units::ByteSize;
use pagetide_bench::pager::{Cache, Order, Part, Plan};

use crate::args::one_of;
use crate::measuring::{BenchArguments, ResultArguments};

pub(crate) const EXAMPLES: &str = "\
Examples:
  The whole comparison, with its file on a disk:
    TMPDIR=/var/tmp pagetide bench pager

  A quick look at faults and fills:
    pagetide bench pager --part random,fill --memory 64M --runs 3

  Sixteen threads, and readers to share their faults:
    pagetide bench pager --part random --threads 1,4,16 --readers 1,2

Exit status: 0; 1 if a run failed or memory did not hold what it should; 2 if the command line makes \
no sense or this machine lacks something that it asks for.";

/// Everything has a default.
#[derive(Debug, Args)]
pub(crate) struct PagerArguments {
    /// What is measured
    ///
    /// random: faults of threads that touch one page each time. around: faults of one thread that walks
    /// upwards, with fault-around, by UFFDIO_COPY and by UFFDIO_CONTINUE. fill: the time to install all
    /// of memory. reader: a thread that reads all of memory in random order meanwhile. replay: a
    /// workload whose touches were recorded and are fetched ahead. image: faults on one page of each chunk
    /// of a compressed image. unpack: the time to install all of it.
    #[arg(
        long, value_name = "LIST", value_delimiter = ',',
        default_value = "random,around,fill,reader,replay,image,unpack",
        value_parser = one_of::<Part>(Part::NAMES),
    )]
    part: Vec<Part>,

    /// Numbers of threads that fault (random), one after the other; the other parts have one
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,8"
    )]
    threads: Vec<u32>,

    /// The file, and the memory that is filled from it: bytes, or a number with K, M, G or T (powers of
    /// 1024), a multiple of 1M. Faults of one page each are measured in at most 64M of it. The file is
    /// written to the directory for temporary files (TMPDIR)
    #[arg(long, value_name = "SIZE", default_value_t = Plan::default().memory)]
    memory: ByteSize,

    /// In which order pages are touched (random)
    #[arg(
        long, value_name = "LIST", value_delimiter = ',', default_value = "random",
        value_parser = one_of::<Order>(Order::NAMES),
    )]
    order: Vec<Order>,

    /// Threads that resolve faults (random; the server has one); each number is a series of its own
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1")]
    readers: Vec<u32>,

    /// Pages that one fault installs (around); each number is a series of its own
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,64"
    )]
    around: Vec<u32>,

    /// Whether the file is in the page cache (replay) [default: both, if the file system can drop it]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = one_of::<Cache>(Cache::NAMES))]
    cache: Option<Vec<Cache>>,

    /// Measured rounds, after one that warms up; a round is one run of each series
    #[arg(long, value_name = "N", default_value_t = Plan::default().runs)]
    runs: u32,

    #[command(flatten)]
    result: ResultArguments,
}

impl BenchArguments for PagerArguments {
    type Plan = Plan;

    fn plan(&self) -> Plan {
        Plan {
            parts: self.part.clone(),
            threads: self.threads.clone(),
            memory: self.memory,
            orders: self.order.clone(),
            readers: self.readers.clone(),
            around: self.around.clone(),
            caches: self.cache.clone().unwrap_or(Plan::default().caches),
            runs: self.runs,
        }
    }

    fn methods_asked(&self) -> bool {
        self.cache.is_some()
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
        assert_eq!(plan::<PagerArguments>([]), Plan::default());
    }

    #[test]
    fn the_reports_command_line_is_understood() {
        assert_understood::<PagerArguments>(&Plan {
            parts: vec![Part::Random, Part::Replay],
            threads: vec![1, 16],
            memory: ByteSize(64 << 20),
            orders: vec![Order::Sequential, Order::Random],
            readers: vec![2],
            around: vec![16],
            caches: vec![Cache::Cold],
            runs: 3,
        });
    }
}
