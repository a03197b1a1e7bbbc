//! A source with a long latency and any number of requests in flight. A fault waits for little more
//! than that latency, whatever prefetch does; and prefetch maintains its rate, whatever faults do.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_memory::{Access, Backing};
use pagetide_pager::{
    Contents, InFlightLimits, Mode, Pager, Prefetch, PrefetchConfig, RegionConfig, Request, Source,
    Urgency,
};
use support::manual::*;

/// Other requests may follow a fault's request at any time, but it passes every bulk request that is
/// not yet submitted, and bulk requests in flight do not use up its limit.
#[test]
fn urgent_requests_pass_all_bulk_requests() {
    let Some(region) = region(1024, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let pager = Pager::new().unwrap();
    let limits = InFlightLimits {
        urgent_bytes: 16 * PAGE,
        bulk_bytes: 64 * PAGE,
    };
    let config = RegionConfig::local(
        Arc::clone(&region),
        Mode::Minor,
        Contents::Source(manual.source()),
    )
    .retry_policy(PERSISTENT)
    .in_flight_limits(limits);
    let id = pager.add(config).unwrap();
    let ahead = Prefetch::spawn(
        &pager,
        PrefetchConfig {
            batch_bytes: 16 * PAGE,
        },
    )
    .unwrap();
    manual.wait_for_waiting(4);
    // The bulk limit is reached, and there is no answer. Each fault's page is requested at once
    // nevertheless: pages that are requested in bulk, and others.
    let mut waiting = Vec::new();
    for page in [3, 1000, 17, 999, 40, 998, 63, 997] {
        waiting.push(exit(&pager, page));
        let urgent = manual.next_urgent();
        assert_eq!(urgent.pages(), range(page, 1));
        complete(urgent);
        let _ = join("the exit", waiting.pop().unwrap()).unwrap();
    }
    assert_eq!(manual.waiting(), 4);
    let is_bulk = |asked: &Requested| asked.urgency == Urgency::Bulk;
    let log = manual.log();
    assert!(log[..4].iter().all(is_bulk) && !log[4..].iter().any(is_bulk));

    // More faults than the limit permits: all of them are submitted before the bulk requests that bulk
    // answers make room for.
    let faults: Vec<_> = (500..540).map(|page| exit(&pager, page)).collect();
    manual.wait_for_waiting(4 + 16);
    eventually("the others", || {
        pager.source_status(id).unwrap().waiting_requests == 24
    });
    let before = manual.log().len();
    (0..4).for_each(|_| complete(manual.next_bulk()));
    (0..40).for_each(|_| complete(manual.next_urgent()));
    for fault in faults {
        let _ = join("an exit", fault).unwrap();
    }
    let log = manual.log();
    assert!(!log[before..before + 24].iter().any(is_bulk), "{log:?}");
    eventually("prefetch", || {
        if let Some(request) = manual.take_if(|_| true) {
            complete(request);
        }
        ahead.is_finished()
    });
    assert!(ahead.finish().unwrap().is_complete);
    check_all(&region);
}

const LATENCY: Duration = Duration::from_millis(5);
const REGION_BYTES: u64 = 64 << 20;

/// A request and the time of its answer; of simultaneous answers, urgent ones come first, as in any
/// source with two queues.
struct Due {
    at: Instant,
    request: Request,
}

#[derive(Default)]
struct Queues {
    urgent: BinaryHeap<Reverse<Due>>,
    bulk: BinaryHeap<Reverse<Due>>,
    is_over: bool,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.request.id()).cmp(&(other.at, other.request.id()))
    }
}

/// Answers each request [`LATENCY`] after it was submitted.
#[derive(Default)]
struct Far {
    queues: Mutex<Queues>,
    changed: Condvar,
}

impl Far {
    fn new() -> (Arc<Self>, thread::JoinHandle<()>) {
        let far = Arc::<Self>::default();
        let its = Arc::clone(&far);
        (far, thread::spawn(move || its.answer()))
    }

    fn answer(&self) {
        let page = content_of(range(0, 64));
        let mut queues = self.queues.lock().unwrap();
        while !queues.is_over {
            let now = Instant::now();
            let Queues { urgent, bulk, .. } = &mut *queues;
            let mut first_due = None;
            let mut due = None;
            for queue in [urgent, bulk] {
                match queue.peek() {
                    Some(Reverse(next)) if next.at <= now => {
                        due = queue.pop();
                        break;
                    }
                    Some(Reverse(next)) => {
                        first_due = Some(first_due.map_or(next.at, |at: Instant| at.min(next.at)));
                    }
                    None => {}
                }
            }
            if let Some(Reverse(Due { request, .. })) = due {
                drop(queues);
                let bytes = usize::try_from(request.bytes()).unwrap();
                request.complete(pagetide_pager::Content::Bytes(&page[..bytes]));
                queues = self.queues.lock().unwrap();
                continue;
            }
            let wait = first_due.map_or(LATENCY, |at| at.saturating_duration_since(now));
            queues = self.changed.wait_timeout(queues, wait).unwrap().0;
        }
    }

    fn end(&self) {
        self.queues.lock().unwrap().is_over = true;
        self.changed.notify_all();
    }
}

impl Source for Far {
    fn submit(&self, request: Request) {
        let urgency = request.urgency();
        let due = Reverse(Due {
            at: Instant::now() + LATENCY,
            request,
        });
        let mut queues = self.queues.lock().unwrap();
        match urgency {
            Urgency::Urgent => queues.urgent.push(due),
            Urgency::Bulk => queues.bulk.push(due),
        }
        drop(queues);
        self.changed.notify_all();
    }
}

/// Prefetches a region; if `faults`, a thread faults on random pages meanwhile. Returns prefetch's rate
/// in pages a second, and the duration of each fault that had to wait.
fn run(bulk_bytes: u64, faults: bool) -> Option<(f64, Vec<Duration>)> {
    let region = region(REGION_BYTES / PAGE, Backing::Shmem)?;
    let (far, answering) = Far::new();
    let pager = Pager::new().unwrap();
    let limits = InFlightLimits {
        bulk_bytes,
        ..InFlightLimits::default()
    };
    let contents = Contents::Source(Arc::clone(&far) as _);
    let config =
        RegionConfig::local(Arc::clone(&region), Mode::Minor, contents).in_flight_limits(limits);
    pager.add(config).unwrap();
    let begun = Instant::now();
    let ahead = Prefetch::spawn(&pager, PrefetchConfig::default()).unwrap();
    let mut took = Vec::new();
    if faults {
        let mut resolver = pager.resolver(Some(0)).unwrap();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        while !ahead.is_finished() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let page = random % region.pages();
            let before = Instant::now();
            let requests = resolver.counters().requests;
            let _ = resolver.resolve_exit(gpa(page), Access::Read).unwrap();
            if resolver.counters().requests > requests {
                took.push(before.elapsed());
            }
        }
    }
    assert!(ahead.finish().unwrap().is_complete);
    let seconds = begun.elapsed().as_secs_f64();
    // Includes the pages of faults, which prefetch did not have to fetch.
    let pages = region.pages() as f64;
    far.end();
    join("answering", answering);
    Some((pages / seconds, took))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The `percent`th percentile, in milliseconds.
fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let index = (sorted.len() * percent / 100).min(sorted.len() - 1);
    sorted[index].as_secs_f64() * 1000.0
}

/// Prints one JSON object: interleaved runs with and without faults, in rounds.
#[test]
#[ignore = "a measurement: cargo test --release --test slow_source -- --ignored --nocapture"]
fn faults_during_prefetch() {
    // A run with a higher limit ends sooner, and has fewer faults.
    for (bulk_bytes, rounds) in [(1 << 20, 5), (InFlightLimits::default().bulk_bytes, 15)] {
        let (mut alone, mut beside, mut took) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let Some((rate, _)) = run(bulk_bytes, false) else {
                return;
            };
            alone.push(rate);
            let (rate, waits) = run(bulk_bytes, true).unwrap();
            beside.push(rate);
            took.extend(waits);
        }
        took.sort_unstable();
        let (alone, beside) = (median(alone), median(beside));
        println!(
            "{{\"latency_ms\":{},\"region_bytes\":{REGION_BYTES},\"bulk_limit_bytes\":{bulk_bytes},\
             \"rounds\":{rounds},\"urgent\":{{\"count\":{},\"p50_ms\":{:.2},\"p99_ms\":{:.2},\
             \"max_ms\":{:.2}}},\"prefetch_pages_per_second\":{{\"alone\":{alone:.0},\
             \"with_faults\":{beside:.0},\"ratio\":{:.3}}}}}",
            LATENCY.as_millis(),
            took.len(),
            percentile(&took, 50),
            percentile(&took, 99),
            percentile(&took, 100),
            beside / alone,
        );
    }
}
