//! Population of all of a VM's memory by several threads.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use pagetide_memory::{FaultInError, GuestRange};

use super::pieces::pieces;
use super::workers::{UnboundMethod, Work, Workers};
use super::{Caller, PopulateError, PopulateFlags, Populated};
use crate::pre_fault::PreFaultError;
use crate::vcpu::{BindError, Vcpu};
use crate::vm::Vm;

/// The longest interval between two calls of `watch`.
const WATCH: Duration = Duration::from_millis(50);

/// The methods of population, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PopulatorMethod {
    /// KVM_POPULATE_MEMORY: fills stage-2 tables, by any number of threads, while vCPUs run or not.
    Populate,
    /// KVM_PRE_FAULT_MEMORY: fills stage-2 tables, by one thread per idle vCPU.
    PreFault,
    /// MADV_POPULATE_WRITE: fills only the host's tables. vCPUs still exit for each page, but find it
    /// present.
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

/// The progress of a population.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PopulationProgress {
    /// Processed bytes.
    pub bytes: u64,
    /// Bytes in total.
    pub total_bytes: u64,
}

/// The result of a population.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Population {
    /// The method used.
    pub method: PopulatorMethod,
    /// The number of threads.
    pub threads: usize,
    /// The result in bytes. With [`PopulatorMethod::HostOnly`], mapped means in the host's page tables.
    pub populated: Populated,
    /// Bytes of all slots at the start.
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
    /// The host could not fault the memory in.
    #[error(transparent)]
    Host(#[from] FaultInError),
    /// A vCPU could not be bound to a worker's thread.
    #[error(transparent)]
    Bind(#[from] BindError),
}

/// Why a population did not complete.
#[derive(Debug, thiserror::Error)]
pub enum PopulationError {
    /// The requested method, or every method, is unavailable.
    #[error("population by {method}: {lacks}")]
    Unavailable {
        /// The method, or the last one tried.
        method: PopulatorMethod,
        /// The missing requirement.
        lacks: &'static str,
    },
    /// A thread could not be started; the earlier ones were stopped.
    #[error("population: cannot start a thread")]
    Thread(#[source] io::Error),
    /// The caller stopped the population.
    #[error("population was stopped: {population}")]
    Stopped {
        /// The result until then.
        population: Population,
    },
    /// A worker failed in `range`; the others were stopped.
    #[error("population of {range}: {population}")]
    Failed {
        /// The range of the piece.
        range: GuestRange,
        /// The result until then.
        population: Population,
        /// The worker's error.
        #[source]
        source: Box<WorkerError>,
    },
}

/// Populates a VM's memory, in the slots that exist at the start, with several threads.
///
/// The memory is divided into pieces of 1 GiB, or less if threads would otherwise have no work. On
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
    /// A population for writing by the best method, with as many threads as there are processors.
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

    /// Sets the number of threads. Fewer are used if there are fewer pieces, or fewer idle vCPUs.
    #[must_use]
    pub fn threads(self, threads: NonZeroUsize) -> Self {
        Self { threads, ..self }
    }

    /// Sets the flags.
    #[must_use]
    pub fn flags(self, flags: PopulateFlags) -> Self {
        Self { flags, ..self }
    }

    /// Provides idle vCPUs of the VM, which [`PopulatorMethod::PreFault`] needs.
    #[must_use]
    pub fn idle_vcpus(self, idle: impl IntoIterator<Item = &'vm mut Vcpu>) -> Self {
        let idle = idle.into_iter().collect();
        Self { idle, ..self }
    }

    /// Uses only this method.
    #[must_use]
    pub fn method(self, method: PopulatorMethod) -> Self {
        Self {
            method: Some(method),
            ..self
        }
    }

    /// The method that [`Populator::run`] will use.
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
            _ if self.flags.present_only => {
                Some("it faults memory in, which present-only excludes")
            }
            PopulatorMethod::PreFault if !capabilities.pre_fault_memory => {
                Some("this kernel lacks KVM_CAP_PRE_FAULT_MEMORY for this VM")
            }
            PopulatorMethod::PreFault => self.idle.is_empty().then_some("it needs an idle vCPU"),
            PopulatorMethod::HostOnly => None,
        }
    }

    /// Populates. Calls `watch` on this thread after each progress and at least 20 times a second.
    /// [`ControlFlow::Break`] ends the population, also while workers wait for a userfaultfd (except
    /// with [`PopulatorMethod::HostOnly`]).
    ///
    /// # Errors
    /// [`PopulationError`], with the progress made.
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
            let mut workers = Workers::new(&work);
            let mut callers = callers.iter();
            let mut idle = idle.into_iter();
            for index in 0..population.threads {
                let unbound = match method {
                    PopulatorMethod::Populate => callers.next().map(UnboundMethod::Ioctl),
                    PopulatorMethod::PreFault => idle.next().map(UnboundMethod::PreFault),
                    PopulatorMethod::HostOnly => Some(UnboundMethod::Host),
                };
                let Some(unbound) = unbound else { break };
                workers
                    .start(scope, index, unbound, sender.clone())
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
                if stopped || work.is_stopped() {
                    workers.stop();
                }
            }
            Ok(workers.join())
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
