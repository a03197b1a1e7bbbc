use super::*;
use pagetide_memory::PageIndex;

pub(crate) const PAGE: u64 = 4096;

pub(crate) const LIMITS: InFlightLimits = InFlightLimits {
    urgent_bytes: 8 * PAGE,
    bulk_bytes: 16 * PAGE,
};

pub(crate) const POLICY: RetryPolicy = RetryPolicy {
    deadline: Duration::from_secs(10),
    attempts: 3,
    first_backoff: Duration::from_millis(100),
    longest_backoff: Duration::from_millis(300),
};

fn requests() -> Requests {
    Requests::new(LIMITS, POLICY, PAGE)
}

pub(crate) fn run(first: u64, count: u64) -> PageRange {
    PageRange::new(PageIndex(first), count)
}

fn bulk(requests: &mut Requests, first: u64, count: u64) {
    requests.want(run(first, count), Urgency::Bulk);
}

fn urgent(requests: &mut Requests, first: u64, count: u64) {
    requests.want(run(first, count), Urgency::Urgent);
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
    bulk(&mut requests, 0, 4);
    bulk(&mut requests, 4, 4);
    urgent(&mut requests, 100, 1);
    urgent(&mut requests, 50, 1);
    let expected = [run(100, 1), run(50, 1), run(0, 4), run(4, 4)];
    assert_eq!(pages(&mut requests, now), expected);
}

#[test]
fn bulk_waits_while_urgent_requests_wait_for_their_limit() {
    let now = Instant::now();
    let mut requests = requests();
    urgent(&mut requests, 0, 8);
    urgent(&mut requests, 20, 1);
    bulk(&mut requests, 30, 4);
    let first = requests.next_submission(now).unwrap();
    assert_eq!(first.pages, run(0, 8));
    assert_eq!(requests.next_submission(now), None);
    requests.finish(first.id).unwrap();
    assert_eq!(pages(&mut requests, now), [run(20, 1), run(30, 4)]);
}

#[test]
fn pages_in_flight_are_bounded_for_each_class() {
    let now = Instant::now();
    let mut requests = requests();
    for page in 0..20 {
        urgent(&mut requests, page, 1);
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
        bulk(&mut requests, first, 5);
    }
    urgent(&mut requests, 100, 1);
    let expected = [run(100, 1), run(0, 5), run(5, 5), run(10, 5)];
    assert_eq!(pages(&mut requests, now), expected);
    assert_eq!(requests.in_flight_bytes(), 16 * PAGE);
}

#[test]
fn a_request_above_its_limit_is_alone_in_flight() {
    let now = Instant::now();
    let mut requests = requests();
    bulk(&mut requests, 0, 1);
    bulk(&mut requests, 10, 100);
    bulk(&mut requests, 200, 1);
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
    let pauses = [100, 200, 300, 300].map(Duration::from_millis);
    assert_eq!(
        [1, 2, 3, 4].map(|failures| POLICY.backoff(failures)),
        pauses
    );
    let huge = RetryPolicy {
        first_backoff: Duration::MAX,
        longest_backoff: Duration::MAX,
        ..POLICY
    };
    assert_eq!(huge.backoff(u32::MAX), Duration::MAX);
}

#[test]
fn a_job_that_pauses_lets_others_pass() {
    let now = Instant::now();
    let mut requests = requests();
    let pause = now + POLICY.first_backoff;
    requests.want_later(run(7, 1), Urgency::Urgent, 1, Some(pause));
    // During its pause the source is free for other requests.
    bulk(&mut requests, 0, 16);
    bulk(&mut requests, 16, 16);
    assert_eq!(requests.next_deadline(now), Some(pause));
    let second = requests.next_submission(now).unwrap();
    assert_eq!(second.pages, run(0, 16));
    requests.finish(second.id).unwrap();
    assert_eq!(pages(&mut requests, pause), [run(7, 1), run(16, 16)]);
}

#[test]
fn an_open_breaker_lets_one_bulk_request_pass_at_a_time() {
    let mut now = Instant::now();
    let mut requests = requests();
    for first in (0..64).step_by(16) {
        bulk(&mut requests, first, 16);
    }
    let until = now + POLICY.longest_backoff;
    let opened = (0..breaker::FAILURES_IN_A_ROW).map(|_| requests.breaker.fail(now, until));
    assert_eq!(opened.filter(|&opened| opened).count(), 1);
    assert!(requests.breaker.is_open() && !requests.has_bulk_room(1));
    // Urgent requests are not held.
    urgent(&mut requests, 100, 1);
    assert_eq!(pages(&mut requests, now), [run(100, 1)]);
    now = until;
    let probe = requests.next_submission(now).unwrap();
    assert_eq!(probe.pages, run(0, 16));
    assert_eq!(requests.next_submission(now), None);
    // One that was in flight before is no probe.
    requests
        .breaker
        .fail(now - Duration::from_millis(1), now + POLICY.longest_backoff);
    assert_eq!(requests.breaker.probes(), 0);
    requests.breaker.fail(now, now + POLICY.longest_backoff);
    assert_eq!(requests.breaker.probes(), 1);
    requests.finish(probe.id).unwrap();
    assert_eq!(requests.next_submission(now), None);
    let next = now + POLICY.longest_backoff;
    assert_eq!(requests.next_deadline(now), Some(next));
    requests.breaker.close();
    assert_eq!(pages(&mut requests, now), [run(16, 16)]);
}

#[test]
fn a_stalled_region_requests_nothing_until_it_is_resumed() {
    let now = Instant::now();
    let mut requests = requests();
    bulk(&mut requests, 50, 2);
    let other = requests.next_submission(now).unwrap();
    requests.stall();
    let pause = Some(now + POLICY.longest_backoff);
    requests.want_later(run(2, 1), Urgency::Urgent, 2, pause);
    bulk(&mut requests, 10, 4);
    assert_eq!(requests.next_submission(now + POLICY.deadline), None);
    assert!(!requests.has_bulk_room(1));
    assert_eq!(requests.waiting(), 2);
    // A request in flight still has its deadline, and then there is no further pause.
    assert_eq!(requests.next_deadline(now), Some(other.deadline));
    requests.finish(other.id).unwrap();
    assert_eq!(requests.next_deadline(now), None);
    requests.resume();
    assert_eq!(pages(&mut requests, now), [run(2, 1), run(10, 4)]);
    assert!(requests.in_flight.values().all(|at| at.job.failures == 0));
}

#[test]
fn recalled_requests_are_repeated_and_old_answers_are_unknown() {
    let now = Instant::now();
    let mut requests = requests();
    urgent(&mut requests, 1, 1);
    bulk(&mut requests, 10, 4);
    let first = submissions(&mut requests, now);
    let ids: Vec<_> = first.iter().map(|submission| submission.id).collect();
    assert_eq!(requests.recall(), ids);
    assert_eq!(requests.in_flight_bytes(), 0);
    let second = submissions(&mut requests, now);
    let jobs = |submissions: &[Submission]| -> Vec<JobId> {
        submissions
            .iter()
            .map(|submission| submission.job)
            .collect()
    };
    assert_eq!(jobs(&first), jobs(&second));
    assert!(second.iter().all(|submission| submission.id > ids[1]));
    for id in ids {
        assert_eq!(requests.finish(id), None);
        assert_eq!(requests.answer(id), None);
    }
    assert_eq!(requests.in_flight_bytes(), 5 * PAGE);
}

#[test]
fn a_job_lives_until_it_ends() {
    let now = Instant::now();
    let mut requests = requests();
    let urgent = requests.want(run(1, 1), Urgency::Urgent);
    let bulk = requests.want(run(10, 4), Urgency::Bulk);
    let flying = submissions(&mut requests, now);
    assert!(requests.is_alive(urgent) && requests.is_alive(bulk));
    for submission in &flying {
        requests.answer(submission.id).unwrap();
    }
    assert!(requests.is_alive(urgent) && requests.is_alive(bulk));
    assert!(requests.end(urgent) && !requests.end(urgent));
    assert!(!requests.is_alive(urgent));
    // Prefetch is stopped while its content is being installed.
    assert_eq!(requests.drop_bulk(), []);
    assert!(!requests.is_alive(bulk) && !requests.end(bulk));
}

#[test]
fn bulk_requests_are_dropped_and_urgent_ones_stay() {
    let now = Instant::now();
    let mut requests = requests();
    urgent(&mut requests, 1, 1);
    bulk(&mut requests, 10, 16);
    bulk(&mut requests, 30, 4);
    let flying = submissions(&mut requests, now);
    urgent(&mut requests, 2, 1);
    assert_eq!(requests.drop_bulk(), [flying[1].id]);
    assert_eq!(requests.in_flight_bytes(), PAGE);
    assert_eq!(requests.waiting(), 1);
    assert!(requests.has_bulk_room(16));
    assert!(requests.finish(flying[0].id).is_some());
}

#[test]
fn clearing_keeps_only_the_numbers() {
    let now = Instant::now();
    let mut requests = requests();
    urgent(&mut requests, 1, 1);
    bulk(&mut requests, 10, 16);
    bulk(&mut requests, 30, 4);
    let flying = submissions(&mut requests, now);
    assert_eq!(requests.clear(), [flying[0].id, flying[1].id]);
    assert_eq!((requests.in_flight_bytes(), requests.waiting()), (0, 0));
    assert_eq!(requests.next_deadline(now), None);
    urgent(&mut requests, 1, 1);
    assert!(requests.next_submission(now).unwrap().id > flying[1].id);
}

#[test]
fn deadlines_expire_one_by_one() {
    let now = Instant::now();
    let mut requests = requests();
    urgent(&mut requests, 1, 1);
    let first = requests.next_submission(now).unwrap();
    assert_eq!(first.deadline, now + POLICY.deadline);
    let later = now + Duration::from_secs(1);
    urgent(&mut requests, 2, 1);
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
    bulk(&mut requests, 0, 10);
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
            ..POLICY
        };
        let soon = now + Duration::from_secs(86_400);
        let mut requests = Requests::new(LIMITS, policy, PAGE);
        urgent(&mut requests, 7, 1);
        let first = requests.next_submission(now).unwrap();
        assert!(first.deadline > soon);
        assert_eq!(requests.next_expired(soon), None);
    }
}
