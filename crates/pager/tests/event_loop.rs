//! A pager's descriptor in a VMM's own event loop.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_memory::{Access, Backing, GuestAddress, PageSize, Region};
use pagetide_pager::{
    Contents, Counters, Mode, Pager, ReaderConfig, Readers, RegionConfig, RetryPolicy, ServeError,
    Serving, UffdLayout,
};
use pagetide_test_support::Sleeper;
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use support::view::View;
use support::*;

/// Whether the pager's descriptor becomes readable within `timeout`.
fn is_ready(serving: &Serving, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(serving, PollFlags::IN)];
    let timeout = Timespec::try_from(timeout).unwrap();
    poll(&mut fds, Some(&timeout)).unwrap() > 0
}

/// An event loop that serves until `is_over` returns true.
fn serve(serving: &mut Serving, is_over: impl Fn() -> bool) -> usize {
    let begun = Instant::now();
    let mut resolved = 0;
    while !is_over() {
        assert!(begun.elapsed() < PATIENCE, "hangs");
        if is_ready(serving, Duration::from_millis(5)) {
            resolved += serving.process_ready().unwrap();
        }
    }
    resolved
}

/// Runs event loops on separate threads for the duration of `work`.
fn with_loops(pager: &Arc<Pager>, loops: usize, messages: usize, work: impl FnOnce()) -> Counters {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..loops {
            scope.spawn(|| {
                let mut serving = Serving::new(pager, messages);
                serve(&mut serving, || over.load(Ordering::Acquire));
            });
        }
        work();
        over.store(true, Ordering::Release);
    });
    pager.counted()
}

fn touch_all(region: &Region) {
    thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for step in 0..region.pages() {
                    check_page(
                        region,
                        (step + thread * region.pages() / 4) % region.pages(),
                    );
                }
            });
        }
    });
}

#[test]
fn a_loop_serves_every_kind_of_region() {
    for (mode, backing) in SMALL_WAYS {
        for (loops, messages) in [(1, 64), (1, 1), (3, 1), (3, 16)] {
            for uffds in [1, 4] {
                let Some(region) = region(256, backing) else {
                    return;
                };
                within_patience(
                    &format!("{mode:?} {backing} {loops} {messages}"),
                    move || {
                        let layout = match uffds {
                            1 => UffdLayout::Single,
                            _ => UffdLayout::PerRange((0..4).map(|i| gpas(64 * i, 64)).collect()),
                        };
                        let set = |config: RegionConfig| config.userfaultfds(layout);
                        let paged = Paged::with(&region, mode, pattern(), set);
                        let counted =
                            with_loops(&paged.pager, loops, messages, || touch_all(&region));
                        assert_eq!(counted.pages, 256, "{counted:?}");
                        assert_eq!(counted.faults, counted.messages);
                        if messages == 1 {
                            assert!(counted.reads >= counted.messages, "{counted:?}");
                        }
                    },
                );
            }
        }
    }
}

#[test]
fn the_descriptor_is_readable_while_there_is_work() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Minor, pattern());
    let mut serving = Serving::new(&paged.pager, 4);
    assert!(!is_ready(&serving, Duration::ZERO));
    assert_eq!(serving.process_ready().unwrap(), 0);
    let its = Arc::clone(&region);
    let toucher = thread::spawn(move || check_page(&its, 1));
    assert!(is_ready(&serving, PATIENCE));
    assert_eq!(serving.process_ready().unwrap(), 1);
    join("the touch", toucher);
    assert!(!is_ready(&serving, Duration::ZERO));
    assert_eq!(serving.counters().pages, 1);
    // The same descriptor serves a region that is added later.
    let other = region_at(GuestAddress(GPA.0 << 1), 4, Backing::Anonymous).unwrap();
    let config = RegionConfig::local(Arc::clone(&other), Mode::Missing, pattern());
    let id = paged.pager.add(config).unwrap();
    let toucher = thread::spawn(move || check_page(&other, 1));
    assert!(is_ready(&serving, PATIENCE));
    assert_eq!(serving.process_ready().unwrap(), 1);
    join("the touch", toucher);
    paged.pager.remove(id).unwrap();
    assert!(!is_ready(&serving, Duration::ZERO));
}

/// A reader that stops with unread messages in its userfaultfd hands them on.
#[test]
fn messages_that_a_reader_leaves_are_read_by_the_next() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let gate = Arc::new(Barrier::new(2));
    let (at_gate, first) = (Arc::clone(&gate), AtomicBool::new(true));
    let contents = local(LocalFn(move |gpa, buffer: &mut [u8]| {
        if first.swap(false, Ordering::AcqRel) {
            at_gate.wait();
            at_gate.wait();
        }
        sources::fill_in(gpa, buffer)
    }));
    let paged = Paged::new(&region, Mode::Minor, contents);
    let touch = |page| {
        let region = Arc::clone(&region);
        spawn_asleep("a touch", move || check_page(&region, page))
    };
    // All messages are present before the reader looks: they are reported once.
    let touchers: Vec<_> = (0..8).map(touch).collect();
    let config = ReaderConfig {
        threads: 1,
        messages_per_read: 1,
    };
    let readers = Readers::spawn(&paged.pager, config).unwrap();
    gate.wait();
    // The reader is in its first fault, with seven messages unread. It stops after this fault.
    let stopping = spawn_asleep("the end", move || readers.stop());
    gate.wait();
    let read = join("the end", stopping);
    assert_eq!(read.messages, 1, "{read:?}");
    let mut serving = Serving::new(&paged.pager, 1);
    let all_read = || touchers.iter().all(Sleeper::is_finished);
    assert_eq!(serve(&mut serving, all_read), 7);
    for toucher in touchers {
        join("a touch", toucher);
    }
}

#[test]
fn readers_and_loops_serve_the_same_pager() {
    let Some(region) = region(1024, Backing::Shmem) else {
        return;
    };
    within_patience("all of them", move || {
        let paged = Paged::new(&region, Mode::Minor, pattern());
        let readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
        with_loops(&paged.pager, 1, 4, || {
            thread::scope(|scope| {
                scope.spawn(|| touch_all(&region));
                // Readers start and stop meanwhile.
                for _ in 0..10 {
                    let more = Readers::spawn(&paged.pager, ReaderConfig::new(2)).unwrap();
                    more.stop();
                }
            });
        });
        readers.stop();
        assert_eq!(paged.pager.counted().pages, 1024);
    });
}

/// Only the event loop repeats a request that is not answered.
#[test]
fn a_loop_serves_deadlines() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let source = ManualSource::new();
    let policy = RetryPolicy {
        deadline: Duration::from_millis(30),
        attempts: 100,
        first_backoff: Duration::from_millis(1),
        longest_backoff: Duration::from_millis(5),
    };
    let set = |config: RegionConfig| config.retry_policy(policy);
    let paged = Paged::with(&region, Mode::Minor, source.contents(), set);
    let mut serving = Serving::new(&paged.pager, 4);
    let its = Arc::clone(&region);
    let toucher = thread::spawn(move || check_page(&its, 1));
    serve(&mut serving, || source.waiting() >= 3);
    let late = [source.next(), source.next()];
    assert!(
        source
            .cancelled()
            .starts_with(&[late[0].id(), late[1].id()])
    );
    // The access still waits: a late answer is as good as one in time.
    let [first, _second] = late;
    sources::complete(first);
    join("the touch", toucher);
    let counted = paged.pager.counted();
    assert!(counted.failed_requests >= 2, "{counted:?}");
    assert!(counted.late_answers >= 1, "{counted:?}");
    assert_no_trouble(&paged.pager);
}

/// A vCPU's thread that waits for its page handles deadlines itself if no thread serves the pager.
#[test]
fn an_exit_that_waits_serves_deadlines() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let source = ManualSource::new();
    let policy = RetryPolicy {
        deadline: Duration::from_millis(10),
        attempts: 1000,
        first_backoff: Duration::from_millis(1),
        longest_backoff: Duration::from_millis(1),
    };
    let set = |config: RegionConfig| config.retry_policy(policy);
    let paged = Paged::with(&region, Mode::Minor, source.contents(), set);
    let mut resolver = paged.resolver();
    let its = Arc::clone(&region);
    let waiting = thread::spawn(move || exit(&mut resolver, &its, 1, Access::Read).unwrap());
    let _first = source.next();
    let _second = source.next();
    while !waiting.is_finished() {
        if source.waiting() > 0 {
            sources::complete(source.next());
        }
        thread::yield_now();
    }
    let _ = join("the exit", waiting);
    check_page(&region, 1);
}

#[test]
fn a_loop_that_panics_leaves_no_thread_asleep() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    // A panic of a local source is caught, fault by fault, so that the loop continues.
    let contents = Contents::Local(Arc::new(LocalFn(move |gpa, buffer: &mut [u8]| {
        if gpa == GPA {
            std::panic::resume_unwind(Box::new("page 0"));
        }
        sources::fill_in(gpa, buffer)
    })));
    let paged = Paged::new(&region, Mode::Minor, contents);
    let touch = |page| {
        let region = Arc::clone(&region);
        handle_sigbus();
        spawn_asleep("a touch", move || match page {
            0 => expect_poison(&region, 0),
            _ => check_page(&region, page),
        })
    };
    let touchers = [0, 1, 2].map(touch);
    let mut serving = Serving::new(&paged.pager, 16);
    serve(&mut serving, || {
        touchers[1].is_finished() && touchers[2].is_finished()
    });
    assert!(paged.pager.trouble().is_some());
    assert!(!touchers[0].is_finished());
    paged.pager.remove(paged.id).unwrap();
    for toucher in touchers {
        join("a touch", toucher);
    }
}

/// However many threads fault, serving returns to the event loop, which can handle other descriptors.
#[test]
fn endless_messages_do_not_block_a_loop() {
    const SLEEPERS: u64 = 300;
    let Some(region) = region(SLEEPERS, Backing::Anonymous) else {
        return;
    };
    // With a userfaultfd of the test's own, which shows the number of its messages.
    let uffd = Arc::new(Userfaultfd::open(Features::NONE).unwrap());
    // SAFETY: the region stays mapped for longer than the userfaultfd is open, and no code relies on
    // its zeroes.
    unsafe { uffd.register(region.guest().into(), Mode::Missing) }.unwrap();
    let size = PageSize::Size4K;
    let config = RegionConfig::foreign(&uffd, region.guest(), size, Mode::Missing, pattern());
    let pager = Pager::new().unwrap();
    pager.add(config.gpa(GPA)).unwrap();
    // If the test fails, these threads get SIGBUS when the pager is dropped, which must not hide the
    // cause.
    handle_sigbus();
    let touchers: Vec<_> = (0..SLEEPERS)
        .map(|page| {
            let region = Arc::clone(&region);
            thread::spawn(move || check_page(&region, page))
        })
        .collect();
    let info = format!("/proc/self/fdinfo/{}", uffd.as_fd().as_raw_fd());
    let all = format!("pending:\t{SLEEPERS}");
    eventually("all threads are asleep", || {
        let info = std::fs::read_to_string(&info).unwrap();
        info.lines().any(|line| line == all)
    });

    let mut serving = Serving::new(&pager, 1);
    let mut resolved = serving.process_ready().unwrap();
    assert!((1..=256).contains(&resolved), "{resolved} at once");
    // Remaining messages are reported again, to any waiting thread.
    let mut other = Serving::new(&pager, 1);
    assert!(is_ready(&other, Duration::ZERO));
    for turn in 0..SLEEPERS {
        if turn % 2 == 0 {
            resolved += other.process_ready().unwrap();
        } else {
            resolved += serving.process_ready().unwrap();
        }
    }
    assert_eq!(resolved as u64, SLEEPERS);
    for toucher in touchers {
        join("a touch", toucher);
    }
    assert!(!is_ready(&serving, Duration::ZERO));
}

/// A loop that has little else to do waits for its other descriptors together with the faults.
#[test]
fn a_watched_descriptor_is_reported_as_long_as_it_is_readable() {
    let Some(region) = region(4, Backing::Anonymous) else {
        return;
    };
    let paged = Paged::with(&region, Mode::Missing, pattern(), |config| config);
    let mut serving = Serving::new(&paged.pager, 4);
    let flags = EventfdFlags::empty();
    let (quiet, loud) = (eventfd(0, flags).unwrap(), eventfd(1, flags).unwrap());
    serving.watch(quiet.as_fd(), 0).unwrap();
    serving.watch(loud.as_fd(), u32::MAX).unwrap();
    assert!(serving.watch(loud.as_fd(), 1).is_err());
    for _ in 0..2 {
        assert_eq!(serving.serve_for(None).unwrap(), [u32::MAX]);
    }
    serving.unwatch(loud.as_fd());
    assert!(serving.serve_for(Some(Duration::ZERO)).unwrap().is_empty());
    thread::scope(|scope| {
        let reading = scope.spawn(|| check_page(&region, 2));
        while !reading.is_finished() {
            let watched = serving.serve_for(Some(Duration::from_millis(5))).unwrap();
            assert!(watched.is_empty());
        }
    });
    assert_eq!(serving.counters().messages, 1);
}

/// A loop with a budget goes back to its other descriptors after each fault, and loses none.
#[test]
fn a_budget_ends_a_turn_after_one_fault() {
    const SLEEPERS: u64 = 6;
    let Some(region) = region(SLEEPERS, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Minor, pattern());
    handle_sigbus();
    let touch = |page| {
        let region = Arc::clone(&region);
        spawn_asleep("a touch", move || check_page(&region, page))
    };
    let touchers: Vec<_> = (0..SLEEPERS).map(touch).collect();
    // One read takes all messages.
    let mut serving = Serving::new(&paged.pager, 16);
    let mut other = Serving::new(&paged.pager, 16);
    for left in (0..SLEEPERS).rev() {
        let turn = if left % 2 == 0 {
            &mut serving
        } else {
            &mut other
        };
        assert_eq!(turn.process_ready_within(Duration::ZERO).unwrap(), 1);
        assert_eq!(is_ready(&serving, Duration::ZERO), left > 0);
    }
    assert_eq!(serving.process_ready_within(Duration::MAX).unwrap(), 0);
    for toucher in touchers {
        join("a touch", toucher);
    }
}

/// Kind: what is ready is reported once, and was lost with another one's failure.
#[test]
fn a_descriptor_that_fails_keeps_no_other_from_being_served() {
    if !has_userfaultfd() {
        return;
    }
    let pager = Pager::new().unwrap();
    let memories = [GPA, GuestAddress(GPA.0 << 1)].map(|gpa| {
        let memory = Arc::new(View::private(2 * PAGE));
        let uffd = memory.register(Mode::Missing);
        let (size, mode) = (PageSize::Size4K, Mode::Missing);
        let config = RegionConfig::foreign(&uffd, memory.range(), size, mode, pattern());
        pager.add(config.gpa(gpa)).unwrap();
        (memory, uffd)
    });
    let touch = |at: usize, page: u64| {
        let memory = Arc::clone(&memories[at].0);
        spawn_asleep("a touch", move || memory.populate_here(page))
    };
    let (first, second) = (touch(0, 0), touch(1, 0));
    // Its number becomes another file's, which nobody can read. It stays open, and polled.
    let number = memories[0].1.as_fd().as_raw_fd();
    let uffd = memories[0].1.as_fd().try_clone_to_owned().unwrap();
    let (_ours, unreadable) = std::io::pipe().unwrap();
    let replace = |by: BorrowedFd<'_>| {
        // SAFETY: no code relies on which file the number is, but for the pager, whose failure is the subject.
        assert_eq!(unsafe { libc::dup2(by.as_raw_fd(), number) }, number);
    };
    replace(unreadable.as_fd());
    let mut serving = Serving::new(&pager, 4);
    let failed = serving.process_ready().unwrap_err();
    assert!(matches!(failed, ServeError::Read(_)), "{failed}");
    assert!(!second.is_finished());
    // To an owner who polls, by whichever thread.
    assert!(is_ready(&serving, Duration::ZERO));
    assert_eq!(Serving::new(&pager, 4).process_ready().unwrap(), 1);
    assert_eq!(second.join(), Ok(()));
    assert_eq!(memories[1].0.read_here(0), !(GPA.0 << 1));
    replace(uffd.as_fd());
    let third = touch(0, 1);
    serve(&mut serving, || first.is_finished() && third.is_finished());
    assert_eq!((first.join(), third.join()), (Ok(()), Ok(())));
    assert_eq!(memories[0].0.read_here(0), !GPA.0);
    assert_eq!(memories[0].0.read_here(1), !(GPA.0 + PAGE));
}
