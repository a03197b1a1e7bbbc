//! Temporary: until the generated constants are in pagetide-uapi.
pub(crate) const KVM_MEMORY_EXIT_FLAG_READ: u32 = 1 << 0;
pub(crate) const KVM_MEMORY_EXIT_FLAG_WRITE: u32 = 1 << 1;
pub(crate) const KVM_MEMORY_EXIT_FLAG_EXEC: u32 = 1 << 2;
pub(crate) const KVM_MEMORY_EXIT_FLAG_PRIVATE: u32 = 1 << 3;
pub(crate) const KVM_MEMORY_EXIT_FLAG_ABSENT: u32 = 1 << 5;
pub(crate) const KVM_MEM_ABSENT_MAPPING_FAULT: u32 = 1 << 8;
pub(crate) const KVM_CAP_ABSENT_MAPPING_FAULT: u32 = 10001;
pub(crate) use kvm_bindings::{
    KVM_CAP_MEMORY_FAULT_INFO, KVM_CAP_PRE_FAULT_MEMORY, KVM_CAP_USER_MEMORY2,
};
