//! Why vCPUs could not be set up, or why their pool failed.

use std::error::Error;
use std::io;

use pagetide_kvm::{BindError, Exit, RunError};

use crate::hooks::HookError;

/// A KVM operation of a VM's or a vCPU's set-up failed.
#[derive(Debug, thiserror::Error)]
#[error("{}{operation} failed", vcpu.map_or_else(String::new, |vcpu| format!("vCPU {vcpu}: ")))]
pub struct SetupError {
    /// The vCPU, if it was an operation on one.
    pub vcpu: Option<u32>,
    /// The ioctl.
    pub operation: &'static str,
    /// The kernel's answer.
    #[source]
    pub source: io::Error,
}

impl SetupError {
    /// For `map_err`, of an operation on a VM.
    pub fn on_vm<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> Self {
        Self::on(None, operation)
    }

    /// For `map_err`, of an operation on a vCPU.
    pub fn on_vcpu<E: Into<io::Error>>(id: u32, operation: &'static str) -> impl FnOnce(E) -> Self {
        Self::on(Some(id), operation)
    }

    fn on<E: Into<io::Error>>(
        vcpu: Option<u32>,
        operation: &'static str,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self {
            vcpu,
            operation,
            source: source.into(),
        }
    }
}

/// The first thing that went wrong in a pool; it stopped all vCPUs.
#[derive(Debug, thiserror::Error)]
pub enum PoolFailure {
    /// No vCPU was given.
    #[error("a pool needs at least 1 vCPU")]
    NoVcpus,
    /// Somebody outside stopped the pool, see [`Stopper::stop`](crate::Stopper::stop).
    #[error("the run was stopped")]
    Stopped(#[source] HookError),
    /// A vCPU's thread could not be started.
    #[error("vCPU {vcpu}: cannot start its thread")]
    Spawn {
        /// The vCPU.
        vcpu: u32,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A vCPU's thread could not be pinned.
    #[error("vCPU {vcpu}: cannot pin its thread to host CPU {cpu}")]
    Pin {
        /// The vCPU.
        vcpu: u32,
        /// The host CPU.
        cpu: usize,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A vCPU could not be bound to its thread.
    #[error("vCPU {vcpu}: cannot be bound to its thread")]
    Bind {
        /// The vCPU.
        vcpu: u32,
        /// Why.
        #[source]
        source: BindError,
    },
    /// KVM_RUN failed.
    #[error("the guest cannot be entered")]
    Run(#[source] RunError),
    /// A hook refused to go on.
    #[error("vCPU {vcpu}: cannot resolve {}{}", what(*exit), at_rip(*rip))]
    Hook {
        /// The vCPU.
        vcpu: u32,
        /// The exit that it was called for; None at the thread's start.
        exit: Option<Exit>,
        /// The guest's instruction pointer, if it could be read.
        rip: Option<u64>,
        /// What the hook says.
        #[source]
        source: HookError,
    },
    /// The guest left for a reason that the hooks do not know.
    #[error("vCPU {vcpu}: unexpected exit: {exit}{}", at_rip(*rip))]
    UnexpectedExit {
        /// The vCPU.
        vcpu: u32,
        /// The exit.
        exit: Exit,
        /// The guest's instruction pointer, if it could be read.
        rip: Option<u64>,
    },
    /// A vCPU's thread panicked.
    #[error("vCPU {vcpu}: thread panicked: {message}")]
    Panicked {
        /// The vCPU.
        vcpu: u32,
        /// What the panic said.
        message: String,
    },
    /// A vCPU's thread did not come back, or not with its vCPU.
    #[error("vCPU {vcpu}: its thread did not come back")]
    Lost {
        /// The vCPU.
        vcpu: u32,
    },
}

impl PoolFailure {
    /// The failure in the terms of whoever gave the pool its hooks: an error of type `E` that a hook
    /// or a stopper brought up comes back as it was, any other failure by `From`.
    pub fn into_own<E: Error + From<Self> + 'static>(self) -> E {
        match self {
            Self::Stopped(source) | Self::Hook { source, .. } if source.is::<E>() => source
                .downcast()
                .map_or_else(|source| Self::Stopped(source).into(), |own| *own),
            other => other.into(),
        }
    }
}

fn what(exit: Option<Exit>) -> String {
    match exit {
        Some(Exit::Fault(fault)) => fault.to_string(),
        Some(exit) => exit.to_string(),
        None => "its thread's start".to_owned(),
    }
}

fn at_rip(rip: Option<u64>) -> String {
    rip.map_or_else(String::new, |rip| format!(" (rip {rip:#x})"))
}
