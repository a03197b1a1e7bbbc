//! Threads that wait for a page, and meanwhile help their source to receive it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Instant;

use pagetide_memory::{Access, Backing, GuestAddress, PageState};
use pagetide_pager::{
    Content, Contents, Counters, Helper, InstalledBy, Mode, Pager, RegionConfig, Request,
    Resolution, Source, Urgency,
};
use pagetide_test_support::Sleeper;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::has_unix_sockets;
use support::manual::*;

const PAGES: u64 = 32;

/// A peer at the other end of a socket, to which threads that wait lend themselves.
struct Remote {
    send: Mutex<UnixStream>,
    receive: UnixStream,
    state: Mutex<RemoteState>,
    changed: Condvar,
    /// Who has completed a request.
    by: Mutex<HashMap<u64, ThreadId>>,
}

#[derive(Default)]
struct RemoteState {
    requests: HashMap<u64, Request>,
    is_received: bool,
}

impl Remote {
    /// The source, and the peer's thread, which answers `answers` requests.
    fn new() -> (Arc<Self>, JoinHandle<()>) {
        let (near, mut far) = UnixStream::pair().unwrap();
        let peer = thread::spawn(move || {
            let mut asked = [0; 8];
            while far.read_exact(&mut asked).is_ok() {
                let content = content(GuestAddress(u64::from_le_bytes(asked)), PAGE);
                far.write_all(&asked).unwrap();
                far.write_all(&content).unwrap();
            }
        });
        let it = Arc::new(Self {
            send: Mutex::new(near.try_clone().unwrap()),
            receive: near,
            state: Mutex::default(),
            changed: Condvar::new(),
            by: Mutex::default(),
        });
        (it, peer)
    }

    fn lock(&self) -> MutexGuard<'_, RemoteState> {
        self.state.lock().unwrap()
    }

    /// Becomes the thread that receives; false if there is nothing to receive for it any more.
    fn take_receiver(&self, helper: &Helper<'_>) -> bool {
        let mut state = self.lock();
        while state.is_received {
            if helper.is_over() {
                return false;
            }
            let left = helper.until().saturating_duration_since(Instant::now());
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
        state.is_received = true;
        true
    }

    fn is_readable(&self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&self.receive, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::try_from(left).unwrap())).unwrap() > 0
    }

    fn receive(&self) -> (Request, Vec<u8>) {
        let mut asked = [0; 8];
        let mut content = vec![0; usize::try_from(PAGE).unwrap()];
        (&self.receive).read_exact(&mut asked).unwrap();
        (&self.receive).read_exact(&mut content).unwrap();
        let at = u64::from_le_bytes(asked);
        self.by.lock().unwrap().insert(at, thread::current().id());
        (self.lock().requests.remove(&at).unwrap(), content)
    }
}

impl Source for Remote {
    fn submit(&self, request: Request) {
        let at = request.gpa().0;
        assert_eq!(request.urgency(), Urgency::Urgent);
        self.lock().requests.insert(at, request);
        let mut send = self.send.lock().unwrap();
        send.write_all(&at.to_le_bytes()).unwrap();
    }

    fn help(&self, helper: &mut Helper<'_>) {
        if !self.take_receiver(helper) {
            return;
        }
        while !helper.is_over() && self.is_readable(helper.until()) {
            let (request, content) = self.receive();
            helper.complete(request, Content::Bytes(&content));
            self.changed.notify_all();
        }
        self.lock().is_received = false;
        self.changed.notify_all();
    }
}

#[test]
fn a_thread_that_waits_receives_its_own_page() {
    if !has_unix_sockets() {
        return;
    }
    for (mode, backing) in WAYS {
        let Some(region) = region(PAGES, backing) else {
            return;
        };
        let (source, peer) = Remote::new();
        let as_source = Arc::clone(&source) as Arc<dyn Source>;
        let (pager, _) = serve(&region, mode, as_source, ONE_ATTEMPT);
        let mut resolver = pager.resolver(Some(0)).unwrap();
        for page in 0..PAGES {
            let resolution = resolver.resolve_exit(gpa(page), Access::Read).unwrap();
            assert_eq!(resolution, Resolution::Waited);
            assert_eq!(state(&pager, page), PageState::Present);
            check_page(&region, page);
        }
        let here = thread::current().id();
        assert!(source.by.lock().unwrap().values().all(|&by| by == here));
        let expected = Counters {
            faults: PAGES,
            waits: PAGES,
            requests: PAGES,
            pages_received_by_waiter: PAGES,
            ..Counters::default()
        };
        assert_eq!(resolver.counters(), &expected, "{mode:?} {backing}");
        drop((resolver, pager, source));
        peer.join().unwrap();
    }
}

/// One receives for all, and hands on when it has its own page.
#[test]
fn threads_that_wait_receive_for_each_other() {
    const THREADS: u64 = 4;
    if !has_unix_sockets() {
        return;
    }
    let Some(region) = region(THREADS * PAGES, Backing::Shmem) else {
        return;
    };
    let (source, peer) = Remote::new();
    let as_source = Arc::clone(&source) as Arc<dyn Source>;
    let (pager, _) = serve(&region, Mode::Minor, as_source, ONE_ATTEMPT);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let mut resolver = pager.resolver(None).unwrap();
            scope.spawn(move || {
                for step in 0..PAGES {
                    let page = gpa(step * THREADS + thread);
                    let _ = resolver.resolve_exit(page, Access::Write).unwrap();
                }
            });
        }
    });
    check_all(&region);
    let counted = pager.counted();
    assert_eq!(counted.pages_received_by_waiter, THREADS * PAGES);
    assert_eq!(counted.pages, THREADS * PAGES);
    drop((pager, source));
    peer.join().unwrap();
}

/// The one that receives its page installs it, and leaves it to no thread that serves: none does.
#[test]
fn a_thread_that_helps_installs_its_own_page() {
    if !has_unix_sockets() {
        return;
    }
    for (mode, backing) in WAYS {
        let Some(region) = region(PAGES, backing) else {
            return;
        };
        let (source, peer) = Remote::new();
        let as_source = Arc::clone(&source) as Arc<dyn Source>;
        let contents = Contents::Source(as_source);
        let config = RegionConfig::local(Arc::clone(&region), mode, contents);
        let pager = Pager::new().unwrap();
        pager
            .add(config.installed_by(InstalledBy::Serving))
            .unwrap();
        let mut resolver = pager.resolver(Some(0)).unwrap();
        for page in 0..PAGES {
            let resolution = resolver.resolve_exit(gpa(page), Access::Read).unwrap();
            assert_eq!(resolution, Resolution::Waited);
            check_page(&region, page);
        }
        assert_eq!(resolver.counters().pages_received_by_waiter, PAGES);
        drop(resolver);
        let counted = pager.counted();
        let installed = (counted.handed_over, counted.answers, counted.pages);
        assert_eq!(installed, (0, PAGES, PAGES), "{mode:?} {backing}");
        drop((pager, source));
        peer.join().unwrap();
    }
}

/// A source that has a thread of its own to receive, and counts how often others offer to help.
struct Offered {
    requests: Arc<ManualSource>,
    offers: AtomicU64,
}

impl Offered {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            requests: ManualSource::new(),
            offers: AtomicU64::new(0),
        })
    }

    fn offers(&self) -> u64 {
        self.offers.load(Ordering::Relaxed)
    }
}

impl Source for Offered {
    fn submit(&self, request: Request) {
        self.requests.submit(request);
    }

    fn help(&self, _: &mut Helper<'_>) {
        self.offers.fetch_add(1, Ordering::Relaxed);
    }
}

/// A source that sends it back at once has it sleep, and not ask again and again.
#[test]
fn a_thread_that_is_not_needed_sleeps() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let source = Offered::new();
    let as_source = Arc::clone(&source) as Arc<dyn Source>;
    let (pager, _) = serve(&region, Mode::Minor, as_source, ONE_ATTEMPT);
    let mut resolver = pager.resolver(Some(0)).unwrap();
    let waiting = Sleeper::spawn("an exit", move || {
        let resolution = resolver.resolve_exit(gpa(3), Access::Read).unwrap();
        (resolution, resolver.counters().pages_received_by_waiter)
    });
    assert!(source.offers() > 0);
    complete(source.requests.next());
    assert_eq!(waiting.join(), (Resolution::Waited, 0));
    check_page(&region, 3);
}

/// There is nothing to receive, and the owner may be replacing what it would be received from.
#[test]
fn a_source_that_is_suspended_gets_no_help() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let source = Offered::new();
    let as_source = Arc::clone(&source) as Arc<dyn Source>;
    let (pager, id) = serve(&region, Mode::Minor, as_source, ONE_ATTEMPT);
    pager.suspend(id).unwrap();
    let mut resolver = pager.resolver(Some(0)).unwrap();
    let waiting = Sleeper::spawn("an exit", move || {
        resolver.resolve_exit(gpa(3), Access::Read).unwrap()
    });
    assert_eq!((source.offers(), source.requests.waiting()), (0, 0));
    pager.resume(id).unwrap();
    eventually("an offer", || source.offers() > 0);
    complete(source.requests.next());
    assert_eq!(waiting.join(), Resolution::Waited);
    check_page(&region, 3);
}

/// A source that is of no help: its thread sleeps until another thread answers.
struct Helpless(Arc<ManualSource>);

impl Source for Helpless {
    fn submit(&self, request: Request) {
        self.0.submit(request);
    }

    fn help(&self, _: &mut Helper<'_>) {
        panic!("of no help");
    }
}

#[test]
fn a_source_that_panics_loses_no_wait() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let source = ManualSource::new();
    let helpless = Arc::new(Helpless(Arc::clone(&source)));
    let (pager, _) = serve(&region, Mode::Minor, helpless, ONE_ATTEMPT);
    let waiting = exit(&pager, 3);
    complete(source.next());
    assert_eq!(waiting.join().unwrap().unwrap(), Resolution::Waited);
    check_page(&region, 3);
}

/// The peer does not answer: the thread that helps returns in time for the stop.
#[test]
fn a_stop_ends_a_help() {
    if !has_unix_sockets() {
        return;
    }
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let (near, far) = UnixStream::pair().unwrap();
    let source = Arc::new(Remote {
        send: Mutex::new(near.try_clone().unwrap()),
        receive: near,
        state: Mutex::default(),
        changed: Condvar::new(),
        by: Mutex::default(),
    });
    let (pager, _) = serve(&region, Mode::Minor, source, ONE_ATTEMPT);
    let waiting = [1, 2].map(|page| exit(&pager, page));
    // Both are requested.
    let mut asked = [0; 16];
    (&far).read_exact(&mut asked).unwrap();
    pager.stop();
    for exit in waiting {
        let error = join("the exit", exit).unwrap_err();
        assert!(error.to_string().contains("stop"), "{error}");
    }
}
