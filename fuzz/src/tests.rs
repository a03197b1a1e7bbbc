//! The properties without a fuzzer: over the seeds, over variants of them, and over inputs that once
//! failed.

use std::path::Path;

use super::*;

#[test]
fn seeds_are_accepted() {
    for target in TARGETS {
        for (number, seed) in (target.seeds)().iter().enumerate() {
            assert!((target.run)(seed), "{} {number}", target.name);
            assert!(seed.len() <= target.max_bytes, "{} {number}", target.name);
        }
    }
}

#[test]
fn variants_of_seeds_have_the_properties() {
    for target in TARGETS {
        for seed in (target.seeds)() {
            // All places of short seeds, and some of long ones.
            let step = seed.len() / 512 + 1;
            for at in (0..seed.len()).step_by(step) {
                (target.run)(&seed[..at]);
                for value in [0, 0xff, seed[at] ^ 1, seed[at] ^ 0x80] {
                    let mut variant = seed.clone();
                    variant[at] = value;
                    (target.run)(&variant);
                }
            }
            (target.run)(&[&seed[..], &seed].concat());
        }
    }
}

/// Inputs on which a property once failed.
#[test]
fn regressions_stay_away() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let mut count = 0;
    for target in std::fs::read_dir(&directory).unwrap() {
        let target = target.unwrap();
        let name = target.file_name().into_string().unwrap();
        let found = find(&name).unwrap_or_else(|| panic!("{name} is no target"));
        for input in std::fs::read_dir(target.path()).unwrap() {
            (found.run)(&std::fs::read(input.unwrap().path()).unwrap());
            count += 1;
        }
    }
    assert!(count > 0);
}

#[test]
fn targets_have_names_and_files_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let list = write_seeds(directory.path()).unwrap();
    assert_eq!(list.lines().count(), TARGETS.len() + 1);
    for line in list.lines() {
        let (name, _) = line.split_once(' ').unwrap();
        assert_eq!(find(name).unwrap().name, name);
        assert!(directory.path().join(name).join("seed-0").is_file());
    }
    assert!(find("no such target").is_none());
}
