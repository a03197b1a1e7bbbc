//! What the verbs print of an image.

use std::fmt::Write as _;

use pagetide_base::units::{ByteSize, decimal, float};
use pagetide_sources::image::{Created, Holes, ImageInfo};
use serde::Serialize;

use crate::failure::Failure;

/// What `--json` prints. Under one version of the program no field changes its meaning; sizes are in
/// bytes.
#[derive(Debug, Serialize)]
pub(super) struct Document {
    image: String,
    version: u32,
    guest_bytes: u64,
    chunk_bytes: u32,
    chunks: u64,
    stored_chunks: u64,
    zero_chunks: u64,
    base_chunks: u64,
    duplicate_chunks: u64,
    zero_percent: f64,
    stored_bytes: u64,
    file_bytes: u64,
    /// Guest memory to the file's length.
    ratio: f64,
    digest: String,
    base: Option<String>,
    base_digest: Option<String>,
    /// Bytes of guest memory that were holes of the memory file, and what they became.
    #[serde(skip_serializing_if = "Option::is_none")]
    hole_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    holes: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
}

impl Document {
    pub(super) fn new(info: &ImageInfo) -> Self {
        let base = info.base.as_ref();
        Self {
            image: info.name.clone(),
            version: info.version,
            guest_bytes: info.memory_bytes,
            chunk_bytes: info.chunk_bytes,
            chunks: info.chunks,
            stored_chunks: info.stored_chunks,
            zero_chunks: info.zero_chunks,
            base_chunks: info.base_chunks,
            duplicate_chunks: info.duplicate_chunks,
            zero_percent: percent(info.zero_chunks, info.chunks),
            stored_bytes: info.stored_bytes,
            file_bytes: info.file_bytes,
            ratio: ratio(info),
            digest: info.digest.to_string(),
            base: base.map(|base| base.place.to_string()),
            base_digest: base.map(|base| base.digest.to_string()),
            hole_bytes: None,
            holes: None,
            seconds: None,
        }
    }

    pub(super) fn created(created: &Created) -> Self {
        Self {
            hole_bytes: Some(created.hole_bytes),
            holes: Some(meaning(created.holes)),
            seconds: Some(created.elapsed.as_secs_f64()),
            ..Self::new(&created.info)
        }
    }
}

pub(crate) fn json(document: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(document);
    Ok(text.map_err(Failure::failed)? + "\n")
}

fn ratio(info: &ImageInfo) -> f64 {
    float(info.memory_bytes) / float(info.file_bytes)
}

pub(crate) fn percent(part: u64, all: u64) -> f64 {
    match all {
        0 => 0.0,
        all => 100.0 * float(part) / float(all),
    }
}

/// A size to read and to compute with.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} bytes"),
        _ => format!("{} ({bytes} bytes)", ByteSize(bytes).about()),
    }
}

pub(crate) type Row = (&'static str, String);

pub(super) fn rows(info: &ImageInfo) -> Vec<Row> {
    let share = |chunks| format!("{chunks} ({} %)", decimal(percent(chunks, info.chunks), 1));
    let mut rows = vec![
        ("image", info.name.clone()),
        ("version", info.version.to_string()),
        ("guest memory", size(info.memory_bytes)),
        ("chunk size", ByteSize(info.chunk_bytes.into()).to_string()),
        ("chunks", info.chunks.to_string()),
        ("  stored", share(info.stored_chunks)),
        ("  zero", share(info.zero_chunks)),
        ("  as in the base", share(info.base_chunks)),
        ("  duplicates", share(info.duplicate_chunks)),
        ("stored", size(info.stored_bytes)),
        ("file", size(info.file_bytes)),
        ("ratio", format!("{} to 1", decimal(ratio(info), 2))),
        ("digest", info.digest.to_string()),
    ];
    match &info.base {
        None => rows.push(("base", "none".to_owned())),
        Some(base) => {
            rows.push(("base", base.place.to_string()));
            rows.push(("base digest", base.digest.to_string()));
        }
    }
    rows
}

/// What holes became.
fn meaning(holes: Holes) -> &'static str {
    match holes {
        Holes::Zero => "zero",
        Holes::Base => "base",
    }
}

pub(super) fn summary(created: &Created) -> String {
    let mut rows = rows(&created.info);
    let became = match created.holes {
        Holes::Zero => "zeroes",
        Holes::Base => "as in the base",
    };
    rows.push((
        "holes of RAW",
        format!("{}: {became}", size(created.hole_bytes)),
    ));
    let seconds = created.elapsed.as_secs_f64();
    let rate = float(created.info.memory_bytes) / float(1 << 30) / seconds;
    rows.push((
        "time",
        format!("{} s, {} GiB/s", decimal(seconds, 2), decimal(rate, 2)),
    ));
    lines(&rows)
}

pub(crate) fn lines(rows: &[Row]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().fold(String::new(), |mut text, (name, value)| {
        let _ = writeln!(text, "{name:width$}  {value}");
        text
    })
}
