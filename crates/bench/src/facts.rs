//! Where figures come from: the machine, its kernel, its KVM, the build.
//!
//! A figure without these is worth little; the report states them all. What cannot be read is said
//! to be unknown, never guessed.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::timing::Timing;

/// Whether shmem gets transparent huge pages.
pub(crate) const THP_SHMEM: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

const CPUFREQ: &str = "/sys/devices/system/cpu/cpu0/cpufreq";

/// The environment of a benchmark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// When the benchmark started: UTC, RFC 3339, to the second.
    pub started_utc: String,
    /// Version of this program.
    pub version: String,
    /// Revision of the checkout that it was built from, with `-dirty` if files were changed.
    pub revision: Option<String>,
    /// Whether it was built without optimisation.
    pub debug_build: bool,
    /// `uname -r` of the kernel under test.
    pub kernel_release: String,
    /// `uname -m`.
    pub machine: String,
    /// The CPU's model name.
    pub cpu_model: Option<String>,
    /// Who chooses the first CPU's frequency, and how (Documentation/admin-guide/pm/cpufreq.rst); a VM has nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub governor: Option<String>,
    /// CPUs that this process may run on.
    pub host_cpus: u32,
    /// Memory of the host in bytes.
    pub memory_bytes: Option<u64>,
    /// Which KVM: the modules that are loaded and what is known of the hardware below them.
    pub kvm: String,
    /// What `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is set to.
    pub thp_shmem: Option<String>,
}

impl Facts {
    /// Reads them off this machine.
    #[must_use]
    pub fn gather(timing: Timing) -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ");
        let uname = |file: &str| read_trimmed(&format!("/proc/sys/kernel/{file}"));
        Self {
            started_utc: now.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            revision: option_env!("PAGETIDE_BUILD_REVISION").map(str::to_owned),
            debug_build: cfg!(debug_assertions),
            kernel_release: uname("osrelease").unwrap_or_else(|| "unknown".to_owned()),
            machine: std::env::consts::ARCH.to_owned(),
            cpu_model: cpu_field(&cpuinfo, "model name"),
            governor: governor(CPUFREQ),
            host_cpus: std::thread::available_parallelism()
                .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX)),
            memory_bytes: fs::read_to_string("/proc/meminfo")
                .ok()
                .and_then(|text| total_memory(&text)),
            kvm: describe_kvm(&loaded_kvm_modules(), &cpuinfo, timing),
            thp_shmem: thp_shmem(),
        }
    }

    /// Names and values for a reader, in the order in which they matter.
    #[must_use]
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let unknown = || "unknown".to_owned();
        let mut build = match &self.revision {
            Some(revision) => format!("{}, revision {revision}", self.version),
            None => format!("{}, revision unknown", self.version),
        };
        if self.debug_build {
            build.push_str(", built without optimisation");
        }
        let mut cpu = self.cpu_model.clone().unwrap_or_else(unknown);
        if let Some(governor) = &self.governor {
            cpu = format!("{cpu}, frequency by {governor}");
        }
        vec![
            ("Started", self.started_utc.clone()),
            (
                "Kernel",
                format!("{} ({})", self.kernel_release, self.machine),
            ),
            ("KVM", self.kvm.clone()),
            ("CPU", cpu),
            ("Host CPUs", self.host_cpus.to_string()),
            (
                "Host memory",
                self.memory_bytes
                    .map_or_else(unknown, |bytes| crate::units::ByteSize(bytes).about()),
            ),
            (
                "THP for shmem",
                self.thp_shmem.clone().unwrap_or_else(unknown),
            ),
            ("Pagetide", build),
        ]
    }
}

/// What [`THP_SHMEM`] is set to.
pub(crate) fn thp_shmem() -> Option<String> {
    chosen(&read_trimmed(THP_SHMEM)?)
}

/// The governor and its driver.
fn governor(cpufreq: &str) -> Option<String> {
    let of_first = |name: &str| read_trimmed(&format!("{cpufreq}/{name}"));
    let governor = of_first("scaling_governor")?;
    let driver = of_first("scaling_driver");
    Some(driver.map_or_else(
        || governor.clone(),
        |driver| format!("{governor} ({driver})"),
    ))
}

fn read_trimmed(path: &str) -> Option<String> {
    fs::read_to_string(path)
        .ok()
        .map(|text| text.trim().to_owned())
}

/// A field of the first CPU of `/proc/cpuinfo`.
fn cpu_field(cpuinfo: &str, name: &str) -> Option<String> {
    cpuinfo.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

/// `MemTotal` of `/proc/meminfo` in bytes.
fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// The bracketed word of a setting like `always [never] advise`.
fn chosen(setting: &str) -> Option<String> {
    let (_, rest) = setting.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

/// Vendor modules of KVM (`kvm_amd`, `kvm_intel`, ...); built-in ones are listed as well.
fn loaded_kvm_modules() -> Vec<String> {
    let Ok(entries) = fs::read_dir(Path::new("/sys/module")) else {
        return Vec::new();
    };
    let mut modules: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("kvm_"))
        .collect();
    modules.sort();
    modules
}

fn describe_kvm(modules: &[String], cpuinfo: &str, timing: Timing) -> String {
    let flags = cpu_field(cpuinfo, "flags").unwrap_or_default();
    let has = |wanted: &str| flags.split_whitespace().any(|flag| flag == wanted);
    let below = if timing.is_lab() {
        "on the lab's software CPU"
    } else if cfg!(target_arch = "x86_64") && !has("svm") && !has("vmx") {
        "which emulates virtualisation: the CPU has neither svm nor vmx, so figures say little \
         about hardware"
    } else if has("hypervisor") {
        "nested: this machine is itself virtual"
    } else {
        "on this machine's hardware"
    };
    if modules.is_empty() {
        format!("/dev/kvm, {below}")
    } else {
        format!("{}, {below}", modules.join(" and "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read() {
        let cpuinfo =
            "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu svm\n\nprocessor\t: 1\n";
        assert_eq!(
            cpu_field(cpuinfo, "model name").as_deref(),
            Some("AMD EPYC")
        );
        assert_eq!(cpu_field(cpuinfo, "stepping"), None);
        assert_eq!(total_memory("MemTotal:  8 kB\nMemFree: 1 kB\n"), Some(8192));
        assert_eq!(
            chosen("always within_size [advise] never").as_deref(),
            Some("advise")
        );
        assert_eq!(chosen("never"), None);
    }

    #[test]
    fn the_governor_is_told_with_its_driver_if_there_is_one() {
        let place = tempfile::tempdir().unwrap();
        let cpufreq = place.path().to_str().unwrap();
        assert_eq!(governor(cpufreq), None);
        fs::write(place.path().join("scaling_governor"), "performance\n").unwrap();
        assert_eq!(governor(cpufreq).as_deref(), Some("performance"));
        fs::write(place.path().join("scaling_driver"), "amd-pstate\n").unwrap();
        let wanted = Some("performance (amd-pstate)");
        assert_eq!(governor(cpufreq).as_deref(), wanted);
    }

    #[test]
    fn the_kvm_line_says_what_is_below() {
        let amd = ["kvm_amd".to_owned()];
        let hardware = describe_kvm(&amd, "flags : fpu svm\n", Timing::Native);
        assert_eq!(hardware, "kvm_amd, on this machine's hardware");
        let nested = describe_kvm(&amd, "flags : svm hypervisor\n", Timing::Native);
        assert_eq!(nested, "kvm_amd, nested: this machine is itself virtual");
        let lab = describe_kvm(&amd, "flags : svm hypervisor\n", Timing::Parallel);
        assert_eq!(lab, "kvm_amd, on the lab's software CPU");
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn emulated_virtualisation_is_called_that() {
        let text = describe_kvm(&[], "flags : fpu hypervisor\n", Timing::Native);
        assert!(
            text.starts_with("/dev/kvm, which emulates virtualisation"),
            "{text}"
        );
    }

    #[test]
    fn this_machine_has_facts() {
        let facts = Facts::gather(Timing::Native);
        assert!(facts.host_cpus > 0);
        assert!(
            facts.kernel_release.contains('.'),
            "{}",
            facts.kernel_release
        );
        assert!(
            facts
                .lines()
                .iter()
                .all(|(name, value)| !name.is_empty() && !value.is_empty())
        );
    }
}
