//! Content that arrives and that the memory does not take.

use super::*;

/// A page whose content the memory does not take is found and set aside. The source answers, so nothing is
/// held, and the page is not tried again because of a further answer.
#[test]
fn bulk_content_that_cannot_be_installed_is_asked_for_again_and_set_aside() {
    let mut now = Instant::now();
    let mut requests = requests();
    requests.want(bulk(0, 8));
    let mut set_aside = Vec::new();
    let mut failures = 0;
    while let Some(submission) = requests.next_submission(now) {
        requests.answered();
        let job = requests.finish(submission.id).unwrap();
        if job.wanted.pages.contains(PageIndex(5)) {
            failures += 1;
            let after = requests.not_installed(job, true, now);
            assert!(!after.stalled && !after.held && after.withdraw == [None, None]);
            set_aside.extend(after.set_aside);
        }
        now = requests.next_deadline(now).unwrap_or(now);
    }
    assert_eq!(
        (failures, set_aside),
        (3 + POLICY.attempts, vec![run(5, 1)])
    );
    assert!(requests.set_aside().runs().eq([run(5, 1)]));
    requests.answered();
    assert!(requests.set_aside().runs().eq([run(5, 1)]));
    assert!(requests.is_first_not_installed() && !requests.is_first_not_installed());
    requests.forget_set_aside();
    assert_eq!(requests.set_aside().runs().count(), 0);
    assert!(requests.is_first_not_installed());
}

/// Prefetch goes on seldom, and wholly when the memory takes content again.
#[test]
fn memory_that_takes_nothing_is_tried_seldom_and_gets_its_pages_back() {
    let mut now = Instant::now();
    let mut requests = requests();
    for first in (0..64).step_by(16) {
        requests.want(bulk(first, 16));
    }
    let mut tried = 0;
    let mut try_all = |requests: &mut Requests, now: Instant| {
        let mut set_aside = 0;
        while let Some(submission) = requests.next_submission(now) {
            tried += 1;
            requests.answered();
            let job = requests.finish(submission.id).unwrap();
            let after = requests.not_installed(job, true, now);
            set_aside += after.set_aside.iter().map(|run| run.count()).sum::<u64>();
        }
        (tried, set_aside)
    };
    while !requests.is_held() {
        try_all(&mut requests, now);
        now = requests.next_deadline(now).unwrap();
    }
    let (before, _) = try_all(&mut requests, now - POLICY.longest_backoff);
    assert_eq!(before, FAILURES_IN_A_ROW);
    // An urgent request is not held, and an answer to it does not end the hold.
    requests.want(urgent(100));
    let urgent = requests
        .next_submission(now - POLICY.longest_backoff)
        .unwrap();
    requests.answered();
    requests.finish(urgent.id).unwrap();
    assert!(requests.is_held() && !requests.has_bulk_room(1));
    for probe in 1..=POLICY.attempts {
        let (tried, set_aside) = try_all(&mut requests, now);
        assert_eq!(tried, before + probe);
        assert_eq!(set_aside > 0, probe == POLICY.attempts);
        now += POLICY.longest_backoff;
    }
    assert_eq!((requests.waiting(), requests.in_flight_bytes()), (0, 0));
    assert!(requests.set_aside().runs().eq([run(0, 64)]));
    requests.installed();
    assert!(!requests.is_held());
    assert_eq!(requests.set_aside().runs().count(), 0);
}

/// Pages that other code has mapped say nothing of the memory for others.
#[test]
fn failures_that_are_no_lack_of_memory_hold_nothing() {
    let mut now = Instant::now();
    let mut requests = requests();
    requests.want(bulk(0, 64));
    let mut tried = 0;
    loop {
        while let Some(submission) = requests.next_submission(now) {
            tried += 1;
            requests.answered();
            let job = requests.finish(submission.id).unwrap();
            assert!(!requests.not_installed(job, false, now).held);
        }
        let Some(next) = requests.next_deadline(now) else {
            break;
        };
        now = next;
    }
    assert_eq!(tried, 63 + 64 * POLICY.attempts);
    assert!(requests.set_aside().runs().eq([run(0, 64)]));
}

/// A source that fails while the memory takes nothing: the pauses stay, and no timer is set for the past.
#[test]
fn failures_of_both_kinds_keep_the_pauses_of_a_hold() {
    let mut now = Instant::now();
    let mut requests = requests();
    requests.want(bulk(0, 64));
    while !requests.is_held() {
        while let Some(submission) = requests.next_submission(now) {
            requests.answered();
            let job = requests.finish(submission.id).unwrap();
            requests.not_installed(job, true, now);
        }
        now = requests.next_deadline(now).unwrap();
    }
    for _ in 1..POLICY.attempts {
        let probe = requests.next_submission(now).unwrap();
        requests.miss(probe.id, Miss::Failed, now).unwrap();
        assert_eq!(requests.next_submission(now), None);
        let next = requests.next_deadline(now).unwrap();
        assert_eq!(next, now + POLICY.longest_backoff);
        now = next;
    }
    assert!(requests.is_held());
}

/// A request that was dropped while its content was being installed does not come back.
#[test]
fn dropped_bulk_requests_are_not_tried_again() {
    let now = Instant::now();
    for clears in [false, true] {
        let mut requests = requests();
        requests.want(bulk(0, 8));
        let submission = requests.next_submission(now).unwrap();
        let job = requests.finish(submission.id).unwrap();
        if clears {
            requests.clear();
        } else {
            requests.drop_bulk();
        }
        let after = requests.not_installed(job, true, now);
        assert_eq!(after.withdraw, [Some(run(0, 8)), None]);
        assert_eq!(requests.waiting(), 0);
    }
}
