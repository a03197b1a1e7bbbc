//! git, cut off from its user's and its caller's settings, so that it does the same everywhere.

use std::ffi::OsStr;
use std::path::Path;

use crate::command::Run;

/// Who commits in the work trees, and when: fixed, so that the same series gives the same commits.
const NAME: &str = "Pagetide";
const EMAIL: &str = "pagetide@localhost";

/// Starts a git command in a repository or work tree.
pub(super) fn git<S: AsRef<OsStr>>(dir: &Path, arguments: impl IntoIterator<Item = S>) -> Run {
    // env -u: when xtask runs from a hook, these point at the hook's repository.
    let unset = [
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_PREFIX",
        "GIT_OBJECT_DIRECTORY",
    ];
    Run::new("env")
        .args(unset.map(|variable| format!("--unset={variable}")))
        .arg("git")
        .arg("-C")
        .arg(dir)
        .args(arguments)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_COMMITTER_NAME", NAME)
        .env("GIT_COMMITTER_EMAIL", EMAIL)
        .env("GIT_AUTHOR_NAME", NAME)
        .env("GIT_AUTHOR_EMAIL", EMAIL)
        .env("LC_ALL", "C")
}
