//! `cargo xtask guest`: the initramfs of Linux guests, from Debian's busybox and what is in
//! guest/linux.

use std::path::PathBuf;

use anyhow::{Context, Result};
use fs_err as fs;

use crate::command::Run;
use crate::initramfs::Initramfs;
use crate::paths::Paths;
use crate::{compile, debian, files, setup};

const BUSYBOX: &str = "busybox-static";
/// Programs of guest/linux, each of one source file.
const PROGRAMS: [&str; 3] = ["balloon", "consume", "memcycler"];

/// Runs the verb.
pub(crate) fn run(paths: &Paths) -> Result<()> {
    println!("{}", build(paths)?.display());
    Ok(())
}

/// Makes the initramfs and returns its place. What was downloaded and compiled before is used again.
pub(crate) fn build(paths: &Paths) -> Result<PathBuf> {
    setup::require(&setup::compiler())?;
    let dir = paths.target().join("guest");
    fs::create_dir_all(&dir)?;

    let mut archive = Initramfs::default();
    for name in ["bin", "dev", "proc", "sys", "tmp"] {
        archive.directory(name)?;
    }
    // What the first process writes to before /dev is mounted.
    archive.device("dev/console", 5, 1)?;
    archive.file("init", &fs::read(paths.in_root("guest/linux/init"))?)?;
    archive.file("bin/busybox", &fs::read(busybox(paths)?)?)?;
    let headers = ["common.h", "pagemap.h"];
    let headers = headers.map(|name| paths.in_root(&format!("guest/linux/{name}")));
    for name in PROGRAMS {
        let source = paths.in_root(&format!("guest/linux/{name}.c"));
        let program = compile::static_program("gcc", &source, &headers, &dir)?;
        archive.file(&format!("bin/{name}"), &fs::read(&program)?)?;
    }

    let file = dir.join("initramfs.cpio");
    let content = archive.finish()?;
    if fs::read(&file).is_ok_and(|old| old == content) {
        return Ok(file);
    }
    files::replace(&file, |new| Ok(fs::write(new, content)?))?;
    Ok(file)
}

/// Debian's static busybox, downloaded and unpacked in the cache.
fn busybox(paths: &Paths) -> Result<PathBuf> {
    let downloads = paths.cache().join("dl");
    if debian::downloaded(&downloads, BUSYBOX, None)?.is_none() {
        debian::download(&downloads, BUSYBOX, None)?;
    }
    let package =
        debian::downloaded(&downloads, BUSYBOX, None)?.context("apt-get download left no file")?;
    let stem = package.file_stem().context("a package without a name")?;
    let unpacked = paths.cache().join("guest").join(stem);
    let program = unpacked.join("bin/busybox");
    if program.exists() {
        return Ok(program);
    }
    let temporary = unpacked.with_extension(files::unique());
    fs::create_dir_all(&temporary)?;
    let unpack = Run::new("dpkg-deb").arg("-x").arg(&package);
    unpack.arg(&temporary).output()?;
    // Somebody else may have been faster, which serves as well.
    if fs::rename(&temporary, &unpacked).is_err() {
        let _ = fs::remove_dir_all(&temporary);
    }
    anyhow::ensure!(program.exists(), "{BUSYBOX} has no bin/busybox");
    Ok(program)
}
