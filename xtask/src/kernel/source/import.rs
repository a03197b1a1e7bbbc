//! Making a source's repository: in a directory that gets its name when it is whole, and that is removed otherwise.

use std::io::{BufWriter, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::super::git::git;
use super::BASE_BRANCH;
use crate::command::Run;
use crate::files;
use crate::outside;
use crate::progress::Progress;

/// What the names of directories end with that are not finished.
const UNFINISHED: &str = ".new";

/// A repository that is being made.
#[derive(Debug)]
pub(super) struct Import {
    temporary: PathBuf,
    place: PathBuf,
}

impl Drop for Import {
    fn drop(&mut self) {
        // After finish() there is none. What cannot be removed now is removed when the next import begins.
        let _ = files::remove(&self.temporary);
    }
}

impl Import {
    /// Begins the source of that name in the cache's directory of sources, of which nobody else makes one meanwhile.
    pub(super) fn begin(dir: &Path, key: &str) -> Result<Self> {
        for left in super::versions_in(dir)? {
            // Of a run that was killed.
            if left.ends_with(UNFINISHED) {
                files::remove(&dir.join(left))?;
            }
        }
        let import = Self {
            temporary: dir.join(format!("{key}{UNFINISHED}")),
            place: dir.join(key),
        };
        files::fresh_dir(&import.temporary)?;
        let repository = import.repository();
        // Trees have the same hashes whatever the user's git prefers.
        git(&import.temporary, ["init", "--quiet", "--bare"])
            .words("--object-format=sha1 --template=")
            .arg(&repository)
            .output()?;
        // Nothing here ever changes, so nothing is worth packing better.
        for setting in ["gc.auto 0", "pack.compression 1", "core.compression 1"] {
            git(&repository, ["config"]).words(setting).output()?;
        }
        Ok(import)
    }

    /// A place beside the repository, which is gone in the end.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        self.temporary.join("work").join(name)
    }

    pub(super) fn repository(&self) -> PathBuf {
        self.temporary.join("git")
    }

    fn log(&self) -> PathBuf {
        self.temporary.join("import.log")
    }

    /// Unpacks Debian's package of a source, and the tarball in it. Returns the source's top directory.
    pub(super) fn unpack_package(
        &self,
        package: &str,
        version: &str,
        file: &Path,
    ) -> Result<PathBuf> {
        let progress = Progress::spinner(&format!("unpacking {package} {version}"));
        let into = self.place("package");
        fs::create_dir_all(&into)?;
        Run::new("dpkg-deb")
            .arg("-x")
            .arg(file)
            .arg(&into)
            .logged(&self.log(), &progress)?;
        let top = self.unpack(&into.join(format!("usr/src/{package}.tar.xz")), &progress)?;
        progress.done();
        Ok(top)
    }

    /// Unpacks a tarball. Returns its only directory.
    pub(super) fn unpack(&self, tarball: &Path, progress: &Progress) -> Result<PathBuf> {
        let into = self.place("unpacked");
        fs::create_dir_all(&into)?;
        Run::new("tar")
            .arg("-xf")
            .arg(tarball)
            .arg("-C")
            .arg(&into)
            .logged(&self.log(), progress)?;
        let entries: Vec<_> = fs::read_dir(&into)?.collect::<Result<_, _>>()?;
        match entries.as_slice() {
            [top] if top.path().is_dir() => Ok(top.path()),
            _ => bail!(
                "{} has {} entries at its top, where a kernel's source has one directory",
                tarball.display(),
                entries.len()
            ),
        }
    }

    /// Makes a directory the repository's one commit.
    pub(super) fn directory(&self, top: &Path, message: &str) -> Result<()> {
        let progress = Progress::spinner("making the source's git repository");
        fast_import(&self.repository(), top, message, &progress)?;
        progress.done();
        Ok(())
    }

    /// Makes the tree of another repository's commit the repository's one commit.
    pub(super) fn repository_of(&self, other: &Path, commit: &str, message: &str) -> Result<()> {
        let progress = Progress::spinner("copying the source from its git repository");
        let repository = self.repository();
        git(&repository, ["fetch", "--quiet", "--depth=1", "--no-tags"])
            .env("GIT_CONFIG_GLOBAL", trusting(&self.temporary, other)?)
            .arg(other)
            .arg(commit)
            .output()?;
        let made = git(&repository, ["commit-tree", "-m", message])
            .arg(format!("{commit}^{{tree}}"))
            .env("GIT_AUTHOR_DATE", "@0 +0000")
            .env("GIT_COMMITTER_DATE", "@0 +0000")
            .text()?;
        let branch = format!("refs/heads/{BASE_BRANCH}");
        git(&repository, ["update-ref", &branch, &made]).output()?;
        git(&repository, ["symbolic-ref", "HEAD", &branch]).output()?;
        // The commit that was fetched, and of which the parents are missing, is nobody's; work trees borrow objects of a
        // repository only if it is whole.
        for left in ["shallow", "FETCH_HEAD"] {
            files::remove(&repository.join(left))?;
        }
        progress.done();
        Ok(())
    }

    /// The hash of the commit's tree.
    pub(super) fn tree(&self) -> Result<String> {
        let tree = format!("{BASE_BRANCH}^{{tree}}");
        git(&self.repository(), ["rev-parse", "--verify", &tree]).text()
    }

    /// Gives the repository its name.
    pub(super) fn finish(self) -> Result<()> {
        files::remove(&self.temporary.join("work"))?;
        // What has the name already is no source, or nobody would make one.
        files::remove(&self.place)?;
        Ok(fs::rename(&self.temporary, &self.place)?)
    }

    /// The same with another name, which only the repository's content gives.
    pub(super) fn finish_as(mut self, place: PathBuf) -> Result<()> {
        self.place = place;
        if self.place.join("git").exists() {
            return Ok(());
        }
        self.finish()
    }
}

/// How much room an import takes while it is made: the package, what is in it, and the repository.
const ROOM_MIB: u64 = 3072;

/// git's settings for a repository that belongs to somebody else, which git refuses to read: whoever names it here has
/// decided to read it.
pub(super) fn trusting(dir: &Path, repository: &Path) -> Result<PathBuf> {
    let file = dir.join("trusting.gitconfig");
    let path = repository.display().to_string().replace('\\', "\\\\");
    let path = path.replace('"', "\\\"");
    fs::write(&file, format!("[safe]\n\tdirectory = \"{path}\"\n"))?;
    Ok(file)
}

/// What is to be said if a directory has no room for an import.
pub(super) fn room(dir: &Path) -> String {
    let little = outside::free_mib(dir).filter(|&free_mib| free_mib < ROOM_MIB);
    let Some(free_mib) = little else {
        return String::new();
    };
    format!(
        ". It takes about {ROOM_MIB} MiB, and {free_mib} MiB are free: make room, or set PAGETIDE_CACHE to another place"
    )
}

/// Feeds a directory to `git fast-import` as one commit. Far quicker than `git add`: one pack is
/// written and no object file.
pub(super) fn fast_import(
    git_dir: &Path,
    top: &Path,
    message: &str,
    progress: &Progress,
) -> Result<()> {
    let mut child = git(git_dir, ["fast-import", "--quiet", "--depth=0"])
        .command()
        .stdin(Stdio::piped())
        .spawn()
        .context("start git fast-import")?;
    let stdin = child.stdin.take().context("git fast-import has no input")?;
    let mut stream = BufWriter::with_capacity(1 << 20, stdin);
    let written = (|| -> Result<()> {
        let message = format!("{message}\n");
        writeln!(stream, "commit refs/heads/{BASE_BRANCH}")?;
        writeln!(stream, "committer Pagetide <pagetide@localhost> 0 +0000")?;
        write!(stream, "data {}\n{message}", message.len())?;
        write_directory(&mut stream, top, Path::new(""), progress)?;
        writeln!(stream, "done")?;
        stream.flush()?;
        Ok(())
    })();
    drop(stream);
    let status = child.wait().context("wait for git fast-import")?;
    if !status.success() {
        let place = git_dir.display();
        bail!("git fast-import failed ({status}): is there room in {place}?");
    }
    written.context("feed git fast-import")?;
    let branch = format!("refs/heads/{BASE_BRANCH}");
    let head = git(git_dir, ["symbolic-ref", "HEAD", &branch]);
    head.output().map(drop)
}

fn write_directory(
    stream: &mut impl Write,
    top: &Path,
    relative: &Path,
    progress: &Progress,
) -> Result<()> {
    let mut names: Vec<_> = fs::read_dir(top.join(relative))?
        .map(|entry| entry.map(|e| e.file_name()))
        .collect::<Result<_, _>>()?;
    names.sort();
    for name in names {
        let path = relative.join(&name);
        let file = top.join(&path);
        let kind = fs::symlink_metadata(&file)?;
        if kind.is_dir() {
            write_directory(stream, top, &path, progress)?;
            continue;
        }
        if !kind.is_symlink() && !kind.is_file() {
            // To read a pipe may take for ever.
            bail!("{} is no file, directory or link", file.display());
        }
        let (mode, content) = if kind.is_symlink() {
            ("120000", fs::read_link(&file)?.into_os_string().into_vec())
        } else {
            let executable = kind.permissions().mode() & 0o100 != 0;
            let mode = if executable { "100755" } else { "100644" };
            (mode, fs::read(&file)?)
        };
        write!(stream, "M {mode} inline ")?;
        stream.write_all(path.as_os_str().as_bytes())?;
        write!(stream, "\ndata {}\n", content.len())?;
        stream.write_all(&content)?;
        stream.write_all(b"\n")?;
        progress.advance(1);
    }
    Ok(())
}
