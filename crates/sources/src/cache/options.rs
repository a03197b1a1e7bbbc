//! Where blocks are cached, and why they cannot be.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Where blocks are cached on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The directory. It is created if it does not exist; its parent has to exist. Objects are read without a cache, with a
    /// warning, if it cannot be opened.
    pub directory: PathBuf,
    /// The bound of all files below the directory, in bytes, for all processes together. If processes
    /// give different bounds, each one keeps its own when it writes.
    pub bytes: u64,
}

/// Why a directory cannot be a cache.
#[derive(Debug, Error)]
pub enum CacheError {
    /// It could not be created or opened.
    #[error("cache directory {}", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It belongs to another user, who could replace blocks.
    #[error("cache directory {} belongs to user {owner}, not to user {user}", directory.display())]
    Owner {
        /// The directory.
        directory: PathBuf,
        /// Its owner's id.
        owner: u32,
        /// This process's effective user id.
        user: u32,
    },
    /// Other users can write to it.
    #[error("cache directory {} has mode {mode:o}: others can write to it", directory.display())]
    Writable {
        /// The directory.
        directory: PathBuf,
        /// Its mode.
        mode: u32,
    },
}
