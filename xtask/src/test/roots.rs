//! Fresh Debian systems in which README's commands run as they stand there, up to the end of the demo.
//!
//! Each is a root of its own with apt and nothing else. What README takes for granted is there: a Rust toolchain (this
//! machine's, bound in read-only, or Debian's), a C compiler and make. The checkout is a copy. Debian's packages, the
//! kernel's source and what is compiled are the root's own; cargo's downloads are this machine's. Where cargo installs
//! commands is on PATH, as rustup has it.

mod script;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use super::clean_root::{self, CleanRoot};
use super::tally::{Tally, Verdict};
use crate::command::Run;
use crate::paths::Paths;
use crate::progress::Progress;

const GROUP: &str = "roots";

/// Debian 12 and 13.
const RELEASES: [&str; 2] = ["bookworm", "trixie"];

/// What README's reader has: with a Rust toolchain comes a C compiler, which links.
const TAKEN_FOR_GRANTED: &str = "gcc libc6-dev make";

/// Where the checkout is in a root.
const CHECKOUT: &str = "/pagetide";

/// Where a root has the certificates that this machine trusts, if a variable names them: behind a proxy that ends TLS, no
/// download succeeds without its certificate.
const CERTIFICATES: &str = "/etc/certificates.pem";

/// The variables by which this machine's user, cargo and pip name such a file.
const CERTIFICATE_VARIABLES: [&str; 3] = ["SSL_CERT_FILE", "CARGO_HTTP_CAINFO", "PIP_CERT"];

pub(super) fn run(paths: &Paths, tally: &mut Tally) -> Result<()> {
    if let Some(reason) = clean_root::unavailable()? {
        for release in RELEASES {
            tally.add(GROUP, release, Verdict::Skipped(reason.clone()));
        }
        return Ok(());
    }
    for release in RELEASES {
        let log = super::log_file(paths, &format!("{GROUP}-{release}"))?;
        tally.leaves(&format!("{GROUP}-{release}"), "output.log", &log);
        let verdict = match read_readme(release, &log, paths) {
            Ok(()) => Verdict::Passed,
            Err(error) => Verdict::Failed(format!("{error:#}")),
        };
        tally.add(GROUP, release, verdict);
        for (time, what) in script::times(&String::from_utf8_lossy(&fs::read(&log)?)) {
            tally.note(format!("{GROUP} {release}: {} s: {what}", time.as_secs()));
        }
    }
    Ok(())
}

/// Makes the root, runs README's commands, and looks whether the kernel is there.
fn read_readme(release: &str, log: &Path, paths: &Paths) -> Result<()> {
    let root = CleanRoot::with_apt(release, paths)?;
    let inside = |path: &str| root.directory().join(path.trim_start_matches('/'));
    copy_checkout(&inside(CHECKOUT), paths)?;
    let certificates = certificates(|name| std::env::var_os(name));
    if let Some(certificates) = &certificates {
        fs::copy(certificates, inside(CERTIFICATES))?;
    }
    let (toolchain, home) = (Toolchain::find()?, cargo_home()?);
    let packages = toolchain.packages();
    let readme = fs::read_to_string(paths.in_root("README.md"))?;
    let restore = fs::read_to_string(paths.in_root("docs/guide/restore.md"))?;
    let program = script::program(&readme, &restore)?;
    let script = format!(
        "set -e
        apt-get -q update
        apt-get -q -y install --no-install-recommends {TAKEN_FOR_GRANTED} {packages}
        cd {CHECKOUT}
        {program}"
    );
    // To write to what the root has would be to write to this machine's.
    let bound = [Some(home.as_path()), toolchain.directory()];
    for directory in bound.iter().flatten() {
        let place = inside(&directory.to_string_lossy());
        ensure!(!place.exists(), "a fresh root has {}", directory.display());
        fs::create_dir_all(place)?;
    }
    // In mounts of its own, which end with it. The toolchain comes last.
    let enter = "set -e
        root=$1; shift
        mount -t proc proc \"$root/proc\"
        mount --rbind /dev \"$root/dev\"
        for directory do mount --bind \"$directory\" \"$root$directory\"; done
        if [ -n \"$2\" ]; then mount -o remount,bind,ro \"$root$2\"; fi
        cp /etc/resolv.conf \"$root/etc/resolv.conf\" || true
        exec chroot \"$root\" /usr/bin/env -i HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        ${http_proxy:+\"http_proxy=$http_proxy\"} ${https_proxy:+\"https_proxy=$https_proxy\"} $CERTIFICATES \
        \"CARGO_HOME=$CARGO_HOME\" CARGO_INSTALL_ROOT=/usr/local \
        \"PATH=$RUST_BIN/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\" sh -c \"$SCRIPT\"";
    let what = format!("README's commands in a fresh {release}");
    let progress = Progress::spinner(&what);
    Run::new("unshare")
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            enter,
            "sh",
        ])
        .arg(root.directory())
        .args(bound.iter().flatten())
        .env("CARGO_HOME", &home)
        .env("RUST_BIN", toolchain.path())
        .env("SCRIPT", script)
        .env("CERTIFICATES", in_root(certificates.is_some()))
        .logged(log, &progress)?;
    progress.done();
    let image = inside(CHECKOUT).join("target/kernel/x86_64/bzImage");
    ensure!(image.exists(), "there is no {}", image.display());
    Ok(())
}

/// The file of certificates that a variable names.
fn certificates(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let mut named = CERTIFICATE_VARIABLES
        .iter()
        .filter_map(|name| variable(name));
    named.find(|file| !file.is_empty()).map(PathBuf::from)
}

/// The variables for a root's programs, as words of a shell.
fn in_root(has_certificates: bool) -> String {
    match has_certificates {
        true => CERTIFICATE_VARIABLES
            .map(|name| format!("{name}={CERTIFICATES}"))
            .join(" "),
        false => String::new(),
    }
}

/// Everything but what is built, with changes that are not committed.
fn copy_checkout(to: &Path, paths: &Paths) -> Result<()> {
    Run::new("rsync")
        .args(["-a", "--exclude=/target", "--exclude=/.git"])
        .arg(format!("{}/", paths.root().display()))
        .arg(to)
        .output()
        .map(drop)
}

/// Which Rust the roots have.
#[derive(Debug, PartialEq, Eq)]
enum Toolchain {
    /// This machine's, in a directory of its own.
    Here(PathBuf),
    /// Debian's, where this machine's is Debian's, too: its directory is /usr.
    Debian,
}

impl Toolchain {
    fn find() -> Result<Self> {
        let sysroot = Run::new("rustc").args(["--print", "sysroot"]).text()?;
        Ok(Self::of(PathBuf::from(sysroot)))
    }

    fn of(sysroot: PathBuf) -> Self {
        match sysroot.to_str() {
            Some("/usr" | "/usr/local") => Self::Debian,
            _ => Self::Here(sysroot),
        }
    }

    /// What to install for it.
    fn packages(&self) -> &'static str {
        match self {
            Self::Here(_) => "",
            Self::Debian => "rustc-web cargo-web",
        }
    }

    /// What to bind for it.
    fn directory(&self) -> Option<&Path> {
        match self {
            Self::Here(directory) => Some(directory),
            Self::Debian => None,
        }
    }

    /// The beginning of PATH.
    fn path(&self) -> String {
        match self {
            Self::Here(directory) => format!("{}/bin:", directory.display()),
            Self::Debian => String::new(),
        }
    }
}

/// Where cargo keeps what it has downloaded.
fn cargo_home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("CARGO_HOME").filter(|home| !home.is_empty()) {
        return Ok(PathBuf::from(home));
    }
    let home = std::env::var_os("HOME").context("no HOME, and no CARGO_HOME")?;
    Ok(PathBuf::from(home).join(".cargo"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_trusts_whom_this_machine_trusts() {
        let here = |name: &str| (name == "CARGO_HTTP_CAINFO").then(|| "/a.pem".into());
        assert_eq!(certificates(here), Some("/a.pem".into()));
        assert_eq!(certificates(|_| Some(OsString::new())), None);
        let words = in_root(true);
        assert!(
            words.starts_with("SSL_CERT_FILE=/etc/certificates.pem "),
            "{words}"
        );
        assert_eq!(in_root(false), "");
    }

    #[test]
    fn nothing_of_this_machines_usr_is_bound() {
        let debian = Toolchain::of("/usr".into());
        assert_eq!((debian.directory(), debian.path()), (None, String::new()));
        assert_eq!(debian.packages(), "rustc-web cargo-web");
        let here = Toolchain::of("/home/a/.rustup/toolchains/stable".into());
        assert_eq!(here.packages(), "");
        assert!(here.path().ends_with("/stable/bin:"), "{}", here.path());
    }
}
