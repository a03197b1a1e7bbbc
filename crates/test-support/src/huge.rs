//! Memory files whose pages the kernel takes from huge pages.

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, ftruncate, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

/// The root of a new tmpfs that is mounted nowhere, and goes with its files.
pub(crate) fn memory_file_system(options: &[(&str, &str)]) -> rustix::io::Result<OwnedFd> {
    let system = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (name, value) in options {
        fsconfig_set_string(&system, *name, *value)?;
    }
    fsconfig_create(&system)?;
    fsmount(
        &system,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )
}

/// An empty file of `bytes` bytes in a tmpfs of its own that is mounted nowhere, with `huge=always`: a write
/// to one page creates a whole huge page, unless a mapping asks for none. The tmpfs goes with the file.
/// `None`, with the reason printed, if this process may not mount one.
pub fn huge_memory_file(bytes: u64) -> Option<OwnedFd> {
    let file = (|| {
        // Room for the file and a few huge pages more.
        let size = (bytes + (8 << 20)).to_string();
        let place = memory_file_system(&[("huge", "always"), ("size", &size)])?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&place, "memory", flags, Mode::RUSR | Mode::WUSR)?;
        ftruncate(&file, bytes)?;
        rustix::io::Result::Ok(file)
    })();
    match file {
        Ok(file) => Some(file),
        Err(error) => {
            println!("SKIP: a tmpfs of huge pages: {error}");
            None
        }
    }
}
