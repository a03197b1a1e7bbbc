//! Images and guest memory that are written to URLs.
//!
//! The kind: what is half there. An object is what was there before, or all of the new one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

#[path = "support/moto.rs"]
mod moto;
mod support;

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use moto::{Moto, put, request, use_server};
use pagetide_sources::image::{
    CreateError, CreateOptions, Created, ExtractError, ExtractOptions, create, create_from_stream,
    create_from_url, extract, extract_to_stream, merge,
};
use pagetide_sources::{Location, OpenOptions, PagetideImage};
use support::{address_without_a_listener, chain, pattern};

/// The server's port, for the child process that has the environment of an S3 client.
const CHILD: &str = "PAGETIDE_TEST_UPLOAD";

/// More than one part of an upload, since random content is not compressed.
const LARGE: usize = (17 << 20) + 4096;

fn url(text: &str) -> Location {
    text.parse().unwrap()
}

fn raw(directory: &Path, name: &str, content: &[u8]) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

fn replacing() -> CreateOptions {
    CreateOptions {
        may_replace: true,
        ..CreateOptions::default()
    }
}

fn created(raw: &Path, new: &str, options: &CreateOptions) -> Result<Created, CreateError> {
    create(raw, &url(new), options, &mut |_, _| {})
}

fn content_of(image: &str) -> Vec<u8> {
    let image = PagetideImage::open(&url(image), &OpenOptions::default()).unwrap();
    let (mut out, options) = (Vec::new(), ExtractOptions::default());
    extract_to_stream(&image, &mut out, "out", &options, &mut |_, _| {}).unwrap();
    out
}

/// What has no name is left nowhere.
fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).unwrap().next().is_none()
}

#[test]
fn an_image_is_written_to_s3() {
    let Some(moto) = Moto::start() else {
        return;
    };
    let temporary = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child", "--nocapture"]);
    child.env(CHILD, moto.port.to_string());
    child.env("TMPDIR", temporary.path());
    use_server(&mut child, moto.port);
    let output = child.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    assert!(is_empty(temporary.path()));
}

/// Takes the end of the file without a name that this process has in the directory of temporary files.
fn cut_temporary_file(bytes: u64) {
    let directory = std::env::temp_dir().canonicalize().unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is_temporary = |path: &PathBuf| {
        let file = std::fs::read_link(path);
        file.is_ok_and(|file| {
            file.starts_with(&directory) && file.to_string_lossy().ends_with(" (deleted)")
        })
    };
    let mut open = open.map(|entry| entry.path()).filter(is_temporary);
    let path = open.next().expect("the file that is uploaded");
    let file = std::fs::File::options().write(true).open(path);
    file.unwrap().set_len(bytes).unwrap();
}

#[test]
fn child() {
    let Ok(port) = std::env::var(CHILD) else {
        return;
    };
    let port = port.parse().unwrap();
    put(port, "/images", b"");
    let directory = tempfile::tempdir().unwrap();
    let content = pattern(LARGE, 5);
    let memory = raw(directory.path(), "memory", &content);
    let base = "s3://images/vm 1/base.img";
    let mut seen = Vec::new();
    let made = create(&memory, &url(base), &replacing(), &mut |done, all| {
        seen.push((done, all));
    });
    let made = made.unwrap();
    assert_eq!(made.info.name, base);
    // Of the image, after those of the memory: none, each of three parts, and all.
    let bytes = made.info.file_bytes;
    seen.retain(|(_, all)| *all == bytes);
    assert_eq!(seen.len(), 5, "{seen:?}");
    assert_eq!((seen[0], seen[4]), ((0, bytes), (bytes, bytes)));
    assert!(content_of(base) == content);

    // A failure after the upload has begun: what is uploaded loses its end. The store keeps no upload, for whose parts it takes money.
    let half = "s3://images/half.img";
    let mut is_cut = false;
    let error = create(&memory, &url(half), &replacing(), &mut |done, all| {
        if all == bytes && done == 0 && !std::mem::replace(&mut is_cut, true) {
            cut_temporary_file(bytes / 2);
        }
    });
    let text = chain(&error.unwrap_err());
    // Of the second part, which is read after the upload has begun.
    assert!(text.contains("failed to fill whole buffer"), "{text}");
    let uploads = request(port, "GET", "/images?uploads", b"");
    assert!(
        is_cut && uploads.contains("<ListMultipartUploadsResult"),
        "{uploads}"
    );
    assert!(!uploads.contains("<Upload>"), "{uploads}");

    // What is there stays, also beside another writer between the look and the end.
    let small = raw(directory.path(), "small", &pattern(8192, 6));
    let usual = CreateOptions::default();
    let error = created(&small, base, &usual).unwrap_err();
    assert!(error.is_refusal());
    assert_eq!(error.to_string(), format!("{base} exists"));
    let taken = "s3://images/taken.img";
    let mut is_taken = false;
    let error = create(&small, &url(taken), &usual, &mut |_, _| {
        if !std::mem::replace(&mut is_taken, true) {
            created(&memory, taken, &usual).unwrap();
        }
    });
    let error = error.unwrap_err();
    assert_eq!(error.to_string(), format!("{taken} exists"));
    assert!(content_of(taken) == content);

    // One above it, which names it as its neighbour, and so does one above a file that will be beside it.
    let above = "s3://images/vm 1/above.img";
    let mut changed = content.clone();
    changed[4096..8192].fill(9);
    let memory = raw(directory.path(), "changed", &changed);
    let local = directory.path().join("base.img");
    let whole = PagetideImage::open(&url(base), &OpenOptions::default()).unwrap();
    merge(&whole, &local.clone().into(), &usual, &mut |_, _| {}).unwrap();
    for of in [url(base), local.clone().into()] {
        let options = CreateOptions {
            base: Some(of),
            any_length: true,
            holes: Some(pagetide_sources::image::Holes::Zero),
            ..replacing()
        };
        let made = created(&memory, above, &options).unwrap();
        assert_eq!(made.info.base.unwrap().place.to_string(), "base.img");
        assert!(made.info.file_bytes < 100_000);
        assert!(content_of(above) == changed);
    }

    // No image is its own base, also if the base is a file so far.
    for of in [url(base), local.into(), url(above)] {
        let options = CreateOptions {
            base: Some(of),
            any_length: true,
            holes: Some(pagetide_sources::image::Holes::Zero),
            ..replacing()
        };
        let error = created(&small, base, &options).unwrap_err();
        assert!(matches!(error, CreateError::SameFile { .. }), "{error}");
    }
    assert!(content_of(above) == changed);

    // Raw memory, from a URL to a URL.
    let image = PagetideImage::open(&url(above), &OpenOptions::default()).unwrap();
    let memory = "s3://images/memory";
    let options = ExtractOptions::default();
    extract(&image, &url(memory), &options, &mut |_, _| {}).unwrap();
    create_from_url(memory, &url("s3://images/again"), &usual, &mut |_, _| {}).unwrap();
    assert!(content_of("s3://images/again") == changed);
    // Nothing is written to what is read.
    let error = extract(
        &image,
        &url(base),
        &ExtractOptions {
            may_replace: true,
            ..options
        },
        &mut |_, _| {},
    );
    let error = error.unwrap_err();
    assert!(matches!(error, ExtractError::SameFile { .. }), "{error}");
    let error = create_from_url(memory, &url(memory), &replacing(), &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, CreateError::SameFile { .. }), "{error}");

    let error = created(&small, "s3://nowhere/a.img", &replacing()).unwrap_err();
    assert!(!error.is_refusal());
    let text = chain(&error);
    assert!(
        text.starts_with("cannot write s3://nowhere/a.img: there is no such bucket"),
        "{text}"
    );
}

/// A store that takes an object in parts, and refuses requests of one method.
struct Store {
    refused: &'static str,
    begun: u32,
    /// Parts that it has taken, and neither joined nor dropped.
    parts: u32,
    dropped: u32,
}

impl Store {
    fn answer(&mut self, method: &str, path: &str) -> (u16, String) {
        let is_begin = path.ends_with("?uploads") || path.ends_with("?uploads=");
        let text = match method {
            "POST" if is_begin => {
                self.begun += 1;
                "<InitiateMultipartUploadResult><UploadId>7</UploadId></InitiateMultipartUploadResult>"
            }
            _ if method == self.refused => return (403, "<Error><Code>Full</Code></Error>".into()),
            "PUT" => {
                self.parts += 1;
                ""
            }
            "DELETE" => {
                assert!(path.ends_with("?uploadId=7"), "{path}");
                (self.parts, self.dropped) = (0, self.dropped + 1);
                ""
            }
            _ => unreachable!("{method} {path}"),
        };
        (200, text.into())
    }
}

/// A store keeps the parts of an upload that nobody ends, and takes money for them. moto has no errors.
#[test]
fn of_an_upload_that_the_store_refuses_no_part_is_left_there() {
    if std::env::var_os(CHILD).is_some() {
        return upload_refused();
    }
    // A part, and the request that joins them.
    for refused in ["PUT", "POST"] {
        let store = Store {
            refused,
            begun: 0,
            parts: 0,
            dropped: 0,
        };
        let store = Arc::new(Mutex::new(store));
        let served = Arc::clone(&store);
        let address = serve(move |method, path, _| served.lock().unwrap().answer(method, path));
        let this = "of_an_upload_that_the_store_refuses_no_part_is_left_there";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", this, "--nocapture"]).env(CHILD, "");
        use_server(&mut child, address.port());
        let output = child.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{refused}: {errors}");
        let store = store.lock().unwrap();
        let left = (store.begun, store.parts, store.dropped);
        assert_eq!(left, (1, 0, 1), "{refused}: begun, parts, dropped");
    }
}

fn upload_refused() {
    let directory = tempfile::tempdir().unwrap();
    let memory = raw(directory.path(), "memory", &pattern(LARGE, 5));
    let error = created(&memory, "s3://images/refused.img", &replacing()).unwrap_err();
    let text = chain(&error);
    assert!(text.contains("403"), "{text}");
}

/// A server of files, which knows neither parts nor conditions.
#[derive(Default)]
struct Site {
    files: HashMap<String, Vec<u8>>,
    /// The statuses of the next answers to PUT.
    refused: Vec<u16>,
    /// Nobody is told what is there.
    is_secret: bool,
    puts: usize,
}

struct Files {
    site: Arc<Mutex<Site>>,
    address: String,
}

impl Files {
    fn start() -> Self {
        let site = Arc::new(Mutex::new(Site::default()));
        let served = Arc::clone(&site);
        let address = serve(move |method, path, body| {
            let status = served.lock().unwrap().answer(method, path, body);
            (status, String::new())
        });
        let address = address.to_string();
        Self { site, address }
    }

    fn url(&self, name: &str) -> String {
        format!("http://user:word@{}/{name}", self.address)
    }

    fn file(&self, name: &str) -> Option<Vec<u8>> {
        let site = self.site.lock().unwrap();
        site.files.get(&format!("/{name}")).cloned()
    }
}

impl Site {
    /// The status of the answer.
    fn answer(&mut self, method: &str, path: &str, body: Vec<u8>) -> u16 {
        match method {
            "PUT" => {
                self.puts += 1;
                match self.refused.pop() {
                    Some(status) => status,
                    None => {
                        self.files.insert(path.to_owned(), body);
                        201
                    }
                }
            }
            _ if self.is_secret => 403,
            _ if self.files.contains_key(path) => 200,
            _ => 404,
        }
    }
}

/// Serves with what `answer` says of a method, a path and a body: a status, and the answer's body.
fn serve(
    answer: impl Fn(&str, &str, Vec<u8>) -> (u16, String) + Send + Sync + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, answer) = (stream.unwrap(), Arc::clone(&answer));
            std::thread::spawn(move || {
                let Some((method, path, body)) = request_of(&stream) else {
                    return;
                };
                let (status, body) = answer(&method, &path, body);
                let length = body.len();
                let text = format!(
                    "HTTP/1.1 {status} -\r\nContent-Length: {length}\r\nETag: \"1\"\r\nConnection: close\r\n\r\n{body}"
                );
                let _ = (&stream).write_all(text.as_bytes());
            });
        }
    });
    address
}

/// The method, the path and the body of a connection's first request.
fn request_of(stream: &TcpStream) -> Option<(String, String, Vec<u8>)> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).unwrap_or(0) == 0 {
            return None;
        }
    }
    let mut words = head.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let lower = head.to_ascii_lowercase();
    let length = lower.split("content-length: ").nth(1);
    let length = length.map_or(0, |text| text.lines().next().unwrap().parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((method.into(), path.into(), body))
}

#[test]
fn a_server_without_parts_or_conditions_takes_an_image_in_one_request() {
    let files = Files::start();
    let directory = tempfile::tempdir().unwrap();
    let local = directory.path().join("image");
    for (name, content) in [("small", pattern(8192, 1)), ("large", pattern(LARGE, 2))] {
        let memory = raw(directory.path(), "memory", &content);
        create(&memory, &local.clone().into(), &replacing(), &mut |_, _| {}).unwrap();
        created(&memory, &files.url(name), &CreateOptions::default()).unwrap();
        assert!(
            files.file(name).unwrap() == std::fs::read(&local).unwrap(),
            "{name}"
        );
    }
    let error = create_from_stream(
        &mut pattern(4096, 3).as_slice(),
        "a pipe",
        &url(&files.url("small")),
        &CreateOptions::default(),
        &mut |_, _| {},
    );
    let text = error.unwrap_err().to_string();
    assert!(
        text.ends_with("/small exists") && !text.contains("word"),
        "{text}"
    );
    // What it could take from much memory only is refused before anything is extracted.
    let memory = directory.path().join("large");
    let file = std::fs::File::create(&memory).unwrap();
    file.set_len((256 << 20) + 4096).unwrap();
    create(&memory, &local.clone().into(), &replacing(), &mut |_, _| {}).unwrap();
    let image = PagetideImage::open(&local.into(), &OpenOptions::default()).unwrap();
    let (mut calls, new) = (0, url(&files.url("raw")));
    let error = extract(&image, &new, &ExtractOptions::default(), &mut |_, _| {
        calls += 1;
    });
    let error = error.unwrap_err();
    assert!(error.is_refusal() && calls == 0, "{calls}");
    assert!(
        chain(&error).contains("in one request only"),
        "{}",
        chain(&error)
    );
}

#[test]
fn a_server_that_refuses_is_named_and_keeps_what_it_had() {
    let files = Files::start();
    let directory = tempfile::tempdir().unwrap();
    let memory = raw(directory.path(), "memory", &pattern(8192, 1));
    let new = files.url("image");
    let set = |change: fn(&mut Site)| change(&mut files.site.lock().unwrap());

    // One failure is tried again.
    set(|site| site.refused = vec![503]);
    created(&memory, &new, &replacing()).unwrap();
    let kept = files.file("image");
    assert!(kept.is_some());
    assert_eq!(files.site.lock().unwrap().puts, 2);

    let other = raw(directory.path(), "other", &pattern(8192, 2));
    for (status, wanted) in [(403, "403"), (507, "507"), (409, "409")] {
        files.site.lock().unwrap().refused = vec![status; 10];
        let error = created(&other, &new, &replacing()).unwrap_err();
        let text = chain(&error);
        assert!(!error.is_refusal(), "{text}");
        assert!(text.contains(wanted) && !text.contains("word"), "{text}");
        assert!(files.file("image") == kept);
    }

    // It does not say whether something is there.
    set(|site| (site.refused, site.is_secret) = (Vec::new(), true));
    let error = created(&other, &new, &CreateOptions::default()).unwrap_err();
    assert!(error.is_refusal());
    let text = chain(&error);
    assert!(text.contains("--force"), "{text}");
    assert!(files.file("image") == kept);
    created(&other, &new, &replacing()).unwrap();
    assert!(files.file("image") != kept);

    // Nobody is advised to replace what may be there, because the server cannot be reached.
    let (_socket, gone) = address_without_a_listener();
    let error = created(
        &other,
        &format!("http://{gone}/image"),
        &CreateOptions::default(),
    );
    let error = error.unwrap_err();
    let text = chain(&error);
    assert!(!error.is_refusal() && !text.contains("--force"), "{text}");
}

#[test]
fn a_url_that_names_no_object_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let memory = raw(directory.path(), "memory", &pattern(8192, 1));
    for new in [
        "s3://bucket",
        "http://host",
        "s3://bucket/folder/",
        "s3://user:word@bucket/a",
    ] {
        let error = created(&memory, new, &replacing()).unwrap_err();
        let text = chain(&error);
        assert!(error.is_refusal() && !text.contains("word"), "{text}");
    }
}
