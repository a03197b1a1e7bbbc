//! Where things live: the checkout, its `target/`, and the cache outside of it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::files::hex;

/// Every place that a verb reads or writes.
#[derive(Debug, Clone)]
pub(crate) struct Paths {
    root: PathBuf,
    cache: PathBuf,
}

impl Paths {
    /// Finds the checkout that this xtask was built from, and the cache.
    pub(crate) fn find() -> Result<Self> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = manifest.parent().context("xtask has no parent directory")?;
        Ok(Self {
            root: root.to_owned(),
            cache: cache_dir()?,
        })
    }

    /// A checkout, with its cache, in a test's directory.
    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            cache: root.join("cache"),
        }
    }

    /// The top of the checkout.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The cache outside the checkout: `$PAGETIDE_CACHE`, else `$XDG_CACHE_HOME/pagetide`, else
    /// `~/.cache/pagetide`.
    pub(crate) fn cache(&self) -> &Path {
        &self.cache
    }

    /// A file or directory of the checkout.
    pub(crate) fn in_root(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// Cargo's target directory. The lab shares it with its VMs, so it is always the checkout's own.
    pub(crate) fn target(&self) -> PathBuf {
        self.root.join("target")
    }

    /// The directory of this checkout's kernel trees: no other checkout uses it.
    pub(crate) fn work(&self) -> PathBuf {
        self.cache.join("work").join(checkout_key(&self.root))
    }
}

fn cache_dir() -> Result<PathBuf> {
    if let Some(dir) = non_empty("PAGETIDE_CACHE") {
        return std::path::absolute(dir).context("PAGETIDE_CACHE");
    }
    if let Some(dir) = non_empty("XDG_CACHE_HOME") {
        return Ok(PathBuf::from(dir).join("pagetide"));
    }
    let home = non_empty("HOME").context(
        "no place for the cache: set PAGETIDE_CACHE to a directory outside the checkout",
    )?;
    Ok(PathBuf::from(home).join(".cache/pagetide"))
}

fn non_empty(variable: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(variable).filter(|value| !value.is_empty())
}

/// A name for a checkout: its directory's name, for people, and a hash of its path, so that two
/// checkouts of the same name do not meet.
fn checkout_key(root: &Path) -> String {
    let name = root
        .file_name()
        .map_or_else(|| "root".into(), |n| n.to_string_lossy());
    let digest = Sha256::digest(root.as_os_str().as_encoded_bytes());
    format!("{name}-{}", &hex(&digest)[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkouts_of_one_name_have_different_keys() {
        let (a, b) = (
            checkout_key(Path::new("/a/main")),
            checkout_key(Path::new("/b/main")),
        );
        assert!(a.starts_with("main-") && b.starts_with("main-"));
        assert_ne!(a, b);
    }
}
