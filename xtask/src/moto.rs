//! The S3 server of the tests: moto, from PyPI, in a virtual environment in the cache. `target/moto` is a
//! link to the environment.
//!
//! Versions and checksums are in moto.txt. The environment is made once for each content of that file.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use fs_err as fs;
use sha2::{Digest, Sha256};

use crate::command::Run;
use crate::files::{self, hex};
use crate::kernel::lock;
use crate::outside::Service;
use crate::paths::Paths;
use crate::progress::Progress;

const REQUIREMENTS: &str = include_str!("moto.txt");

/// Written last: an environment without it is not whole.
const WHOLE: &str = "pagetide-whole";

/// Makes the environment, unless it is there.
///
/// # Errors
/// Whatever keeps it from being made: no network, no venv, a Python that the versions are not for. The tests
/// that need it are then skipped.
pub(crate) fn install(paths: &Paths) -> Result<()> {
    let directory = environment(paths);
    let link = paths.target().join("moto");
    if !directory.join(WHOLE).exists() {
        let _lock = lock::take(&paths.cache().join("moto"))?;
        if !directory.join(WHOLE).exists() {
            make(&directory, &paths.cache().join("moto/install.log"))?;
        }
    }
    if fs::read_link(&link).is_ok_and(|to| to == directory) {
        return Ok(());
    }
    fs::create_dir_all(paths.target())?;
    let new = link.with_extension(files::unique());
    symlink(&directory, &new)?;
    if link.is_dir() && !link.is_symlink() {
        files::remove(&link)?;
    }
    Ok(fs::rename(&new, &link)?)
}

/// Where the environment is. Another content of the file has another one.
fn environment(paths: &Paths) -> PathBuf {
    let digest = hex(&Sha256::digest(REQUIREMENTS));
    paths.cache().join("moto").join(&digest[..12])
}

fn make(directory: &Path, log: &Path) -> Result<()> {
    // What a killed xtask has left. An environment cannot be moved, so it is made in its place.
    files::remove(directory)?;
    let progress = Progress::spinner("installing moto from PyPI");
    Run::new("python3")
        .args(["-m", "venv"])
        .arg(directory)
        .logged(log, &progress)?;
    let requirements = directory.join("moto.txt");
    fs::write(&requirements, REQUIREMENTS)?;
    Service::PyPi.again("installing the S3 server of the tests", || {
        Run::new(directory.join("bin/python3"))
            .words("-m pip install --quiet --disable-pip-version-check --no-input --retries 1")
            .words("--only-binary :all: --no-deps --require-hashes --requirement")
            .arg(&requirements)
            .logged(log, &progress)
    })?;
    let server = directory.join("bin/moto_server");
    if !server.exists() {
        bail!("pip has installed no {}", server.display());
    }
    fs::write(directory.join(WHOLE), "")?;
    progress.done();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_has_a_version_and_a_checksum() {
        let text = REQUIREMENTS.replace("\\\n", " ");
        let packages: Vec<&str> = files::lines(&text).collect();
        assert!(packages.iter().any(|line| line.starts_with("moto")));
        for line in packages {
            let is_pinned = line.contains("==") && line.contains("--hash=sha256:");
            assert!(is_pinned, "{line}");
        }
    }

    #[test]
    fn an_environment_that_is_whole_is_linked_and_not_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let paths = Paths::at(directory.path());
        let environment = environment(&paths);
        std::fs::create_dir_all(&environment).unwrap();
        std::fs::write(environment.join(WHOLE), "").unwrap();
        for _ in 0..2 {
            install(&paths).unwrap();
            let link = paths.target().join("moto");
            assert_eq!(std::fs::read_link(&link).unwrap(), environment);
        }
        // What was installed by hand before.
        let link = paths.target().join("moto");
        std::fs::remove_file(&link).unwrap();
        std::fs::create_dir_all(link.join("bin")).unwrap();
        install(&paths).unwrap();
        assert!(link.is_symlink());
    }
}
