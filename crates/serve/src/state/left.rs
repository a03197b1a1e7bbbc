//! What a former server has left: VMs that this one goes on with, and those that it cannot read.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use pagetide_memory::MapFile;

use super::{Description, FORMAT, KeptVm, MAX_DESCRIPTION_BYTES};
use crate::log_limit::log_labelled;
use crate::native::label::VmLabel;
use crate::options::OnFailure;
use crate::peer::Peer;

/// What a former server has left.
pub(super) struct Left {
    pub(super) vms: Vec<KeptVm>,
    /// VMs that this server cannot serve.
    unreadable: Vec<Unreadable>,
    /// The first number that none of them has.
    pub(super) next_id: u64,
}

/// A VM that this server cannot serve.
struct Unreadable {
    id: u64,
    connection: Option<UnixStream>,
    /// What can be told of it nevertheless.
    label: Option<VmLabel>,
    error: io::Error,
}

impl Default for Left {
    fn default() -> Self {
        Self {
            vms: Vec::new(),
            unreadable: Vec::new(),
            next_id: 1,
        }
    }
}

impl Left {
    pub(super) fn add(&mut self, id: u64, descriptors: Vec<OwnedFd>) {
        // Also those that stay with the keeper: their numbers are taken.
        self.next_id = self.next_id.max(id.saturating_add(1));
        let copy_of = |at: usize| descriptors.get(at).and_then(|fd| fd.try_clone().ok());
        let (connection, file) = (copy_of(1), copy_of(3));
        match kept_vm(id, descriptors) {
            Ok(vm) => self.vms.push(vm),
            Err(error) => self.unreadable.push(Unreadable {
                id,
                connection: connection.map(UnixStream::from),
                label: file.and_then(|file| description_in(&file).ok()?.label()),
                error,
            }),
        }
    }

    /// Adds a VM of which nothing but its number is known.
    pub(super) fn add_unreadable(&mut self, id: u64, error: io::Error) {
        self.unreadable.push(Unreadable {
            id,
            connection: None,
            label: None,
            error,
        });
    }

    /// Does with VMs that nobody serves what is the policy.
    pub(super) fn settle(
        &mut self,
        on_failure: OnFailure,
        forget: impl Fn(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        for unreadable in self.unreadable.drain(..) {
            let Unreadable {
                id,
                connection,
                label,
                error,
            } = unreadable;
            let label = label.as_ref();
            self.next_id = self.next_id.max(id.saturating_add(1));
            let peer = connection.and_then(|stream| Peer::of(&stream).ok());
            match peer.filter(|_| on_failure == OnFailure::Kill) {
                Some(peer) if peer.kill().is_ok() => {
                    let text = "the VMM of a former server was killed: nobody serves it";
                    log_labelled!(error, label, vm = id, %error, "{text}");
                    forget(id)?;
                }
                _ => log_labelled!(
                    error,
                    label,
                    vm = id,
                    %error,
                    "a VM of a former server is not served: it sleeps, and stays with the keeper"
                ),
            }
        }
        Ok(())
    }
}

fn wrong() -> io::Error {
    io::Error::other("the keeper sent other descriptors")
}

fn description_in(file: &OwnedFd) -> io::Result<Description> {
    let bytes = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(u64::MAX);
    if bytes > MAX_DESCRIPTION_BYTES {
        return Err(wrong());
    }
    let mut text = vec![0; usize::try_from(bytes).unwrap_or(0)];
    let read = rustix::io::pread(file, &mut text, 0)?;
    Ok(serde_json::from_slice(
        text.get(..read).unwrap_or_default(),
    )?)
}

pub(super) fn kept_vm(id: u64, descriptors: Vec<OwnedFd>) -> io::Result<KeptVm> {
    let [uffd, stream, maps, file]: [OwnedFd; 4] = descriptors.try_into().map_err(|_| wrong())?;
    let description = description_in(&file)?;
    let format = description.format;
    if format != FORMAT {
        return Err(io::Error::other(format!(
            "it was kept by another version of the server (format {format}, not {FORMAT}), which can go on with it"
        )));
    }
    Ok(KeptVm {
        id,
        uffd: Arc::new(uffd),
        stream: UnixStream::from(stream),
        maps: MapFile::open(Arc::new(maps)).map_err(io::Error::other)?,
        description,
    })
}
