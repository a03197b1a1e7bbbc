//! KVM's counts of a machine's stage-2 tables.

use pagetide_kvm::{Stats, StatsError, Vcpu, Vm};

/// KVM's counts of stage-2 faults and mappings. A count that this kernel lacks is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTwo {
    /// Stage-2 faults of vCPUs, of all kinds (`pf_taken`).
    pub faults_taken: u64,
    /// Present mappings of 4 KiB.
    pub mappings_4k: u64,
    /// Present mappings of 2 MiB.
    pub mappings_2m: u64,
    /// Present mappings of 1 GiB.
    pub mappings_1g: u64,
}

impl StageTwo {
    /// Reads the VM's counts and those of the vCPUs.
    pub(crate) fn read<'vcpu>(
        vm: &Vm,
        vcpus: impl Iterator<Item = &'vcpu Vcpu>,
    ) -> Result<Self, StatsError> {
        let stats = Stats::of_vm(vm)?;
        let value = |stats: &Stats, name| Ok::<_, StatsError>(stats.value(name)?.unwrap_or(0));
        let mut counts = Self {
            mappings_4k: value(&stats, "pages_4k")?,
            mappings_2m: value(&stats, "pages_2m")?,
            mappings_1g: value(&stats, "pages_1g")?,
            ..Self::default()
        };
        for vcpu in vcpus {
            let stats = Stats::of_vcpu(vcpu)?;
            counts.faults_taken += value(&stats, "pf_taken")?;
        }
        Ok(counts)
    }

    /// Mappings of any size.
    #[must_use]
    pub fn mappings(&self) -> u64 {
        self.mappings_4k + self.mappings_2m + self.mappings_1g
    }
}
