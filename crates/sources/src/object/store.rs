//! From a URL to a store and a key.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{ClientConfigKey, HeaderMap, HeaderValue, ObjectStore, RetryConfig};

use super::client::{Connector, WebConnector};
use super::failure::{Report, with_causes};
use super::options::ObjectOptions;
use super::parts::{Parts, decoded};
use super::runtime::provide_tls;
use super::secrets::Secrets;

/// The longest time of a request of an upload. A part of 8 MiB beside three others takes that at 2 Mbit/s.
const UPLOAD_LIMIT: Duration = Duration::from_secs(120);

/// After which a request of an upload is not repeated any more.
const UPLOAD_RETRIES: Duration = Duration::from_secs(600);

/// An object of a store.
pub(super) struct Place {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) path: Path,
    /// What tells this object from others: its name, its store, and its query without a signature.
    pub(super) identity: String,
}

/// How long the store's client waits for a request, and how often it repeats one.
pub(super) struct Requests {
    limit: Duration,
    retry: RetryConfig,
}

impl Requests {
    /// Attempts are limited and repeated by the reader, where they are counted.
    pub(super) fn of_reads(options: &ObjectOptions) -> Self {
        Self {
            limit: options.limit.saturating_mul(2),
            retry: RetryConfig {
                max_retries: 0,
                ..RetryConfig::default()
            },
        }
    }

    /// The client repeats requests of an upload: it knows the numbers of parts.
    pub(super) fn of_uploads(options: &ObjectOptions) -> Self {
        let max_retries = usize::try_from(options.attempts.saturating_sub(1));
        Self {
            limit: UPLOAD_LIMIT,
            retry: RetryConfig {
                max_retries: max_retries.unwrap_or(usize::MAX),
                retry_timeout: UPLOAD_RETRIES,
                ..RetryConfig::default()
            },
        }
    }
}

impl Parts<'_> {
    pub(super) fn secrets(&self) -> Secrets {
        Secrets::of(self)
    }

    /// Builds the store from the environment. Nothing is sent.
    pub(super) fn place(&self, requests: Requests) -> Result<Place, Report> {
        let secrets = self.secrets();
        let failed = |error: object_store::Error| secrets.report(&unmade(&error));
        let invalid = |error: object_store::path::Error| secrets.report(&error.to_string());
        let Requests { retry, limit } = requests;
        let limit = limit.max(Duration::from_millis(1));
        let limit_ms = format!("{} ms", limit.as_millis());
        let timeout = ClientConfigKey::Timeout;
        provide_tls();
        let is_http = matches!(self.scheme, "http" | "https");
        if self.user.is_some() && !is_http {
            return Err(Report::new(
                "credentials of a store come from the environment, not from the URL",
            ));
        }
        let mut identity = vec![self.name()];
        let store: Arc<dyn ObjectStore> = match self.scheme {
            "s3" => {
                let builder = AmazonS3Builder::from_env()
                    .with_bucket_name(self.host)
                    .with_config(AmazonS3ConfigKey::Client(timeout), limit_ms)
                    .with_retry(retry)
                    .with_http_connector(Connector);
                let keys = [AmazonS3ConfigKey::Endpoint, AmazonS3ConfigKey::S3Endpoint];
                identity.extend(keys.iter().filter_map(|key| builder.get_config_value(key)));
                Arc::new(builder.build().map_err(failed)?)
            }
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env()
                    .with_bucket_name(self.host)
                    .with_config(GoogleConfigKey::Client(timeout), limit_ms)
                    .with_retry(retry)
                    .with_http_connector(Connector);
                identity.extend(builder.get_config_value(&GoogleConfigKey::BaseUrl));
                Arc::new(builder.build().map_err(failed)?)
            }
            "az" => {
                let builder = MicrosoftAzureBuilder::from_env()
                    .with_container_name(self.host)
                    .with_config(AzureConfigKey::Client(timeout), limit_ms)
                    .with_retry(retry)
                    .with_http_connector(Connector);
                let keys = [AzureConfigKey::AccountName, AzureConfigKey::Endpoint];
                identity.extend(keys.iter().filter_map(|key| builder.get_config_value(key)));
                Arc::new(builder.build().map_err(failed)?)
            }
            "http" | "https" => {
                let connector = WebConnector {
                    headers: self.headers()?,
                    limit,
                    is_https: self.scheme == "https",
                    has_certificates: true,
                };
                let fields = self.query.unwrap_or_default().split('&');
                identity.extend(
                    fields
                        .filter(|field| !is_of_signature(field))
                        .map(str::to_owned),
                );
                let query = self.query.map(|query| format!("?{query}"));
                let base = format!(
                    "{}://{}/{}",
                    self.scheme,
                    self.host,
                    query.unwrap_or_default()
                );
                let build = |connector| {
                    HttpBuilder::new()
                        .with_url(&base)
                        .with_retry(retry.clone())
                        .with_http_connector(connector)
                        .build()
                };
                let built = match build(connector.clone()) {
                    // Over http nobody shows a certificate. A server that redirects to https is trusted in nothing.
                    Err(error) if self.scheme == "http" && lacks_certificates(&error) => {
                        build(WebConnector {
                            has_certificates: false,
                            ..connector
                        })
                    }
                    built => built,
                };
                Arc::new(built.map_err(failed)?)
            }
            _ => return Err(Report::new("its scheme is unknown")),
        };
        let path = match is_http {
            true => Path::from_url_path(self.path),
            false => Path::parse(self.path),
        };
        Ok(Place {
            store,
            path: path.map_err(invalid)?,
            identity: identity.join("\n"),
        })
    }

    /// What each request over HTTP carries: `USER:PASSWORD@` of the URL as basic authentication, and
    /// the demand that a server does not compress, since ranges are those of the bytes as they are stored.
    fn headers(&self) -> Result<HeaderMap, Report> {
        let mut headers = HeaderMap::new();
        headers.insert("accept-encoding", HeaderValue::from_static("identity"));
        if let Some(user) = self.user {
            let user = decoded(user).ok_or_else(|| Report::new("its credentials are malformed"))?;
            let text = format!("Basic {}", STANDARD.encode(user));
            let mut value = HeaderValue::try_from(text)
                .map_err(|_| Report::new("its credentials are malformed"))?;
            value.set_sensitive(true);
            headers.insert("authorization", value);
        }
        Ok(headers)
    }
}

/// Why a client could not be made.
fn unmade(error: &object_store::Error) -> String {
    match lacks_certificates(error) {
        true => "no certificates of authorities are found: the package ca-certificates has them, or SSL_CERT_FILE names \
                 a file of them"
            .into(),
        false => with_causes(error),
    }
}

/// Whether a client could not be made because this system has no certificates of authorities. rustls says so in words alone.
fn lacks_certificates(error: &object_store::Error) -> bool {
    with_causes(error).contains("No CA certificates were loaded")
}

/// Whether a field of a query signs the request: it differs between two URLs of one object.
fn is_of_signature(field: &str) -> bool {
    /// Fields of signatures in lower case: of S3's older kind, and of Azure's shared access.
    const FIELDS: [&str; 16] = [
        "",
        "awsaccesskeyid",
        "signature",
        "expires",
        "googleaccessid",
        "sig",
        "se",
        "st",
        "sp",
        "sv",
        "sr",
        "spr",
        "sip",
        "skoid",
        "token",
        "access_token",
    ];
    let name = field
        .split('=')
        .next()
        .unwrap_or(field)
        .to_ascii_lowercase();
    FIELDS.contains(&name.as_str()) || name.starts_with("x-amz-") || name.starts_with("x-goog-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_in_a_url_of_a_store_are_refused() {
        let parts = Parts::of("s3://key:secret@bucket/a").unwrap();
        let requests = Requests::of_reads(&ObjectOptions::default());
        assert!(parts.place(requests).is_err());
    }
}
