//! Objects of a server that speaks S3: moto, from PyPI, in a virtual environment below `target/`.
//!
//! The environment takes half a minute to install, so the test does not: without it, it is skipped.
//!
//! ```text
//! python3 -m venv target/moto && target/moto/bin/pip install 'moto[server]'
//! ```

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

mod support;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_memory::Urgency::{Bulk, Urgent};
use pagetide_sources::{Blob, BlobError, CacheOptions, ObjectBlob, ObjectOptions, OpenObjectError};
use support::pattern;

const BLOCK: usize = 16 << 10;
/// The server's port, for the child process that has the environment of an S3 client.
const CHILD: &str = "PAGETIDE_TEST_S3";

struct Moto(Child);

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn moto() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?;
    Some(target.join("moto/bin/moto_server")).filter(|path| path.exists())
}

/// Sends a request that moto does not authenticate.
fn put(port: u16, path: &str, body: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = format!(
        "PUT {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {}\r\nConnection: close\r\nAuthorization: AWS4-HMAC-SHA256 Credential=key/20261102/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
fn an_object_of_s3_is_read() {
    let Some(server) = moto() else {
        println!(
            "SKIP: no target/moto: python3 -m venv target/moto && target/moto/bin/pip install 'moto[server]'"
        );
        return;
    };
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let mut command = Command::new(server);
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
    let started = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut running = match started {
        Ok(child) => Moto(child),
        Err(error) => {
            println!("SKIP: moto does not start: {error}");
            return;
        }
    };
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        let ended = running.0.try_wait().unwrap();
        if ended.is_some() || begun.elapsed() > Duration::from_secs(20) {
            println!("SKIP: moto does not listen: {ended:?}");
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
    // The environment of this process is not changed: other threads read it.
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child", "--nocapture"]);
    child.env(CHILD, port.to_string());
    child
        .env("AWS_ACCESS_KEY_ID", "key")
        .env("AWS_SECRET_ACCESS_KEY", "word");
    child
        .env("AWS_DEFAULT_REGION", "us-east-1")
        .env("AWS_ALLOW_HTTP", "true");
    child.env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}"));
    assert!(child.status().unwrap().success());
}

#[test]
fn child() {
    let Ok(port) = std::env::var(CHILD) else {
        return;
    };
    let port = port.parse().unwrap();
    let content = pattern(20 * BLOCK + 77, 3);
    put(port, "/images", b"");
    put(port, "/images/vm/memory%201", &content);
    let directory = tempfile::tempdir().unwrap();
    let cache = CacheOptions {
        directory: directory.path().into(),
        bytes: 1 << 30,
    };
    let options = ObjectOptions {
        block_bytes: BLOCK,
        get_bytes: 4 * BLOCK,
        ..ObjectOptions::default()
    };
    let open = |url: &str| ObjectBlob::open(url, &options, Some(&cache));
    let url = "s3://images/vm/memory 1";
    let blob = open(url).unwrap();
    assert_eq!(blob.name(), url);
    assert_eq!(blob.bytes(), content.len() as u64);
    assert!(blob.version().is_some());
    let mut buffer = vec![0; content.len()];
    blob.read_at(0, &mut buffer, Bulk).unwrap();
    assert_eq!(buffer, content);
    assert!(blob.counters().gets >= 6);

    for missing in ["s3://images/none", "s3://nowhere/none"] {
        let failed = open(missing).unwrap_err();
        let is_missing = matches!(failed, OpenObjectError::Blob(BlobError::NotFound { .. }));
        assert!(is_missing, "{missing}: {failed:?}");
    }

    // Replaced by content of equal length.
    let uncached = ObjectBlob::open(url, &options, None).unwrap();
    let changed = pattern(content.len(), 4);
    put(port, "/images/vm/memory%201", &changed);
    let failed = uncached.read_at(0, &mut buffer, Urgent).unwrap_err();
    assert!(matches!(failed, BlobError::Changed { .. }), "{failed:?}");
    let replaced = open(url).unwrap();
    assert_ne!(replaced.version(), blob.version());
    replaced.read_at(0, &mut buffer, Urgent).unwrap();
    assert_eq!(buffer, changed);
}
