//! What a benchmark of the pager is asked to do, and whether that makes sense.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::machines::Machines;
use super::view;
use crate::benchmark::Benchmark;
use crate::model::{Column, Comparison, Quantity};
use crate::options::{PlanError, check_list, check_runs, list, named};
use crate::prepare::PrepareError;
use crate::timing::Timing;
use crate::units::ByteSize;

/// Most threads that fault, and most readers.
pub const MAX_THREADS: u32 = 16;
/// Largest fault-around, in pages.
const MAX_AROUND: u32 = 512;
/// Bytes of the smallest page.
pub(super) const PAGE: u64 = 4096;
/// Least memory: a part of it is touched by up to 16 threads.
const LEAST_MEMORY: ByteSize = ByteSize(1 << 20);

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Faults of threads that touch one page each time.
    Random,
    /// Faults of one thread that walks upwards, with fault-around.
    Around,
    /// The time to install all of memory.
    Fill,
    /// A thread that reads all of memory in random order while it is being installed.
    Reader,
    /// A recorded workload, with its working set replayed.
    Replay,
    /// Faults on one page of each chunk of a compressed image.
    Image,
    /// The time to install all of a compressed image.
    Unpack,
}

/// What resolves faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// A loop that reads a userfaultfd and installs from a mapping of the file.
    Raw,
    /// The engine, with the file as its source.
    Engine,
    /// The whole server, over its socket.
    Server,
    /// The whole server, which replays a working set.
    Replay,
    /// The same for a clone by the native protocol: warm, another clone has brought the image into memory.
    Clone,
    /// The kernel: a private mapping of the file.
    Map,
}

/// How pages are installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// UFFDIO_COPY into anonymous memory.
    Copy,
    /// UFFDIO_CONTINUE of a memfd's page cache.
    Continue,
}

/// The order in which pages are touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// The same permutation in every run.
    Random,
    /// Upwards.
    Sequential,
}

/// Whether the file is in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// All of it.
    Warm,
    /// Nothing of it.
    Cold,
}

named! {
    Part {
        Random => "random",
        Around => "around",
        Fill => "fill",
        Reader => "reader",
        Replay => "replay",
        Image => "image",
        Unpack => "unpack",
    }
    Way {
        Raw => "raw",
        Engine => "engine",
        Server => "server",
        Replay => "replay",
        Clone => "clone",
        Map => "map",
    }
    Via { Copy => "copy", Continue => "continue" }
    Order { Random => "random", Sequential => "sequential" }
    Cache { Warm => "warm", Cold => "cold" }
}

/// One line of the result. What means nothing to its part is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Series {
    /// What is measured.
    pub part: Part,
    /// In which order pages are touched.
    pub order: Option<Order>,
    /// How pages are installed.
    pub via: Option<Via>,
    /// How many pages a fault installs.
    pub around: Option<u32>,
    /// Whether the file is in the page cache.
    pub cache: Option<Cache>,
    /// What resolves faults.
    pub way: Way,
    /// By how many threads, where that can be chosen.
    pub readers: Option<u32>,
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = match (self.part, self.order) {
            (Part::Random, Some(order)) => order.to_string(),
            (part, _) => part.to_string(),
        };
        let mut add = |word: Option<String>| {
            if let Some(word) = word {
                text.push(' ');
                text.push_str(&word);
            }
        };
        add(self.around.map(|pages| pages.to_string()));
        add(self.via.map(|via| via.to_string()));
        add(self.cache.map(|cache| cache.to_string()));
        add(Some(format!("\u{2013} {}", self.way)));
        let several = self.readers.filter(|&readers| readers > 1);
        add(several.map(|readers| format!("({readers} readers)")));
        f.pad(&text)
    }
}

/// A benchmark of the pager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What is measured.
    pub parts: Vec<Part>,
    /// Numbers of threads that fault, in the part `random`; one thread faults in the others.
    pub threads: Vec<u32>,
    /// The file, and the memory that is filled from it.
    #[serde(rename = "memory_bytes")]
    pub memory: ByteSize,
    /// In which order pages are touched, in the part `random`.
    pub orders: Vec<Order>,
    /// Threads that resolve faults, in the part `random`.
    pub readers: Vec<u32>,
    /// Pages that a fault installs, in the part `around`.
    pub around: Vec<u32>,
    /// Whether the file is in the page cache, in the part `replay`.
    pub caches: Vec<Cache>,
    /// Measured rounds, after one that warms up.
    pub runs: u32,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            parts: vec![
                Part::Random,
                Part::Around,
                Part::Fill,
                Part::Reader,
                Part::Replay,
                Part::Image,
                Part::Unpack,
            ],
            threads: vec![1, 8],
            memory: ByteSize(512 << 20),
            orders: vec![Order::Random],
            readers: vec![1],
            around: vec![1, 64],
            caches: vec![Cache::Warm, Cache::Cold],
            runs: 7,
        }
    }
}

impl Plan {
    /// The series of one part.
    fn series_of(&self, part: Part) -> Vec<Series> {
        let one = |way| Series {
            part,
            order: None,
            via: None,
            around: None,
            cache: None,
            way,
            readers: None,
        };
        let three = [Way::Raw, Way::Engine, Way::Server].map(one);
        let two = [Way::Raw, Way::Engine].map(one);
        let mut all = Vec::new();
        match part {
            Part::Random => {
                for &order in &self.orders {
                    let order = Some(order);
                    for &readers in &self.readers {
                        let readers = Some(readers);
                        all.extend(two.map(|one| Series {
                            order,
                            readers,
                            ..one
                        }));
                    }
                    // The server has one reader for each VM.
                    all.push(Series {
                        order,
                        ..one(Way::Server)
                    });
                }
            }
            Part::Around => {
                for via in [Via::Copy, Via::Continue] {
                    for &pages in &self.around {
                        let (via, around) = (Some(via), Some(pages));
                        all.extend(two.map(|one| Series { via, around, ..one }));
                    }
                }
            }
            Part::Fill | Part::Reader => all.extend(three),
            Part::Image | Part::Unpack => all.push(one(Way::Server)),
            Part::Replay => {
                for &cache in &self.caches {
                    let ways = [Way::Map, Way::Server, Way::Replay, Way::Clone].map(one);
                    let cache = Some(cache);
                    all.extend(ways.map(|one| Series { cache, ..one }));
                }
            }
        }
        all
    }
}

impl Benchmark for Plan {
    type Series = Series;
    type Machines = Machines;

    const NAME: &'static str = "pager";
    const QUANTITIES: &'static [Quantity] = &[
        view::ELAPSED,
        view::PAGES,
        view::FAULTS,
        view::P50,
        view::P99,
        view::P999,
    ];
    const COLUMNS: &'static [Column] = &[
        view::TIME,
        view::RATE,
        view::MEDIAN_LATENCY,
        view::FAULT_COUNT,
    ];
    const COMPARISONS: &'static [Comparison<Series>] = &[
        view::LATENCY_OF_RAW,
        view::RATE_OVER_RAW,
        view::TIME_OF_RAW,
        view::FAULTS_OF_NO_REPLAY,
        view::SPEED_OVER_NO_REPLAY,
        view::TIME_OF_MAP,
    ];
    const TIME: Option<Quantity> = Some(view::ELAPSED);

    fn vcpus(&self) -> &[u32] {
        &self.threads
    }

    fn series(&self) -> Vec<Series> {
        let parts = self.parts.iter();
        parts.flat_map(|&part| self.series_of(part)).collect()
    }

    fn is_measured(&self, threads: u32, series: Series) -> bool {
        threads == 1 || series.part == Part::Random
    }

    fn runs(&self) -> u32 {
        self.runs
    }

    fn command(&self) -> String {
        let mut command = format!(
            "pagetide bench pager --part {} --threads {} --memory {} --order {} --readers {} \
             --around {} --runs {}",
            list(&self.parts),
            list(&self.threads),
            self.memory,
            list(&self.orders),
            list(&self.readers),
            list(&self.around),
            self.runs
        );
        if !self.caches.is_empty() {
            command.push_str(&format!(" --cache {}", list(&self.caches)));
        }
        command
    }

    fn check(&self) -> Result<(), PlanError> {
        check_list("--part", "random,fill", &self.parts)?;
        check_list("--threads", "1,8", &self.threads)?;
        check_list("--order", "random,sequential", &self.orders)?;
        check_list("--readers", "1,2", &self.readers)?;
        check_list("--around", "1,64", &self.around)?;
        check_list("--cache", "warm,cold", &self.caches)?;
        for (option, numbers) in [("--threads", &self.threads), ("--readers", &self.readers)] {
            let mut numbers = numbers.iter();
            if let Some(bad) = numbers.find(|number| !(1..=MAX_THREADS).contains(*number)) {
                let why = format!("1 to {MAX_THREADS} threads can be measured");
                return Err(PlanError::refused(format!("{option} {bad}"), why));
            }
        }
        let others = self.parts.iter().any(|&part| part != Part::Random);
        if others && !self.threads.contains(&1) {
            let why = "only the part random has several threads; add 1, or choose --part random";
            let threads = list(&self.threads);
            return Err(PlanError::refused(format!("--threads {threads}"), why));
        }
        let mut around = self.around.iter();
        if let Some(bad) = around.find(|pages| !pages.is_power_of_two() || **pages > MAX_AROUND) {
            let why = format!("a power of two up to {MAX_AROUND}");
            return Err(PlanError::refused(format!("--around {bad}"), why));
        }
        let memory = self.memory;
        if memory < LEAST_MEMORY || !memory.0.is_multiple_of(LEAST_MEMORY.0) {
            let why = format!("a multiple of {LEAST_MEMORY} is needed");
            return Err(PlanError::refused(format!("--memory {memory}"), why));
        }
        check_runs(self.runs)
    }

    fn prepare(
        &mut self,
        methods_asked: bool,
        timing: Timing,
    ) -> Result<(Machines, Vec<String>), PrepareError> {
        let _ = timing;
        Machines::prepare(self, methods_asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_makes_sense() {
        let plan = Plan::default();
        assert_eq!(plan.check(), Ok(()));
        let names: Vec<_> = plan.series().iter().map(ToString::to_string).collect();
        let wanted = [
            "random \u{2013} raw",
            "random \u{2013} engine",
            "random \u{2013} server",
            "around 1 copy \u{2013} raw",
            "around 1 copy \u{2013} engine",
            "around 64 copy \u{2013} raw",
            "around 64 copy \u{2013} engine",
            "around 1 continue \u{2013} raw",
            "around 1 continue \u{2013} engine",
            "around 64 continue \u{2013} raw",
            "around 64 continue \u{2013} engine",
            "fill \u{2013} raw",
            "fill \u{2013} engine",
            "fill \u{2013} server",
            "reader \u{2013} raw",
            "reader \u{2013} engine",
            "reader \u{2013} server",
            "replay warm \u{2013} map",
            "replay warm \u{2013} server",
            "replay warm \u{2013} replay",
            "replay warm \u{2013} clone",
            "replay cold \u{2013} map",
            "replay cold \u{2013} server",
            "replay cold \u{2013} replay",
            "replay cold \u{2013} clone",
            "image \u{2013} server",
            "unpack \u{2013} server",
        ];
        assert_eq!(names, wanted);
    }

    #[test]
    fn only_random_faults_have_several_threads() {
        let plan = Plan::default();
        let measured = |threads| {
            let all = plan.series().into_iter();
            all.filter(|&one| plan.is_measured(threads, one)).count()
        };
        assert_eq!((measured(1), measured(8)), (27, 3));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_its_option() {
        type Change = fn(&mut Plan);
        let cases: [(Change, &str); 8] = [
            (|plan| plan.parts = vec![], "--part names nothing"),
            (|plan| plan.threads = vec![0], "--threads 0: 1 to 16"),
            (|plan| plan.threads = vec![17], "--threads 17: 1 to 16"),
            (
                |plan| plan.threads = vec![2],
                "--threads 2: only the part random",
            ),
            (|plan| plan.readers = vec![1, 1], "--readers names 1 twice"),
            (|plan| plan.around = vec![3], "--around 3: a power of two"),
            (
                |plan| plan.memory = ByteSize(4096),
                "--memory 4K: a multiple of 1M",
            ),
            (|plan| plan.runs = 0, "--runs 0: nothing"),
        ];
        for (change, message) in cases {
            let mut plan = Plan::default();
            change(&mut plan);
            let told = plan.check().expect_err(message).to_string();
            assert!(told.starts_with(message), "{told}");
        }
    }
}
