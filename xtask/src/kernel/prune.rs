//! Work trees of checkouts that are gone.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};

use super::tree;
use crate::paths::Paths;

/// The file that says whose trees a directory has.
const OWNER: &str = "checkout";

/// Notes that this checkout has trees, and removes those of checkouts that no longer exist (a CI run
/// leaves three a run). A tree with work that was never exported stays.
pub(super) fn prune(paths: &Paths) -> Result<()> {
    let mine = paths.work();
    std::fs::create_dir_all(&mine).with_context(|| format!("create {}", mine.display()))?;
    let owner = mine.join(OWNER);
    std::fs::write(&owner, paths.root().as_os_str().as_encoded_bytes())
        .with_context(|| format!("write {}", owner.display()))?;
    let Some(all) = mine.parent() else {
        return Ok(());
    };
    for entry in std::fs::read_dir(all).with_context(|| format!("read {}", all.display()))? {
        let dir = entry?.path();
        if is_orphan(&dir) && !tree::has_unexported(&dir) {
            eprintln!(
                "removing kernel trees of a checkout that is gone: {}",
                dir.display()
            );
            remove(&dir)?;
        }
    }
    Ok(())
}

/// Removes a directory. Another xtask may do the same at the same time.
fn remove(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

fn is_orphan(dir: &Path) -> bool {
    let owner = std::fs::read_to_string(dir.join(OWNER));
    owner.is_ok_and(|checkout| !checkout.is_empty() && !Path::new(&checkout).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_has_removed_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        std::fs::create_dir_all(tree.join("a")).unwrap();
        remove(&tree).unwrap();
        assert!(!tree.exists());
        remove(&tree).unwrap();
    }

    #[test]
    fn only_trees_of_lost_checkouts_are_orphans() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_orphan(dir.path()));
        std::fs::write(
            dir.path().join(OWNER),
            dir.path().as_os_str().as_encoded_bytes(),
        )
        .unwrap();
        assert!(!is_orphan(dir.path()));
        std::fs::write(dir.path().join(OWNER), "/nowhere/at/all").unwrap();
        assert!(is_orphan(dir.path()));
    }
}
