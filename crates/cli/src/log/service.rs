//! Messages of a service, whose life they are.

use std::io::{self, Write};

use indicatif::ProgressBar;

use super::{Form, Queue, start};
use crate::serve::LogFormat;

/// Standard error, above a line that is refreshed there.
struct AboveLine(ProgressBar);

impl Write for AboveLine {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Sends the messages of a service, whose life they are, to standard error by a thread; so are panics.
pub(crate) fn of_service(format: LogFormat, line: &ProgressBar) -> Queue {
    let queue = Queue::start(AboveLine(line.clone()));
    let form = match format {
        LogFormat::Text => Form::Text,
        LogFormat::Json => Form::Json,
    };
    start(tracing::Level::INFO, form, queue.clone());
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!(panic = %panic, "a thread has panicked");
    }));
    queue
}
