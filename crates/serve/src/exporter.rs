//! The metrics over HTTP.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::thread::JoinHandle;

use thiserror::Error;
use tiny_http::{Header, Response};

use crate::metrics::Metrics;

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
#[error("serving the metrics at {address:?}")]
pub struct ExporterError {
    address: MetricsAddress,
    #[source]
    source: io::Error,
}

/// Serves the metrics until it is dropped.
pub struct Exporter {
    server: Arc<tiny_http::Server>,
    thread: Option<JoinHandle<()>>,
    socket: Option<PathBuf>,
    address: Option<SocketAddr>,
}

impl Exporter {
    /// Binds the address, and answers `GET /metrics` and `GET /health`.
    ///
    /// # Errors
    /// [`ExporterError`].
    pub fn start(address: &MetricsAddress, metrics: Metrics) -> Result<Self, ExporterError> {
        let failed = |source| ExporterError {
            address: address.clone(),
            source,
        };
        let other =
            |error: Box<dyn std::error::Error + Send + Sync>| failed(io::Error::other(error));
        let (server, socket) = match address {
            MetricsAddress::Tcp(at) => (tiny_http::Server::http(at).map_err(other)?, None),
            MetricsAddress::Named(at) => (tiny_http::Server::http(at).map_err(other)?, None),
            MetricsAddress::Unix(path) => {
                crate::listener::remove_stale(path).map_err(failed)?;
                let server = tiny_http::Server::http_unix(path).map_err(other)?;
                (server, Some(path.clone()))
            }
        };
        let address = server.server_addr().to_ip();
        let server = Arc::new(server);
        let its = Arc::clone(&server);
        let thread = std::thread::Builder::new()
            .name("pt-metrics".into())
            .spawn(move || answer(&its, &metrics))
            .map_err(failed)?;
        Ok(Self {
            server,
            thread: Some(thread),
            socket,
            address,
        })
    }

    /// The address that was bound, of which the port may have been 0.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

fn answer(server: &tiny_http::Server, metrics: &Metrics) {
    const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    for request in server.incoming_requests() {
        let response = match request.url() {
            "/metrics" | "/" => Response::from_string(metrics.text()),
            "/health" => Response::from_string("ok\n"),
            _ => Response::from_string("GET /metrics or /health\n").with_status_code(404),
        };
        let kind = Header::from_bytes("Content-Type", TEXT);
        let response = match kind {
            Ok(kind) => response.with_header(kind),
            Err(()) => response,
        };
        // A client that has gone is its own affair.
        let _ = request.respond(response);
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.server.unblock();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(socket) = &self.socket {
            let _ = fs_err::remove_file(socket);
        }
    }
}

impl std::fmt::Debug for Exporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exporter")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
