//! Debian's packages as files: downloaded with apt, without being installed and without root.

use std::path::{Path, PathBuf};

use anyhow::Result;
use fs_err as fs;

use crate::command::Run;
use crate::outside::Service;
use crate::progress::Progress;

/// Downloads a package into `dir`: one version, or else what Debian serves now.
pub(crate) fn download(dir: &Path, package: &str, version: Option<&str>) -> Result<()> {
    fs::create_dir_all(dir)?;
    let what = match version {
        Some(version) => format!("{package}={version}"),
        None => package.to_owned(),
    };
    let progress = Progress::spinner(&format!("downloading {package}"));
    Service::Debian.again(&format!("downloading {package}"), || {
        Run::new("apt-get")
            .words("-o APT::Sandbox::User=root download")
            .arg(&what)
            .dir(dir)
            .logged(&dir.join("apt.log"), &progress)
    })?;
    progress.done();
    Ok(())
}

/// The newest downloaded file of a package, of one version if given.
pub(crate) fn downloaded(
    dir: &Path,
    package: &str,
    version: Option<&str>,
) -> Result<Option<PathBuf>> {
    let prefix = match version {
        // apt escapes the colon of an epoch in file names
        Some(version) => format!("{package}_{}_", version.replace(':', "%3a")),
        None => format!("{package}_"),
    };
    if !dir.exists() {
        return Ok(None);
    }
    let mut newest = None;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&prefix) && name.ends_with(".deb") {
            let modified = entry.metadata()?.modified()?;
            newest = newest.max(Some((modified, entry.path())));
        }
    }
    Ok(newest.map(|(_, file)| file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_found_by_name_and_version() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a_1%3a2-3_amd64.deb", "ab_9_all.deb", "a_4_amd64.deb.part"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let found = |version| downloaded(dir.path(), "a", version).unwrap();
        let file = Some(dir.path().join("a_1%3a2-3_amd64.deb"));
        assert_eq!(found(Some("1:2-3")), file);
        assert_eq!(found(None), file);
        assert_eq!(found(Some("4")), None);
        let nowhere = dir.path().join("nowhere");
        assert_eq!(downloaded(&nowhere, "a", None).unwrap(), None);
    }
}
