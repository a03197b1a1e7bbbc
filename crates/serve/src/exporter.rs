//! The metrics over HTTP.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{self, SocketAddr};
use std::os::unix;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use crate::log_limit::{LogLimit, log_limited};
use crate::metrics::Metrics;
use crate::task_thread::TaskThread;

/// The most connections at once.
const CONNECTIONS: usize = 32;

/// The longest time that a connection takes. It has one request.
const LIMIT: Duration = Duration::from_secs(10);

/// The longest time until a connection's request is there.
const HEADER_LIMIT: Duration = Duration::from_secs(2);

/// The pause after a connection could not be accepted, for example because no descriptor was free.
const PAUSE: Duration = Duration::from_millis(200);

/// Bounds the lines on clients that are not accepted.
static LOGGED: LogLimit = LogLimit::new();

/// Where the metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// `ADDRESS:PORT`.
    Tcp(SocketAddr),
    /// `NAME:PORT`, of which the name is looked up when the server starts.
    Named(String),
    /// `unix:PATH`.
    Unix(PathBuf),
}

/// A text that is no address of metrics.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text:?} is neither ADDRESS:PORT (an IP address or a host's name) nor unix:PATH")]
pub struct ParseMetricsAddressError {
    text: String,
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Named(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for MetricsAddress {
    type Err = ParseMetricsAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseMetricsAddressError { text: text.into() };
        match text.strip_prefix("unix:") {
            Some("") => Err(wrong()),
            Some(path) => Ok(Self::Unix(path.into())),
            None => match (text.parse(), text.rsplit_once(':')) {
                (Ok(address), _) => Ok(Self::Tcp(address)),
                (_, Some((name, port))) if is_name(name) && port.parse::<u16>().is_ok() => {
                    Ok(Self::Named(text.into()))
                }
                _ => Err(wrong()),
            },
        }
    }
}

fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    // The last part of a name is no number: that would be an IP address which is none.
    let last = text.rsplit('.').next().unwrap_or_default();
    !last.is_empty() && text.chars().all(is_part) && !last.chars().all(|c| c.is_ascii_digit())
}

/// Why the metrics are not served.
#[derive(Debug, Error)]
#[error("serving the metrics at {address}")]
pub struct ExporterError {
    address: MetricsAddress,
    #[source]
    source: io::Error,
}

/// Serves the metrics until it is dropped.
pub struct Exporter {
    socket: Option<PathBuf>,
    address: Option<SocketAddr>,
    /// Dropped after the file of the socket was removed.
    thread: Option<TaskThread>,
}

impl Exporter {
    /// Binds the address, and answers `GET /metrics`, `GET /health` (always 200: what is wrong, a line each) and `GET /ready` (503
    /// while further VMs are refused).
    ///
    /// # Errors
    /// [`ExporterError`].
    pub fn start(address: &MetricsAddress, metrics: Metrics) -> Result<Self, ExporterError> {
        let failed = |source| ExporterError {
            address: address.clone(),
            source,
        };
        if let MetricsAddress::Unix(path) = address {
            crate::listener::remove_stale(path).map_err(failed)?;
        }
        let bound = Bound::new(address).map_err(failed)?;
        let mut exporter = Self {
            socket: match address {
                MetricsAddress::Unix(path) => Some(path.clone()),
                MetricsAddress::Tcp(_) | MetricsAddress::Named(_) => None,
            },
            address: bound.address(),
            thread: None,
        };
        let task = || Ok(accept(bound.listen()?, metrics));
        let thread = TaskThread::start("pt-metrics", task);
        exporter.thread = Some(thread.map_err(failed)?);
        Ok(exporter)
    }

    /// The address that was bound, of which the port may have been 0.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

/// A socket that is bound, and not yet Tokio's.
enum Bound {
    Tcp(net::TcpListener),
    Unix(unix::net::UnixListener),
}

impl Bound {
    fn new(address: &MetricsAddress) -> io::Result<Self> {
        Ok(match address {
            MetricsAddress::Tcp(at) => Self::Tcp(net::TcpListener::bind(at)?),
            MetricsAddress::Named(at) => Self::Tcp(net::TcpListener::bind(at.as_str())?),
            MetricsAddress::Unix(path) => Self::Unix(unix::net::UnixListener::bind(path)?),
        })
    }

    fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    /// Hands the socket to Tokio, in whose context this is called.
    fn listen(self) -> io::Result<Listener> {
        Ok(match self {
            Self::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                Listener::Tcp(TcpListener::from_std(listener)?)
            }
            Self::Unix(listener) => {
                listener.set_nonblocking(true)?;
                Listener::Unix(UnixListener::from_std(listener)?)
            }
        })
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

async fn accept(listener: Listener, metrics: Metrics) {
    let free = Arc::new(Semaphore::new(CONNECTIONS));
    // The semaphore is never closed.
    while let Ok(permit) = Arc::clone(&free).acquire_owned().await {
        let metrics = metrics.clone();
        let accepted = match &listener {
            Listener::Tcp(listener) => listener.accept().await.map(|(stream, _)| {
                tokio::spawn(connection(stream, metrics, permit));
            }),
            Listener::Unix(listener) => listener.accept().await.map(|(stream, _)| {
                tokio::spawn(connection(stream, metrics, permit));
            }),
        };
        if let Err(error) = accepted {
            log_limited!(warn, LOGGED, %error, "a connection for the metrics was not accepted");
            sleep(PAUSE).await;
        }
    }
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    metrics: Metrics,
    _permit: OwnedSemaphorePermit,
) {
    let service = service_fn(|request: Request<Incoming>| {
        let response = answer(request.uri().path(), &metrics);
        async move { Ok::<_, Infallible>(response) }
    });
    let served = http1::Builder::new()
        .keep_alive(false)
        .half_close(true)
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_LIMIT)
        .serve_connection(TokioIo::new(stream), service);
    // A client that has gone, or is slow, is its own affair.
    let _ = timeout(LIMIT, served).await;
}

fn answer(path: &str, metrics: &Metrics) -> Response<Full<Bytes>> {
    const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    const TEXT: &str = "text/plain; charset=utf-8";
    let (status, kind, text) = match path {
        "/metrics" | "/" => (StatusCode::OK, METRICS, metrics.text()),
        "/health" => (StatusCode::OK, TEXT, health(metrics)),
        "/ready" => {
            let (status, text) = ready(metrics);
            (status, TEXT, text)
        }
        _ => {
            let text = "GET /metrics, /health or /ready\n".to_owned();
            (StatusCode::NOT_FOUND, TEXT, text)
        }
    };
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// That the process answers, and what is wrong: no reason to start it again.
fn health(metrics: &Metrics) -> String {
    let troubles = metrics.troubles().into_iter();
    let lines = troubles.map(|trouble| format!("{trouble}\n"));
    std::iter::once("ok\n".to_owned()).chain(lines).collect()
}

/// Whether VMs may be sent to this server.
fn ready(metrics: &Metrics) -> (StatusCode, String) {
    let troubles = metrics.troubles().into_iter();
    let refusing = troubles.filter(|trouble| trouble.refuses_vms());
    let lines: String = refusing.map(|trouble| format!("{trouble}\n")).collect();
    match lines.is_empty() {
        true => (StatusCode::OK, "ready\n".to_owned()),
        false => (StatusCode::SERVICE_UNAVAILABLE, lines),
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // While it still listens: later the file may be another server's.
        if let Some(socket) = &self.socket {
            let _ = fs_err::remove_file(socket);
        }
    }
}

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exporter")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use pagetide_test_support::{NoOtherThread, in_a_process_of_its_own};

    use super::*;

    #[test]
    fn without_a_thread_there_is_an_error_and_no_socket() {
        let this = "exporter::tests::without_a_thread_there_is_an_error_and_no_socket";
        in_a_process_of_its_own(this, || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("metrics.sock");
            let address = MetricsAddress::Unix(path.clone());
            let none = NoOtherThread::begin(&[]);
            let refused = Exporter::start(&address, Metrics::default());
            drop(none);
            assert!(refused.is_err());
            assert!(!path.exists());
            let exporter = Exporter::start(&address, Metrics::default()).unwrap();
            assert!(path.exists());
            drop(exporter);
            assert!(!path.exists());
        });
    }

    #[test]
    fn a_hosts_name_is_an_address_of_metrics() {
        let address: MetricsAddress = "localhost:0".parse().unwrap();
        let exporter = Exporter::start(&address, Metrics::default()).unwrap();
        let at = exporter.address().unwrap();
        assert!(at.ip().is_loopback());
        for text in [
            "localhost",
            ":9409",
            "localhost:",
            "127.0.0.300:9409",
            "a b:1",
            "localhost:65536",
            "unix:",
        ] {
            assert!(text.parse::<MetricsAddress>().is_err(), "{text:?}");
        }
    }
}
