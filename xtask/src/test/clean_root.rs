//! A Debian system that has nothing but what every Debian system has.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fs_err as fs;

use crate::command::Run;
use crate::files;
use crate::kernel::lock;
use crate::outside::Service;
use crate::paths::Paths;
use crate::progress::Progress;

/// A system in a directory of its own, which is removed when this is dropped.
#[derive(Debug)]
pub(super) struct CleanRoot {
    directory: PathBuf,
}

/// Why this machine cannot have one.
pub(super) fn unavailable() -> Result<Option<String>> {
    if codename(&os_release()?).is_none() {
        return Ok(Some("/etc/os-release names no release of Debian".into()));
    }
    let changes_root = Run::new("unshare").args(["--mount", "chroot", "/", "true"]);
    Ok(if !rustix::process::geteuid().is_root() {
        Some("a clean root takes root".into())
    } else if !changes_root.succeeds()? {
        Some("chroot, with mounts of its own, is not permitted".into())
    } else {
        None
    })
}

impl CleanRoot {
    /// Makes a system of this machine's release. The first one is downloaded and kept in the cache.
    pub(super) fn new(paths: &Paths) -> Result<Self> {
        let release = os_release()?;
        let codename = codename(&release).context("/etc/os-release names no release of Debian")?;
        let original = original(codename, Variant::Essential, paths)?;
        Self::copy_of(&original, paths)
    }

    /// Makes a system of a release that has apt.
    pub(super) fn with_apt(codename: &str, paths: &Paths) -> Result<Self> {
        Self::copy_of(&original(codename, Variant::Apt, paths)?, paths)
    }

    /// Makes a system of a release that has systemd.
    pub(super) fn with_systemd(codename: &str, paths: &Paths) -> Result<Self> {
        Self::copy_of(&original(codename, Variant::Systemd, paths)?, paths)
    }

    fn copy_of(original: &Path, paths: &Paths) -> Result<Self> {
        let test = paths.target().join("test");
        fs::create_dir_all(&test)?;
        let directory = test.join(format!("root-{}", files::unique()));
        let root = Self { directory };
        Run::new("cp")
            .args(["-a", "--reflink=auto"])
            .arg(original)
            .arg(&root.directory)
            .output()?;
        Ok(root)
    }

    /// The directory that is the system's `/`.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Copies a file into the system's top directory.
    pub(super) fn copy_in(&self, file: &Path) -> Result<PathBuf> {
        let name = file.file_name().context("a file without a name")?;
        let to = self.directory.join(name);
        fs::copy(file, &to)?;
        Ok(Path::new("/").join(name))
    }

    /// A command in the system, with nothing of this process's environment.
    pub(super) fn run(&self, program: &str) -> Run {
        Run::new("env")
            .args(["-i", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"])
            .arg("PATH=/usr/sbin:/usr/bin:/sbin:/bin")
            .arg("chroot")
            .arg(&self.directory)
            .arg(program)
    }

    /// Whether the system has a file of that absolute path.
    pub(super) fn has(&self, path: &str) -> bool {
        self.directory.join(path.trim_start_matches('/')).is_file()
    }

    /// Every path in the system, but for dpkg's records and logs.
    pub(super) fn paths(&self) -> Result<BTreeSet<String>> {
        let found = Run::new("find").arg(".").dir(&self.directory).text()?;
        let kept = |path: &&str| {
            !["./var/lib/dpkg/", "./var/log/"]
                .iter()
                .any(|records| path.starts_with(records))
        };
        Ok(found.lines().filter(kept).map(str::to_owned).collect())
    }
}

impl Drop for CleanRoot {
    fn drop(&mut self) {
        // A leftover takes space and does no other harm.
        let _ = files::remove(&self.directory);
    }
}

/// What a clean root has.
#[derive(Debug, Clone, Copy)]
enum Variant {
    /// What every Debian system has.
    Essential,
    /// And apt.
    Apt,
    /// And systemd as the first process, and what the package recommends and the guides call.
    Systemd,
}

impl Variant {
    fn name(self) -> &'static str {
        match self {
            Self::Essential => "essential",
            Self::Apt => "apt",
            Self::Systemd => "service",
        }
    }

    /// mmdebstrap's options for it.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Essential => &["--variant=essential"],
            Self::Apt => &["--variant=apt"],
            Self::Systemd => &[
                "--variant=apt",
                "--include=systemd,systemd-sysv,ca-certificates,zstd",
            ],
        }
    }
}

fn os_release() -> Result<String> {
    Ok(fs::read_to_string("/etc/os-release")?)
}

/// The code name of a release of Debian, in the text of /etc/os-release.
fn codename(os_release: &str) -> Option<&str> {
    let value = |name: &str| {
        let lines = os_release.lines();
        let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        Some(values.next()?.trim_matches('"'))
    };
    (value("ID")? == "debian").then(|| value("VERSION_CODENAME"))?
}

/// The system that every clean root is a copy of.
fn original(codename: &str, variant: Variant, paths: &Paths) -> Result<PathBuf> {
    let roots = paths.cache().join("roots");
    let directory = roots.join(format!("{codename}-{}", variant.name()));
    if directory.exists() {
        return Ok(directory);
    }
    let _lock = lock::take(&roots)?;
    if directory.exists() {
        return Ok(directory);
    }
    let new = roots.join(format!("new-{}", files::unique()));
    let progress = Progress::spinner("making a clean root");
    let make = || {
        // What a failed try has left.
        files::remove(&new)?;
        Run::new("mmdebstrap")
            .arg("--mode=root")
            .args(variant.options())
            .arg(codename)
            .arg(&new)
            .logged(&roots.join("mmdebstrap.log"), &progress)
    };
    let made = Service::Debian
        .again("making a clean root", make)
        .and_then(|()| Ok(fs::rename(&new, &directory)?));
    if made.is_err() {
        let _ = files::remove(&new);
    }
    made?;
    progress.done();
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debian_has_a_code_name() {
        let debian = "PRETTY_NAME=\"Debian\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(codename(debian), Some("bookworm"));
        let quoted = "ID=\"debian\"\nVERSION_CODENAME=\"trixie\"\n";
        assert_eq!(codename(quoted), Some("trixie"));
        assert_eq!(codename("ID=ubuntu\nVERSION_CODENAME=noble\n"), None);
        assert_eq!(codename("ID=debian\n"), None);
    }
}
