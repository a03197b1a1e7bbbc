//! Certificates of authorities, which a system has or has not: without them, objects at an http URL are read all the same, and an
//! https URL is refused with what is missing. What an http URL leads to is trusted as an https URL is.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

mod support;

use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use pagetide_memory::Urgency::Urgent;
use pagetide_sources::{Blob, ObjectBlob};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use support::{Act, Server, chain, options};

const URL: &str = "PAGETIDE_TEST_URL";

/// What an authority's certificate vouches for, from 1970 to 9999: a server at 127.0.0.1. The authority's key was not kept.
const AUTHORITY: &str = include_str!("support/certificates/authority.pem");
const CERTIFICATE: &[u8] = include_bytes!("support/certificates/server.der");
const KEY: &[u8] = include_bytes!("support/certificates/server-key.der");

/// A file without a certificate.
const NONE: &str = "/dev/null";

/// In a process of its own, whose environment says where certificates are, and names a file that has none.
#[test]
fn a_system_without_certificates() {
    if let Ok(url) = std::env::var(URL) {
        return open(&url);
    }
    let server = Server::start(8192);
    for (url, wanted) in [
        (server.url.clone(), "read 8192 bytes"),
        (
            https(&server),
            "no certificates of authorities are found: the package ca-certificates has them",
        ),
    ] {
        let said = said("a_system_without_certificates", &url, NONE.as_ref());
        assert!(said.contains(wanted), "{url}: {said}");
    }
}

/// A client that was made for http alone would know no authority where the redirect leads.
#[test]
fn a_redirect_leads_to_a_server_that_the_systems_certificates_vouch_for() {
    if let Ok(url) = std::env::var(URL) {
        return open(&url);
    }
    let directory = tempfile::tempdir().unwrap();
    let certificates = directory.path().join("authority.pem");
    std::fs::write(&certificates, AUTHORITY).unwrap();
    let (first, secure) = redirected();
    for url in [first.url.clone(), https(&secure)] {
        let this = "a_redirect_leads_to_a_server_that_the_systems_certificates_vouch_for";
        let said = said(this, &url, &certificates);
        assert!(said.contains("read 8192 bytes"), "{url}: {said}");
    }
    // By the redirect, too.
    assert_eq!(secure.gets().len(), 2);
    assert_eq!(first.gets().len(), 1);
}

/// Nothing vouches for anybody then, and what is read is a guest's memory.
#[test]
fn without_certificates_a_redirect_to_https_is_refused() {
    if let Ok(url) = std::env::var(URL) {
        return open(&url);
    }
    let (first, secure) = redirected();
    let this = "without_certificates_a_redirect_to_https_is_refused";
    let said = said(this, &first.url, NONE.as_ref());
    assert!(said.contains("invalid peer certificate"), "{said}");
    assert!(!first.requests().is_empty() && secure.requests().is_empty());
}

/// A server at an http URL, and the one with TLS to which it leads.
fn redirected() -> (Server, Server) {
    let config = tls();
    let secure = Server::start_behind(8192, move |connection: TcpStream| {
        let tls = ServerConnection::new(Arc::clone(&config)).unwrap();
        StreamOwned::new(tls, connection)
    });
    let first = Server::start(8192);
    first.always(Act::Redirect(https(&secure)));
    (first, secure)
}

fn tls() -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().unwrap();
    let (certificate, key) = (
        CertificateDer::from(CERTIFICATE),
        PrivatePkcs8KeyDer::from(KEY),
    );
    let config = config.with_no_client_auth();
    Arc::new(
        config
            .with_single_cert(vec![certificate], key.into())
            .unwrap(),
    )
}

fn https(server: &Server) -> String {
    server.url.replace("http:", "https:")
}

/// What the test `test` says of this URL in a process whose system has these certificates.
fn said(test: &str, url: &str, certificates: &Path) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(URL, url)
        .env("SSL_CERT_FILE", certificates)
        .env_remove("SSL_CERT_DIR")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    said
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
