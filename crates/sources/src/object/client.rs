//! The HTTP client below the stores: it notes each answer's status and bounds the body of an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use async_trait::async_trait;
use futures_util::StreamExt as _;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

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
