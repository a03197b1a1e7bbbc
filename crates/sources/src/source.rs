//! An image as the pager's source.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagetide_memory::{GuestAddress, HostRange};
use pagetide_pager::{
    BlockingSource, Filled, Pool, PoolConfig, ReadAt, Room, ServeError, Source, SourceError,
};

use crate::guest_image::{GuestImage, ImageError};

/// Reads an image for the pager. The regions' home gpas are offsets in the image
/// ([`pagetide_pager::RegionConfig::gpa`]). One serves any number of regions and VMs.
pub struct ImageSource {
    image: Arc<dyn GuestImage>,
    on_read: Box<dyn Fn(Duration) + Send + Sync>,
    on_error: Box<dyn Fn(&ImageError) + Send + Sync>,
}

impl ImageSource {
    /// Starts the threads that read. `on_read` sees the duration of each read, and `on_error` each failed
    /// read, on the thread that has read.
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub fn start(
        image: Arc<dyn GuestImage>,
        config: PoolConfig,
        on_read: impl Fn(Duration) + Send + Sync + 'static,
        on_error: impl Fn(&ImageError) + Send + Sync + 'static,
    ) -> Result<Arc<dyn Source>, ServeError> {
        Ok(Pool::new(Self::new(image, on_read, on_error), config)?)
    }

    /// The same without threads until the pool is attended.
    ///
    /// # Errors
    /// As [`Pool::at_rest`].
    pub fn at_rest(
        image: Arc<dyn GuestImage>,
        config: PoolConfig,
        on_read: impl Fn(Duration) + Send + Sync + 'static,
        on_error: impl Fn(&ImageError) + Send + Sync + 'static,
    ) -> Result<Arc<Pool>, ServeError> {
        Pool::at_rest(Self::new(image, on_read, on_error), config)
    }

    fn new(
        image: Arc<dyn GuestImage>,
        on_read: impl Fn(Duration) + Send + Sync + 'static,
        on_error: impl Fn(&ImageError) + Send + Sync + 'static,
    ) -> Self {
        Self {
            image,
            on_read: Box::new(on_read),
            on_error: Box::new(on_error),
        }
    }

    fn read_and_tell(&self, at: ReadAt, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        let GuestAddress(offset) = at.gpa;
        let begun = Instant::now();
        let read = self.image.read(offset, buffer, at.urgency);
        (self.on_read)(begun.elapsed());
        read.map_err(|error| {
            (self.on_error)(&error);
            SourceError::Unavailable(Box::new(error))
        })
    }
}

impl BlockingSource for ImageSource {
    /// A panic, of the image's code or of an observer's, is a failed read: the thread serves all VMs of the image, and
    /// a request that it took is owed an answer.
    fn read(&self, at: ReadAt, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        let read = catch_unwind(AssertUnwindSafe(|| self.read_and_tell(at, buffer)));
        read.unwrap_or_else(|_| Err(SourceError::Unavailable("the read has panicked".into())))
    }

    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        let GuestAddress(offset) = at.gpa;
        self.image.read_now(offset, room.buffer()?, at.urgency)
    }

    fn mapped_now(&self, at: ReadAt, bytes: u64) -> Option<HostRange> {
        let GuestAddress(offset) = at.gpa;
        self.image.mapped(offset, bytes)
    }
}
