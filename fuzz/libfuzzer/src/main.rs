//! libFuzzer around the targets of `pagetide-fuzz`. `PAGETIDE_FUZZ_TARGET` names the target; with
//! `PAGETIDE_FUZZ_SEEDS=DIR` the program writes every target's seeds below DIR, lists the targets, and
//! ends.
#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use pagetide_fuzz::{Target, find, write_seeds};

static TARGET: OnceLock<&Target> = OnceLock::new();

fn begin() {
    if let Some(directory) = std::env::var_os("PAGETIDE_FUZZ_SEEDS") {
        let status = match write_seeds(Path::new(&directory)) {
            Ok(list) => {
                print!("{list}");
                0
            }
            Err(error) => {
                eprintln!("{}: {error}", directory.display());
                2
            }
        };
        std::process::exit(status);
    }
    let name = std::env::var("PAGETIDE_FUZZ_TARGET").unwrap_or_default();
    let Some(target) = find(&name) else {
        eprintln!("PAGETIDE_FUZZ_TARGET={name:?} is no target");
        std::process::exit(2);
    };
    let _ = TARGET.set(target);
}

libfuzzer_sys::fuzz_target!(init: begin(), |data: &[u8]| {
    if let Some(target) = TARGET.get() {
        (target.run)(data);
    }
});
