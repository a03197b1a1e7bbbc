//! Objects of a store that the caller names, such as an emulator of Google Cloud's or Azure's.
//!
//! `PAGETIDE_TEST_STORE` is the URL of a bucket or container, which must exist; the store's usual environment
//! variables have the endpoint and the credentials. docs/design/object-storage.md has the commands.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

mod support;

use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload};
use pagetide_memory::Urgency::{Bulk, Urgent};
use pagetide_sources::{Blob, BlobError, ObjectBlob, OpenObjectError};
use support::{blocks_of, cache_in, pattern};

const BLOCK: usize = 16 << 10;

#[test]
fn an_object_of_the_named_store_is_read() {
    let Ok(bucket) = std::env::var("PAGETIDE_TEST_STORE") else {
        println!("SKIP: PAGETIDE_TEST_STORE names no bucket");
        return;
    };
    // Fails if another test of this process has installed it, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let url = bucket.parse().unwrap();
    let (store, _) = object_store::parse_url_opts(&url, std::env::vars()).unwrap();
    let put = |content: &[u8]| {
        let (path, content) = (
            Path::from("vm/memory 1"),
            PutPayload::from(content.to_vec()),
        );
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let done = runtime.unwrap().block_on(store.put(&path, content));
        done.unwrap();
    };
    let content = pattern(20 * BLOCK + 77, 3);
    put(&content);
    let directory = tempfile::tempdir().unwrap();
    let cache = cache_in(directory.path());
    let options = blocks_of(BLOCK);
    let url = format!("{bucket}/vm/memory 1");
    let blob = ObjectBlob::open(&url, &options, Some(&cache)).unwrap();
    assert_eq!((blob.name(), blob.bytes()), (&*url, content.len() as u64));
    assert!(blob.version().is_some());
    let mut buffer = vec![0; content.len()];
    blob.read_at(0, &mut buffer, Bulk).unwrap();
    assert!(buffer == content);
    assert!(blob.counters().gets >= 6, "ranges and not the whole");
    let missing = ObjectBlob::open(&format!("{bucket}/none"), &options, None).unwrap_err();
    let is_missing = matches!(missing, OpenObjectError::Blob(BlobError::NotFound { .. }));
    assert!(is_missing, "{missing:?}");
    // Replaced by content of equal length.
    let uncached = ObjectBlob::open(&url, &options, None).unwrap();
    let changed = pattern(content.len(), 4);
    put(&changed);
    let failed = uncached.read_at(0, &mut buffer, Urgent).unwrap_err();
    assert!(matches!(failed, BlobError::Changed { .. }), "{failed:?}");
    let replaced = ObjectBlob::open(&url, &options, Some(&cache)).unwrap();
    replaced.read_at(0, &mut buffer, Urgent).unwrap();
    assert!(buffer == changed);
}
