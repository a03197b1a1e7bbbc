//! Memory with an uncorrected error (MADV_HWPOISON), as the VMM meets it on every architecture: an
//! exit that names the memory, each time that the guest touches it, and nothing else.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;
mod poisoning;

use guest::{DATA, DATA_PAGES, Limited, Machine, PAGE};
use pagetide_kvm::Exit;
use pagetide_memory::{GuestAddress, GuestRange, PageSize};
use poisoning::{may_poison, poison};

#[test]
fn a_guest_that_touches_poison_exits() {
    if !may_poison() {
        return;
    }
    let Some(machine) = Machine::new() else {
        return;
    };
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    Limited::spawn("a guest that touches poison", move || {
        let mut here = vcpu.bind().expect("signals");
        let bad = GuestAddress(DATA + 3 * PAGE);
        assert_eq!(machine.peek(&mut here, bad.0), Ok(3));
        poison(&machine.data, bad);
        for _ in 0..2 {
            let Err(Exit::Fault(fault)) = machine.peek(&mut here, bad.0) else {
                panic!("the guest read what is lost");
            };
            assert!(fault.poisoned && !fault.is_resolvable(), "{fault}");
            assert_eq!((fault.gpa, fault.size_bytes), (bad, PAGE));
            let error = machine.vm.error_of(fault.gpa, PageSize::Size4K);
            let lost = error.expect("in a slot").lost;
            assert_eq!(lost, GuestRange::new(bad, PAGE).expect("a page"));
        }
        for page in (0..DATA_PAGES).filter(|&page| page != 3) {
            let found = machine.peek(&mut here, DATA + page * PAGE);
            assert_eq!(found.map(u64::from), Ok(page), "page {page}");
        }
    })
    .join();
}
