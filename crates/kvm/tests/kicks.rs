//! Kicks end KVM_RUN at any time.
//!
//! The vCPU has no memory and only the state that KVM initialises; without an in-kernel interrupt
//! controller it is runnable from the start (on arm64, after KVM_ARM_VCPU_INIT), and immediate_exit
//! prevents it from entering the guest.

use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::{Exit, Kvm, Vcpu, Vm};

const LIMIT: Duration = Duration::from_secs(60);

fn vcpu() -> Option<(Vm, Vcpu)> {
    let vm = match Kvm::open().map(|kvm| kvm.create_vm_with_signals()) {
        Ok(Ok(vm)) => vm,
        Ok(Err(error)) => {
            println!("SKIP: {error}");
            return None;
        }
        Err(error) => {
            println!("SKIP: {error}");
            return None;
        }
    };
    let vcpu = vm.create_vcpu(0).expect("one vCPU");
    make_runnable(&vm, &vcpu);
    Some((vm, vcpu))
}

/// Initialises an arm64 vCPU; KVM_RUN fails without (KVM_ARM_VCPU_INIT).
fn make_runnable(_vm: &Vm, _vcpu: &Vcpu) {
    #[cfg(target_arch = "aarch64")]
    {
        let mut kind = kvm_bindings::kvm_vcpu_init::default();
        let target = _vm.fd().get_preferred_target(&mut kind);
        target.expect("a processor that KVM knows");
        _vcpu.fd().vcpu_init(&kind).expect("a new vCPU");
    }
}

#[test]
fn a_kick_before_the_run_is_not_lost() {
    let Some((_vm, mut vcpu)) = vcpu() else {
        return;
    };
    let kick = vcpu.kick_handle();
    kick.kick();
    kick.kick();
    let mut here = vcpu.bind().expect("signals work");
    assert_eq!(here.run().expect("no failure"), Exit::Interrupted);
    kick.kick();
    assert_eq!(here.run().expect("no failure"), Exit::Interrupted);
}

#[test]
fn a_kick_outlives_its_vcpu() {
    let Some((vm, mut vcpu)) = vcpu() else { return };
    let kick = vcpu.kick_handle();
    drop(vcpu.bind().expect("signals work"));
    drop((vm, vcpu));
    kick.kick();
}

#[test]
fn completing_io_leaves_no_kick_behind() {
    let Some((_vm, mut vcpu)) = vcpu() else {
        return;
    };
    let kick = vcpu.kick_handle();
    let mut here = vcpu.bind().expect("signals work");
    here.complete_io().expect("there is none");
    kick.kick();
    assert_eq!(here.run().expect("no failure"), Exit::Interrupted);
    kick.kick();
    here.forget_kicks();
    here.complete_io().expect("there is none");
}

/// The thread that runs the vCPU may also read a page source.
#[test]
fn a_blocking_read_survives_a_kick() {
    let Some((_vm, mut vcpu)) = vcpu() else {
        return;
    };
    let kick = vcpu.kick_handle();
    let mut here = vcpu.bind().expect("signals work");
    let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
    let this_thread = rustix::thread::gettid();
    let kicker = thread::spawn(move || {
        let start = Instant::now();
        for _ in 0..20 {
            while !is_asleep_in_read(this_thread) {
                assert!(start.elapsed() < LIMIT, "no thread reads");
                thread::yield_now();
            }
            kick.kick();
        }
        writer.write_all(b"page").expect("a reader");
    });
    let mut page = [0; 8];
    // One system call: an interruption would be an error here.
    let count = reader.read(&mut page).expect("no kick is seen");
    assert_eq!(&page[..count], b"page");
    kicker.join().expect("no panic");
    assert_eq!(here.run().expect("no failure"), Exit::Interrupted);
}

/// Whether a thread of this process is in read().
fn is_asleep_in_read(thread: rustix::thread::Pid) -> bool {
    let path = format!("/proc/self/task/{}/syscall", thread.as_raw_nonzero());
    let call = std::fs::read_to_string(path).expect("procfs");
    let number = call.split(' ').next().and_then(|word| word.parse().ok());
    number == Some(libc::SYS_read)
}
