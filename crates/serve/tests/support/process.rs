//! A server in a process of its own, which a test starts from its own program.

use std::fs::File;
use std::path::Path;
use std::thread;

use pagetide_serve::{Binding, Options, Server};
use pagetide_sources::Location;

use super::confine_process;

/// The binding of the files of a [`super::Place`].
pub fn binding(directory: &Path) -> Binding {
    Binding::new(
        directory.join("guest.sock"),
        Location::Path(directory.join("guest.mem")),
    )
}

/// Serves until the end of standard input. The log goes to a file of the directory, in which another one, `ready`, appears
/// when VMs can connect.
pub fn serve(directory: &Path, options: Options) {
    let log = File::options()
        .create(true)
        .append(true)
        .open(directory.join("log"));
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(log.unwrap())
        .init();
    let server = Server::bind(options).unwrap();
    confine_process(&server);
    let stopper = server.stopper();
    thread::spawn(move || {
        let _ = std::io::stdin().lines().count();
        stopper.stop();
    });
    std::fs::write(directory.join("ready"), "").unwrap();
    server.run().unwrap();
}
