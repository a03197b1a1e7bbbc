//! Objects of a server that speaks S3.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

#[path = "support/moto.rs"]
mod moto;
mod support;

use std::process::Command;

use moto::{Moto, put, use_server};
use pagetide_memory::Urgency::{Bulk, Urgent};
use pagetide_sources::{Blob, BlobError, ObjectBlob, OpenObjectError};
use support::{blocks_of, cache_in, pattern};

const BLOCK: usize = 16 << 10;
/// The server's port, for the child process that has the environment of an S3 client.
const CHILD: &str = "PAGETIDE_TEST_S3";

#[test]
fn an_object_of_s3_is_read() {
    let Some(moto) = Moto::start() else {
        return;
    };
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child", "--nocapture"]);
    child.env(CHILD, moto.port.to_string());
    use_server(&mut child, moto.port);
    let output = child.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
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
    let cache = cache_in(directory.path());
    let options = blocks_of(BLOCK);
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
