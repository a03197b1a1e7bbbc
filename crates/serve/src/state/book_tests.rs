//! What is said to a keeper, and what is heard.

use std::os::unix::net::{UnixDatagram, UnixStream};

use pagetide_test_support::within_patience;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::super::map_file;
use super::super::wire::DESCRIPTORS;
use super::*;

/// The two ends of a connection to a keeper: the server's, and the keeper's. Nobody waits at either.
fn connection() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

fn held() -> Held {
    let (stream, _guest) = UnixStream::pair().unwrap();
    let maps = map_file(4096).unwrap();
    let uffd = Arc::clone(&maps);
    Held {
        uffd,
        stream: stream.into(),
        maps,
        description: b"{}".to_vec(),
        label: None,
    }
}

/// A book with these VMs, which are to be sent.
fn book(ids: impl IntoIterator<Item = u64>) -> Book {
    let book = Book::new().unwrap();
    ids.into_iter()
        .for_each(|id| book.insert(id, held(), false));
    book
}

/// All that a keeper has been sent.
fn heard(keeper: &OwnedFd) -> Vec<Message> {
    // An error says that there is no more.
    let next = || receive(keeper.as_fd()).ok().flatten();
    std::iter::from_fn(next)
        .map(|(message, _)| message)
        .collect()
}

fn keeps(ids: impl IntoIterator<Item = u64>) -> Vec<Message> {
    ids.into_iter().map(|id| Message::Keep { id }).collect()
}

#[test]
fn a_keeper_whose_queue_is_full_gets_each_vm_once() {
    const VMS: u64 = 40;
    let (server, keeper) = connection();
    // As small as the kernel has one.
    set_socket_send_buffer_size(&server, 1).unwrap();
    let book = book(0..VMS);
    let mut all = Vec::new();
    while book.say(&server).unwrap() {
        all.extend(heard(&keeper));
        assert!(all.len() < keeps(0..VMS).len(), "{all:?}");
    }
    assert!(!all.is_empty(), "the queue was never full");
    all.extend(heard(&keeper));
    assert_eq!(all, keeps(0..VMS));
    assert!(!book.say(&server).unwrap());
    assert_eq!(heard(&keeper), []);
}

/// Kind: a state that is entered and not left. VMs that begin later would not wait for a keeper that answers.
#[test]
fn a_keeper_that_answers_late_is_waited_for_again() {
    let (server, keeper) = connection();
    let book = Book::new().unwrap();
    book.keep(1, held());
    assert!(book.lock().is_silent);
    send_now(keeper.as_fd(), &Message::Acknowledged { id: 1 }, &[]).unwrap();
    book.hear(&server).unwrap();
    assert!(!book.lock().is_silent && book.is_held(1));
    // And a service manager.
    book.keep(2, held());
    assert!(book.lock().is_silent);
    book.acknowledge(&[2]);
    assert!(!book.lock().is_silent && book.is_held(2));
}

#[test]
fn another_keeper_gets_the_vms_that_are_there_and_hears_of_no_others() {
    let book = book(1..4);
    let (server, keeper) = connection();
    assert!(!book.say(&server).unwrap());
    assert_eq!(heard(&keeper), keeps(1..4));
    book.acknowledge(&[1, 2, 3]);
    // It ends before it hears that.
    book.forget(2);
    book.lose();
    let is_held = |vm: &Entry| vm.is_acknowledged;
    assert!(!book.lock().vms.values().any(is_held));
    // One that nobody has heard of.
    book.insert(4, held(), false);
    book.forget(4);
    let (server, next) = connection();
    assert!(!book.say(&server).unwrap());
    assert_eq!(heard(&next), keeps([1, 3]));
    book.forget(1);
    assert!(!book.say(&server).unwrap());
    assert_eq!(heard(&next), [Message::Forget { id: 1 }]);
}

/// Kind: a keeper's end is taken for what this process lacks.
#[test]
fn the_end_of_a_keeper_is_found_by_whoever_says_something() {
    for has_read in [true, false] {
        let (server, keeper) = connection();
        let book = book([1]);
        assert!(!book.say(&server).unwrap());
        if has_read {
            assert_eq!(heard(&keeper), keeps([1]));
        }
        drop(keeper);
        book.insert(2, held(), false);
        let error = book.say(&server).unwrap_err();
        assert!(has_gone(&error), "{has_read}: {error}");
        let error = book.hear(&server).unwrap_err();
        assert!(has_gone(&error), "{has_read}: {error}");
    }
    for errno in [Errno::MFILE, Errno::NOMEM, Errno::TOOMANYREFS] {
        assert!(!has_gone(&errno.into()), "{errno}");
    }
}

/// Kind: one peer's cost is everybody's.
#[test]
fn a_service_manager_that_does_nothing_holds_up_neither_vms_nor_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let _reads_nothing = UnixDatagram::bind(&path).unwrap();
    let store = DescriptorStore::new(path.as_os_str(), 64).unwrap();
    let book = Arc::new(Book::new().unwrap());
    let its = Arc::clone(&book);
    let talking = std::thread::spawn(move || its.talk_to_store(&store));
    let its = Arc::clone(&book);
    within_patience("a VM", move || its.keep(1, held()));
    assert!(!book.is_held(1));
    book.end();
    within_patience("the end", move || talking.join().unwrap());
}

/// Kind: a state that is entered and not left. The VM would not outlive the server although there is room for it.
#[test]
fn a_vm_for_which_there_was_no_room_is_stored_when_another_one_has_ended() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let store = DescriptorStore::new(path.as_os_str(), DESCRIPTORS).unwrap();
    let said = |book: &Book| {
        let mut sent = Vec::new();
        assert!(!book.say_to_store(&store, &mut sent).unwrap());
        // Not its descriptors, which are closed with the message.
        sent.iter().for_each(|_| {
            manager.recv(&mut [0; 64]).unwrap();
        });
        sent
    };
    let book = book([1, 2]);
    assert_eq!(said(&book), [1]);
    book.acknowledge(&[1]);
    assert!(book.is_held(1) && !book.is_held(2));
    assert!(said(&book).is_empty());
    book.forget(1);
    assert_eq!(said(&book), [2]);
    book.acknowledge(&[2]);
    assert!(book.is_held(2));
}
