//! VMs that a former server has left: nothing that they do not need keeps them asleep.

use std::fs;
use std::net::TcpListener;

use pagetide_test_support::{Sleeper, eventually, within_patience};
use rustix::process::Signal;

use super::guest::Guest;
use super::{Place, assert_refused, ended, signal};

#[test]
fn metrics_and_a_control_socket_that_are_not_to_be_had_keep_no_vm_asleep() {
    let Some(guest) = Guest::new() else {
        return;
    };
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound").to_string();
    fs::write(place.path("blocked"), "a file").expect("a temporary file");
    let common = [
        "--state",
        "state",
        "--prefetch",
        "off",
        "--working-set",
        "off",
    ];
    let (metrics, control) = (["--metrics", address.as_str()], ["--control", "blocked"]);
    // Without VMs, whoever starts it is to see what is wrong.
    for (beside, wanted) in [
        (metrics, "serving the metrics at"),
        (control, "a file that is no socket"),
    ] {
        let binding = place.binding();
        let words = [&[binding.as_str()], &common[..], &beside].concat();
        let output = place.command(&words).output().expect("it starts");
        assert_refused(&output, wanted);
    }
    let mut killed = place.start(&common);
    let stream = guest.connect(&place.path("socket"));
    assert_eq!(within_patience("a page", guest.reader(0)), 7);
    killed.kill().expect("it runs");
    assert!(!ended(&mut killed).success());
    let asleep = Sleeper::spawn("the guest", guest.reader(1));
    let mut child = place.start(&[&common[..], &metrics, &control].concat());
    assert_eq!(asleep.join(), 7);
    let log = fs::read_to_string(place.path("log")).expect("UTF-8");
    for what in ["metrics", "a control socket"] {
        let wanted = format!("the server runs without {what} until its next start");
        assert!(log.contains(&wanted), "{wanted:?} is not in {log}");
    }
    drop(stream);
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
    let keeper = place.path("state/keeper.sock");
    eventually("the keeper's end", || !keeper.exists());
}
