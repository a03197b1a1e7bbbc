//! Debian's own kernels, which have the lab's drivers as modules.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fs_err as fs;

use super::lock;
use crate::apt::{Archive, Kind, Lists, Suite};
use crate::command::Run;
use crate::files;
use crate::initramfs::Initramfs;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::vm;

/// The package that depends on a release's newest one.
const PACKAGE: &str = "linux-image-amd64";

/// What the lab mounts and its tests open: its root and the ports of its agent first.
const MODULES: [&str; 6] = [
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "fuse",
];

/// A release of Debian.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Release {
    /// Debian 12. Its Linux 6.1 has no UFFDIO_POISON.
    Bookworm,
    /// Debian 13.
    Trixie,
}

impl Release {
    fn code_name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
        }
    }
}

/// A kernel that can be booted.
#[derive(Debug)]
pub(crate) struct Distribution {
    /// As `uname -r` prints it.
    pub(crate) version: String,
    pub(crate) image: PathBuf,
    pub(crate) initramfs: PathBuf,
}

/// The newest kernel that Debian serves for a release; downloaded once.
pub(crate) fn newest(release: Release, paths: &Paths) -> Result<Distribution> {
    let code_name = release.code_name();
    let place = paths.cache().join("distribution").join(code_name);
    let _lock = lock::take(&place)?;
    let progress = Progress::spinner(&format!("fetching the kernel of {code_name}"));
    let suites = vec![
        Suite::new(Archive::Security, format!("{code_name}-security")),
        Suite::new(Archive::Main, code_name),
    ];
    let lists = Lists::fetch(&place.join("lists"), Kind::Binaries, suites, &progress)?;
    let mut depends = lists.depends(PACKAGE)?.into_iter();
    let name = depends.find(|name| name.starts_with("linux-image-"));
    let name = name.with_context(|| format!("{PACKAGE} depends on no kernel"))?;
    let versions = lists.versions(&name)?;
    let served = versions.first();
    let served = served.with_context(|| format!("{} list no {name}", lists.names()))?;
    let kept = place.join(format!("{name}_{}", served.version));
    if !kept.exists() {
        let package = lists.download(&name, &served.version, &place.join("package"), &progress)?;
        files::replace(&kept, |new| {
            let unpack = Run::new("dpkg-deb").arg("-x").arg(&package).arg(new);
            unpack.output().map(drop)
        })?;
        files::remove(&place.join("package"))?;
    }
    progress.done();
    let version = name.trim_start_matches("linux-image-").to_owned();
    let image = kept.join("boot").join(format!("vmlinuz-{version}"));
    let modules = modules(&kept, &version)?;
    let content = archive(&vm::build_early(paths)?, &modules)?;
    let initramfs = paths
        .target()
        .join("vm")
        .join(format!("{version}.initramfs"));
    files::replace(&initramfs, |new| Ok(fs::write(new, &content)?))?;
    Ok(Distribution {
        version,
        image,
        initramfs,
    })
}

/// The files of the modules, in the order in which they can be loaded.
fn modules(kept: &Path, version: &str) -> Result<Vec<PathBuf>> {
    // Debian 13's are below /usr.
    let merged = kept.join("usr");
    let root = match merged.join("lib/modules").exists() {
        true => &merged,
        false => kept,
    };
    Run::new("depmod")
        .arg("--basedir")
        .args([root.as_os_str(), version.as_ref()])
        .output()?;
    let mut files = Vec::new();
    for module in MODULES {
        let text = Run::new("modprobe")
            .arg("--dirname")
            .arg(root)
            .args(["--set-version", version, "--show-depends", module])
            .text()?;
        for file in insmod(&text) {
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    Ok(files)
}

/// The files in what `modprobe --show-depends` prints: `insmod FILE OPTIONS`, or `builtin NAME`.
fn insmod(text: &str) -> Vec<PathBuf> {
    let file = |line: &str| {
        line.strip_prefix("insmod ")?
            .split(' ')
            .next()
            .map(PathBuf::from)
    };
    text.lines().filter_map(file).collect()
}

fn archive(early: &Path, modules: &[PathBuf]) -> Result<Vec<u8>> {
    let mut archive = Initramfs::default();
    for directory in ["dev", "modules", "root"] {
        archive.directory(directory)?;
    }
    archive.device("dev/console", 5, 1)?;
    archive.file("init", &fs::read(early)?)?;
    for (number, module) in modules.iter().enumerate() {
        let is_packed = module
            .extension()
            .is_some_and(|extension| extension == "xz");
        let content = match is_packed {
            true => Run::new("xz").arg("-dc").arg(module).output()?,
            false => fs::read(module)?,
        };
        archive.file(&format!("modules/{number:02}.ko"), &content)?;
    }
    archive.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_in_the_order_in_which_they_are_loaded() {
        let text = "insmod /a/virtio.ko \nbuiltin ext4\ninsmod /a/virtio_pci.ko force_legacy=0\n";
        let files = ["/a/virtio.ko", "/a/virtio_pci.ko"].map(PathBuf::from);
        assert_eq!(insmod(text), files);
    }
}
