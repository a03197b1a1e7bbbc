//! The metrics over HTTP when the process is short of descriptors. The limit is the process's: one test alone.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use pagetide_serve::{Exporter, Metrics, MetricsAddress};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::*;

fn health(at: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(at)?;
    stream.set_read_timeout(Some(Duration::from_millis(500)))?;
    stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[test]
fn metrics_are_served_again_when_descriptors_are_free() {
    let address: MetricsAddress = "127.0.0.1:0".parse().unwrap();
    let exporter = Exporter::start(&address, Metrics::default()).unwrap();
    let at = exporter.address().unwrap();
    eventually("an answer", || {
        health(at).is_ok_and(|text| text.ends_with("ok\n"))
    });
    let client = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let before = getrlimit(Resource::Nofile);
    let few = Rlimit {
        current: Some(256),
        ..before
    };
    setrlimit(Resource::Nofile, few).unwrap();
    let mut taken = Vec::new();
    let error = loop {
        match rustix::io::dup(&client) {
            Ok(descriptor) => taken.push(File::from(descriptor)),
            Err(error) => break error,
        }
    };
    assert_eq!(error, Errno::MFILE);
    connect(&client, &at).unwrap();
    // The connection takes no descriptor before it is accepted, which is tried now.
    thread::sleep(Duration::from_millis(100));
    eventually("an answer after the shortage", || {
        taken.pop();
        health(at).is_ok_and(|text| text.ends_with("ok\n"))
    });
    setrlimit(Resource::Nofile, before).unwrap();
}
