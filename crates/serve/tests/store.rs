//! A service manager's store of descriptors as the keeper of VMs. A part of systemd's protocol stands in for it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};
use std::thread;

use pagetide_serve::control::channel::{AskError, ControlSocket, ask};
use pagetide_serve::control::message::{Answer, Request, SocketState};
use pagetide_serve::{DescriptorStore, Inherited, Options};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use support::*;

type Stored = Arc<Mutex<BTreeMap<String, Vec<OwnedFd>>>>;

/// A service manager. Its thread ends with the process.
struct Manager {
    place: Place,
    stored: Stored,
}

impl Manager {
    fn start() -> Self {
        let place = Place::new(64);
        let socket = UnixDatagram::bind(place.directory.path().join("notify")).unwrap();
        let stored = Stored::default();
        let all = Arc::clone(&stored);
        thread::spawn(move || {
            loop {
                obey(&socket, &all);
            }
        });
        Self { place, stored }
    }

    /// A server that is started by it, with what it has stored.
    fn serve(&self, room: usize) -> Running {
        self.serve_with(room, self.options())
    }

    fn serve_with(&self, room: usize, options: Options) -> Running {
        let notify = self.place.directory.path().join("notify");
        let mut store = DescriptorStore::new(notify.as_os_str(), room).unwrap();
        for (name, descriptors) in self.stored.lock().unwrap().iter() {
            assert!(DescriptorStore::is_of_a_vm(name));
            // In another order.
            for descriptor in descriptors.iter().rev() {
                store.take_back(name, descriptor.try_clone().unwrap());
            }
        }
        let inherited = Inherited {
            store: Some(store),
            ..Inherited::default()
        };
        Running::with(options, inherited).unwrap()
    }

    fn options(&self) -> Options {
        self.place.options()
    }

    fn vms(&self) -> usize {
        self.stored.lock().unwrap().len()
    }
}

/// Handles one datagram.
fn obey(socket: &UnixDatagram, stored: &Stored) {
    let mut text = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut text)];
    let got = recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(given) = message {
            descriptors.extend(given);
        }
    }
    let text = String::from_utf8_lossy(&text[..got.bytes]).into_owned();
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
    let mut stored = stored.lock().unwrap();
    if text.starts_with("FDSTORE=1") {
        assert!(text.contains("FDPOLL=0"));
        stored.insert(name.unwrap().to_owned(), descriptors);
    } else if text.starts_with("FDSTOREREMOVE=1") {
        stored.remove(name.unwrap());
    } else {
        // Its descriptor is closed now.
        assert_eq!(text, "BARRIER=1");
    }
}

#[test]
fn a_successor_gets_the_vms_that_the_service_manager_has_stored() {
    if !has_userfaultfd() {
        return;
    }
    let manager = Manager::start();
    let guest = shared(64);
    let running = manager.serve(8);
    let stream = guest.connect(&manager.place.socket());
    guest.check(3, &content(3));
    assert_eq!(manager.vms(), 1, "it was stored before it was served");
    let balloon = Arc::clone(&guest);
    within_patience("the balloon", move || balloon.discard(5, 1));
    running.stop();
    let asleep = guest.touch(9);
    let running = manager.serve(8);
    assert!(asleep.join() == content(9));
    guest.check(5, &[0; PAGE]);
    guest.check(3, &content(3));
    drop(stream);
    running.ended(1);
    running.stop();
    eventually("the VM's removal", || manager.vms() == 0);
}

/// The store drops what it has no room for, and says nothing.
#[test]
fn a_vm_for_which_the_store_has_no_room_is_drained() {
    if !has_userfaultfd() {
        return;
    }
    let manager = Manager::start();
    let [stored, not_stored] = [shared(64), shared(64)];
    let running = manager.serve(7);
    let _first = stored.connect(&manager.place.socket());
    stored.check(3, &content(3));
    let _second = not_stored.connect(&manager.place.socket());
    not_stored.check(3, &content(3));
    running.stop();
    (0..64).for_each(|page| not_stored.check(page, &content(page)));
    assert_eq!(manager.vms(), 1);
    let asleep = stored.touch(4);
    let _running = manager.serve(7);
    assert!(asleep.join() == content(4));
}

/// Kind: a VM that is counted only where something else is, here a binding of its socket.
#[test]
fn vms_of_a_former_server_are_listed_and_drained_where_nothing_is_served_any_more() {
    if !has_userfaultfd() {
        return;
    }
    let manager = Manager::start();
    let guest = shared(64);
    let running = manager.serve(8);
    let _stream = guest.connect(&manager.place.socket());
    guest.check(3, &content(3));
    running.stop();
    let running = manager.serve_with(
        8,
        Options {
            bindings: Vec::new(),
            may_lack_bindings: true,
            ..manager.options()
        },
    );
    let (controller, metrics) = (running.controller.clone(), running.metrics.clone());
    let path = manager.place.directory.path().join("control");
    let _control = ControlSocket::start(&path, move |request, reply| {
        controller.handle(request, reply);
    })
    .unwrap();
    let Ok(Answer::Sockets(sockets)) = ask(&path, &Request::List, PATIENCE) else {
        panic!("nothing is listed");
    };
    let [socket] = &sockets[..] else {
        panic!("{sockets:?}");
    };
    assert_eq!((socket.state, socket.vms), (SocketState::Closed, 1));
    let of_socket = |line: &&str| line.starts_with("pagetide_socket_vms{") && line.ends_with(" 1");
    eventually("its series", || {
        metrics.text().lines().find(of_socket).is_some()
    });
    let socket = manager.place.socket();
    let removed: Result<Answer, _> = ask(&path, &Request::Remove { socket }, PATIENCE);
    let Err(AskError::Refused(error)) = removed else {
        panic!("{removed:?}");
    };
    assert!(
        error.ends_with("is closed already, and has 1 VMs"),
        "{error}"
    );
    let drained: Result<Answer, _> = ask(&path, &Request::Drain { socket: None }, PATIENCE);
    assert!(matches!(drained, Ok(Answer::Drained)), "{drained:?}");
    assert_eq!(guest.resident(), 64);
}
