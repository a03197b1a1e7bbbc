//! Memory files whose pages the kernel takes from huge pages.

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, ftruncate, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

/// An empty file of `bytes` bytes in a tmpfs of its own that is mounted nowhere, with `huge=always`: a write
/// to one page creates a whole huge page, unless a mapping asks for none. The tmpfs goes with the file.
/// `None`, with the reason printed, if this process may not mount one.
pub fn huge_memory_file(bytes: u64) -> Option<OwnedFd> {
    let file = (|| {
        let system = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&system, "huge", "always")?;
        // Room for the file and a few huge pages more.
        fsconfig_set_string(&system, "size", (bytes + (8 << 20)).to_string())?;
        fsconfig_create(&system)?;
        let place = fsmount(
            &system,
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::empty(),
        )?;
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
