//! What a client calls its VM: in the log, in the metrics, and nowhere as another line.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock};

use pagetide_serve::native::client::{Attached, Client, ClientError};
use pagetide_serve::native::frame::Frame;
use pagetide_serve::native::label::VmLabel;
use pagetide_serve::native::message::{Message, RefusedCode, VmState};
use pagetide_serve::native::{FEATURE_LABELS, VERSION};
use support::native::*;
use support::*;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn traceparent() -> String {
    format!("00-{TRACE}-00f067aa0ba902b7-01")
}

/// What the servers of this process log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// That of all tests: a process has one.
    fn of_all() -> Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        let start = || {
            let log = Self::default();
            let writer = log.clone();
            tracing_subscriber::fmt()
                .with_ansi(false)
                .with_writer(move || writer.clone())
                .init();
            log
        };
        LOG.get_or_init(start).clone()
    }

    /// The lines with all of these.
    fn lines(&self, wanted: &[&str]) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        let has_all = |line: &&str| wanted.iter().all(|wanted| line.contains(wanted));
        log.lines().filter(has_all).map(str::to_owned).collect()
    }

    /// Waits for such a line.
    fn line(&self, wanted: &[&str]) -> String {
        eventually("a line of the log", || {
            let line = self.lines(wanted).into_iter().next();
            line.ok_or_else(|| format!("{wanted:?}"))
        })
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(line)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The samples of VMs with a label.
fn samples(running: &Running) -> Vec<String> {
    let text = running.metrics.text();
    let is_sample = |line: &&str| line.starts_with("pagetide_vm_info{");
    text.lines().filter(is_sample).map(str::to_owned).collect()
}

/// Sends a label of any texts, by a frame that may not be skipped.
fn send_label(client: &Client, id: &str, traceparent: &str) {
    let mut payload = Vec::new();
    for text in [id, traceparent] {
        payload.extend(u16::try_from(text.len()).unwrap().to_le_bytes());
        payload.extend(text.as_bytes());
    }
    let label = Frame {
        kind: 14,
        flags: 0,
        id: 1 << 20,
        payload,
    };
    let mut bytes = Vec::new();
    label.encode(&mut bytes).unwrap();
    send(client.stream(), &bytes, &[]);
}

fn attach(client: &mut Client, guest: &Guest) -> Result<Attached, ClientError> {
    let attach = attach_of(guest, vec![region(guest)]);
    client.attach(&attach, &[guest.uffd.as_fd()])
}

#[test]
fn a_label_is_in_each_line_on_its_vm_and_in_the_metrics_while_it_runs() {
    if !has_userfaultfd() {
        return;
    }
    let log = Log::of_all();
    let place = Place::new(16);
    let socket = place.socket();
    let (mut options, damage) = place.damaged(5);
    options.resume_after = NEVER;
    let running = Running::start(options);
    let (guest, other) = (Guest::new(16), Guest::new(16));
    let mut client = connect(&socket);
    let welcome = client.welcome();
    assert_eq!(
        (welcome.version, welcome.features & 16),
        (VERSION, FEATURE_LABELS)
    );
    let label = VmLabel::new("web-7", traceparent()).unwrap();
    assert!(client.label(&label).unwrap());
    attach(&mut client, &guest).unwrap();
    let unlabelled = attached(&other, &socket);
    for guest in [&guest, &other] {
        guest.check(1, &content(1));
    }
    let found = samples(&running);
    let sample = format!(
        "pagetide_vm_info{{vm=\"1\",socket=\"{}\",id=\"web-7\",trace_id=\"{TRACE}\"}} 1",
        socket.display()
    );
    assert_eq!(found, [sample], "that of the VM with a label alone");
    let fields = format!("id=\"web-7\" trace_id=\"{TRACE}\"");
    let waiting = guest.touch(5);
    let line = log.line(&["VM stalled", "web-7"]);
    assert!(line.contains(&fields), "{line}");
    damage.mend();
    assert_eq!(client.resume().unwrap(), 1);
    assert!(waiting.join() == content(5));
    client.goodbye().unwrap();
    let socket = socket.display().to_string();
    let line = log.line(&["VM ended", &socket]);
    assert!(line.contains(&fields), "{line}");
    unlabelled.goodbye().unwrap();
    running.ended(2);
    assert!(samples(&running).is_empty());
    let of_other = ["VM ended", &socket, "vm=2"];
    let line = log.line(&of_other);
    assert!(
        !line.contains(" id=") && !line.contains("trace_id"),
        "{line}"
    );
}

/// Also one that is refused later, and one without a trace.
#[test]
fn the_line_on_a_refusal_has_the_label() {
    let log = Log::of_all();
    let place = Place::new(16);
    let _running = Running::start(place.options());
    let mut client = connect(&place.socket());
    client
        .label(&VmLabel::new("refused:1", "").unwrap())
        .unwrap();
    let nothing = attach_of_nothing(&mut client);
    assert_eq!(code(nothing), RefusedCode::Protocol);
    let line = log.line(&["VM refused", "id=\"refused:1\""]);
    assert!(!line.contains("trace_id"), "{line}");
}

fn attach_of_nothing(client: &mut Client) -> Result<Attached, ClientError> {
    client.attach(&Default::default(), &[])
}

/// Nothing that a client sends is a line of the log, or a label of another name.
#[test]
fn a_label_that_could_forge_a_line_is_refused_by_name_and_loses_nothing() {
    if !has_userfaultfd() {
        return;
    }
    let log = Log::of_all();
    let place = Place::new(16);
    let running = Running::start(place.options());
    let guest = Guest::new(16);
    let (longer, good) = ("a".repeat(65), traceparent());
    for (id, traceparent, wanted) in [
        ("a\nforged: VM ended", "", "the VM's id has at byte 1"),
        ("a\" forged=\"1", "", "the VM's id has at byte 1"),
        ("\u{1b}[2J", "", "the VM's id has at byte 0"),
        ("forged ä", "", "the VM's id has at byte 6"),
        ("", "", "the VM's id has 0 bytes"),
        (&longer, "", "the VM's id has 65 bytes"),
        ("a", "00-forged", "the traceparent is not"),
        ("a", &format!("{good}\nforged"), "the traceparent is not"),
        ("a", &good.to_uppercase(), "the traceparent is not"),
    ] {
        let mut client = connect(&place.socket());
        send_label(&client, id, traceparent);
        let refused = attach(&mut client, &guest);
        let text = refused.as_ref().unwrap_err().to_string();
        assert!(text.contains(wanted), "{id:?}: {text}");
        assert_eq!(code(refused), RefusedCode::Protocol, "{id:?}");
    }
    let socket = place.socket().display().to_string();
    log.line(&["VM refused", &socket, "the VM's id has 65 bytes"]);
    assert!(log.lines(&["forged"]).is_empty());
    assert!(samples(&running).is_empty());
    // The VMM may come again.
    let mut client = connect(&place.socket());
    send_label(&client, "a", &good);
    attach(&mut client, &guest).unwrap();
    (0..16).for_each(|page| guest.check(page, &content(page)));
    assert_eq!(samples(&running).len(), 1);
}

#[test]
fn a_vm_has_one_label_and_has_it_before_attach() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(16);
    let running = Running::start(place.options());
    let guest = Guest::new(16);
    let mut client = connect(&place.socket());
    send_label(&client, "a", "");
    send_label(&client, "b", "");
    assert_eq!(code(attach(&mut client, &guest)), RefusedCode::Order);

    let mut client = attached(&guest, &place.socket());
    send_label(&client, "late", "");
    // Its refusal comes before the next answer.
    assert_eq!(code(client.health()), RefusedCode::Order);
    assert_eq!(client.health().unwrap().state, VmState::Serving);
    guest.check(1, &content(1));
    // A frame that is no message ends the requests, and nothing else.
    send_label(&client, "a\nb", "");
    assert_eq!(code(client.health()), RefusedCode::Protocol);
    (2..16).for_each(|page| guest.check(page, &content(page)));
    assert!(samples(&running).is_empty());
}

/// A server that knows no labels skips it.
#[test]
fn a_label_may_be_skipped() {
    let label = VmLabel::new("a", "").unwrap();
    assert!(Message::Label(label).frame(7, false).is_optional());
}
