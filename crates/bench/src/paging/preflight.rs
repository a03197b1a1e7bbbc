//! Whether this machine can do what a plan asks for, found out before anything is built.
//!
//! What is missing is told in one line that also says how to get it.

use std::path::PathBuf;

use pagetide_memory::{Backing, PageSize};

use super::plan::{Delivery, Mode, Plan, Uffds};
use crate::benchmark::Benchmark;
use crate::facts::THP_SHMEM;
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
    /// KVM_CAP_POPULATE_MEMORY.
    pub populate_memory: bool,
    /// userfaultfd MINOR faults on shmem.
    pub minor_shmem: bool,
    /// userfaultfd MINOR faults on hugetlb.
    pub minor_hugetlb: bool,
    /// Bytes of ordinary memory that can be had, by the host or by this process's control group;
    /// `None` if neither says.
    pub available_bytes: Option<u64>,
    /// The hugetlb pool of the backing's page size; `None` if there is none.
    pub hugepages: Option<Pool>,
    /// Whether shmem gets transparent huge pages; `None` if the host does not say.
    pub shmem_thp: Option<String>,
    /// How many file descriptors this process may have; `None` if there is no limit.
    pub descriptors: Option<u64>,
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
    /// The kernel cannot fill stage-2 tables ahead.
    #[error(
        "--pre-fault: this kernel lacks KVM_CAP_PRE_FAULT_MEMORY (Linux 6.11 and later, x86 with \
         two-dimensional paging); leave --pre-fault out"
    )]
    PreFaultMemory,
    /// The kernel cannot map what is present.
    #[error(
        "--populate: this kernel lacks KVM_CAP_POPULATE_MEMORY; boot one with the Pagetide series \
         (cargo xtask vm -- COMMAND does), or leave --populate out"
    )]
    PopulateMemory,
    /// No MINOR faults for the backing.
    #[error(
        "--mode minor: this kernel's userfaultfd has no {feature} \
         (CONFIG_HAVE_ARCH_USERFAULTFD_MINOR, 64-bit x86 and arm64); use --mode missing"
    )]
    Minor {
        /// The feature's name.
        feature: &'static str,
    },
    /// Not enough file descriptors.
    #[error(
        "{vcpus} vCPUs need {wanted} file descriptors and this process may have {most}; raise the \
         limit (ulimit -n), or lower --vcpus or --readers"
    )]
    Descriptors {
        /// With how many vCPUs.
        vcpus: u32,
        /// Needed.
        wanted: u64,
        /// Allowed.
        most: u64,
    },
    /// Not enough memory.
    #[error(
        "{vcpus} vCPUs need {needed} of memory{} and {available} are available; lower --per-vcpu \
         or --vcpus, or free memory",
        .buffers.as_ref().map_or_else(String::new, |buffers| format!(
            " ({buffers} of it for buffers: --mode missing copies a page of --backing, times \
             --fault-around, in each thread)"
        ))
    )]
    Memory {
        /// With how many vCPUs.
        vcpus: u32,
        /// Needed, in words.
        needed: String,
        /// How much of it for buffers, in words, if that matters.
        buffers: Option<String>,
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
    if plan.populate && !host.populate_memory {
        return Err(Missing::PopulateMemory);
    }
    check_minor(plan, host)?;
    check_descriptors(plan, host)?;
    check_memory(plan, host)?;
    let mut warnings = Vec::new();
    if let (Backing::Thp, Some(setting @ ("never" | "deny"))) =
        (plan.backing, host.shmem_thp.as_deref())
    {
        warnings.push(format!(
            "--backing thp: {THP_SHMEM} is {setting}, so this is shmem of 4K pages; write advise \
             to it"
        ));
    }
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

/// What a process has open beside its vCPUs, userfaultfds and readers: its streams, KVM and the VM,
/// memory, files of results, and whatever it was started with.
const OTHER_DESCRIPTORS: u64 = 32;

fn check_descriptors(plan: &Plan, host: &Host) -> Result<(), Missing> {
    let vcpus = plan.most_vcpus();
    let uffds = match plan.uffds {
        Uffds::Single => 1,
        Uffds::PerVcpu => vcpus,
    };
    // A vCPU has one, a reader waits with one.
    let counted = [vcpus, uffds, plan.readers_for(vcpus)].map(u64::from);
    let wanted = counted.iter().sum::<u64>() + OTHER_DESCRIPTORS;
    match host.descriptors {
        Some(most) if most < wanted => Err(Missing::Descriptors {
            vcpus,
            wanted,
            most,
        }),
        _ => Ok(()),
    }
}

fn check_memory(plan: &Plan, host: &Host) -> Result<(), Missing> {
    let vcpus = plan.most_vcpus();
    let bytes = plan.total_bytes(vcpus);
    let backing = plan.backing;
    let huge = backing.page_size() != PageSize::Size4K;
    let buffers = buffer_bytes(plan);
    let ordinary = buffers.saturating_add(if huge { 0 } else { bytes });
    match host.available_bytes {
        Some(available) if available < ordinary => {
            return Err(Missing::Memory {
                vcpus,
                needed: ByteSize(ordinary).about(),
                buffers: (huge || buffers > bytes).then(|| ByteSize(buffers).about()),
                available: ByteSize(available).about(),
            });
        }
        _ => {}
    }
    if !huge {
        return Ok(());
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

/// What threads that resolve faults put content together in before the kernel copies it: nothing in
/// MINOR mode, which fills the page cache itself.
fn buffer_bytes(plan: &Plan) -> u64 {
    if plan.mode == Mode::Minor {
        return 0;
    }
    let vcpus = plan.most_vcpus();
    let threads = |delivery| match delivery {
        Delivery::None => 0,
        Delivery::Uffd => plan.readers_for(vcpus),
        Delivery::Exit => plan.readers_for(vcpus) + vcpus,
    };
    let page = plan.backing.page_size().bytes();
    let bytes = plan.series().into_iter().map(|series| {
        let run = (page * u64::from(series.fault_around)).min(plan.total_bytes(vcpus));
        run.saturating_mul(threads(series.delivery).into())
    });
    bytes.max().unwrap_or(0)
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
            populate_memory: true,
            minor_shmem: true,
            minor_hugetlb: true,
            available_bytes: Some(8 << 30),
            hugepages: Some(Pool {
                free: 256,
                setting: "/sys/pool/nr_hugepages".into(),
            }),
            shmem_thp: Some("advise".to_owned()),
            descriptors: Some(1024),
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
        let cases: [(Change, &str); 14] = [
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
                |plan, host| {
                    plan.populate = true;
                    host.populate_memory = false;
                },
                "--populate: this kernel lacks KVM_CAP_POPULATE_MEMORY; boot one with the Pagetide \
                 series (cargo xtask vm -- COMMAND does), or leave --populate out",
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
                |_, host| host.descriptors = Some(48),
                "8 vCPUs need 49 file descriptors and this process may have 48; raise the limit \
                 (ulimit -n), or lower --vcpus or --readers",
            ),
            (
                |plan, host| {
                    plan.uffds = Uffds::PerVcpu;
                    plan.readers = Some(1000);
                    host.descriptors = Some(1047);
                },
                "8 vCPUs need 1048 file descriptors and this process may have 1047; raise the \
                 limit (ulimit -n), or lower --vcpus or --readers",
            ),
            (
                |plan, host| {
                    plan.mode = Mode::Missing;
                    host.available_bytes = Some(512 << 20);
                },
                "8 vCPUs need 512.1 MiB of memory and 512 MiB are available; lower --per-vcpu or \
                 --vcpus, or free memory",
            ),
            (
                |plan, _| {
                    plan.mode = Mode::Missing;
                    plan.backing = Backing::Hugetlb1G;
                    plan.per_vcpu = ByteSize(1 << 30);
                },
                "8 vCPUs need 16 GiB of memory (16 GiB of it for buffers: --mode missing copies a \
                 page of --backing, times --fault-around, in each thread) and 8 GiB are \
                 available; lower --per-vcpu or --vcpus, or free memory",
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
    fn buffers_are_those_of_the_most_demanding_series() {
        let mut plan = Plan {
            mode: Mode::Missing,
            backing: Backing::Hugetlb2M,
            vcpus: vec![1, 4],
            readers: Some(2),
            ..Plan::default()
        };
        plan.deliveries = vec![Delivery::Uffd];
        assert_eq!(buffer_bytes(&plan), 2 * (2 << 20));
        plan.deliveries = vec![Delivery::Uffd, Delivery::Exit];
        plan.fault_around = vec![1, 16];
        assert_eq!(buffer_bytes(&plan), 6 * (32 << 20));
        plan.mode = Mode::Minor;
        assert_eq!(buffer_bytes(&plan), 0);
    }

    #[test]
    fn thp_that_is_switched_off_is_a_warning() {
        let plan = Plan {
            vcpus: vec![1],
            backing: Backing::Thp,
            ..Plan::default()
        };
        for (setting, warns) in [("never", true), ("deny", true), ("always", false)] {
            let host = Host {
                shmem_thp: Some(setting.to_owned()),
                ..host()
            };
            let warnings = check(&plan, &host).unwrap();
            assert_eq!(warnings.len(), usize::from(warns), "{warnings:?}");
            for warning in warnings {
                assert!(
                    warning.contains("/sys/kernel/mm/transparent_hugepage/shmem_enabled is")
                        && warning.contains(setting),
                    "{warning}"
                );
            }
        }
    }

    #[test]
    fn what_a_plan_does_not_use_may_be_missing() {
        let host = Host {
            absent_mapping_fault: false,
            pre_fault_memory: false,
            populate_memory: false,
            minor_shmem: false,
            minor_hugetlb: false,
            hugepages: None,
            available_bytes: None,
            shmem_thp: None,
            descriptors: None,
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
