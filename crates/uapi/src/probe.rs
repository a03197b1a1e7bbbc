//! The capabilities of this kernel and machine, and the fallback for each that is missing.
//!
//! Every answer comes from the running kernel, none from its version number. A query that cannot be
//! made (no `/dev/kvm`, no permission) yields an answer too, not an error.

use std::fs;
use std::io;

use kvm_ioctls::{Kvm, VmFd};
use serde::{Deserialize, Serialize};

use crate::generated as abi;
use crate::generated::MFD_MF_KEEP_UE_MAPPED;
use crate::host::HugepagePool;
use crate::memory_failure::has_keep_ue_mapped;
use crate::userfaultfd::{Features, OpenError, Userfaultfd};

/// A capability that a kernel or machine may have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// The kernel's name for the capability, or a name of ours where the kernel has none.
    pub name: String,
    /// The number of the KVM capability or the bit of the feature; `None` for other capabilities.
    pub number: Option<u64>,
    /// Whether Pagetide can use the capability here.
    pub present: bool,
    /// The value of the capability: what `KVM_CHECK_EXTENSION` returned, or a number of free pages.
    /// `None` if there is none.
    pub value: Option<i64>,
    /// What this kernel or machine has, as text.
    pub found: String,
    /// What Pagetide uses if the capability is missing.
    pub fallback: String,
}

impl Capability {
    /// What Pagetide uses instead; empty for a capability that is present.
    pub fn instead(&self) -> &str {
        if self.present { "" } else { &self.fallback }
    }

    /// The cells of the capability's table row: name, number, what this kernel has, what is used
    /// instead.
    pub fn row(&self) -> [String; 4] {
        let number = self
            .number
            .map(|number| number.to_string())
            .unwrap_or_default();
        [
            self.name.clone(),
            number,
            self.found.clone(),
            self.instead().to_owned(),
        ]
    }
}

/// All capabilities that Pagetide makes use of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The running kernel's release, for display only.
    pub kernel_release: String,
    /// The CPU architecture.
    pub architecture: String,
    /// The capabilities, in groups: KVM, userfaultfd, memory.
    pub capabilities: Vec<Capability>,
}

impl Probe {
    /// The column heads for [`Capability::row`].
    pub const COLUMNS: [&str; 4] = ["capability", "number", "this kernel has", "used instead"];

    /// Queries the running kernel.
    pub fn run() -> Self {
        let system = rustix::system::uname();
        let mut capabilities = kvm("/dev/kvm");
        capabilities.extend(userfaultfd(&Userfaultfd::available()));
        capabilities.extend(memory());
        Self {
            kernel_release: system.release().to_string_lossy().into_owned(),
            architecture: system.machine().to_string_lossy().into_owned(),
            capabilities,
        }
    }

    /// The capability with that name.
    pub fn capability(&self, name: &str) -> Option<&Capability> {
        self.capabilities
            .iter()
            .find(|capability| capability.name == name)
    }

    /// Whether the capability with that name is present; `false` for an unknown name.
    pub fn has(&self, name: &str) -> bool {
        self.capability(name)
            .is_some_and(|capability| capability.present)
    }
}

/// KVM capabilities: name, number, what is used instead.
const KVM_CAPABILITIES: [(&str, u32, &str); 7] = [
    (
        "KVM_CAP_USER_MEMORY2",
        abi::KVM_CAP_USER_MEMORY2,
        "KVM_SET_USER_MEMORY_REGION, which takes no slot flags for exits",
    ),
    (
        "KVM_CAP_MEMORY_FAULT_INFO",
        abi::KVM_CAP_MEMORY_FAULT_INFO,
        "nothing: a failed access is an EFAULT that names no address",
    ),
    (
        "KVM_CAP_ABSENT_MAPPING_FAULT",
        abi::KVM_CAP_ABSENT_MAPPING_FAULT,
        "userfaultfd reader threads serve every fault (--delivery uffd)",
    ),
    (
        "KVM_CAP_PRE_FAULT_MEMORY",
        abi::KVM_CAP_PRE_FAULT_MEMORY,
        "stage-2 tables fill as the guest touches its memory",
    ),
    (
        "KVM_CAP_SET_USER_MEMORY_REGION_LIST",
        abi::KVM_CAP_SET_USER_MEMORY_REGION_LIST,
        "memory slots change while every vCPU is stopped outside KVM_RUN",
    ),
    (
        "KVM_CAP_POPULATE_MEMORY",
        abi::KVM_CAP_POPULATE_MEMORY,
        "KVM_PRE_FAULT_MEMORY by idle vCPUs, else MADV_POPULATE_WRITE on the host's side",
    ),
    (
        "KVM_CAP_KICK_VCPUS",
        abi::KVM_CAP_KICK_VCPUS,
        "a signal to each vCPU's thread",
    ),
];

fn kvm(device: &str) -> Vec<Capability> {
    let opened = Kvm::new_with_path(match std::ffi::CString::new(device) {
        Ok(path) => path,
        Err(_) => return Vec::new(),
    });
    let mut answers = vec![Capability {
        name: device.to_owned(),
        number: None,
        present: opened.is_ok(),
        value: None,
        found: match &opened {
            Ok(kvm) => format!("usable, API version {}", kvm.get_api_version()),
            Err(error) => explain_kvm(&io::Error::from_raw_os_error(error.errno())),
        },
        fallback: "no VM can be run".to_owned(),
    }];
    // A VM's answer may be more exact than the system's, because it depends on the VM's type.
    let vm = opened.as_ref().ok().and_then(|kvm| kvm.create_vm().ok());
    for (name, number, fallback) in KVM_CAPABILITIES {
        let value = opened
            .as_ref()
            .ok()
            .map(|kvm| check_extension(kvm, vm.as_ref(), number));
        let present = value.is_some_and(|value| value > 0);
        let found = match value {
            None => "unknown: no KVM".to_owned(),
            Some(..=0) => "no".to_owned(),
            Some(1) => "yes".to_owned(),
            Some(value) => format!("yes ({value:#x})"),
        };
        answers.push(Capability {
            name: name.to_owned(),
            number: Some(u64::from(number)),
            present,
            value,
            found,
            fallback: fallback.to_owned(),
        });
    }
    answers
}

fn check_extension(kvm: &Kvm, vm: Option<&VmFd>, number: u32) -> i64 {
    let number = number.into();
    i64::from(match vm {
        Some(vm) => vm.check_extension_raw(number),
        None => kvm.check_extension_raw(number),
    })
}

fn explain_kvm(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound if cfg!(target_arch = "x86_64") => {
            "missing: load kvm_intel or kvm_amd, or turn on (nested) virtualisation".to_owned()
        }
        io::ErrorKind::NotFound => {
            "missing: the kernel needs CONFIG_KVM, and a machine that starts it at EL2".to_owned()
        }
        io::ErrorKind::PermissionDenied => {
            "no permission: run as root or join the group kvm".to_owned()
        }
        _ => format!("not usable: {error}"),
    }
}

/// Userfaultfd features: feature, what is used instead.
const USERFAULTFD_FEATURES: [(Features, &str); 5] = [
    (Features::MISSING_SHMEM, "anonymous memory only"),
    (
        Features::MINOR_SHMEM,
        "pages of shmem are copied in (MISSING mode)",
    ),
    (Features::MISSING_HUGETLBFS, "no hugetlb memory"),
    (
        Features::MINOR_HUGETLBFS,
        "pages of hugetlb memory are copied in (MISSING mode)",
    ),
    (Features::POISON, "a page that is lost stops the VM"),
];

fn userfaultfd(available: &Result<Features, OpenError>) -> Vec<Capability> {
    let mut answers = vec![Capability {
        name: "userfaultfd".to_owned(),
        number: None,
        present: available.is_ok(),
        value: None,
        found: match available {
            Ok(_) => "usable, also for KVM's faults".to_owned(),
            Err(error) => error.to_string(),
        },
        fallback: "nothing: no memory can be paged in".to_owned(),
    }];
    for (feature, fallback) in USERFAULTFD_FEATURES {
        let present = available
            .as_ref()
            .ok()
            .map(|features| features.contains(feature));
        answers.push(Capability {
            name: feature.to_string(),
            number: Some(feature.bits()),
            present: present == Some(true),
            value: present.map(i64::from),
            found: match present {
                None => "unknown: no userfaultfd",
                Some(true) => "yes",
                Some(false) => "no",
            }
            .to_owned(),
            fallback: fallback.to_owned(),
        });
    }
    answers
}

fn memory() -> Vec<Capability> {
    let mut answers = Vec::new();
    for (name, page_bytes) in [("hugetlb-2m", 2 << 20), ("hugetlb-1g", 1 << 30)] {
        let pool = HugepagePool::read(page_bytes);
        answers.push(Capability {
            name: format!("huge pages for {name}"),
            number: None,
            present: pool.as_ref().is_some_and(|pool| pool.free > 0),
            value: pool.as_ref().and_then(|pool| i64::try_from(pool.free).ok()),
            found: match &pool {
                None => "no pool of that size".to_owned(),
                Some(pool) => format!("{} of {} free", pool.free, pool.total),
            },
            fallback: match &pool {
                None => "no memory of that size".to_owned(),
                Some(pool) => format!("reserve some: write to {}", pool.setting.display()),
            },
        });
    }
    answers.push(transparent_hugepages(
        fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
            .ok()
            .as_deref(),
    ));
    answers.push(keep_ue_mapped(has_keep_ue_mapped));
    answers
}

/// The memory for which an uncorrected error costs only 4 KiB. `has` reports it for hugetlb memory with
/// pages of the given size, or for shmem (`None`).
fn keep_ue_mapped(has: impl Fn(Option<u64>) -> bool) -> Capability {
    let kinds = [
        (None, "shmem"),
        (Some(2 << 20), "hugetlb-2m"),
        (Some(1 << 30), "hugetlb-1g"),
    ];
    let kinds: Vec<_> = kinds
        .into_iter()
        .filter(|(pages, _)| has(*pages))
        .map(|(_, name)| name)
        .collect();
    Capability {
        name: "MFD_MF_KEEP_UE_MAPPED".to_owned(),
        number: Some(u64::from(MFD_MF_KEEP_UE_MAPPED)),
        present: !kinds.is_empty(),
        value: None,
        found: match &*kinds {
            [] => "no".to_owned(),
            kinds => format!("yes, for {}", kinds.join(", ")),
        },
        fallback: "an uncorrected error takes its whole huge page of hugetlb memory".to_owned(),
    }
}

/// Parses a setting that has the active word in brackets: `always within_size advise [never] deny
/// force`.
fn transparent_hugepages(setting: Option<&str>) -> Capability {
    let chosen = setting
        .and_then(|text| text.split_once('[')?.1.split_once(']'))
        .map(|(word, _)| word);
    Capability {
        name: "transparent huge pages for shmem".to_owned(),
        number: None,
        present: matches!(chosen, Some("always" | "within_size" | "advise" | "force")),
        value: None,
        found: chosen.unwrap_or("not in this kernel").to_owned(),
        fallback: match chosen {
            Some(_) => {
                "4K pages: write advise to /sys/kernel/mm/transparent_hugepage/shmem_enabled"
            }
            None => "4K pages",
        }
        .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_capability_has_an_answer() {
        let probe = Probe::run();
        assert!(!probe.kernel_release.is_empty());
        for (name, number, _) in KVM_CAPABILITIES {
            let capability = probe.capability(name).unwrap();
            assert_eq!(capability.number, Some(u64::from(number)));
            // Either a value, or the reason why there is none.
            assert_eq!(
                capability.value.is_none(),
                capability.found.starts_with("unknown")
            );
        }
        assert!(!probe.has("no such capability"));
        assert_eq!(probe.has("userfaultfd"), Userfaultfd::available().is_ok());
    }

    #[test]
    fn without_kvm_each_answer_names_the_reason() {
        let answers = kvm("/nonexistent/kvm");
        assert_eq!(answers.len(), 1 + KVM_CAPABILITIES.len());
        assert!(answers[0].found.starts_with("missing"), "{:?}", answers[0]);
        for answer in &answers[1..] {
            assert!(!answer.present);
            assert_eq!(answer.found, "unknown: no KVM");
            assert!(!answer.instead().is_empty());
        }
        let denied = explain_kvm(&io::Error::from(io::ErrorKind::PermissionDenied));
        assert!(denied.contains("group kvm"), "{denied}");
    }

    #[test]
    fn without_userfaultfd_each_answer_names_the_reason() {
        let device = io::Error::from(io::ErrorKind::PermissionDenied);
        let answers = userfaultfd(&Err(OpenError::NoPermission { device }));
        assert!(
            answers
                .iter()
                .all(|answer| !answer.present && answer.value.is_none())
        );
        assert!(
            answers[0].found.contains("unprivileged_userfaultfd"),
            "{:?}",
            answers[0]
        );
    }

    #[test]
    fn each_feature_is_reported_separately() {
        let answers = userfaultfd(&Ok(Features::MINOR_SHMEM));
        let present: Vec<_> = answers
            .iter()
            .filter(|answer| answer.present)
            .map(|answer| &*answer.name)
            .collect();
        assert_eq!(present, ["userfaultfd", "UFFD_FEATURE_MINOR_SHMEM"]);
    }

    #[test]
    fn the_setting_for_transparent_huge_pages_is_parsed() {
        let cases = [
            (
                Some("always within_size advise [never] deny force\n"),
                false,
                "never",
            ),
            (
                Some("always within_size [advise] never deny force\n"),
                true,
                "advise",
            ),
            (Some("rubbish"), false, "not in this kernel"),
            (None, false, "not in this kernel"),
        ];
        for (setting, present, found) in cases {
            let capability = transparent_hugepages(setting);
            assert_eq!(
                (capability.present, &*capability.found),
                (present, found),
                "{setting:?}"
            );
        }
    }

    #[test]
    fn the_memory_failure_policy_names_the_memory_that_supports_it() {
        let none = keep_ue_mapped(|_| false);
        assert_eq!((none.present, &*none.found), (false, "no"));
        assert!(none.instead().contains("whole huge page"));
        let some = keep_ue_mapped(|pages| pages != Some(1 << 30));
        assert_eq!(
            (some.present, &*some.found, some.instead()),
            (true, "yes, for shmem, hugetlb-2m", "")
        );
    }

    #[test]
    fn a_probe_round_trips_through_json() {
        let probe = Probe::run();
        let json = serde_json::to_string(&probe).unwrap();
        assert_eq!(serde_json::from_str::<Probe>(&json).unwrap(), probe);
        assert_eq!(probe.capabilities[0].row().len(), Probe::COLUMNS.len());
    }
}
