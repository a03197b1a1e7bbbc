//! Populating all of a VM's memory with several threads.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use pagetide_memory::{FaultInError as HostError, GuestRange};

use super::crew::{Crew, Tool, Work};
use super::pieces::pieces;
use super::{Caller, PopulateError, PopulateFlags, Populated};
use crate::pre_fault::PreFaultError;
use crate::vcpu::{BindError, Vcpu};
use crate::vm::Vm;

/// How often the caller is asked whether to go on, at least.
const WATCH: Duration = Duration::from_millis(50);

/// How memory is populated, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PopulatorMethod {
    /// KVM_POPULATE_MEMORY: stage-2 tables, by any number of threads, vCPUs running or not.
    Populate,
    /// KVM_PRE_FAULT_MEMORY: stage-2 tables, by one thread for each idle vCPU.
    PreFault,
    /// MADV_POPULATE_WRITE: the host's tables only. vCPUs still exit for each page, but find it.
    HostOnly,
}

impl PopulatorMethod {
    const ALL: [Self; 3] = [Self::Populate, Self::PreFault, Self::HostOnly];
}

impl fmt::Display for PopulatorMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Populate => "KVM_POPULATE_MEMORY",
            Self::PreFault => "KVM_PRE_FAULT_MEMORY",
            Self::HostOnly => "MADV_POPULATE_WRITE",
        })
    }
}

/// How far a population is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PopulationProgress {
    /// Bytes dealt with.
    pub bytes: u64,
    /// Of so many.
    pub total_bytes: u64,
}

/// What a population did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Population {
    /// The method that was used.
    pub method: PopulatorMethod,
    /// Threads that worked.
    pub threads: usize,
    /// What became of the memory. With [`PopulatorMethod::HostOnly`], mapped means by the host.
    pub populated: Populated,
    /// Bytes of all slots when it began.
    pub total_bytes: u64,
}

impl fmt::Display for Population {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            method,
            threads,
            populated,
            total_bytes,
        } = self;
        write!(
            f,
            "{populated}, of {total_bytes}, by {method} with {threads} threads"
        )
    }
}

/// Why a worker ended early.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// KVM_POPULATE_MEMORY failed.
    #[error(transparent)]
    Populate(#[from] PopulateError),
    /// KVM_PRE_FAULT_MEMORY failed.
    #[error(transparent)]
    PreFault(#[from] PreFaultError),
    /// The host could not make memory present.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A vCPU cannot be bound to a worker's thread.
    #[error(transparent)]
    Bind(#[from] BindError),
}

/// Why a population did not get to its end.
#[derive(Debug, thiserror::Error)]
pub enum PopulationError {
    /// The method that was asked for, or every one, cannot be used.
    #[error("population by {method}: {lacks}")]
    Unavailable {
        /// The method; the last one that was considered.
        method: PopulatorMethod,
        /// What it needs.
        lacks: &'static str,
    },
    /// A thread could not be started; those before it were stopped.
    #[error("population: cannot start a thread")]
    Thread(#[source] io::Error),
    /// The caller said stop.
    #[error("population was stopped: {population}")]
    Stopped {
        /// What was done until then.
        population: Population,
    },
    /// A worker failed in `range`; the others were stopped.
    #[error("population of {range}: {population}")]
    Failed {
        /// The piece of memory.
        range: GuestRange,
        /// What was done until then.
        population: Population,
        /// Why.
        #[source]
        source: Box<WorkerError>,
    },
}

/// Populates a VM's memory, as its slots are when it begins, with several threads.
///
/// Memory is divided into pieces of 1 GiB, or less if that would leave threads without work. On
/// machines with several NUMA nodes a thread runs on the node of the pages that it maps.
#[derive(Debug)]
pub struct Populator<'vm> {
    vm: &'vm Vm,
    idle: Vec<&'vm mut Vcpu>,
    threads: NonZeroUsize,
    flags: PopulateFlags,
    method: Option<PopulatorMethod>,
}

impl<'vm> Populator<'vm> {
    /// With as many threads as there are processors, for writing, by the best method there is.
    #[must_use]
    pub fn new(vm: &'vm Vm) -> Self {
        Self {
            vm,
            idle: Vec::new(),
            threads: thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            flags: PopulateFlags {
                write: true,
                present_only: false,
            },
            method: None,
        }
    }

    /// With `threads` threads, or fewer if there is not as much to do, or not as many idle vCPUs.
    #[must_use]
    pub fn threads(self, threads: NonZeroUsize) -> Self {
        Self { threads, ..self }
    }

    /// With these flags.
    #[must_use]
    pub fn flags(self, flags: PopulateFlags) -> Self {
        Self { flags, ..self }
    }

    /// vCPUs of the VM that may be used meanwhile, for [`PopulatorMethod::PreFault`].
    #[must_use]
    pub fn idle_vcpus(self, idle: impl IntoIterator<Item = &'vm mut Vcpu>) -> Self {
        let idle = idle.into_iter().collect();
        Self { idle, ..self }
    }

    /// By this method or not at all.
    #[must_use]
    pub fn method(self, method: PopulatorMethod) -> Self {
        Self {
            method: Some(method),
            ..self
        }
    }

    /// The method that [`Populator::run`] is going to use.
    ///
    /// # Errors
    /// [`PopulationError::Unavailable`].
    pub fn choose(&self) -> Result<PopulatorMethod, PopulationError> {
        let usable = |method| match self.lacks(method) {
            None => Ok(method),
            Some(lacks) => Err(PopulationError::Unavailable { method, lacks }),
        };
        if let Some(method) = self.method {
            return usable(method);
        }
        let [best, then, last] = PopulatorMethod::ALL;
        usable(best)
            .or_else(|_| usable(then))
            .or_else(|_| usable(last))
    }

    fn lacks(&self, method: PopulatorMethod) -> Option<&'static str> {
        let capabilities = self.vm.capabilities();
        match method {
            PopulatorMethod::Populate => (!capabilities.populate_memory)
                .then_some("this kernel lacks KVM_CAP_POPULATE_MEMORY for this VM"),
            _ if self.flags.present_only => Some("it faults memory in, which present-only forbids"),
            PopulatorMethod::PreFault if !capabilities.pre_fault_memory => {
                Some("this kernel lacks KVM_CAP_PRE_FAULT_MEMORY for this VM")
            }
            PopulatorMethod::PreFault => self.idle.is_empty().then_some("it needs an idle vCPU"),
            PopulatorMethod::HostOnly => None,
        }
    }

    /// Populates. `watch` is called on this thread, whenever there is progress and at least 20 times
    /// a second, and ends it by [`ControlFlow::Break`], also while workers wait for a userfaultfd
    /// (not so with [`PopulatorMethod::HostOnly`]).
    ///
    /// # Errors
    /// [`PopulationError`] says how far it got.
    pub fn run(
        self,
        mut watch: impl FnMut(PopulationProgress) -> ControlFlow<()>,
    ) -> Result<Population, PopulationError> {
        let method = self.choose()?;
        let Self {
            vm,
            idle,
            threads,
            flags,
            ..
        } = self;
        let threads = match method {
            PopulatorMethod::PreFault => threads.get().min(idle.len()),
            PopulatorMethod::Populate | PopulatorMethod::HostOnly => threads.get(),
        };
        let work = Work::new(pieces(&vm.layout(), threads), flags);
        let mut population = Population {
            method,
            threads: threads.min(work.pieces()),
            populated: Populated::default(),
            total_bytes: work.total_bytes,
        };
        let mut callers = Vec::new();
        if let (PopulatorMethod::Populate, Some(range)) = (method, work.first()) {
            for _ in 0..population.threads {
                let caller = Caller::new(vm.inner(), range);
                callers.push(caller.map_err(|error| failed(range, population, error.into()))?);
            }
        }
        let mut stopped = false;
        let failure = thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            let mut crew = Crew::new(&work);
            let mut callers = callers.iter();
            let mut idle = idle.into_iter();
            for index in 0..population.threads {
                let tool = match method {
                    PopulatorMethod::Populate => callers.next().map(Tool::Ioctl),
                    PopulatorMethod::PreFault => idle.next().map(Tool::PreFault),
                    PopulatorMethod::HostOnly => Some(Tool::Host),
                };
                let Some(tool) = tool else { break };
                crew.start(scope, index, tool, sender.clone())
                    .map_err(PopulationError::Thread)?;
            }
            drop(sender);
            loop {
                match receiver.recv_timeout(WATCH) {
                    Ok(populated) => population.populated += populated,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                let progress = PopulationProgress {
                    bytes: population.populated.bytes(),
                    total_bytes: population.total_bytes,
                };
                stopped |= watch(progress).is_break();
                if stopped || work.is_over() {
                    crew.halt();
                }
            }
            Ok(crew.join())
        })?;
        match failure {
            Some((range, source)) => Err(failed(range, population, source)),
            None if population.populated.bytes() < population.total_bytes => {
                Err(PopulationError::Stopped { population })
            }
            None => Ok(population),
        }
    }
}

fn failed(range: GuestRange, population: Population, source: WorkerError) -> PopulationError {
    PopulationError::Failed {
        range,
        population,
        source: Box::new(source),
    }
}
