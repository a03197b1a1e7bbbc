//! A guest touches every page once, and wrong content is always found.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::sync::Arc;

use pagetide_memory::{Backing, GuestAddress, PageIndex};
use pagetide_testbed::{
    Content, DATA_GPA, Expected, GuestError, Machine, MachineConfig, Order, RunOutcome, Seed,
    Touch, VerifyError, Workload, pattern,
};
use pagetide_vmm::NoFaults;
use support::{SEED, chain, fill, machine, write};

const MIB: u64 = 1 << 20;

fn run(machine: &mut Machine, touch: Touch, order: Order) -> RunOutcome {
    machine
        .run(&Workload::new(touch, order), Arc::new(NoFaults))
        .unwrap_or_else(|failure| panic!("{}", chain(&failure)))
}

#[test]
fn every_backing_is_read_and_verified() {
    for backing in Backing::ALL {
        let page_bytes = backing.page_size().bytes();
        let per_vcpu_bytes = page_bytes.max(2 * MIB);
        // A gigabyte takes too long to fill and to read in a software CPU: one page, its first word.
        let huge = backing == Backing::Hugetlb1G;
        let vcpus = if huge { 1 } else { 2 };
        let config = MachineConfig {
            backing,
            ..MachineConfig::new(vcpus, per_vcpu_bytes)
        };
        let Some(mut machine) = machine(config) else {
            continue;
        };
        if huge {
            let word = pattern::word(DATA_GPA, SEED).to_le_bytes();
            write(machine.data(), PageIndex(0), &word).expect("the data region is there");
        } else {
            fill(machine.data(), SEED).expect("the data region is there");
        }
        for order in [Order::Sequential, Order::Random { seed: 7 }] {
            let outcome = run(&mut machine, Touch::ReadPattern(SEED), order);
            let pages = per_vcpu_bytes / page_bytes;
            assert_eq!(outcome.vcpus.len() as u64, u64::from(vcpus));
            for vcpu in &outcome.vcpus {
                assert_eq!(vcpu.touches, pages, "{backing}");
                assert_eq!(vcpu.latencies.len() as u64, pages);
                assert!(vcpu.latencies.cycles().iter().all(|cycles| *cycles > 0));
                assert_eq!(vcpu.counts.faults, 0);
                assert!(vcpu.elapsed <= outcome.elapsed && !vcpu.elapsed.is_zero());
            }
        }
        if !huge {
            let verified = machine
                .verify(Expected::all(Content::Pattern(SEED)))
                .unwrap_or_else(|error| panic!("{backing}: {}", chain(&error)));
            assert_eq!(verified.bytes, 2 * per_vcpu_bytes);
        }
    }
}

#[test]
fn writes_change_the_touched_words_only() {
    let Some(mut machine) = machine(MachineConfig::new(3, MIB)) else {
        return;
    };
    fill(machine.data(), SEED).expect("the data region is there");
    let written = Seed::new(99);
    run(
        &mut machine,
        Touch::Write(written),
        Order::Random { seed: 1 },
    );
    let (touched, rest) = (Content::Pattern(written), Content::Pattern(SEED));
    let verified = machine
        .verify(Expected { touched, rest })
        .expect("written and kept");
    assert_eq!(verified.bytes, 3 * MIB);
    let error = machine
        .verify(Expected::all(rest))
        .expect_err("the first words were written");
    let VerifyError::Mismatch {
        wrong_pages, gpa, ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!((wrong_pages, gpa), (3 * 256, GuestAddress(DATA_GPA)));
}

#[test]
fn a_wrong_page_is_reported_with_its_gpa_by_guest_and_host() {
    let Some(mut machine) = machine(MachineConfig::new(2, MIB)) else {
        return;
    };
    fill(machine.data(), SEED).expect("the data region is there");
    // Page 300 belongs to vCPU 1. It gets its neighbour's content: a page in the wrong place.
    let page = PageIndex(300);
    let gpa = machine
        .data()
        .gpa_of_page(page)
        .expect("a page of the region");
    let mut bytes = [0; 4096];
    pattern::fill(GuestAddress(gpa.0 + 4096), SEED, &mut bytes);
    write(machine.data(), page, &bytes).expect("the page is there");

    for order in [Order::Sequential, Order::Random { seed: 3 }] {
        let workload = Workload::new(Touch::ReadPattern(SEED), order);
        let failure = machine
            .run(&workload, Arc::new(NoFaults))
            .expect_err("a page is wrong");
        let GuestError::WrongWord {
            vcpu,
            count,
            gpa: bad,
            found,
            expected,
        } = *failure.cause
        else {
            panic!("{failure}")
        };
        assert_eq!((vcpu, count, bad), (1, 1, gpa));
        assert_eq!(found, pattern::word(gpa.0 + 4096, SEED));
        assert_eq!(expected, pattern::word(gpa.0, SEED));
    }
    let error = machine
        .verify(Expected::all(Content::Pattern(SEED)))
        .expect_err("a page is wrong");
    let VerifyError::Mismatch {
        wrong_pages,
        gpa: bad,
        ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!((wrong_pages, bad), (1, gpa));

    // The guest does not read the page's end, and the host does.
    fill(machine.data(), SEED).expect("the data region is there");
    machine
        .data()
        .write_service(page, 4095, &[0xff])
        .expect("the page is there");
    run(&mut machine, Touch::ReadPattern(SEED), Order::Sequential);
    let error = machine
        .verify(Expected::all(Content::Pattern(SEED)))
        .expect_err("a byte is wrong");
    let VerifyError::Mismatch { gpa: bad, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(bad.0, gpa.0 + 4088);
}

#[test]
fn a_guest_that_expects_a_pattern_refuses_zeroes() {
    let Some(mut machine) = machine(MachineConfig::new(1, MIB)) else {
        return;
    };
    run(&mut machine, Touch::ReadZero, Order::Sequential);
    machine
        .verify(Expected::all(Content::Zero))
        .expect("fresh memory is zero");
    let workload = Workload::new(Touch::ReadPattern(SEED), Order::Sequential);
    let failure = machine
        .run(&workload, Arc::new(NoFaults))
        .expect_err("it was not filled");
    assert!(
        matches!(
            *failure.cause,
            GuestError::WrongWord {
                count: 256,
                found: 0,
                ..
            }
        ),
        "{failure}"
    );
}

#[test]
fn overlapping_vcpus_walk_all_of_the_memory() {
    for pin in [false, true] {
        let config = MachineConfig {
            overlap: true,
            pin,
            ..MachineConfig::new(4, MIB)
        };
        let Some(mut machine) = machine(config) else {
            return;
        };
        fill(machine.data(), SEED).expect("the data region is there");
        for seed in 0..3 {
            // New page table entries, for which the vCPUs race.
            let pages = machine.data().all_pages();
            machine
                .data()
                .zap_guest(pages)
                .expect("shmem can be zapped");
            let outcome = run(
                &mut machine,
                Touch::ReadPattern(SEED),
                Order::Random { seed },
            );
            assert!(outcome.vcpus.iter().all(|vcpu| vcpu.touches == 4 * 256));
        }
    }
}

#[test]
fn strides_touch_parts_of_large_pages() {
    let config = MachineConfig {
        stride_bytes: Some(64 << 10),
        ..MachineConfig::new(2, MIB)
    };
    let Some(mut machine) = machine(config) else {
        return;
    };
    let outcome = run(&mut machine, Touch::Write(SEED), Order::Sequential);
    assert!(outcome.vcpus.iter().all(|vcpu| vcpu.touches == 16));
    let (touched, rest) = (Content::Pattern(SEED), Content::Zero);
    machine
        .verify(Expected { touched, rest })
        .expect("every 64 KiB, nothing else");
}

#[test]
fn absent_anonymous_pages_are_an_error_of_verification() {
    let config = MachineConfig {
        backing: Backing::Anonymous,
        ..MachineConfig::new(1, MIB)
    };
    let Some(machine) = machine(config) else {
        return;
    };
    let error = machine
        .verify(Expected::all(Content::Zero))
        .expect_err("nothing was touched");
    let VerifyError::Absent { gpa } = error else {
        panic!("{error}")
    };
    assert_eq!(gpa, GuestAddress(DATA_GPA));
}
