//! The HTTP client below the stores: it notes each answer's status and bounds the body of an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, HeaderMap};

/// The maximal length of an error's body that is kept, in bytes. A store explains an error in less.
const MOST_ERROR_BYTES: usize = 16 << 10;

/// Where the status of a request's answer is noted. An extension of the request.
#[derive(Clone, Debug, Default)]
pub(super) struct Status(Arc<AtomicU16>);

impl Status {
    /// The HTTP status; 0 if there was no answer.
    pub(super) fn get(&self) -> u16 {
        self.0.load(Relaxed)
    }
}

/// Makes clients of which each notes the status and bounds errors.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Watched { client }))
    }
}

/// The longest time until a connection is there.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Makes such clients for URLs over HTTP. Another host to which a server redirects one gets no `Referer`: that is the URL with its
/// query, which may be a signature. Of several addresses of a host the resolver's first one is tried first.
#[derive(Clone, Debug)]
pub(super) struct WebConnector {
    /// What each request carries.
    pub(super) headers: HeaderMap,
    /// The longest time of a request.
    pub(super) limit: Duration,
    pub(super) is_https: bool,
    /// Without the system's certificates nothing over https is trusted.
    pub(super) has_certificates: bool,
}

impl HttpConnector for WebConnector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let builder = reqwest::Client::builder()
            .user_agent(concat!("pagetide/", env!("CARGO_PKG_VERSION")))
            .default_headers(self.headers.clone())
            .timeout(self.limit)
            .connect_timeout(CONNECT_LIMIT)
            .http1_only()
            .https_only(self.is_https)
            // Lengths and ranges are those of the bytes as they are stored.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .referer(false);
        let builder = match self.has_certificates {
            true => builder,
            false => builder.tls_certs_only([]),
        };
        let client = builder
            .build()
            .map_err(|error| object_store::Error::Generic {
                store: "HTTP",
                source: Box::new(error),
            })?;
        let client = HttpClient::new(client);
        Ok(HttpClient::new(Watched { client }))
    }
}

#[derive(Debug)]
struct Watched {
    client: HttpClient,
}

#[async_trait]
impl HttpService for Watched {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let noted = request.extensions().get::<Status>().cloned();
        let answer = self.client.execute(request).await?;
        let status = answer.status();
        if let Some(Status(noted)) = noted {
            noted.store(status.as_u16(), Relaxed);
        }
        if status.is_success() {
            return Ok(answer);
        }
        // The store's client reads all of an error's body: without a bound, a server could fill memory.
        let (parts, body) = answer.into_parts();
        let mut kept = Vec::new();
        let mut stream = body.bytes_stream();
        while let Some(Ok(part)) = stream.next().await {
            let room = MOST_ERROR_BYTES - kept.len();
            kept.extend_from_slice(part.get(..room).unwrap_or(&part));
            if kept.len() == MOST_ERROR_BYTES {
                break;
            }
        }
        let text = String::from_utf8_lossy(&kept).into_owned();
        Ok(HttpResponse::from_parts(parts, text.into()))
    }
}
