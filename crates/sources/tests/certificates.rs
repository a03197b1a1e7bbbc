//! A system without certificates of authorities: objects at an http URL are read all the same, and an https URL is refused with
//! what is missing.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

mod support;

use std::process::Command;

use pagetide_memory::Urgency::Urgent;
use pagetide_sources::{Blob, ObjectBlob};
use support::{Server, chain, options};

const URL: &str = "PAGETIDE_TEST_URL";

/// In a process of its own, whose environment says where certificates are, and names a file that has none.
#[test]
fn a_system_without_certificates() {
    if let Ok(url) = std::env::var(URL) {
        return open(&url);
    }
    let server = Server::start(8192);
    for (scheme, wanted) in [
        ("http", "read 8192 bytes"),
        (
            "https",
            "no certificates of authorities are found: the package ca-certificates has them",
        ),
    ] {
        let this = std::env::current_exe().unwrap();
        let output = Command::new(this)
            .args(["--exact", "a_system_without_certificates", "--nocapture"])
            .env(URL, server.url.replace("http:", &format!("{scheme}:")))
            .env("SSL_CERT_FILE", "/dev/null")
            .env_remove("SSL_CERT_DIR")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}");
        assert!(said.contains(wanted), "{scheme}: {said}");
    }
}

fn open(url: &str) {
    match ObjectBlob::open(url, &options(), None) {
        Ok(blob) => {
            let mut content = vec![0; 8192];
            blob.read_at(0, &mut content, Urgent).unwrap();
            println!("read {} bytes", content.len());
        }
        Err(error) => println!("{}", chain(&error)),
    }
}
