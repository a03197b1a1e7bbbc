use super::*;

#[path = "requests_tests/model.rs"]
mod model;
#[path = "requests_tests/not_installed.rs"]
mod not_installed;

const PAGE: u64 = 4096;

const LIMITS: InFlightLimits = InFlightLimits {
    urgent_bytes: 8 * PAGE,
    bulk_bytes: 16 * PAGE,
};

const POLICY: RetryPolicy = RetryPolicy {
    deadline: Duration::from_secs(10),
    attempts: 3,
    first_backoff: Duration::from_millis(100),
    longest_backoff: Duration::from_millis(300),
};

fn requests() -> Requests {
    Requests::new(LIMITS, POLICY, PAGE)
}

fn run(first: u64, count: u64) -> PageRange {
    PageRange::new(PageIndex(first), count)
}

fn bulk(first: u64, count: u64) -> Wanted {
    Wanted {
        pages: run(first, count),
        fault: None,
    }
}

fn urgent(page: u64) -> Wanted {
    urgent_run(page, page, 1)
}

fn urgent_run(page: u64, first: u64, count: u64) -> Wanted {
    Wanted {
        pages: run(first, count),
        fault: Some(PageIndex(page)),
    }
}

/// All submissions at a moment.
fn submissions(requests: &mut Requests, now: Instant) -> Vec<Submission> {
    std::iter::from_fn(|| requests.next_submission(now)).collect()
}

/// The runs of all submissions at a moment.
fn pages(requests: &mut Requests, now: Instant) -> Vec<PageRange> {
    let submissions = submissions(requests, now);
    submissions
        .iter()
        .map(|submission| submission.pages)
        .collect()
}

#[test]
fn urgent_passes_bulk() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(bulk(0, 4));
    requests.want(bulk(4, 4));
    requests.want(urgent(100));
    requests.want(urgent(50));
    let expected = [run(100, 1), run(50, 1), run(0, 4), run(4, 4)];
    assert_eq!(pages(&mut requests, now), expected);
}

#[test]
fn bulk_waits_while_urgent_requests_wait_for_their_limit() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(urgent_run(0, 0, 8));
    requests.want(urgent(20));
    requests.want(bulk(30, 4));
    let first = requests.next_submission(now).unwrap();
    assert_eq!(first.pages, run(0, 8));
    assert_eq!(requests.next_submission(now), None);
    requests.finish(first.id).unwrap();
    assert_eq!(pages(&mut requests, now), [run(20, 1), run(30, 4)]);
}

#[test]
fn a_failed_urgent_request_passes_bulk_again_after_its_pause() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(urgent(7));
    let first = requests.next_submission(now).unwrap();
    requests.miss(first.id, Miss::Failed, now).unwrap();
    // During its pause the source is free for other requests.
    requests.want(bulk(0, 16));
    requests.want(bulk(16, 16));
    let second = requests.next_submission(now).unwrap();
    assert_eq!(second.pages, run(0, 16));
    requests.finish(second.id).unwrap();
    let later = now + POLICY.first_backoff;
    assert_eq!(pages(&mut requests, later), [run(7, 1), run(16, 16)]);
}

#[test]
fn pages_in_flight_are_bounded_for_each_class() {
    let now = Instant::now();
    let mut requests = requests();
    for page in 0..20 {
        requests.want(urgent(page));
    }
    let first = submissions(&mut requests, now);
    assert_eq!(first.len(), 8);
    assert_eq!(requests.in_flight_bytes(), 8 * PAGE);
    assert_eq!(requests.waiting(), 12);
    requests.finish(first[3].id).unwrap();
    assert_eq!(pages(&mut requests, now), [run(8, 1)]);
    for submission in submissions(&mut requests, now) {
        requests.finish(submission.id);
    }

    let mut requests = Requests::new(LIMITS, POLICY, PAGE);
    for first in (0..40).step_by(5) {
        requests.want(bulk(first, 5));
    }
    requests.want(urgent(100));
    let expected = [run(100, 1), run(0, 5), run(5, 5), run(10, 5)];
    assert_eq!(pages(&mut requests, now), expected);
    assert_eq!(requests.in_flight_bytes(), 16 * PAGE);
}

#[test]
fn a_request_above_its_limit_is_alone_in_flight() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(bulk(0, 1));
    requests.want(bulk(10, 100));
    requests.want(bulk(200, 1));
    let first = requests.next_submission(now).unwrap();
    // It waits until the others are answered, and no request overtakes it.
    assert_eq!(requests.next_submission(now), None);
    requests.finish(first.id).unwrap();
    let large = requests.next_submission(now).unwrap();
    assert_eq!(large.pages, run(10, 100));
    assert_eq!(requests.next_submission(now), None);
    requests.finish(large.id).unwrap();
    assert_eq!(pages(&mut requests, now), [run(200, 1)]);
}

#[test]
fn pauses_double_up_to_the_longest() {
    let mut now = Instant::now();
    let policy = RetryPolicy {
        attempts: 100,
        ..POLICY
    };
    let mut requests = Requests::new(LIMITS, policy, PAGE);
    requests.want(urgent(1));
    for wait in [100, 200, 300, 300] {
        let wait = Duration::from_millis(wait);
        let submission = requests.next_submission(now).unwrap();
        assert_eq!(requests.next_deadline(now), Some(now + POLICY.deadline));
        let after = requests.miss(submission.id, Miss::Failed, now).unwrap();
        assert_eq!(after, AfterFailure::default());
        assert_eq!(requests.next_deadline(now), Some(now + wait));
        let almost = now + wait - Duration::from_nanos(1);
        assert_eq!(requests.next_submission(almost), None);
        now += wait;
    }
    assert!(requests.next_submission(now).is_some());
    let huge = RetryPolicy {
        first_backoff: Duration::MAX,
        longest_backoff: Duration::MAX,
        ..POLICY
    };
    assert_eq!(huge.backoff(u32::MAX), Duration::MAX);
}

#[test]
fn a_failed_run_is_narrowed_to_the_urgent_page() {
    let now = Instant::now();
    for (page, withdraw) in [
        (4, [None, Some(run(5, 3))]),
        (6, [Some(run(4, 2)), Some(run(7, 1))]),
        (7, [Some(run(4, 3)), None]),
    ] {
        for miss in [Miss::Failed, Miss::PoisonedAmongOthers] {
            let mut requests = requests();
            requests.want(urgent_run(page, 4, 4));
            let submission = requests.next_submission(now).unwrap();
            let after = requests.miss(submission.id, miss, now).unwrap();
            assert_eq!((after.withdraw, after.stalled), (withdraw, false));
            let wait = match miss {
                Miss::Failed => POLICY.first_backoff,
                _ => Duration::ZERO,
            };
            let again = requests.next_submission(now + wait).unwrap();
            assert_eq!(
                (again.pages, again.urgency),
                (run(page, 1), Urgency::Urgent)
            );
            assert_eq!(requests.waiting(), 0);
        }
    }
}

#[test]
fn a_bulk_request_that_failed_is_halved() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(bulk(0, 5));
    let submission = requests.next_submission(now).unwrap();
    let after = requests.miss(submission.id, Miss::Failed, now).unwrap();
    assert_eq!(after, AfterFailure::default());
    let later = now + POLICY.first_backoff;
    assert_eq!(pages(&mut requests, later), [run(0, 2), run(2, 3)]);
}

#[test]
fn lost_pages_are_identified_without_counting_as_failures() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(bulk(0, 16));
    let mut asked = 0;
    let mut poisoned = Vec::new();
    while let Some(submission) = requests.next_submission(now) {
        asked += 1;
        let has_it = submission.pages.contains(PageIndex(11));
        if has_it && submission.pages.count() > 1 {
            let after = requests
                .miss(submission.id, Miss::PoisonedAmongOthers, now)
                .unwrap();
            assert_eq!(after, AfterFailure::default());
            continue;
        }
        if has_it {
            poisoned.push(submission.pages);
        }
        requests.finish(submission.id).unwrap();
    }
    assert_eq!(poisoned, [run(11, 1)]);
    assert_eq!(asked, 9);
    assert!(!requests.is_stalled());
}

/// Submits everything until nothing is left to do. A request that has a page of `bad` fails, or is late; any
/// other is answered. Returns the failures, and the pages that were set aside.
fn fetch(
    requests: &mut Requests,
    now: &mut Instant,
    bad: impl Fn(u64) -> bool,
) -> (u32, Vec<PageRange>) {
    let (mut failures, mut set_aside) = (0, Vec::new());
    loop {
        while let Some(submission) = requests.next_submission(*now) {
            if !submission.pages.iter().any(|page| bad(page.0)) {
                requests.answered();
                requests.finish(submission.id).unwrap();
                continue;
            }
            let after = requests.miss(submission.id, Miss::Failed, *now).unwrap();
            assert!(!after.stalled);
            failures += 1;
            set_aside.extend(after.set_aside);
        }
        match requests.next_deadline(*now) {
            Some(next) => *now = next,
            None => return (failures, set_aside),
        }
    }
}

#[test]
fn one_bad_page_of_a_bulk_request_is_set_aside_and_the_rest_arrives() {
    for page in [0, 7, 15] {
        let mut now = Instant::now();
        let mut requests = requests();
        requests.want(bulk(0, 16));
        requests.want(bulk(16, 16));
        let (failures, set_aside) = fetch(&mut requests, &mut now, |at| at == page);
        // Four halvings take none of the page's attempts.
        assert_eq!(failures, 4 + POLICY.attempts, "page {page}");
        assert_eq!(set_aside, [run(page, 1)]);
        assert!(!requests.is_stalled() && !requests.is_held());
        assert_eq!((requests.waiting(), requests.in_flight_bytes()), (0, 0));
        assert!(requests.set_aside().runs().eq([run(page, 1)]));
        // A thread that touches it has all attempts, and then stalls the region.
        stall(&mut requests, page, now);
        // Another prefetch tries it again.
        requests.resume();
        assert!(requests.set_aside().runs().eq([run(page, 1)]));
        requests.forget_set_aside();
        assert_eq!(requests.set_aside().runs().count(), 0);
    }
}

#[test]
fn a_source_that_answers_nothing_is_asked_seldom_and_gets_its_pages_back() {
    let mut now = Instant::now();
    let mut requests = requests();
    for first in (0..64).step_by(16) {
        requests.want(bulk(first, 16));
    }
    let mut asked = 0;
    while !requests.is_held() {
        while let Some(submission) = requests.next_submission(now) {
            asked += 1;
            requests.miss(submission.id, Miss::Failed, now).unwrap();
        }
        now = requests.next_deadline(now).unwrap();
    }
    assert_eq!(asked, FAILURES_IN_A_ROW);
    assert!(!requests.is_stalled());
    assert!(!requests.has_bulk_room(1));
    // One at a time.
    let begun = now;
    let first = requests.next_submission(now).unwrap();
    assert_eq!(requests.next_submission(now), None);
    assert_eq!(requests.next_deadline(now), Some(first.deadline));
    let waiting = requests.waiting() + 1;
    // Urgent requests are not held.
    requests.want(urgent(100));
    let other = requests.next_submission(now).unwrap();
    assert_eq!(other.pages, run(100, 1));
    requests.want(urgent(101));
    requests.miss(first.id, Miss::Failed, now).unwrap();
    let pause = requests.next_submission(now).unwrap();
    assert_eq!(pause.pages, run(101, 1));
    assert_eq!(requests.next_submission(now), None);
    now += POLICY.longest_backoff;
    let probe = requests.next_submission(now).unwrap();
    assert_eq!(requests.waiting(), waiting - 1);
    // An answer to anything ends the hold: everything is asked for again, also what was set aside.
    requests.answered();
    requests.finish(other.id).unwrap();
    assert!(!requests.is_held());
    assert_eq!(requests.set_aside().runs().count(), 0);
    assert!(requests.next_submission(now).is_some());
    assert_eq!(
        requests.wanted_by(probe.id).unwrap().urgency(),
        Urgency::Bulk
    );
    assert!(now - begun < POLICY.deadline);
}

/// Requests of a source that has never answered.
fn requests_that_are_held() -> Requests {
    let mut requests = requests();
    for first in (0..64).step_by(16) {
        requests.want(bulk(first, 16));
    }
    fetch(&mut requests, &mut Instant::now(), |_| true);
    assert!(requests.is_held());
    requests
}

#[test]
fn a_source_that_never_answers_ends_the_bulk_work() {
    let mut now = Instant::now();
    let begun = now;
    let mut requests = requests();
    for first in (0..64).step_by(16) {
        requests.want(bulk(first, 16));
    }
    let (failures, set_aside) = fetch(&mut requests, &mut now, |_| true);
    assert!(requests.is_held() && !requests.is_stalled());
    let mut pages: Vec<_> = set_aside
        .iter()
        .flat_map(|run| run.iter())
        .map(|page| page.0)
        .collect();
    pages.sort_unstable();
    assert_eq!(pages, (0..64).collect::<Vec<_>>());
    assert!(requests.set_aside().runs().eq([run(0, 64)]));
    assert_eq!((requests.waiting(), requests.in_flight_bytes()), (0, 0));
    assert!(
        failures < 64 * POLICY.attempts && now - begun < POLICY.deadline,
        "{failures}"
    );
    // What comes later is tried once.
    assert!(requests.has_bulk_room(16));
    requests.want(bulk(100, 8));
    let (failures, set_aside) = fetch(&mut requests, &mut now, |_| true);
    assert_eq!((failures, set_aside), (1, vec![run(100, 8)]));
    // Another prefetch has all attempts again.
    let mut another = requests_that_are_held();
    another.forget_set_aside();
    assert!(!another.is_held() && another.set_aside().runs().count() == 0);
    // Then the source answers.
    requests.want(bulk(108, 8));
    let (failures, _) = fetch(&mut requests, &mut now, |_| false);
    assert_eq!(failures, 0);
    assert_eq!(requests.set_aside().runs().count(), 0);
}

/// Fails a request until the region is stalled; returns the time of the stall.
fn stall(requests: &mut Requests, page: u64, mut now: Instant) -> Instant {
    requests.want(urgent(page));
    for attempt in 1..=POLICY.attempts {
        let submission = requests.next_submission(now).unwrap();
        assert_eq!(submission.pages, run(page, 1));
        let after = requests.miss(submission.id, Miss::Failed, now).unwrap();
        assert_eq!(after.stalled, attempt == POLICY.attempts);
        now += POLICY.longest_backoff;
    }
    assert!(requests.is_stalled());
    now
}

#[test]
fn after_the_last_attempt_nothing_is_requested_until_it_is_resumed() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(bulk(50, 2));
    let other = requests.next_submission(now).unwrap();
    let now = stall(&mut requests, 1, now);
    requests.want(urgent(2));
    requests.want(bulk(10, 4));
    assert_eq!(requests.next_submission(now + POLICY.deadline), None);
    assert!(!requests.has_bulk_room(1));
    assert_eq!(requests.waiting(), 3);
    // The stall is reported once; a request in flight still has its deadline, and then there is no
    // further pause.
    assert_eq!(requests.next_deadline(now), Some(other.deadline));
    let after = requests.miss(other.id, Miss::Failed, now).unwrap();
    assert_eq!(after, AfterFailure::default());
    assert_eq!(requests.next_deadline(now), None);

    requests.resume();
    let expected = [run(1, 1), run(2, 1), run(10, 4), run(50, 1), run(51, 1)];
    assert_eq!(pages(&mut requests, now), expected);
    // All attempts are available again.
    requests.recall();
    requests.clear();
    stall(&mut requests, 1, now);
}

#[test]
fn requests_in_flight_have_all_attempts_again_after_a_resume() {
    let mut now = Instant::now();
    let mut requests = requests();
    requests.want(urgent(7));
    for _ in 1..POLICY.attempts {
        let submission = requests.next_submission(now).unwrap();
        requests.miss(submission.id, Miss::Failed, now).unwrap();
        now += POLICY.longest_backoff;
    }
    // The last attempt is in flight to a source that is unreachable.
    let last = requests.next_submission(now).unwrap();
    let now = stall(&mut requests, 1, now);
    requests.resume();
    let after = requests.miss(last.id, Miss::Failed, now).unwrap();
    assert!(!after.stalled);
    assert!(!requests.is_stalled());
}

#[test]
fn recalled_requests_are_repeated_and_old_answers_are_unknown() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(urgent(1));
    requests.want(bulk(10, 4));
    let first = submissions(&mut requests, now);
    let ids: Vec<_> = first.iter().map(|submission| submission.id).collect();
    assert_eq!(requests.recall(), ids);
    assert_eq!(requests.in_flight_bytes(), 0);
    let second = submissions(&mut requests, now);
    assert_eq!(second.len(), 2);
    assert!(second.iter().all(|submission| submission.id > ids[1]));
    for id in ids {
        assert_eq!(requests.finish(id), None);
        assert_eq!(requests.miss(id, Miss::Failed, now), None);
    }
    assert_eq!(requests.in_flight_bytes(), 5 * PAGE);
}

#[test]
fn bulk_requests_are_dropped_and_urgent_ones_stay() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(urgent(1));
    requests.want(bulk(10, 16));
    requests.want(bulk(30, 4));
    let flying = submissions(&mut requests, now);
    requests.want(urgent(2));
    let (ids, pages) = requests.drop_bulk();
    assert_eq!(ids, [flying[1].id]);
    assert_eq!(pages, [run(30, 4), run(10, 16)]);
    assert_eq!(requests.in_flight_bytes(), PAGE);
    assert_eq!(requests.waiting(), 1);
    assert!(requests.has_bulk_room(16));
    assert_eq!(
        requests.finish(flying[0].id).map(|job| job.wanted),
        Some(urgent(1))
    );
}

#[test]
fn clearing_keeps_only_the_numbers() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(urgent(1));
    requests.want(bulk(10, 16));
    requests.want(bulk(30, 4));
    let flying = submissions(&mut requests, now);
    assert_eq!(requests.clear(), [flying[0].id, flying[1].id]);
    assert_eq!((requests.in_flight_bytes(), requests.waiting()), (0, 0));
    assert_eq!(requests.next_deadline(now), None);
    requests.want(urgent(1));
    assert!(requests.next_submission(now).unwrap().id > flying[1].id);
}

#[test]
fn deadlines_expire_one_by_one() {
    let now = Instant::now();
    let mut requests = requests();
    requests.want(urgent(1));
    let first = requests.next_submission(now).unwrap();
    assert_eq!(first.deadline, now + POLICY.deadline);
    let later = now + Duration::from_secs(1);
    requests.want(urgent(2));
    let second = requests.next_submission(later).unwrap();
    let almost = first.deadline - Duration::from_nanos(1);
    assert_eq!(requests.next_expired(almost), None);
    assert_eq!(requests.next_expired(first.deadline), Some(first.id));
    assert_eq!(requests.next_expired(second.deadline), Some(first.id));
    requests.finish(first.id).unwrap();
    assert_eq!(requests.next_expired(first.deadline), None);
    assert_eq!(requests.next_deadline(now), Some(second.deadline));
    assert_eq!(requests.next_expired(second.deadline), Some(second.id));
}

#[test]
fn prefetch_requests_up_to_the_limit_and_at_least_one_batch() {
    let now = Instant::now();
    let mut requests = requests();
    assert!(requests.has_bulk_room(1000));
    requests.want(bulk(0, 10));
    assert!(requests.has_bulk_room(6) && !requests.has_bulk_room(7));
    let submission = requests.next_submission(now).unwrap();
    assert!(requests.has_bulk_room(6) && !requests.has_bulk_room(7));
    requests.finish(submission.id).unwrap();
    assert!(requests.has_bulk_room(1000));
    requests.stall();
    assert!(!requests.has_bulk_room(1));
}

#[test]
fn times_that_overflow_are_far_in_the_future() {
    let now = Instant::now();
    for long in [Duration::MAX, Duration::from_secs(1 << 62)] {
        let policy = RetryPolicy {
            deadline: long,
            first_backoff: long,
            longest_backoff: long,
            ..POLICY
        };
        let soon = now + Duration::from_secs(86_400);
        let mut requests = Requests::new(LIMITS, policy, PAGE);
        requests.want(urgent(7));
        let first = requests.next_submission(now).unwrap();
        assert!(first.deadline > soon);
        assert_eq!(requests.next_expired(soon), None);
        requests.miss(first.id, Miss::Failed, now).unwrap();
        assert_eq!(requests.next_submission(soon), None);
        assert!(requests.next_deadline(now).unwrap() > soon);
        // The pause does not bind the owner, who can resume at any time.
        requests.resume();
        assert_eq!(pages(&mut requests, now), [run(7, 1)]);
    }
}
