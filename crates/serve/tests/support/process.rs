//! A server in a process of its own, which a test starts from its own program.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use pagetide_serve::{Binding, Options, Server};
use pagetide_sources::Location;
use tracing_subscriber::filter::LevelFilter;

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
    let unwatched = (|_: &str| {}, LevelFilter::INFO);
    serve_with(directory, options, confine_process, unwatched);
}

/// The same without a filter of system calls, and with `watch` called for each line of the log, of which there are more, before
/// it is written, by the thread that logs it.
pub fn serve_watched(
    directory: &Path,
    options: Options,
    watch: impl Fn(&str) + Clone + Send + Sync + 'static,
) {
    let watched = (watch, LevelFilter::DEBUG);
    serve_with(directory, options, |_| {}, watched);
}

fn serve_with(
    directory: &Path,
    options: Options,
    confine: impl Fn(&Server),
    (watch, level): (impl Fn(&str) + Clone + Send + Sync + 'static, LevelFilter),
) {
    let mut log = File::options();
    let log = log.create(true).append(true).open(directory.join("log"));
    let log = Arc::new(log.unwrap());
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(level)
        .with_writer(move || Watched(Arc::clone(&log), watch.clone()))
        .init();
    let server = Server::bind(options).unwrap();
    confine(&server);
    let stopper = server.stopper();
    thread::spawn(move || {
        let _ = io::stdin().lines().count();
        stopper.stop();
    });
    std::fs::write(directory.join("ready"), "").unwrap();
    server.run().unwrap();
}

/// A line at a time.
struct Watched<W>(Arc<File>, W);

impl<W: Fn(&str)> Write for Watched<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        (self.1)(&String::from_utf8_lossy(line));
        (&*self.0).write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
