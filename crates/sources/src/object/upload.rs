//! Putting a file at a URL.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use object_store::{
    Error as StoreError, MultipartUpload, ObjectStore, PutMode, PutMultipartOptions, PutOptions,
    PutPayload,
};
use tokio::runtime::Handle;

use super::client::Status;
use super::failure::{Failure, Report};
use super::fetch::{look, watched};
use super::options::ObjectOptions;
use super::parts::{Parts, shown};
use super::runtime;
use super::secrets::Secrets;
use super::store::{Place, Requests};
use crate::upload::UploadError;

/// The least bytes of a part, which a smaller object is put with at once.
const PART_BYTES: u64 = 8 << 20;

/// The most parts that every store takes.
const MOST_PARTS: u64 = 10_000;

/// Parts on their way at a time.
const CONCURRENT: usize = 4;

/// The most bytes for a server that takes an object in one request only, from memory.
const MOST_AT_ONCE: u64 = 256 << 20;

/// An object that is to be.
pub(crate) struct Upload {
    name: String,
    handle: Handle,
    place: Place,
    secrets: Secrets,
    options: ObjectOptions,
    may_replace: bool,
}

impl Upload {
    /// Begins the object that will be at `url`. Asks whether something is there, unless that may be replaced.
    ///
    /// # Errors
    /// [`UploadError`].
    pub(crate) fn begin(
        url: &str,
        options: &ObjectOptions,
        may_replace: bool,
    ) -> Result<Self, UploadError> {
        let refused = |source| UploadError::Refused {
            name: shown(url),
            source,
        };
        let parts = Parts::of(url).filter(|parts| !parts.path.ends_with('/'));
        let parts = parts.ok_or_else(|| {
            let text = "the URL has no host, or no path or key, or ends in a slash";
            refused(Report::new(text).into())
        })?;
        let place = parts.place(Requests::of_uploads(options));
        let place = place.map_err(|report| refused(report.into()))?;
        let handle = runtime::handle().map_err(|error| refused(error.into()))?;
        let upload = Self {
            name: parts.name(),
            handle,
            place,
            secrets: parts.secrets(),
            options: options.clone(),
            may_replace,
        };
        if !may_replace {
            upload.refuse_to_replace()?;
        }
        Ok(upload)
    }

    fn refuse_to_replace(&self) -> Result<(), UploadError> {
        let Place { store, path, .. } = &self.place;
        let name = self.name.clone();
        let look = look(&**store, path, &self.secrets, &self.options);
        match self.handle.block_on(look) {
            Err(Failure::NotFound) => Ok(()),
            Ok(_) => Err(self.exists()),
            Err(Failure::Forbidden(report)) => {
                let text = format!(
                    "the store does not say whether something is there, so that it may only be replaced (--force): {report}"
                );
                let source = text.into();
                Err(UploadError::Refused { name, source })
            }
            Err(failure) => {
                let source = Stop::Failed(failure).into_source();
                Err(UploadError::Failed { name, source })
            }
        }
    }

    /// Refuses an object that its server would take only from memory that this program does not have.
    ///
    /// # Errors
    /// [`UploadError::Refused`].
    pub(crate) fn check_bytes(&self, bytes: u64) -> Result<(), UploadError> {
        let takes_no_parts = self.name.starts_with("http");
        match takes_no_parts && bytes > MOST_AT_ONCE {
            true => Err(UploadError::Refused {
                name: self.name.clone(),
                source: Stop::TakesNoParts.into_source(),
            }),
            false => Ok(()),
        }
    }

    fn exists(&self) -> UploadError {
        let name = self.name.clone();
        UploadError::Exists { name }
    }

    /// Puts the file's first bytes there. The object appears when it is complete. `progress` is told how many of the bytes
    /// the store has.
    ///
    /// # Errors
    /// [`UploadError`].
    pub(crate) fn put(
        &self,
        file: &File,
        bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), UploadError> {
        progress(0, bytes);
        let put = self.handle.block_on(async {
            if bytes <= PART_BYTES {
                return self.put_at_once(file, bytes).await;
            }
            match self.put_in_parts(file, bytes, progress).await {
                Err(Stop::TakesNoParts) if bytes <= MOST_AT_ONCE => {
                    self.put_at_once(file, bytes).await
                }
                put => put,
            }
        });
        put.map_err(|stop| match stop {
            Stop::Exists => self.exists(),
            stop => UploadError::Failed {
                name: self.name.clone(),
                source: stop.into_source(),
            },
        })?;
        progress(bytes, bytes);
        Ok(())
    }

    async fn put_at_once(&self, file: &File, bytes: u64) -> Result<(), Stop> {
        let payload = PutPayload::from(read(file, 0, bytes)?);
        let mode = match self.may_replace {
            true => PutMode::Overwrite,
            false => PutMode::Create,
        };
        match self.put_payload(payload.clone(), mode).await {
            // A server that knows no condition: nothing was there before.
            Err((StoreError::NotImplemented { .. }, _)) => {
                let put = self.put_payload(payload, PutMode::Overwrite).await;
                put.map_err(|(error, status)| self.sorted(&error, &status))
            }
            put => put.map_err(|(error, status)| self.sorted(&error, &status)),
        }
    }

    async fn put_payload(
        &self,
        payload: PutPayload,
        mode: PutMode,
    ) -> Result<(), (StoreError, Status)> {
        let (status, extensions) = watched();
        let options = PutOptions {
            mode,
            extensions,
            ..PutOptions::default()
        };
        let Place { store, path, .. } = &self.place;
        let put = store.put_opts(path, payload, options).await;
        put.map(drop).map_err(|error| (error, status))
    }

    async fn put_in_parts(
        &self,
        file: &File,
        bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Stop> {
        let Place { store, path, .. } = &self.place;
        let (status, extensions) = watched();
        let options = PutMultipartOptions {
            extensions,
            ..PutMultipartOptions::default()
        };
        let mut upload = match store.put_multipart_opts(path, options).await {
            Err(StoreError::NotImplemented { .. }) => return Err(Stop::TakesNoParts),
            begun => begun.map_err(|error| self.sorted(&error, &status))?,
        };
        let put = self.put_parts(&mut *upload, file, bytes, progress).await;
        let put = match put {
            Ok(()) => upload.complete().await.map(drop).map_err(Ok),
            failed => failed,
        };
        if put.is_err() {
            // The store keeps the parts otherwise, and asks for money.
            let _ = upload.abort().await;
        }
        put.map_err(|error| match error {
            Ok(error) => self.sorted(&error, &status),
            Err(stop) => stop,
        })
    }

    /// Errors are the store's, or of this side.
    async fn put_parts(
        &self,
        upload: &mut dyn MultipartUpload,
        file: &File,
        bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Result<StoreError, Stop>> {
        let part_bytes = part_bytes(bytes);
        let (mut offset, mut done) = (0, 0);
        let mut parts = FuturesUnordered::new();
        while offset < bytes || !parts.is_empty() {
            if offset < bytes && parts.len() < CONCURRENT {
                let part = (bytes - offset).min(part_bytes);
                let content = read(file, offset, part).map_err(Err)?;
                let put = upload.put_part(content.into());
                parts.push(async move { put.await.map(|()| part) });
                offset += part;
                continue;
            }
            if let Some(put) = parts.next().await {
                done += put.map_err(Ok)?;
                progress(done, bytes);
            }
        }
        Ok(())
    }

    fn sorted(&self, error: &StoreError, status: &Status) -> Stop {
        // The client calls each conflict so, also with other requests.
        if !self.may_replace && matches!(error, StoreError::AlreadyExists { .. }) {
            return Stop::Exists;
        }
        Stop::Failed(Failure::sort(error, status.get(), &self.secrets))
    }
}

/// Why nothing was put.
enum Stop {
    Exists,
    TakesNoParts,
    File(io::Error),
    Failed(Failure),
}

impl Stop {
    fn into_source(self) -> Box<dyn std::error::Error + Send + Sync> {
        match self {
            Self::Exists => "it exists".into(),
            Self::TakesNoParts => format!(
                "the server takes an object in one request only, for which this program has at most {} MiB of memory; write \
                 a file, and upload that by another program",
                MOST_AT_ONCE >> 20
            )
            .into(),
            Self::File(error) => error.into(),
            Self::Failed(failure) => match failure {
                Failure::NotFound => "there is no such bucket, container or folder".into(),
                Failure::Forbidden(report)
                | Failure::Transient(report)
                | Failure::Permanent(report) => report.into(),
                Failure::Late(limit) => format!("no answer in {} ms", limit.as_millis()).into(),
                Failure::Changed => "the store has found another object there".into(),
                Failure::Short { .. } => "an answer was cut".into(),
            },
        }
    }
}

fn read(file: &File, offset: u64, bytes: u64) -> Result<Vec<u8>, Stop> {
    let mut content = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
    let read = file.read_exact_at(&mut content, offset);
    read.map_err(Stop::File)?;
    Ok(content)
}

/// The bytes of a part, so that no store has too many of them.
fn part_bytes(bytes: u64) -> u64 {
    const UNIT: u64 = 1 << 20;
    let least = bytes.div_ceil(MOST_PARTS).div_ceil(UNIT) * UNIT;
    least.max(PART_BYTES)
}

/// Without the store's client, which would show a URL with its credentials.
impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Upload");
        fields.field("name", &self.name);
        fields.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_object_has_too_many_parts() {
        for bytes in [1, PART_BYTES, 80 << 30, (80 << 30) + 1, 1 << 40, 5 << 40] {
            let part = part_bytes(bytes);
            assert!(part >= PART_BYTES);
            assert!(bytes.div_ceil(part) <= MOST_PARTS, "{bytes}");
        }
        assert_eq!(part_bytes(1 << 30), PART_BYTES);
    }
}
