//! What a paging benchmark is asked to do, and whether that makes sense.

use std::fmt;

use pagetide_memory::Backing;
use serde::{Deserialize, Serialize};

use super::machines::Machines;
use super::view::{
    ELAPSED, EXITS, INSTRUCTIONS, INSTRUCTIONS_OVER_UFFD, MESSAGES, PAGES, RATE, RATE_OVER_UFFD,
    RATE_PER_VCPU,
};
use crate::benchmark::Benchmark;
use crate::model::{Column, Comparison, Quantity};
use crate::options::{PlanError, check_list, check_pages, check_runs, check_vcpus, list, named};
use crate::prepare::PrepareError;
use crate::timing::Timing;
use crate::units::ByteSize;

/// Largest number of vCPUs that a plan may name, whatever the kernel allows: the guest's parameter
/// and log areas are laid out for it.
pub const MAX_VCPUS: u32 = 1024;
/// Most reader threads.
pub const MAX_READERS: u32 = 1024;
/// Largest fault-around, in pages.
pub const MAX_FAULT_AROUND: u32 = 512;

/// How a fault on an absent page reaches the code that resolves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Delivery {
    /// No fault to resolve: the memory is present on the host before the guest touches it, and only
    /// the stage-2 tables are filled. The floor under the other two.
    None,
    /// A userfaultfd message to a reader thread while the vCPU sleeps in the kernel.
    Uffd,
    /// KVM_RUN exits and the vCPU's own thread resolves the fault (KVM_CAP_ABSENT_MAPPING_FAULT).
    Exit,
}

/// Which kind of userfaultfd fault an absent page causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The content is in the page cache already; resolving maps it (UFFDIO_CONTINUE).
    Minor,
    /// There is no page; resolving copies one in (UFFDIO_COPY).
    Missing,
}

/// How many userfaultfds share the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Uffds {
    /// One for all of memory.
    Single,
    /// One for each vCPU's range.
    PerVcpu,
}

/// The order in which a vCPU touches its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Ascending addresses.
    Sequential,
    /// A pseudo-random permutation, the same in every run.
    Random,
}

/// What a touch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// The guest writes.
    Write,
    /// The guest reads and compares.
    Read,
}

named! {
    Delivery { None => "none", Uffd => "uffd", Exit => "exit" }
    Mode { Minor => "minor", Missing => "missing" }
    Uffds { Single => "single", PerVcpu => "per-vcpu" }
    Order { Sequential => "sequential", Random => "random" }
    Access { Write => "write", Read => "read" }
}

/// One line of the result: a delivery and, for exits, how many neighbours each one resolves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Series {
    /// How faults are delivered.
    pub delivery: Delivery,
    /// Pages that one fault makes present, itself included; a power of two, 1 unless `delivery` is
    /// [`Delivery::Exit`].
    pub fault_around: u32,
    /// Whether the vCPU's thread maps what it installed in stage 2 before it enters the guest again
    /// (KVM_POPULATE_MEMORY, PRESENT_ONLY).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub populate: bool,
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault_around {
            1 => self.delivery.fmt(f),
            pages if self.populate => {
                f.pad(&format!("{}, {pages} around, populated", self.delivery))
            }
            pages => f.pad(&format!("{}, {pages} around", self.delivery)),
        }
    }
}

/// A paging benchmark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The numbers of vCPUs to measure with.
    pub vcpus: Vec<u32>,
    /// Memory of each vCPU: what it touches, and with `overlap` its part of what all touch.
    #[serde(rename = "per_vcpu_bytes")]
    pub per_vcpu: ByteSize,
    /// The deliveries to compare.
    pub deliveries: Vec<Delivery>,
    /// Pages resolved by one exit; one series for each, [`Delivery::Exit`] only.
    pub fault_around: Vec<u32>,
    /// What the memory is made of.
    #[serde(flatten, with = "backing_and_page")]
    pub backing: Backing,
    /// What is absent at first.
    pub mode: Mode,
    /// How many userfaultfds share the memory.
    pub uffds: Uffds,
    /// Reader threads; `None`: as many as vCPUs.
    pub readers: Option<u32>,
    /// Every vCPU touches all of memory.
    pub overlap: bool,
    /// The order of a vCPU's touches.
    pub order: Order,
    /// What a touch is.
    pub access: Access,
    /// After installing, fill the stage-2 tables with KVM_PRE_FAULT_MEMORY; exits only.
    pub pre_fault: bool,
    /// Measure each fault-around above 1 also with what an exit installed mapped in stage 2 at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub populate: bool,
    /// Measured rounds, after one that warms up.
    pub runs: u32,
    /// Pin vCPU threads to host CPUs.
    pub pin: bool,
}

impl Default for Plan {
    /// The published experiment's shape at a size that any machine can run.
    fn default() -> Self {
        Self {
            vcpus: vec![1, 2, 4, 8],
            per_vcpu: ByteSize(64 << 20),
            deliveries: vec![Delivery::Uffd, Delivery::Exit],
            fault_around: vec![1],
            backing: Backing::Shmem,
            mode: Mode::Minor,
            uffds: Uffds::Single,
            readers: None,
            overlap: false,
            order: Order::Sequential,
            access: Access::Write,
            pre_fault: false,
            populate: false,
            runs: 7,
            pin: false,
        }
    }
}

/// A backing in JSON: its name, and the bytes of its pages, which are the granularity in which memory
/// is made present.
mod backing_and_page {
    use pagetide_memory::Backing;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::options::by_name;

    #[derive(Serialize, Deserialize)]
    struct Record {
        #[serde(with = "by_name")]
        backing: Backing,
        page_bytes: u64,
    }

    pub(super) fn serialize<S: Serializer>(
        &backing: &Backing,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let page_bytes = backing.page_size().bytes();
        let record = Record {
            backing,
            page_bytes,
        };
        record.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Backing, D::Error> {
        Record::deserialize(deserializer).map(|record| record.backing)
    }
}

impl Plan {
    fn check_memory(&self) -> Result<(), PlanError> {
        let (size, backing) = (self.per_vcpu, self.backing);
        if size.0 == 0 {
            let why = "each vCPU needs at least one page to touch";
            return Err(PlanError::refused("--per-vcpu 0", why));
        }
        check_pages("--per-vcpu", size, backing.page_size().bytes(), backing)?;
        for &vcpus in &self.vcpus {
            // 2^51 bytes is less than the smallest guest-physical address space that has 52 bits,
            // and leaves room for the low memory below the data.
            let total = size.0.checked_mul(u64::from(vcpus));
            if total.is_none_or(|total| total > 1 << 51) {
                return Err(PlanError::Meaningless(format!(
                    "--per-vcpu {size} times {vcpus} vCPUs is more than a guest can address"
                )));
            }
        }
        match (self.mode, backing) {
            (Mode::Minor, Backing::Anonymous) => Err(PlanError::refused(
                "--mode minor with --backing anonymous",
                "anonymous memory has no page cache to map from; use --mode missing",
            )),
            (Mode::Missing, Backing::Thp) => Err(PlanError::refused(
                "--mode missing with --backing thp",
                "copying single 4K pages under a huge page can show the guest wrong data; use \
                 --mode minor",
            )),
            _ => Ok(()),
        }
    }

    fn check_series(&self) -> Result<(), PlanError> {
        check_list("--delivery", "uffd,exit", &self.deliveries)?;
        let exits = self.deliveries.contains(&Delivery::Exit);
        for &pages in &self.fault_around {
            let option = format!("--fault-around {pages}");
            if !pages.is_power_of_two() || pages > MAX_FAULT_AROUND {
                let why = format!("must be a power of two from 1 to {MAX_FAULT_AROUND} pages");
                return Err(PlanError::refused(option, why));
            }
            if pages > 1 && !exits {
                let option = format!("{option} needs --delivery exit");
                return Err(PlanError::refused(option, "only exits resolve neighbours"));
            }
        }
        check_list("--fault-around", "1,16", &self.fault_around)?;
        if self.pre_fault && !exits {
            return Err(PlanError::refused(
                "--pre-fault needs --delivery exit",
                "it is done by the vCPU's own thread",
            ));
        }
        if self.populate && !(exits && self.fault_around.iter().any(|&pages| pages > 1)) {
            return Err(PlanError::refused(
                "--populate needs --delivery exit and a --fault-around above 1",
                "it maps the pages that come with the faulting one",
            ));
        }
        Ok(())
    }

    /// Whether each touch of a series is a fault: each page is touched once, and nothing but its
    /// own touch brings it in.
    #[must_use]
    pub fn every_touch_faults(&self, series: Series) -> bool {
        series.delivery != Delivery::None && series.fault_around == 1 && !self.overlap
    }

    /// Reader threads for a machine with `vcpus` vCPUs. The default is one per vCPU, as in the
    /// published experiment.
    #[must_use]
    pub fn readers_for(&self, vcpus: u32) -> u32 {
        self.readers.unwrap_or(vcpus)
    }

    /// Bytes of data memory of a machine with `vcpus` vCPUs.
    #[must_use]
    pub fn total_bytes(&self, vcpus: u32) -> u64 {
        self.per_vcpu.0.saturating_mul(u64::from(vcpus))
    }

    /// Pages of data memory of a machine with `vcpus` vCPUs; each is made present once.
    #[must_use]
    pub fn total_pages(&self, vcpus: u32) -> u64 {
        self.total_bytes(vcpus) / self.backing.page_size().bytes()
    }
}

impl Benchmark for Plan {
    type Series = Series;
    type Machines = Machines;

    const NAME: &'static str = "paging";
    const QUANTITIES: &'static [Quantity] = &[ELAPSED, PAGES, EXITS, MESSAGES];
    const COLUMNS: &'static [Column] = &[RATE, RATE_PER_VCPU, INSTRUCTIONS];
    const COMPARISONS: &'static [Comparison<Series>] = &[RATE_OVER_UFFD, INSTRUCTIONS_OVER_UFFD];
    const TIME: Option<Quantity> = Some(ELAPSED);

    fn vcpus(&self) -> &[u32] {
        &self.vcpus
    }

    fn series(&self) -> Vec<Series> {
        let mut all = Vec::new();
        for &delivery in &self.deliveries {
            if delivery == Delivery::Exit {
                for &fault_around in &self.fault_around {
                    let alone = Series {
                        delivery,
                        fault_around,
                        populate: false,
                    };
                    all.push(alone);
                    // Side by side: each is measured with and without.
                    all.extend((self.populate && fault_around > 1).then_some(Series {
                        populate: true,
                        ..alone
                    }));
                }
            } else {
                all.push(Series {
                    delivery,
                    fault_around: 1,
                    populate: false,
                });
            }
        }
        all
    }

    fn runs(&self) -> u32 {
        self.runs
    }

    fn command(&self) -> String {
        let mut words = vec![
            "pagetide bench paging".to_owned(),
            format!("--vcpus {}", list(&self.vcpus)),
            format!("--per-vcpu {}", self.per_vcpu),
            format!("--delivery {}", list(&self.deliveries)),
            format!("--fault-around {}", list(&self.fault_around)),
            format!("--backing {}", self.backing),
            format!("--mode {}", self.mode),
            format!("--uffds {}", self.uffds),
            format!("--order {}", self.order),
            format!("--access {}", self.access),
            format!("--runs {}", self.runs),
        ];
        words.extend(self.readers.map(|readers| format!("--readers {readers}")));
        let switches = [
            (self.overlap, "--overlap"),
            (self.pre_fault, "--pre-fault"),
            (self.populate, "--populate"),
            (self.pin, "--pin"),
        ];
        let switches = switches.into_iter().filter(|(on, _)| *on);
        words.extend(switches.map(|(_, name)| name.to_owned()));
        words.join(" ")
    }

    fn check(&self) -> Result<(), PlanError> {
        check_vcpus(&self.vcpus, MAX_VCPUS)?;
        self.check_memory()?;
        self.check_series()?;
        let readers = self.readers.unwrap_or(1);
        let why = match readers {
            0 => Some("without a reader thread nobody resolves userfaultfd messages".to_owned()),
            readers if readers > MAX_READERS => {
                Some(format!("at most {MAX_READERS} reader threads"))
            }
            _ => None,
        };
        if let Some(why) = why {
            return Err(PlanError::refused(format!("--readers {readers}"), why));
        }
        check_runs(self.runs)?;
        if self.uffds == Uffds::PerVcpu && self.overlap {
            return Err(PlanError::refused(
                "--uffds per-vcpu with --overlap",
                "memory that all vCPUs share cannot have a userfaultfd for each; drop one of the two",
            ));
        }
        Ok(())
    }

    /// A delivery that the kernel lacks is an error, whoever asked for it.
    fn prepare(
        &mut self,
        _methods_asked: bool,
        timing: Timing,
    ) -> Result<(Machines, Vec<String>), PrepareError> {
        Machines::prepare(self, timing)
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
