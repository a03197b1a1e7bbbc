//! Why a pool of vCPUs failed.

use std::error::Error;
use std::io;

use pagetide_kvm::{BindError, Exit, RunError};

use crate::hooks::HookError;

/// The first failure in a pool, which stopped all of its vCPUs.
#[derive(Debug, thiserror::Error)]
pub enum PoolFailure {
    /// The pool was given no vCPU.
    #[error("a pool needs at least 1 vCPU")]
    NoVcpus,
    /// A [`Stopper`](crate::Stopper) stopped the pool with this cause.
    #[error("the run was stopped")]
    Stopped(#[source] HookError),
    /// A vCPU's thread cannot be started, or cannot be pinned.
    #[error("vCPU {vcpu}: cannot {}", cpu.map_or_else(
        || "start its thread".to_owned(),
        |cpu| format!("pin its thread to host CPU {cpu}")
    ))]
    Thread {
        /// The vCPU.
        vcpu: u32,
        /// The host CPU that it should be pinned to.
        cpu: Option<usize>,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A vCPU cannot be bound to its thread.
    #[error("vCPU {vcpu}: cannot bind it to its thread")]
    Bind {
        /// The vCPU.
        vcpu: u32,
        /// The reason.
        #[source]
        source: BindError,
    },
    /// KVM_RUN failed.
    #[error("cannot enter the guest")]
    Run(#[source] RunError),
    /// A hook returned an error.
    #[error("vCPU {vcpu}: cannot resolve {}{}", what(*exit), at_rip(*rip))]
    Hook {
        /// The vCPU.
        vcpu: u32,
        /// The exit that the hook handled; None at the thread's start.
        exit: Option<Exit>,
        /// The guest's instruction pointer, if it could be read.
        rip: Option<u64>,
        /// The hook's error.
        #[source]
        source: HookError,
    },
    /// The hooks do not handle this exit.
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
        /// The panic's message.
        message: String,
    },
    /// A vCPU's thread did not end in time, or ended without its vCPU.
    #[error("vCPU {vcpu}: its thread did not end")]
    Lost {
        /// The vCPU.
        vcpu: u32,
    },
}

impl PoolFailure {
    /// Converts the failure into the error type of the pool's user: an error of type `E` that a hook or
    /// a stopper gave is returned as it is, any other failure is converted by `From`.
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
    let name = if cfg!(target_arch = "x86_64") {
        "rip"
    } else {
        "pc"
    };
    rip.map_or_else(String::new, |rip| format!(" ({name} {rip:#x})"))
}
