use pagetide_test_support::Task;

use super::*;

const START: u64 = 1 << 20;

fn range(pages: u64) -> GuestRange {
    GuestRange::new(GuestAddress(START), pages << 12).unwrap()
}

/// Processes `pages` pages, the last one of which is absent, and then fails with `errno`.
fn deal(request: &mut abi::kvm_populate_memory, pages: u64, errno: i32) -> io::Result<()> {
    request.mapped = (pages << 12).saturating_sub(1 << 12);
    request.absent = (pages << 12).min(1 << 12);
    request.gpa += pages << 12;
    request.size -= pages << 12;
    match errno {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

#[test]
fn population_resumes_after_signals_and_retries() {
    let mut seen = Vec::new();
    let answers = [
        (3, libc::EINTR),
        (0, libc::EAGAIN),
        (2, libc::EAGAIN),
        (5, 0),
    ];
    let mut answers = answers.into_iter();
    let flags = PopulateFlags {
        write: true,
        present_only: true,
    };
    let done = resume(
        range(10),
        flags,
        || false,
        |request| {
            seen.push((request.gpa - START, request.size, request.flags));
            let (pages, errno) = answers.next().unwrap();
            deal(request, pages, errno)
        },
    );
    let done = done.unwrap();
    assert_eq!((done.mapped_bytes, done.absent_bytes), (7 << 12, 3 << 12));
    assert_eq!(done.bytes(), 10 << 12);
    let wanted = [(0, 10), (3, 7), (3, 7), (5, 5)];
    assert_eq!(seen, wanted.map(|(at, left)| (at << 12, left << 12, 3)));
}

/// Kind: a wait that takes the processor from whom it waits for.
#[test]
fn a_slot_update_that_takes_long_is_waited_for_asleep() {
    /// Behind the first few of these, it sleeps.
    const TRIES: u64 = 64;
    let sleeps = || Task::this().state().unwrap().1;
    let before = sleeps();
    let mut left = TRIES;
    let done = resume(
        range(10),
        PopulateFlags::default(),
        || false,
        |request| {
            left = left.saturating_sub(1);
            match left {
                0 => deal(request, 10, 0),
                _ => deal(request, 0, libc::EAGAIN),
            }
        },
    );
    assert_eq!(done.unwrap().bytes(), 10 << 12);
    let slept = sleeps() - before;
    assert!(slept >= TRIES / 2, "{slept} pauses");
}

#[test]
fn the_callers_condition_stops_it_and_the_rest_is_reported() {
    let mut asked = 0;
    let stop = || {
        asked += 1;
        asked > 1
    };
    let error = resume(range(10), PopulateFlags::default(), stop, |request| {
        deal(request, 4, libc::EINTR)
    });
    let error = error.unwrap_err();
    assert!(
        matches!(error, PopulateError::Interrupted { .. }),
        "{error}"
    );
    let unfinished = error.unfinished().unwrap();
    assert_eq!(unfinished.done.bytes(), 4 << 12);
    assert_eq!(unfinished.rest.start().0, START + (4 << 12));
    assert_eq!(unfinished.rest.bytes(), 6 << 12);
}

#[test]
fn every_errno_has_its_error() {
    type Is = fn(&PopulateError) -> bool;
    let cases: [(i32, Is); 5] = [
        (
            libc::ENOENT,
            |error| matches!(error, PopulateError::NoSlot { gpa, .. } if gpa.0 == START + 0x2000),
        ),
        (libc::EINVAL, |error| {
            matches!(error, PopulateError::Invalid { .. })
        }),
        (libc::ENOMEM, |error| {
            matches!(error, PopulateError::Failed { .. })
        }),
        (libc::EIO, |error| {
            matches!(error, PopulateError::Failed { .. })
        }),
        (libc::EOPNOTSUPP, |error| {
            matches!(error, PopulateError::Failed { .. })
        }),
    ];
    for (errno, is) in cases {
        let mut calls = 0;
        let error = resume(
            range(10),
            PopulateFlags::default(),
            || false,
            |request| {
                calls += 1;
                deal(request, 2, errno)
            },
        );
        let error = error.unwrap_err();
        assert!(is(&error), "{errno}: {error}");
        assert_eq!(calls, 1, "{error}");
        let source = std::error::Error::source(&error).expect("the kernel's answer");
        assert_eq!(
            source.to_string(),
            io::Error::from_raw_os_error(errno).to_string()
        );
    }
}

#[test]
fn an_error_of_a_part_is_reported_for_the_whole() {
    let whole = range(10);
    let part = GuestRange::new(GuestAddress(START + (4 << 12)), 2 << 12).unwrap();
    let error = resume(
        part,
        PopulateFlags::default(),
        || false,
        |request| deal(request, 1, libc::ENOMEM),
    );
    let before = Populated {
        mapped_bytes: 4 << 12,
        ..Populated::default()
    };
    let error = error.unwrap_err().within(whole, before);
    assert_eq!(
        error.to_string(),
        "population failed; 0x105000..0x10a000 is left (16384 bytes mapped, 4096 absent, 0 \
         poisoned)"
    );
}

#[test]
fn flags_have_the_kernels_bits() {
    for (write, present_only, bits) in [(false, false, 0), (true, false, 1), (false, true, 2)] {
        let flags = PopulateFlags {
            write,
            present_only,
        };
        assert_eq!(flags.bits(), bits, "{flags}");
    }
}
