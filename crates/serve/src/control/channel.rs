//! Requests and answers at a Unix socket, for whoever may control the process: lines of JSON.
//!
//! ```text
//! {"version":1,"request":…}        one line, 64 KiB at most
//! {"version":1,"answer":…}         or {"version":1,"error":"why it was not done"}
//! ```
//!
//! A connection has any number of requests, one after the other. Only root and the process' own user are answered. Nothing
//! that a client does, or does not do, holds up another one for longer than [`LINE_LIMIT`].

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::geteuid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{sleep, timeout};

use crate::listener::{ListenError, Listener};
use crate::log_limit::{LogLimit, log_limited};
use crate::peer::user_of;
use crate::task_thread::TaskThread;

/// The version of the protocol, which each line names.
pub const VERSION: u32 = 1;

/// The longest request.
const REQUEST_BYTES: u64 = 64 << 10;

/// The longest answer that a client takes.
const ANSWER_BYTES: u64 = 64 << 20;

/// The most connections at once.
const CONNECTIONS: usize = 64;

/// The longest time that a line takes, on its way in or out, and a connection without a request.
const LINE_LIMIT: Duration = Duration::from_secs(5);

/// The pause after a connection could not be accepted, for example because no descriptor was free; and between two looks
/// whether a client that waits has gone.
const PAUSE: Duration = Duration::from_millis(200);

/// Bounds the lines on clients that are refused.
static LOGGED: LogLimit = LogLimit::new();

/// A line from a client.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked<Q> {
    version: u32,
    request: Q,
}

/// The version alone: a request of another one may have any form.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// A line from a server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Told<A> {
    version: u32,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    answer: Option<A>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn none<A>() -> Option<A> {
    None
}

impl<A> Told<A> {
    fn new(result: Result<A, String>) -> Self {
        let (answer, error) = match result {
            Ok(answer) => (Some(answer), None),
            Err(error) => (None, Some(error)),
        };
        Self {
            version: VERSION,
            answer,
            error,
        }
    }
}

/// Where the answer to a request goes. One that is dropped answers that the process ends.
#[derive(Debug)]
pub struct Reply<A>(oneshot::Sender<Result<A, String>>);

impl<A> Reply<A> {
    /// Answers. A client that has gone is its own affair.
    pub fn send(self, result: Result<A, String>) {
        let _ = self.0.send(result);
    }
}

/// Answers requests at a socket until it is dropped.
#[derive(Debug)]
pub struct ControlSocket {
    /// Ends before the listener, which shuts its socket down: Tokio would try to accept for ever, and never let its thread
    /// look at anything else.
    _thread: TaskThread,
    /// Its file is removed with it.
    _listener: Listener,
}

/// Why there is no control socket.
#[derive(Debug, Error)]
pub enum ControlError {
    /// It could not be bound.
    #[error("the control socket")]
    Listen(#[from] ListenError),
    /// Its thread was not started.
    #[error("starting the control socket {}", path.display())]
    Start {
        /// The socket.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl ControlSocket {
    /// Listens at `path`, and hands each request to `handle`, which must not wait.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn start<Q, A>(
        path: &Path,
        handle: impl Fn(Q, Reply<A>) + Send + Sync + 'static,
    ) -> Result<Self, ControlError>
    where
        Q: DeserializeOwned + Send + 'static,
        A: Serialize + Send + 'static,
    {
        let listener = Listener::bind(path, 0o600, None)?;
        let failed = |source| ControlError::Start {
            path: path.into(),
            source,
        };
        let task = || {
            let socket = UnixListener::from_std(listener.socket.try_clone()?)?;
            Ok(accept(socket, Arc::new(handle)))
        };
        let thread = TaskThread::start("pt-control", task).map_err(failed)?;
        Ok(Self {
            _thread: thread,
            _listener: listener,
        })
    }
}

async fn accept<Q, A>(
    listener: UnixListener,
    handle: Arc<impl Fn(Q, Reply<A>) + Send + Sync + 'static>,
) where
    Q: DeserializeOwned + Send + 'static,
    A: Serialize + Send + 'static,
{
    let free = Arc::new(Semaphore::new(CONNECTIONS));
    // The semaphore is never closed.
    while let Ok(permit) = Arc::clone(&free).acquire_owned().await {
        match listener.accept().await {
            // A user who may not control the process takes no place.
            Ok((stream, _)) if !may_control(&stream) => {
                log_limited!(
                    warn,
                    LOGGED,
                    "a client of the control socket was refused: it is another user's"
                );
            }
            Ok((stream, _)) => {
                let handle = Arc::clone(&handle);
                tokio::spawn(connection(stream, handle, permit));
            }
            Err(error) => {
                log_limited!(warn, LOGGED, %error, "a connection to the control socket was not accepted");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Whether a client is root's, or of this process' user.
fn may_control(stream: &UnixStream) -> bool {
    let user = user_of(stream.as_fd());
    user.is_ok_and(|uid| uid == 0 || uid == geteuid().as_raw())
}

/// Serves one client.
async fn connection<Q, A>(
    stream: UnixStream,
    handle: Arc<impl Fn(Q, Reply<A>) + Send + Sync>,
    _permit: OwnedSemaphorePermit,
) where
    Q: DeserializeOwned,
    A: Serialize,
{
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read);
    // A client that has gone, or is slow, is its own affair.
    while let Ok(Ok(Some(line))) = timeout(LINE_LIMIT, next_line(&mut lines, REQUEST_BYTES)).await {
        let result = match parse(&line) {
            Ok(request) => match answer_of(request, &*handle, &mut lines).await {
                Some(result) => result,
                // Nobody waits for the answer.
                None => return,
            },
            Err(error) => Err(error),
        };
        if !matches!(
            timeout(LINE_LIMIT, tell(&mut write, result)).await,
            Ok(Ok(()))
        ) {
            return;
        }
    }
}

/// The answer to a request; `None` if the client goes before it is there.
async fn answer_of<Q, A>(
    request: Q,
    handle: &impl Fn(Q, Reply<A>),
    lines: &mut BufReader<OwnedReadHalf>,
) -> Option<Result<A, String>> {
    let (send, answered) = oneshot::channel();
    handle(request, Reply(send));
    let (mut answered, mut gone) = (pin!(answered), pin!(gone(lines)));
    poll_fn(|context| match answered.as_mut().poll(context) {
        Poll::Ready(result) => {
            let result = result.unwrap_or_else(|_| Err("the server ends".to_owned()));
            Poll::Ready(Some(result))
        }
        Poll::Pending => gone.as_mut().poll(context).map(|()| None),
    })
    .await
}

/// Returns when the client has closed its connection. One that only sends no more waits for its answer, as does one that
/// has sent its next request.
async fn gone(lines: &mut BufReader<OwnedReadHalf>) {
    // Its next request comes, or the end of what it sends.
    let _ = lines.fill_buf().await;
    while !has_hung_up(lines.get_ref().as_ref()) {
        sleep(PAUSE).await;
    }
}

/// Whether both directions of a connection are closed.
fn has_hung_up(stream: &UnixStream) -> bool {
    // This is reported without being asked for.
    let mut polled = [PollFd::new(stream, PollFlags::empty())];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let ready = rustix::event::poll(&mut polled, Some(&at_once));
    ready.is_ok_and(|_| {
        polled[0]
            .revents()
            .intersects(PollFlags::HUP | PollFlags::ERR)
    })
}

/// The request in a line, or what is wrong with it.
pub(crate) fn parse<Q: DeserializeOwned>(line: &[u8]) -> Result<Q, String> {
    let wrong = |error: serde_json::Error| format!("the request makes no sense: {error}");
    let Versioned { version } = serde_json::from_slice(line).map_err(wrong)?;
    if version != VERSION {
        return Err(format!(
            "version {version} of the control protocol is unknown here, where it is {VERSION}"
        ));
    }
    let asked: Asked<Q> = serde_json::from_slice(line).map_err(wrong)?;
    Ok(asked.request)
}

async fn tell<A: Serialize>(
    write: &mut OwnedWriteHalf,
    result: Result<A, String>,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(&Told::new(result)).map_err(io::Error::from)?;
    line.push(b'\n');
    write.write_all(&line).await
}

/// The next line without its end; `None` after the last one. One that is too long is an error.
async fn next_line(
    lines: &mut (impl AsyncBufRead + Unpin),
    limit: u64,
) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let read = lines.take(limit).read_until(b'\n', &mut line).await?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) if read as u64 == limit => Err(io::ErrorKind::InvalidData.into()),
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Why a request was not answered, or not done.
#[derive(Debug, Error)]
pub enum AskError {
    /// The process could not be asked.
    #[error("asking at the control socket {}", path.display())]
    Ask {
        /// The socket.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// It did not answer in time.
    #[error("{}: no answer within {} s; what was asked may still be done", path.display(), limit.as_secs())]
    Late {
        /// The socket.
        path: PathBuf,
        /// The time.
        limit: Duration,
    },
    /// The answer makes no sense.
    #[error("the answer at the control socket {} makes no sense: is it another program's?", path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// It was not done.
    #[error("{0}")]
    Refused(String),
}

/// Asks the process that listens at `path`, and waits for the answer.
///
/// # Errors
/// [`AskError`].
pub fn ask<Q: Serialize, A: DeserializeOwned>(
    path: &Path,
    request: &Q,
    limit: Duration,
) -> Result<A, AskError> {
    let failed = |source| AskError::Ask {
        path: path.into(),
        source,
    };
    let asked = Asked {
        version: VERSION,
        request,
    };
    let mut line = serde_json::to_vec(&asked).map_err(|error| failed(error.into()))?;
    line.push(b'\n');
    let runtime = runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(failed)?;
    let exchanged = runtime.block_on(async { timeout(limit, exchange(path, &line)).await });
    let Ok(answer) = exchanged else {
        return Err(AskError::Late {
            path: path.into(),
            limit,
        });
    };
    let wrong = |source| AskError::Answer {
        path: path.into(),
        source,
    };
    let told: Told<A> =
        serde_json::from_slice(&answer.map_err(failed)?).map_err(|error| wrong(error.into()))?;
    match (told.answer, told.error) {
        (Some(answer), None) => Ok(answer),
        (None, Some(error)) => Err(AskError::Refused(error)),
        _ => Err(wrong(io::ErrorKind::InvalidData.into())),
    }
}

async fn exchange(path: &Path, line: &[u8]) -> io::Result<Vec<u8>> {
    let (read, mut write) = UnixStream::connect(path).await?.into_split();
    let exchanged = async {
        write.write_all(line).await?;
        next_line(&mut BufReader::new(read), ANSWER_BYTES).await
    };
    match exchanged.await {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => Err(closed()),
        Err(error) => Err(match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => closed(),
            _ => error,
        }),
    }
}

fn closed() -> io::Error {
    io::Error::other(
        "it was closed without an answer: only root and the server's user are answered, 64 clients at one time",
    )
}
