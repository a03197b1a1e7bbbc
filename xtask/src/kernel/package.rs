//! `cargo xtask kernel package`: the series' kernel as Debian packages, for hosts whose users have no kernel tree.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use super::lock;
use super::make::make;
use super::source::{Base, Source};
use super::{Arch, Variant, build};
use crate::apt::{Archive, Kind, Lists, Suite};
use crate::command::Run;
use crate::files;
use crate::paths::Paths;
use crate::progress::{self, Progress};
use crate::setup;

/// What Debian has configured of its kernel for clouds, in its package of configurations.
const CLOUD: &str = "config.amd64_none_cloud-amd64.xz";

/// What has a host boot the kernel once.
const BOOT_ONCE: &str = "kernel/boot-once.sh";

/// What is appended to the version of Debian's source.
const REVISION: &str = "+pagetide1";

/// The kernel that the packages have.
pub(crate) fn variant() -> Variant {
    Variant {
        package: true,
        ..Variant::patched(Arch::X86_64)
    }
}

/// Where the packages are put.
pub(crate) fn directory(paths: &Paths) -> PathBuf {
    variant().out(paths).join("packages")
}

/// Runs the verb.
pub(crate) fn run(paths: &Paths) -> Result<()> {
    setup::ensure(&setup::kernel_package_tools())?;
    build::ensure(variant(), paths)?;
    for file in packages(&directory(paths))? {
        let mib = fs::metadata(&file)?.len() >> 20;
        println!("{} ({mib} MiB)", file.display());
    }
    println!("docs/guide/hardware.md says how they are installed");
    Ok(())
}

/// Debian's configuration for clouds, of the source's version or, with a warning, of the newest that Debian serves.
pub(super) fn configuration(paths: &Paths, base: &Base, source: &Source) -> Result<String> {
    let dir = paths.cache().join("source").join("configuration");
    let _lock = lock::take(&dir)?;
    let kept = dir.join(&source.version);
    let text = files::text_if_any(&kept)?;
    if !text.is_empty() {
        return Ok(text);
    }
    let name = base.sibling("linux-config");
    let progress = Progress::spinner(&format!("downloading {name}"));
    let suites = vec![
        Suite::new(Archive::Security, "trixie-security"),
        Suite::new(Archive::Main, "trixie"),
    ];
    let lists = Lists::fetch(&dir.join("lists"), Kind::Binaries, suites, &progress)?;
    let served = lists.versions(&name)?;
    // Each release of Debian has a name of its own for one version.
    let of_source = |version: &str| plain(version) == plain(&source.version);
    let same = served.iter().find(|served| of_source(&served.version));
    let chosen = same.or(served.first());
    let version = &chosen
        .with_context(|| format!("{} list no {name}", lists.names()))?
        .version;
    let place = dir.join("unpacked");
    files::fresh_dir(&place)?;
    let package = lists.download(&name, version, &place, &progress)?;
    let unpack = Run::new("dpkg-deb").arg("-x").arg(&package).arg(&place);
    unpack.output()?;
    let file = place.join("usr/src").join(&name).join(CLOUD);
    let text = Run::new("xz").arg("-dc").arg(&file).text()?;
    progress.done();
    files::remove(&place)?;
    if same.is_some() {
        files::replace(&kept, |new| Ok(fs::write(new, &text)?))?;
    } else {
        progress::warn(&format!(
            "Debian serves no {name} {}: its configuration of {version} is used",
            source.version
        ));
    }
    Ok(text)
}

/// A version without what a release of Debian has appended.
fn plain(version: &str) -> &str {
    version.split('~').next().unwrap_or(version)
}

/// Builds the packages from a directory that is configured. They are left in the tree, above that directory.
pub(super) fn build(
    paths: &Paths,
    source: &Source,
    (tree, output): (&Path, &str),
    log: &Path,
    progress: &Progress,
) -> Result<()> {
    remove_leftovers(tree)?;
    make(paths, Arch::X86_64, tree, output)
        .arg("bindeb-pkg")
        .arg(format!("KDEB_PKGVERSION={}{REVISION}", source.version))
        .env("DEBFULLNAME", "Pagetide developers")
        .env("DEBEMAIL", "pagetide@localhost")
        .logged(log, progress)
}

/// Takes the packages of the kernel and of its headers out of the tree, with their digests. Unpacks what is booted and
/// tested: the packages' own files.
pub(super) fn install(paths: &Paths, tree: &Path, modules: &Path) -> Result<()> {
    let into = directory(paths);
    files::fresh_dir(&into)?;
    let mut digests = String::new();
    for file in packages(tree)? {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        // Programs are compiled against Debian's own.
        if !name.starts_with("linux-libc-dev_") {
            fs::rename(&file, into.join(&*name))?;
            let sum = Run::new("sha256sum").arg(&*name).dir(&into).text()?;
            digests += &(sum.trim_end().to_owned() + "\n");
        }
    }
    fs::write(into.join("SHA256SUMS"), digests)?;
    fs::copy(paths.in_root(BOOT_ONCE), into.join("boot-once.sh"))?;
    remove_leftovers(tree)?;
    let image = package_of_image(&into)?;
    let image = image.context("make bindeb-pkg left no package of the kernel")?;
    files::fresh_dir(modules)?;
    let unpack = Run::new("dpkg-deb").arg("-x").arg(image).arg(modules);
    unpack.output()?;
    let release = release(modules)?;
    let depmod = Run::new("depmod").arg("-b").arg(modules).arg(&release);
    depmod.output().map(drop)
}

/// Removes what dpkg has put into the tree, whose files are those of the series.
fn remove_leftovers(tree: &Path) -> Result<()> {
    for file in files_with(&["deb", "changes", "buildinfo"], tree)? {
        files::remove(&file)?;
    }
    Ok(())
}

/// Whether there is a package of the kernel.
pub(super) fn is_there(paths: &Paths) -> bool {
    package_of_image(&directory(paths)).is_ok_and(|image| image.is_some())
}

fn package_of_image(directory: &Path) -> Result<Option<PathBuf>> {
    let is_image = |file: &PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("linux-image-")
    };
    Ok(packages(directory)?.into_iter().find(is_image))
}

/// The file that a boot loader loads, in an unpacked package.
pub(super) fn image(unpacked: &Path) -> Result<PathBuf> {
    let release = release(unpacked)?;
    Ok(unpacked.join("boot").join(format!("vmlinuz-{release}")))
}

/// The name of the one kernel in an unpacked package.
fn release(unpacked: &Path) -> Result<String> {
    let mut names = fs::read_dir(unpacked.join("lib/modules"))?;
    let first = names.next().context("the package has no modules")??;
    ensure!(
        names.next().is_none(),
        "the package has modules of two kernels"
    );
    Ok(first.file_name().to_string_lossy().into_owned())
}

/// The packages in a directory, in the order of their names.
fn packages(directory: &Path) -> Result<Vec<PathBuf>> {
    files_with(&["deb"], directory)
}

fn files_with(extensions: &[&str], directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    if directory.exists() {
        for entry in fs::read_dir(directory)? {
            let file = entry?.path();
            let extension = file.extension().and_then(|extension| extension.to_str());
            if extension.is_some_and(|extension| extensions.contains(&extension)) {
                files.push(file);
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GRUB's configuration as Debian's 10_linux writes it, in a German locale.
    const GRUB: &str = "menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'gnulinux-simple-77' {\n\
        submenu 'Erweiterte Optionen' $menuentry_id_option 'gnulinux-advanced-77' {\n\
        menuentry 'Debian, mit Linux 6.12.118-pagetide' $menuentry_id_option 'gnulinux-6.12.118-pagetide-advanced-77' {\n\
        menuentry 'recovery' $menuentry_id_option 'gnulinux-6.12.118-pagetide-recovery-77' {\n\
        menuentry 'Debian, mit Linux 6.1.0-1' $menuentry_id_option 'gnulinux-6.1.0-1-advanced-77' {\n";

    #[test]
    fn a_kernel_is_booted_once_or_nothing_is() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str| place.path().join(name);
        std::fs::write(file("grub.cfg"), GRUB).unwrap();
        std::fs::write(file("defaults"), "GRUB_DEFAULT=0\nGRUB_TIMEOUT=5\n").unwrap();
        // Their names and arguments are what they would do.
        let program = "#!/bin/sh\necho \"${0##*/} $*\"\n";
        for name in ["update-grub", "grub-set-default", "grub-reboot"] {
            let write = "printf %s \"$1\" >\"$0\" && chmod +x \"$0\"";
            let write = Run::new("sh").args(["-c", write]).arg(file(name));
            write.arg(program).output().unwrap();
        }
        let script = Paths::find().unwrap().in_root(BOOT_ONCE);
        let run = |release: &str| {
            Run::new("env")
                .arg(format!("PATH={}:/usr/bin:/bin", place.path().display()))
                .arg(format!("GRUB_CONFIG={}", file("grub.cfg").display()))
                .arg(format!("GRUB_DEFAULTS={}", file("defaults").display()))
                .arg("sh")
                .arg(&script)
                .args([release, "6.1.0-1"])
                .result()
                .unwrap()
        };
        let done = run("6.12.118-pagetide");
        let said = String::from_utf8(done.stdout).unwrap();
        assert!(done.status.success(), "{said}");
        let wanted = "update-grub \n\
            grub-set-default gnulinux-advanced-77>gnulinux-6.1.0-1-advanced-77\n\
            grub-reboot gnulinux-advanced-77>gnulinux-6.12.118-pagetide-advanced-77\n\
            The next boot takes 6.12.118-pagetide, all later ones 6.1.0-1.";
        assert!(said.starts_with(wanted), "{said}");
        let defaults = std::fs::read_to_string(file("defaults")).unwrap();
        assert_eq!(defaults, "GRUB_TIMEOUT=5\nGRUB_DEFAULT=saved\n");

        let other = run("6.12.9-pagetide");
        assert!(!other.status.success());
        assert_eq!(other.stdout, b"update-grub \n");
    }

    #[test]
    fn a_version_is_one_in_each_release_of_debian() {
        assert_eq!(plain("6.12.118-1~deb12u1"), plain("6.12.118-1"));
        assert_ne!(plain("6.12.118-1"), plain("6.12.118-2"));
    }

    #[test]
    fn a_package_has_the_modules_of_one_kernel() {
        let place = tempfile::tempdir().unwrap();
        let modules = place.path().join("lib/modules");
        std::fs::create_dir_all(modules.join("6.12.1-a")).unwrap();
        assert_eq!(release(place.path()).unwrap(), "6.12.1-a");
        let image = image(place.path()).unwrap();
        assert_eq!(image, place.path().join("boot/vmlinuz-6.12.1-a"));
        std::fs::create_dir(modules.join("6.12.1-b")).unwrap();
        assert!(release(place.path()).is_err());
    }
}
