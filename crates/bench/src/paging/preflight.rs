//! Whether this machine can do what a plan asks for, found out before anything is built.
//!
//! What is missing is told in one line that also says how to get it.

use std::path::PathBuf;

use pagetide_memory::{Backing, PageSize};

use super::plan::{Delivery, Mode, Plan};
use crate::units::ByteSize;

/// What a plan needs to know of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// KVM_CAP_MAX_VCPUS.
    pub max_vcpus: u32,
    /// KVM_CAP_NR_VCPUS: what the kernel recommends.
    pub recommended_vcpus: u32,
    /// KVM_CAP_ABSENT_MAPPING_FAULT.
    pub absent_mapping_fault: bool,
    /// KVM_CAP_PRE_FAULT_MEMORY.
    pub pre_fault_memory: bool,
    /// userfaultfd MINOR faults on shmem.
    pub minor_shmem: bool,
    /// userfaultfd MINOR faults on hugetlb.
    pub minor_hugetlb: bool,
    /// Bytes of ordinary memory that can be had; `None` if the host does not say.
    pub available_bytes: Option<u64>,
    /// The hugetlb pool of the backing's page size; `None` if there is none.
    pub hugepages: Option<Pool>,
}

/// A hugetlb pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Pages free and not promised to anybody.
    pub free: u64,
    /// The file that sets the pool's size.
    pub setting: PathBuf,
}

/// What this machine lacks for a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// KVM refuses that many vCPUs.
    #[error("--vcpus {wanted}: this kernel's KVM allows at most {most} vCPUs (KVM_CAP_MAX_VCPUS)")]
    Vcpus {
        /// Asked for.
        wanted: u32,
        /// Allowed.
        most: u32,
    },
    /// The kernel cannot exit on absent memory.
    #[error(
        "--delivery exit: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT; boot one with the \
         Pagetide series (cargo xtask vm -- COMMAND does), or measure --delivery uffd"
    )]
    AbsentMappingFault,
    /// The kernel cannot fill second-stage tables ahead.
    #[error(
        "--pre-fault: this kernel lacks KVM_CAP_PRE_FAULT_MEMORY (Linux 6.11 and later, x86 with \
         two-dimensional paging); leave --pre-fault out"
    )]
    PreFaultMemory,
    /// No MINOR faults for the backing.
    #[error(
        "--mode minor: this kernel's userfaultfd has no {feature} \
         (CONFIG_HAVE_ARCH_USERFAULTFD_MINOR, 64-bit x86 and arm64); use --mode missing"
    )]
    Minor {
        /// The feature's name.
        feature: &'static str,
    },
    /// Not enough memory.
    #[error(
        "{vcpus} vCPUs need {needed} of memory and {available} are available; lower --per-vcpu or \
         --vcpus, or free memory"
    )]
    Memory {
        /// With how many vCPUs.
        vcpus: u32,
        /// Needed, in words.
        needed: String,
        /// Available, in words.
        available: String,
    },
    /// The hugetlb pool has too few free pages.
    #[error(
        "--backing {backing}: {wanted} free huge pages are needed for {vcpus} vCPUs and {free} are \
         free; write a larger number to {}", .setting.display()
    )]
    Hugepages {
        /// The backing.
        backing: Backing,
        /// With how many vCPUs.
        vcpus: u32,
        /// Needed.
        wanted: u64,
        /// Free.
        free: u64,
        /// The file that sets the pool's size.
        setting: PathBuf,
    },
    /// No such hugetlb pool.
    #[error(
        "--backing {backing}: this kernel or CPU has no huge pages of that size; it needs \
         CONFIG_HUGETLBFS and a CPU that has them"
    )]
    NoHugepagePool {
        /// The backing.
        backing: Backing,
    },
}

/// Checks `plan` against `host`; returns warnings.
///
/// # Errors
/// The first thing that is missing.
pub fn check(plan: &Plan, host: &Host) -> Result<Vec<String>, Missing> {
    let wanted = plan.most_vcpus();
    if wanted > host.max_vcpus {
        return Err(Missing::Vcpus {
            wanted,
            most: host.max_vcpus,
        });
    }
    if plan.deliveries.contains(&Delivery::Exit) && !host.absent_mapping_fault {
        return Err(Missing::AbsentMappingFault);
    }
    if plan.pre_fault && !host.pre_fault_memory {
        return Err(Missing::PreFaultMemory);
    }
    check_minor(plan, host)?;
    check_memory(plan, host)?;
    let mut warnings = Vec::new();
    if wanted > host.recommended_vcpus {
        warnings.push(format!(
            "{wanted} vCPUs are more than KVM recommends here: {} (KVM_CAP_NR_VCPUS)",
            host.recommended_vcpus
        ));
    }
    Ok(warnings)
}

fn check_minor(plan: &Plan, host: &Host) -> Result<(), Missing> {
    let pages = plan
        .deliveries
        .iter()
        .any(|&delivery| delivery != Delivery::None);
    if plan.mode != Mode::Minor || !pages {
        return Ok(());
    }
    let (has, feature) = if plan.backing.is_hugetlb() {
        (host.minor_hugetlb, "UFFD_FEATURE_MINOR_HUGETLBFS")
    } else {
        (host.minor_shmem, "UFFD_FEATURE_MINOR_SHMEM")
    };
    if has {
        Ok(())
    } else {
        Err(Missing::Minor { feature })
    }
}

fn check_memory(plan: &Plan, host: &Host) -> Result<(), Missing> {
    let vcpus = plan.most_vcpus();
    let bytes = plan.total_bytes(vcpus);
    let backing = plan.backing;
    if backing.page_size() == PageSize::Size4K {
        return match host.available_bytes {
            Some(available) if available < bytes => Err(Missing::Memory {
                vcpus,
                needed: ByteSize(bytes).about(),
                available: ByteSize(available).about(),
            }),
            _ => Ok(()),
        };
    }
    let Some(pool) = &host.hugepages else {
        return Err(Missing::NoHugepagePool { backing });
    };
    let wanted = bytes / backing.page_size().bytes();
    if pool.free < wanted {
        let (free, setting) = (pool.free, pool.setting.clone());
        return Err(Missing::Hugepages {
            backing,
            vcpus,
            wanted,
            free,
            setting,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that has everything.
    fn host() -> Host {
        Host {
            max_vcpus: 64,
            recommended_vcpus: 4,
            absent_mapping_fault: true,
            pre_fault_memory: true,
            minor_shmem: true,
            minor_hugetlb: true,
            available_bytes: Some(8 << 30),
            hugepages: Some(Pool {
                free: 256,
                setting: "/sys/pool/nr_hugepages".into(),
            }),
        }
    }

    #[test]
    fn a_machine_with_everything_passes() {
        let plan = Plan {
            vcpus: vec![1, 4],
            ..Plan::default()
        };
        assert_eq!(check(&plan, &host()), Ok(Vec::new()));
    }

    #[test]
    fn more_vcpus_than_recommended_is_a_warning() {
        let warnings = check(&Plan::default(), &host()).unwrap();
        assert_eq!(
            warnings,
            ["8 vCPUs are more than KVM recommends here: 4 (KVM_CAP_NR_VCPUS)"]
        );
    }

    #[test]
    fn what_is_missing_is_named_with_the_way_to_get_it() {
        type Change = fn(&mut Plan, &mut Host);
        let cases: [(Change, &str); 9] = [
            (
                |plan, _| plan.vcpus = vec![65],
                "--vcpus 65: this kernel's KVM allows at most 64 vCPUs (KVM_CAP_MAX_VCPUS)",
            ),
            (
                |_, host| host.absent_mapping_fault = false,
                "--delivery exit: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT; boot one with \
                 the Pagetide series (cargo xtask vm -- COMMAND does), or measure --delivery uffd",
            ),
            (
                |plan, host| {
                    plan.pre_fault = true;
                    host.pre_fault_memory = false;
                },
                "--pre-fault: this kernel lacks KVM_CAP_PRE_FAULT_MEMORY (Linux 6.11 and later, \
                 x86 with two-dimensional paging); leave --pre-fault out",
            ),
            (
                |_, host| host.minor_shmem = false,
                "--mode minor: this kernel's userfaultfd has no UFFD_FEATURE_MINOR_SHMEM \
                 (CONFIG_HAVE_ARCH_USERFAULTFD_MINOR, 64-bit x86 and arm64); use --mode missing",
            ),
            (
                |plan, host| {
                    plan.backing = Backing::Hugetlb2M;
                    host.minor_hugetlb = false;
                },
                "--mode minor: this kernel's userfaultfd has no UFFD_FEATURE_MINOR_HUGETLBFS \
                 (CONFIG_HAVE_ARCH_USERFAULTFD_MINOR, 64-bit x86 and arm64); use --mode missing",
            ),
            (
                |plan, _| plan.per_vcpu = ByteSize(2 << 30),
                "8 vCPUs need 16 GiB of memory and 8 GiB are available; lower --per-vcpu or \
                 --vcpus, or free memory",
            ),
            (
                |plan, host| {
                    plan.backing = Backing::Hugetlb2M;
                    host.hugepages = Some(Pool {
                        free: 255,
                        setting: "/sys/pool/nr".into(),
                    });
                },
                "--backing hugetlb-2m: 256 free huge pages are needed for 8 vCPUs and 255 are \
                 free; write a larger number to /sys/pool/nr",
            ),
            (
                |plan, _| {
                    plan.backing = Backing::Hugetlb1G;
                    plan.per_vcpu = ByteSize(1 << 40);
                },
                "--backing hugetlb-1g: 8192 free huge pages are needed for 8 vCPUs and 256 are \
                 free; write a larger number to /sys/pool/nr_hugepages",
            ),
            (
                |plan, host| {
                    plan.backing = Backing::Hugetlb1G;
                    host.hugepages = None;
                },
                "--backing hugetlb-1g: this kernel or CPU has no huge pages of that size; it needs \
                 CONFIG_HUGETLBFS and a CPU that has them",
            ),
        ];
        for (change, message) in cases {
            let (mut plan, mut host) = (Plan::default(), host());
            change(&mut plan, &mut host);
            assert_eq!(check(&plan, &host).expect_err(message).to_string(), message);
        }
    }

    #[test]
    fn what_a_plan_does_not_use_may_be_missing() {
        let host = Host {
            absent_mapping_fault: false,
            pre_fault_memory: false,
            minor_shmem: false,
            minor_hugetlb: false,
            hugepages: None,
            available_bytes: None,
            ..host()
        };
        let floor = Plan {
            deliveries: vec![Delivery::None],
            ..Plan::default()
        };
        assert!(check(&floor, &host).is_ok());
        let missing = Plan {
            deliveries: vec![Delivery::Uffd],
            mode: Mode::Missing,
            ..Plan::default()
        };
        assert!(check(&missing, &host).is_ok());
    }
}
