//! What must hold for every input of Pagetide's parsers, and examples of inputs.
//!
//! Each [`Target`] is one parser of bytes that a peer, a file or the kernel sends. Its function panics if
//! a property does not hold: what is accepted reads back the same, every bound of the format's document
//! holds, and a small input takes little memory. `fuzz/libfuzzer` runs the targets under libFuzzer; the
//! unit tests run them over the seeds, over variants of the seeds, and over the inputs in
//! `fuzz/regressions` that once failed.
#![allow(clippy::panic, reason = "a property that does not hold is a panic")]

mod config;
mod control;
mod events;
mod frames;
mod handshake;
mod image;
mod keeper;
mod mapped_ram;
mod memory;
mod migrate;
mod migrate_machines;
mod native;
mod page_maps;
mod planted;
mod poison;
mod working_set;

use std::io;
use std::path::Path;

/// One parser and its properties.
#[derive(Debug)]
pub struct Target {
    /// Its name, for people and for files.
    pub name: &'static str,
    /// The longest useful input, in bytes.
    pub max_bytes: usize,
    /// Checks every property for an input, and returns whether the parser accepted it.
    ///
    /// # Panics
    /// A property does not hold.
    pub run: fn(&[u8]) -> bool,
    /// Inputs that the parser accepts.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "handshake",
        max_bytes: 2048,
        run: handshake::run,
        seeds: handshake::seeds,
    },
    Target {
        name: "native-stream",
        max_bytes: 2048,
        run: native::stream,
        seeds: native::stream_seeds,
    },
    Target {
        name: "native-message",
        max_bytes: 2048,
        run: native::message,
        seeds: native::message_seeds,
    },
    Target {
        name: "image",
        max_bytes: 8192,
        run: image::run,
        seeds: image::seeds,
    },
    Target {
        name: "mapped-ram",
        max_bytes: 8192,
        run: mapped_ram::run,
        seeds: mapped_ram::seeds,
    },
    Target {
        name: "working-set",
        max_bytes: 1024,
        run: working_set::run,
        seeds: working_set::seeds,
    },
    Target {
        name: "events",
        max_bytes: 4096,
        run: events::run,
        seeds: events::seeds,
    },
    Target {
        name: "page-map-file",
        max_bytes: 256,
        run: page_maps::file,
        seeds: page_maps::file_seeds,
    },
    Target {
        name: "page-map-image",
        max_bytes: 512,
        run: page_maps::image,
        seeds: page_maps::image_seeds,
    },
    Target {
        name: "poison-map",
        max_bytes: 1024,
        run: poison::run,
        seeds: poison::seeds,
    },
    Target {
        name: "keeper",
        max_bytes: 2048,
        run: keeper::run,
        seeds: keeper::seeds,
    },
    Target {
        name: "control",
        max_bytes: 2048,
        run: control::run,
        seeds: control::seeds,
    },
    Target {
        name: "config",
        max_bytes: 2048,
        run: config::run,
        seeds: config::seeds,
    },
    Target {
        name: "migrate-stream",
        max_bytes: 2048,
        run: migrate::stream,
        seeds: migrate::stream_seeds,
    },
    Target {
        name: "migrate-message",
        max_bytes: 2048,
        run: migrate::message,
        seeds: migrate::message_seeds,
    },
    Target {
        name: "migrate-journal",
        max_bytes: 1024,
        run: migrate::journal,
        seeds: migrate::journal_seeds,
    },
    Target {
        name: "migrate-machines",
        max_bytes: 1024,
        run: migrate_machines::run,
        seeds: migrate_machines::seeds,
    },
];

/// A target that fails behind comparisons of several bytes, which chance does not pass: a fuzzer that
/// finds it is guided by coverage.
pub const PLANTED: Target = Target {
    name: "planted",
    max_bytes: 16,
    run: planted::run,
    seeds: planted::seeds,
};

/// The target with this name; also [`PLANTED`].
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS
        .iter()
        .chain([&PLANTED])
        .find(|target| target.name == name)
}

/// Writes the seeds of each target to files in `directory/NAME`. Returns one line for each target: its name
/// and its longest input.
///
/// # Errors
/// The kernel's.
pub fn write_seeds(directory: &Path) -> io::Result<String> {
    let mut list = String::new();
    for target in TARGETS.iter().chain([&PLANTED]) {
        let directory = directory.join(target.name);
        std::fs::create_dir_all(&directory)?;
        for (number, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(directory.join(format!("seed-{number}")), seed)?;
        }
        list += &format!("{} {}\n", target.name, target.max_bytes);
    }
    Ok(list)
}

/// The number at the start of the input, which is removed; 0 if the input has ended.
fn take<const BYTES: usize>(input: &mut &[u8]) -> [u8; BYTES] {
    let mut number = [0; BYTES];
    let count = input.len().min(BYTES);
    let (taken, rest) = input.split_at(count);
    number[..count].copy_from_slice(taken);
    *input = rest;
    number
}

#[cfg(test)]
mod tests;
