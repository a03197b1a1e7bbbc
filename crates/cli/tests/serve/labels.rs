//! What a client calls its VM, in both forms of the log.

use std::fs;

use pagetide_serve::native::label::VmLabel;
use pagetide_test_support::within_patience;
use rustix::process::Signal;
use serde_json::Value;

use super::guest::Guest;
use super::{Place, ended, logged, signal};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// Serves a VM with a label and one without. Returns the lines on their ends.
fn lines(form: &[&str]) -> Option<[String; 2]> {
    let (labelled, other) = (Guest::new()?, Guest::new()?);
    let place = Place::new();
    let mut child = place.start(form);
    let traceparent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    let label = VmLabel::new("web-7", traceparent).expect("it is one");
    for (guest, label) in [(&labelled, Some(&label)), (&other, None)] {
        let client = guest.attach(&place.path("socket"), label);
        assert_eq!(within_patience("a page", guest.reader(0)), 7);
        client.goodbye().expect("it is answered");
        // The answer comes before the line.
        logged(&place.path("log"), "VM ended");
    }
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
    let log = fs::read_to_string(place.path("log")).expect("UTF-8");
    let mut ends = log.lines().filter(|line| line.contains("VM ended"));
    let mut next = || ends.next().expect("a line for each VM").to_owned();
    Some([next(), next()])
}

#[test]
fn a_vms_label_is_in_the_log_as_text() {
    let Some([labelled, other]) = lines(&[]) else {
        return;
    };
    let fields = format!("id=\"web-7\" trace_id=\"{TRACE}\"");
    assert!(labelled.contains(&fields), "{labelled}");
    assert!(
        !other.contains(" id=") && !other.contains("trace_id="),
        "{other}"
    );
}

#[test]
fn a_vms_label_is_in_the_log_as_json() {
    let Some(lines) = lines(&["--log", "json"]) else {
        return;
    };
    let [labelled, other] = lines.map(|line| serde_json::from_str::<Value>(&line).expect("JSON"));
    assert_eq!(
        (&labelled["id"], &labelled["trace_id"]),
        (&"web-7".into(), &TRACE.into())
    );
    assert!(
        other.get("id").is_none() && other.get("trace_id").is_none(),
        "{other}"
    );
}
