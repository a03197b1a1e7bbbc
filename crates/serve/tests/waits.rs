//! How long guests wait, as the metrics tell it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use support::*;

/// Whether the content was at hand, and whether it came late.
#[test]
fn the_times_for_which_guests_waited_are_counted_by_what_they_waited_for() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let (mut options, damage) = place.damaged(5);
    options.resume_after = std::time::Duration::from_millis(50);
    let running = Running::start(options);
    let waits = |what: &str| {
        let text = running.metrics.text();
        let name = format!("pagetide_guest_wait_seconds_count{{for=\"{what}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap().parse::<u64>().unwrap()
    };
    let guest = Guest::new(8);
    let _stream = guest.connect(&place.socket());
    guest.check(1, &content(1));
    // Chunks are unpacked by other threads, or were at hand.
    eventually("the first wait", || {
        equals(waits("source") + waits("at_hand"), &1)
    });
    let before = waits("source");
    let reader = guest.begin_to_read(5);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    assert_eq!(waits("source"), before, "it waits still");
    damage.mend();
    assert!(within_patience("the page", move || reader.join().unwrap()) == content(5));
    eventually("the end of the wait", || {
        equals(waits("source"), &(before + 1))
    });
    // A page that was given up is at hand: it has no content.
    guest.go_round(1);
    eventually("the third wait", || {
        equals(waits("source") + waits("at_hand"), &3)
    });
}
