//! What KVM counts of a machine's stage-2 tables.

use pagetide_kvm::{Stats, StatsError, Vcpu, Vm};

/// KVM's own counts, which have the last word on whether population spared vCPUs anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTwo {
    /// Stage-2 faults that vCPUs took, of all kinds (`pf_taken`).
    pub faults_taken: u64,
    /// Those that mapped something (`pf_fixed`).
    pub faults_fixed: u64,
    /// Mappings of 4 KiB that there are now.
    pub mappings_4k: u64,
    /// Mappings of 2 MiB that there are now.
    pub mappings_2m: u64,
    /// Mappings of 1 GiB that there are now.
    pub mappings_1g: u64,
}

impl StageTwo {
    /// Reads them; a count that this kernel does not have is 0.
    pub(crate) fn read<'vcpu>(
        vm: &Vm,
        vcpus: impl Iterator<Item = &'vcpu Vcpu>,
    ) -> Result<Self, StatsError> {
        let stats = Stats::of_vm(vm)?;
        let mappings = |name| Ok::<_, StatsError>(stats.value(name)?.unwrap_or(0));
        let mut counts = Self {
            mappings_4k: mappings("pages_4k")?,
            mappings_2m: mappings("pages_2m")?,
            mappings_1g: mappings("pages_1g")?,
            ..Self::default()
        };
        for vcpu in vcpus {
            let stats = Stats::of_vcpu(vcpu)?;
            counts.faults_taken += stats.value("pf_taken")?.unwrap_or(0);
            counts.faults_fixed += stats.value("pf_fixed")?.unwrap_or(0);
        }
        Ok(counts)
    }

    /// Mappings of any size.
    #[must_use]
    pub fn mappings(&self) -> u64 {
        self.mappings_4k + self.mappings_2m + self.mappings_1g
    }
}
