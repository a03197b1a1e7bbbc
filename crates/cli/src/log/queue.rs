//! Lines that wait to be written, and the thread that writes them.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// The most bytes of lines that wait to be written.
const MOST_BYTES: usize = 1 << 20;

/// How long the end of the process waits for the last lines to be written.
const LAST_LINES: Duration = Duration::from_millis(500);

/// Lines that wait to be written. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Queue(Arc<Shared>);

struct Shared {
    lines: Mutex<Lines>,
    /// Notified when there is a line, and when there is none any more.
    changed: Condvar,
    /// Lines that were dropped so far.
    dropped: Arc<AtomicU64>,
}

#[derive(Default)]
struct Lines {
    waiting: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Whether the thread is writing one that is not among those that wait.
    is_writing: bool,
}

impl Queue {
    /// Starts the thread that writes the lines. Without a thread they are dropped.
    pub(crate) fn start(mut output: impl Write + Send + 'static) -> Self {
        let queue = Self::idle();
        let lines = queue.clone();
        let write = move || lines.write_lines(&mut output);
        let started = Builder::new().name("pt-log".to_owned()).spawn(write);
        drop(started);
        queue
    }

    fn idle() -> Self {
        Self(Arc::new(Shared {
            lines: Mutex::default(),
            changed: Condvar::new(),
            dropped: Arc::default(),
        }))
    }

    /// The number of lines that were dropped so far.
    pub(crate) fn dropped(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.0.dropped)
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.0.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a line, if there is room.
    fn leave(&self, line: &[u8]) {
        let mut lines = self.lock();
        if lines.bytes + line.len() > MOST_BYTES {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        lines.bytes += line.len();
        lines.waiting.push_back(line.to_owned());
        self.0.changed.notify_all();
    }

    /// Waits for the next line.
    fn next(&self) -> Vec<u8> {
        let mut lines = self.lock();
        lines.is_writing = false;
        loop {
            if let Some(line) = lines.waiting.pop_front() {
                lines.bytes -= line.len();
                lines.is_writing = true;
                return line;
            }
            self.0.changed.notify_all();
            let waited = self.0.changed.wait(lines);
            lines = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Writes lines as they come, for ever.
    fn write_lines(&self, output: &mut impl Write) {
        let mut told = 0;
        loop {
            let line = self.next();
            if output.write_all(&line).is_err() {
                self.0.dropped.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let dropped = self.0.dropped.load(Ordering::Relaxed);
            if dropped > told {
                tracing::warn!(
                    dropped = dropped - told,
                    "lines of the log were dropped: standard error did not take them"
                );
                told = dropped;
            }
        }
    }

    /// Waits until all lines are written, but not for long.
    pub(crate) fn flush(&self) {
        let end = Instant::now() + LAST_LINES;
        let mut lines = self.lock();
        while lines.is_writing || !lines.waiting.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.0.changed.wait_timeout(lines, left);
            (lines, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A subscriber writes a line by one call.
impl Write for Queue {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.leave(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Queue {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use pagetide_test_support::eventually;

    use super::*;

    /// An output that takes a line when the test says so, and fails when it says that.
    struct Told {
        orders: Receiver<io::Result<()>>,
        written: Sender<Vec<u8>>,
    }

    impl Write for Told {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let order = self
                .orders
                .recv()
                .unwrap_or_else(|_| Err(io::Error::other("the end")));
            order.map(|()| {
                let _ = self.written.send(bytes.to_owned());
                bytes.len()
            })
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn started() -> (Queue, Sender<io::Result<()>>, Receiver<Vec<u8>>) {
        let ((order, orders), (written, lines)) = (channel(), channel());
        (Queue::start(Told { orders, written }), order, lines)
    }

    fn dropped(queue: &Queue) -> u64 {
        queue.dropped().load(Ordering::Relaxed)
    }

    #[test]
    fn an_output_that_takes_nothing_holds_nobody_and_its_lines_are_bounded() {
        let (queue, order, lines) = started();
        let line = vec![b'a'; 1 << 10];
        // More than there is room for, on this thread: none of the calls waits.
        for _ in 0..3000 {
            queue
                .clone()
                .write_all(&line)
                .expect("it is left or dropped");
        }
        let waiting = queue.lock().bytes;
        assert!(waiting <= MOST_BYTES);
        let missing = dropped(&queue);
        assert!((1900..2000).contains(&missing), "{missing} were dropped");
        // A single line that is longer than all room.
        queue
            .clone()
            .write_all(&vec![b'b'; MOST_BYTES + 1])
            .expect("dropped");
        assert_eq!(dropped(&queue), missing + 1);
        // The end of the process does not wait for it.
        queue.flush();
        // When the output takes lines again, those that are left come.
        for _ in 0..3000 - missing {
            order.send(Ok(())).expect("the thread lives");
            assert_eq!(lines.recv().expect("it is written"), line);
        }
        queue.flush();
        eventually("nothing waits", || queue.lock().bytes == 0);
    }

    #[test]
    fn an_output_that_fails_ends_nothing() {
        let (queue, order, lines) = started();
        for text in ["one", "two", "three"] {
            queue.clone().write_all(text.as_bytes()).expect("left");
        }
        let failed = || Err(io::Error::from(io::ErrorKind::BrokenPipe));
        order.send(failed()).expect("the thread lives");
        order.send(failed()).expect("the thread lives");
        order.send(Ok(())).expect("the thread lives");
        assert_eq!(lines.recv().expect("it is written"), b"three");
        assert_eq!(dropped(&queue), 2);
    }
}
