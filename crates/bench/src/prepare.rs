//! Whether this machine can do what a plan asks for, as far as benchmarks ask alike.
//!
//! What is missing is told in one line that also says how to get it.

use std::fmt;
use std::path::PathBuf;

use pagetide_kvm::{CreateVmError, Kvm, OpenError, StatsError};
use pagetide_memory::{Backing, PageSize};
use pagetide_testbed::MachineError;
use pagetide_uapi::host::{HugepagePool, available_bytes};
use pagetide_uapi::userfaultfd;

use crate::facts::{THP_SHMEM, thp_shmem};
use crate::limits;
use crate::paging::preflight::Missing;
use crate::units::ByteSize;

/// Why a plan cannot be run here.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// /dev/kvm cannot be used.
    #[error(transparent)]
    Kvm(#[from] OpenError),
    /// No VM can be made.
    #[error(transparent)]
    CreateVm(#[from] CreateVmError),
    /// userfaultfd cannot be used.
    #[error(transparent)]
    Userfaultfd(#[from] userfaultfd::OpenError),
    /// This machine lacks something that paging needs.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// KVM refuses that many vCPUs.
    #[error("--vcpus {wanted}: this kernel's KVM allows at most {most} vCPUs (KVM_CAP_MAX_VCPUS)")]
    Vcpus {
        /// Asked for.
        wanted: u32,
        /// Allowed.
        most: usize,
    },
    /// The kernel lacks what an option's value needs.
    #[error("{option}: this kernel lacks {needs}; {advice}")]
    Lacks {
        /// The option and its value.
        option: String,
        /// What it needs.
        needs: &'static str,
        /// How to get it.
        advice: &'static str,
    },
    /// Not enough memory.
    #[error("--memory {wanted}: {available} are available; lower it, or free memory")]
    Memory {
        /// Asked for.
        wanted: ByteSize,
        /// Available, in words.
        available: String,
    },
    /// The hugetlb pool has too few free pages.
    #[error(
        "--backing {backing}: {wanted} free huge pages are needed and {free} are free; write a \
         larger number to {}", .setting.display()
    )]
    Hugepages {
        /// The backing.
        backing: Backing,
        /// Needed.
        wanted: u64,
        /// Free.
        free: u64,
        /// The file that sets the pool's size.
        setting: PathBuf,
    },
    /// No such hugetlb pool.
    #[error("--backing {backing}: this kernel or CPU has no huge pages of that size")]
    NoHugepagePool {
        /// The backing.
        backing: Backing,
    },
    /// The largest machine of the plan cannot be made.
    #[error("a machine with {vcpus} vCPUs cannot be made")]
    Machine {
        /// Its number of vCPUs.
        vcpus: u32,
        /// Why.
        #[source]
        source: MachineError,
    },
    /// Errors cannot be simulated.
    #[error("--poison: {what}; or measure --poison 0")]
    NoSimulation {
        /// What is in the way, and what to do about it.
        what: &'static str,
    },
    /// The file to measure with cannot be written.
    #[error("{}: no file of --memory can be written there; name another directory in TMPDIR", .directory.display())]
    Scratch {
        /// The directory for temporary files.
        directory: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// KVM does not say what it counts.
    #[error(transparent)]
    Stats(#[from] StatsError),
}

/// What a method needs of the kernel.
pub(crate) struct Gate<M> {
    pub(crate) method: M,
    pub(crate) present: bool,
    /// The capability's or flag's name.
    pub(crate) needs: &'static str,
    /// How to get it.
    pub(crate) advice: &'static str,
}

/// Takes methods whose needs this kernel lacks out of a plan, and returns a warning for each; if
/// they were asked for by `option`, the first one is an error.
pub(crate) fn leave_out<M: Copy + PartialEq + fmt::Display>(
    option: &str,
    methods: &mut Vec<M>,
    asked: bool,
    gates: impl IntoIterator<Item = Gate<M>>,
) -> Result<Vec<String>, PrepareError> {
    let mut warnings = Vec::new();
    for gate in gates {
        let (method, needs) = (gate.method, gate.needs);
        if gate.present || !methods.contains(&method) {
            continue;
        }
        if asked {
            return Err(PrepareError::Lacks {
                option: format!("{option} {method}"),
                needs,
                advice: gate.advice,
            });
        }
        methods.retain(|kept| *kept != method);
        warnings.push(format!("{method} was left out: this kernel lacks {needs}"));
    }
    Ok(warnings)
}

/// Whether KVM allows that many vCPUs.
pub(crate) fn check_vcpus(kvm: &Kvm, wanted: u32) -> Result<(), PrepareError> {
    let most = kvm.max_vcpus();
    if usize::try_from(wanted).unwrap_or(usize::MAX) > most {
        return Err(PrepareError::Vcpus { wanted, most });
    }
    Ok(())
}

/// Whether there is memory enough; perhaps with a warning.
pub(crate) fn check_room(
    backing: Backing,
    memory: ByteSize,
) -> Result<Option<String>, PrepareError> {
    if backing.page_size() == PageSize::Size4K {
        let available = available_bytes().into_iter().chain(limits::group_bytes());
        return match available.min() {
            Some(available) if available < memory.0 => Err(PrepareError::Memory {
                wanted: memory,
                available: ByteSize(available).about(),
            }),
            _ => Ok(without_thp(backing, thp_shmem().as_deref())),
        };
    }
    let page = backing.page_size().bytes();
    let pool = HugepagePool::read(page).ok_or(PrepareError::NoHugepagePool { backing })?;
    let wanted = memory.0 / page;
    if pool.free < wanted {
        let (free, setting) = (pool.free, pool.setting);
        return Err(PrepareError::Hugepages {
            backing,
            wanted,
            free,
            setting,
        });
    }
    Ok(None)
}

fn without_thp(backing: Backing, setting: Option<&str>) -> Option<String> {
    let off = matches!(setting, None | Some("never" | "deny"));
    (backing == Backing::Thp && off).then(|| {
        format!(
            "--backing thp: {THP_SHMEM} is {}, so this is shmem of 4K pages; write advise to it",
            setting.unwrap_or("not there")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thp_that_is_switched_off_is_a_warning() {
        for (setting, warns) in [(Some("never"), true), (None, true), (Some("advise"), false)] {
            let warning = without_thp(Backing::Thp, setting);
            assert_eq!(warning.is_some(), warns, "{setting:?}");
            assert_eq!(without_thp(Backing::Shmem, setting), None);
        }
    }

    #[test]
    fn what_is_lacking_is_an_error_only_where_it_was_asked_for() {
        let gates = || {
            [("a", true), ("b", false), ("c", false)].map(|(method, present)| Gate {
                method,
                present,
                needs: "KVM_CAP_X",
                advice: "boot one",
            })
        };
        let mut methods = vec!["a", "b"];
        let error = leave_out("--method", &mut methods, true, gates()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--method b: this kernel lacks KVM_CAP_X; boot one"
        );
        let warnings = leave_out("--method", &mut methods, false, gates()).unwrap();
        assert_eq!(warnings, ["b was left out: this kernel lacks KVM_CAP_X"]);
        assert_eq!(methods, ["a"]);
    }
}
