//! The metrics over HTTP when the process is short of descriptors. The limit is the process's: one test alone.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};

use pagetide_serve::{Exporter, Metrics, MetricsAddress};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::*;
use tracing_subscriber::fmt::MakeWriter;

/// What the exporter logs.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn has(&self, text: &str) -> bool {
        let log = self.0.lock().unwrap();
        String::from_utf8_lossy(&log).contains(text)
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

fn health(at: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(at)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[test]
fn metrics_are_served_again_when_descriptors_are_free() {
    let log = Log::default();
    tracing_subscriber::fmt().with_writer(log.clone()).init();
    let address: MetricsAddress = "127.0.0.1:0".parse().unwrap();
    let exporter = Exporter::start(&address, Metrics::default()).unwrap();
    let at = exporter.address().unwrap();
    assert!(health(at).unwrap().ends_with("ok\n"));
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
    // The connection takes no descriptor before it is accepted.
    eventually("an attempt to accept it", || log.has("was not accepted"));
    // For this connection, the next, and its client.
    taken.truncate(taken.len() - 8);
    assert!(health(at).unwrap().ends_with("ok\n"));
    setrlimit(Resource::Nofile, before).unwrap();
}
