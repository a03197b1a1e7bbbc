//! Work trees of checkouts that are gone.

use std::path::Path;

use anyhow::Result;
use fs_err as fs;

use super::tree;
use crate::files;
use crate::paths::Paths;

/// The file that says whose trees a directory has.
const OWNER: &str = "checkout";

/// Notes that this checkout has trees, and removes those of checkouts that no longer exist (a CI run
/// leaves three a run). A tree with work that was never exported stays.
pub(super) fn prune(paths: &Paths) -> Result<()> {
    let mine = paths.work();
    fs::create_dir_all(&mine)?;
    fs::write(
        mine.join(OWNER),
        paths.root().as_os_str().as_encoded_bytes(),
    )?;
    let Some(all) = mine.parent() else {
        return Ok(());
    };
    for entry in fs::read_dir(all)? {
        let dir = entry?.path();
        if is_orphan(&dir) && !tree::has_unexported(&dir) {
            let place = dir.display();
            eprintln!("removing kernel trees of a checkout that is gone: {place}");
            files::remove(&dir)?;
        }
    }
    Ok(())
}

fn is_orphan(dir: &Path) -> bool {
    let owner = std::fs::read_to_string(dir.join(OWNER));
    owner.is_ok_and(|checkout| !checkout.is_empty() && !Path::new(&checkout).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

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
