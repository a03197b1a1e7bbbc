//! A source that `PAGETIDE_KERNEL_SOURCE` names: a tarball, a directory, or a git repository, of which the commit that is
//! checked out is taken.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;
use sha2::{Digest, Sha256};

use super::super::git::git;
use super::import::{self, Import};
use super::{Origin, Source};
use crate::files::{self, hex};
use crate::progress::Progress;

/// What only a directory has in which a kernel was built.
const BUILT: [&str; 3] = [".config", "vmlinux", "include/generated"];

/// The source in the cache, copied there first if it is not there. Nobody else uses the directory meanwhile.
pub(super) fn ensure(dir: &Path, place: &Path) -> Result<Source> {
    // What a link leads to may change while the link does not.
    let place = &fs::canonicalize(place)?;
    let status = fs::metadata(place)?;
    let seen = if status.is_dir() {
        match is_repository(place)? {
            true => return from_repository(dir, place),
            false => {
                let built = BUILT.iter().find(|file| place.join(file).exists());
                if let Some(file) = built {
                    bail!(
                        "it is not pristine: a kernel was built there ({file}). Name a git repository, or a \
                         directory after `make mrproper`"
                    );
                }
                seen(place)?
            }
        }
    } else {
        seen(place)?
    };
    // What a file or a directory holds is read once, as long as sizes and times stay the same.
    let note = dir.join(format!("given-as-{}", &seen[..16]));
    if let Ok(key) = fs::read_to_string(&note)
        && let Some(source) = cached(dir, key.trim(), place)?
    {
        return Ok(source);
    }
    let import = Import::begin(dir, "given")?;
    let top = if status.is_dir() {
        place.to_owned()
    } else {
        let progress = Progress::spinner(&format!("unpacking {}", place.display()));
        let top = import.unpack(place, &progress)?;
        progress.done();
        top
    };
    let version = version(&fs::read_to_string(top.join("Makefile"))?)?;
    import.directory(&top, &format!("Linux {version}"))?;
    let key = key(&version, &import.tree()?);
    import.finish_as(dir.join(&key))?;
    files::replace(&note, |file| Ok(fs::write(file, &key)?))?;
    cached(dir, &key, place)?.context("the source that was just imported is not in the cache")
}

fn is_repository(place: &Path) -> Result<bool> {
    let bare = place.join("HEAD").exists() && place.join("objects").exists();
    Ok(place.join(".git").exists() || bare)
}

fn from_repository(dir: &Path, place: &Path) -> Result<Source> {
    let settings = import::trusting(dir, place)?;
    let ask = |arguments: &str| {
        let run = git(place, arguments.split(' '));
        run.env("GIT_CONFIG_GLOBAL", &settings).text()
    };
    if ask("rev-parse --is-bare-repository")? == "false" {
        let changed = ask("status --porcelain --untracked-files=no")?;
        let files: Vec<_> = changed.lines().take(5).map(str::trim).collect();
        ensure!(
            changed.is_empty(),
            "it has changes that are not committed ({}): commit or stash them, since its commit is what is built",
            files.join(", ")
        );
    }
    let (commit, tree) = (ask("rev-parse HEAD")?, ask("rev-parse HEAD^{tree}")?);
    let makefile = ask("show HEAD:Makefile").context("its commit has no Makefile")?;
    let version = version(&makefile)?;
    let key = key(&version, &tree);
    if let Some(source) = cached(dir, &key, place)? {
        return Ok(source);
    }
    let import = Import::begin(dir, "given")?;
    import.repository_of(place, &commit, &format!("Linux {version}"))?;
    import.finish_as(dir.join(&key))?;
    cached(dir, &key, place)?.context("the source that was just copied is not in the cache")
}

fn key(version: &str, tree: &str) -> String {
    format!("given-{version}-{}", tree.get(..12).unwrap_or(tree))
}

fn cached(dir: &Path, key: &str, place: &Path) -> Result<Option<Source>> {
    let Some((version, _)) = key
        .strip_prefix("given-")
        .and_then(|key| key.rsplit_once('-'))
    else {
        return Ok(None);
    };
    Source::cached(dir, key, version, Origin::Given(place.to_owned()))
}

/// The version that a kernel's makefile names.
fn version(makefile: &str) -> Result<String> {
    let value = |name: &str| {
        let line = makefile.lines().find(|line| {
            line.split('=')
                .next()
                .is_some_and(|word| word.trim() == name)
        });
        line.and_then(|line| line.split_once('='))
            .map(|(_, value)| value.trim())
    };
    match (value("VERSION"), value("PATCHLEVEL"), value("SUBLEVEL")) {
        (Some(version), Some(level), Some(sublevel)) => {
            let extra = value("EXTRAVERSION").unwrap_or_default();
            Ok(format!("{version}.{level}.{sublevel}{extra}"))
        }
        _ => bail!(
            "its Makefile names no VERSION, PATCHLEVEL and SUBLEVEL: it is no kernel's source"
        ),
    }
}

/// A digest of names, sizes and times of a file, or of everything in a directory.
fn seen(place: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    let mut left: Vec<PathBuf> = vec![place.to_owned()];
    while let Some(path) = left.pop() {
        let status = fs::symlink_metadata(&path)?;
        let name = path.as_os_str().as_bytes();
        hash.update(name.len().to_le_bytes());
        hash.update(name);
        for number in [
            status.mtime(),
            status.mtime_nsec(),
            status.ctime(),
            status.ctime_nsec(),
        ] {
            hash.update(number.to_le_bytes());
        }
        for number in [status.size(), status.ino(), u64::from(status.mode())] {
            hash.update(number.to_le_bytes());
        }
        if status.is_dir() {
            let mut entries: Vec<_> = fs::read_dir(&path)?
                .map(|entry| entry.map(|entry| entry.path()))
                .collect::<Result<_, _>>()?;
            entries.sort();
            left.extend(entries);
        }
    }
    Ok(hex(&hash.finalize()))
}
