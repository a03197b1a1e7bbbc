//! An initramfs, in the cpio format that the kernel documents as "newc".

use std::io::Write;

use anyhow::{Context, Result};
use cpio::newc;

/// An archive in the making. Directories come before what is in them.
#[derive(Debug, Default)]
pub(crate) struct Initramfs {
    bytes: Vec<u8>,
    entries: u32,
}

impl Initramfs {
    /// Adds a directory.
    pub(crate) fn directory(&mut self, name: &str) -> Result<()> {
        self.entry(name, 0o040_755, (0, 0), &[])
    }

    /// Adds an executable file.
    pub(crate) fn file(&mut self, name: &str, content: &[u8]) -> Result<()> {
        self.entry(name, 0o100_755, (0, 0), content)
    }

    /// Adds a character device.
    pub(crate) fn device(&mut self, name: &str, major: u32, minor: u32) -> Result<()> {
        self.entry(name, 0o020_600, (major, minor), &[])
    }

    /// Ends the archive.
    pub(crate) fn finish(self) -> Result<Vec<u8>> {
        newc::trailer(self.bytes).context("end an initramfs")
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> Result<()> {
        self.entries += 1;
        let size = u32::try_from(content.len()).context("a file too large for an initramfs")?;
        let entry = newc::Builder::new(name).ino(self.entries).mode(mode);
        let entry = entry.rdev_major(device.0).rdev_minor(device.1);
        let mut writer = entry.write(&mut self.bytes, size);
        writer.write_all(content)?;
        writer.finish()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{Run, on_path};

    #[test]
    fn cpio_reads_the_archive() {
        if !on_path("cpio") {
            eprintln!("SKIP: cpio is not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let mut archive = Initramfs::default();
        archive.directory("d").unwrap();
        archive.file("d/file", b"12345").unwrap();
        let file = dir.path().join("archive");
        std::fs::write(&file, archive.finish().unwrap()).unwrap();
        let list = Run::new("cpio")
            .arg("-idF")
            .arg(&file)
            .arg("--quiet")
            .dir(dir.path());
        list.output().unwrap();
        assert_eq!(std::fs::read(dir.path().join("d/file")).unwrap(), b"12345");
    }
}
