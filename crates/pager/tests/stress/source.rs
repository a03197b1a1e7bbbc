//! The expected content of memory, and sources that answer correctly, late, wrongly or not at all.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pagetide_memory::GuestAddress;
use pagetide_pager::{
    BlockingSource, Content, Filled, LocalSource, ReadAt, RegionId, Request, RequestId, Source,
    SourceError,
};

use crate::tally::{Op, Tally};
use pagetide_test_support::mix;

/// The word at `gpa`, a multiple of 8. Every sixteenth 4 KiB are zeroes.
pub fn word_at(gpa: u64) -> u64 {
    if mix(gpa >> 12).is_multiple_of(16) {
        return 0;
    }
    mix(gpa) | 1
}

pub fn fill(gpa: u64, bytes: &mut [u8]) {
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&word_at(gpa + 8 * index as u64).to_ne_bytes());
    }
}

fn content(gpa: u64, bytes: u64) -> Vec<u8> {
    let mut content = vec![0; usize::try_from(bytes).unwrap()];
    fill(gpa, &mut content);
    content
}

pub struct Local;

impl LocalSource for Local {
    fn fill(&self, gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        fill(gpa.0, buffer);
        let is_zero = buffer.iter().all(|&byte| byte == 0);
        Ok(if is_zero { Filled::Zero } else { Filled::Bytes })
    }
}

/// For the crate's own pool.
pub struct Blocking {
    pub calls: AtomicU64,
}

impl BlockingSource for Blocking {
    fn read(&self, at: ReadAt, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        match mix(self.calls.fetch_add(1, Ordering::Relaxed)) % 20 {
            0 => return Err(unavailable()),
            1 => thread::sleep(Duration::from_millis(1)),
            _ => {}
        }
        fill(at.gpa.0, buffer);
        Ok(Filled::Bytes)
    }
}

fn unavailable() -> SourceError {
    SourceError::Unavailable("by chance".into())
}

/// The answer to a request by another thread.
enum Later {
    Well(Request),
    Slowly(Request),
    Fail(Request),
}

/// Threads that answer for all sources.
pub struct Workers {
    sender: mpsc::Sender<Later>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    pub fn new(count: usize) -> Self {
        let (sender, receiver) = mpsc::channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let threads = (0..count).map(|_| {
            let receiver = Arc::clone(&receiver);
            thread::spawn(move || {
                loop {
                    let next = receiver.lock().unwrap().recv();
                    match next {
                        Ok(Later::Well(request)) => answer(request),
                        Ok(Later::Slowly(request)) => {
                            thread::sleep(Duration::from_millis(2));
                            answer(request);
                        }
                        Ok(Later::Fail(request)) => request.fail(unavailable()),
                        Err(_) => return,
                    }
                }
            })
        });
        Self {
            sender,
            threads: threads.collect(),
        }
    }

    pub fn source(&self, seed: u64, tally: &Arc<Tally>) -> Arc<Moody> {
        Arc::new(Moody {
            seed,
            calls: AtomicU64::new(0),
            later: self.sender.clone(),
            hanging: Mutex::default(),
            tally: Arc::clone(tally),
        })
    }

    /// Call this after all sources were dropped.
    pub fn join(self) {
        drop(self.sender);
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

fn answer(request: Request) {
    let content = content(request.gpa().0, request.bytes());
    if content.iter().all(|&byte| byte == 0) {
        request.complete(Content::Zero);
    } else {
        request.complete(Content::Bytes(&content));
    }
}

/// Answers immediately, later, wrongly, never, or with a failure.
pub struct Moody {
    seed: u64,
    calls: AtomicU64,
    later: mpsc::Sender<Later>,
    /// Requests that are answered on cancellation, if at all.
    hanging: Mutex<HashMap<(RegionId, RequestId), Request>>,
    tally: Arc<Tally>,
}

impl Source for Moody {
    fn submit(&self, request: Request) {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let send = |later| {
            self.later.send(later).unwrap();
            Op::AnsweredLater
        };
        let op = match mix(self.seed ^ mix(call)) % 100 {
            0..45 => {
                answer(request);
                Op::AnsweredAtOnce
            }
            45..75 => send(Later::Well(request)),
            75..80 => send(Later::Slowly(request)),
            80..85 => send(Later::Fail(request)),
            85..90 => {
                request.fail(unavailable());
                Op::Failed
            }
            90..93 => {
                drop(request);
                Op::Dropped
            }
            93..95 => {
                request.complete(Content::Bytes(&[0; 12]));
                Op::AnsweredWrongly
            }
            95..97 if request.pages().count() > 1 => {
                request.complete(Content::Poisoned);
                Op::AnsweredWrongly
            }
            _ => {
                let key = (request.region(), request.id());
                self.hanging.lock().unwrap().insert(key, request);
                Op::Hung
            }
        };
        self.tally.count(op);
    }

    fn cancel(&self, region: RegionId, id: RequestId) {
        let cancelled = self.hanging.lock().unwrap().remove(&(region, id));
        if let Some(request) = cancelled {
            self.tally.count(Op::Cancelled);
            // Too late: the answer must be dropped.
            answer(request);
        }
    }
}
