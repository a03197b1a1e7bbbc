//! The pristine source: Debian's package, as a git repository with one commit.

use std::io::{BufWriter, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::{git::git, lock};
use crate::command::Run;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::{debian, files};

/// The branch of the one commit.
pub(super) const BASE_BRANCH: &str = "base";

/// What kernel/BASE names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Base {
    package: String,
    version: String,
}

/// A source that is in the cache.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The package's version.
    pub(crate) version: String,
    /// The version in kernel/BASE; differs when Debian no longer serves that one.
    pub(crate) wanted: String,
    /// The repository.
    pub(super) git: PathBuf,
}

impl Base {
    /// The package.
    pub(crate) fn package(&self) -> &str {
        &self.package
    }

    /// Reads kernel/BASE.
    pub(crate) fn read(paths: &Paths) -> Result<Self> {
        let file = paths.in_root("kernel/BASE");
        let base = Self::parse(&fs::read_to_string(&file)?);
        base.with_context(|| format!("in {}", file.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let (mut package, mut version) = (None, None);
        for line in files::lines(text) {
            match line.split_once(' ') {
                Some(("package", value)) => package = Some(value.trim().to_owned()),
                Some(("version", value)) => version = Some(value.trim().to_owned()),
                _ => bail!("expected \"package NAME\" or \"version VERSION\", found {line:?}"),
            }
        }
        Ok(Self {
            package: package.context("no package line")?,
            version: version.context("no version line")?,
        })
    }
}

/// The source that is in the cache, fetched first if it is not there.
pub(crate) fn ensure(paths: &Paths) -> Result<Source> {
    let base = Base::read(paths)?;
    let dir = paths.cache().join("source");
    if let Some(source) = cached(&dir, &base) {
        return Ok(source);
    }
    let _lock = lock::take(&dir)?;
    if let Some(source) = cached(&dir, &base) {
        return Ok(source);
    }
    let package = fetch(paths, &base)?;
    let field = Run::new("dpkg-deb").arg("-f").arg(&package).arg("Version");
    let version = field.text()?;
    if !dir.join(&version).exists() {
        import(&dir, &base.package, &version, &package)?;
    }
    if version != base.version {
        fs::write(substitute_marker(&dir, &base), &version)?;
    }
    cached(&dir, &base).context("the source that was just imported is not in the cache")
}

/// Where it is noted which version was found instead of the wanted one.
fn substitute_marker(dir: &Path, base: &Base) -> PathBuf {
    dir.join(format!("instead-of-{}", base.version))
}

fn cached(dir: &Path, base: &Base) -> Option<Source> {
    let source = |version: &str| Source {
        version: version.to_owned(),
        wanted: base.version.clone(),
        git: dir.join(version).join("git"),
    };
    let exact = source(&base.version);
    if exact.git.exists() {
        return Some(exact);
    }
    let found = fs::read_to_string(substitute_marker(dir, base)).ok()?;
    let found = source(found.trim());
    if !found.git.exists() {
        return None;
    }
    eprintln!(
        "WARNING: {} {} is not served any more; using {}",
        base.package, base.version, found.version
    );
    Some(found)
}

/// Downloads the package: the wanted version, or else the one that Debian serves now.
fn fetch(paths: &Paths, base: &Base) -> Result<PathBuf> {
    let dir = paths.cache().join("dl");
    let name = &base.package;
    if let Some(file) = debian::downloaded(&dir, name, Some(&base.version))? {
        return Ok(file);
    }
    if debian::download(&dir, name, Some(&base.version)).is_err() {
        debian::download(&dir, name, None).with_context(|| not_downloaded(base))?;
    }
    match debian::downloaded(&dir, name, Some(&base.version))? {
        Some(file) => Ok(file),
        None => debian::downloaded(&dir, name, None)?.context("apt-get download left no file"),
    }
}

/// What to look at. Debian 12 has the package in its security suite only.
fn not_downloaded(base: &Base) -> String {
    let suite = if base.version.contains("~deb12") {
        "bookworm-security"
    } else {
        "the suite of the version in kernel/BASE"
    };
    format!(
        "the kernel source {} {} could not be downloaded: is there a network, is {suite} among \
         apt's sources, and did `apt-get update` run?",
        base.package, base.version
    )
}

/// Unpacks the package and makes the repository, in a directory that gets its name at the end.
fn import(dir: &Path, package: &str, version: &str, file: &Path) -> Result<()> {
    let temporary = dir.join(format!("{version}.new"));
    let unpacked = temporary.join("unpacked");
    files::fresh_dir(&temporary)?;
    fs::create_dir(&unpacked)?;
    let log = temporary.join("import.log");

    let progress = Progress::spinner(&format!("unpacking {package} {version}"));
    let unpack = Run::new("dpkg-deb").arg("-x").arg(file).arg(&unpacked);
    unpack.logged(&log, &progress)?;
    let archive = format!("usr/src/{package}.tar.xz");
    let unpack = Run::new("tar").args(["-xf", &archive]).dir(&unpacked);
    unpack.logged(&log, &progress)?;
    progress.done();

    let progress = Progress::spinner("making the source's git repository");
    let git_dir = temporary.join("git");
    let init = Run::new("git").words("init --quiet --bare");
    init.arg(&git_dir).output()?;
    // Nothing here ever changes, so nothing is worth packing better.
    for setting in ["gc.auto 0", "pack.compression 1", "core.compression 1"] {
        git(&git_dir, ["config"]).words(setting).output()?;
    }
    let top = unpacked.join(package);
    fast_import(&git_dir, &top, package, version, &progress)?;
    progress.done();

    fs::remove_dir_all(&unpacked)?;
    Ok(fs::rename(&temporary, dir.join(version))?)
}

/// Feeds a directory to `git fast-import` as one commit. Far quicker than `git add`: one pack is
/// written and no object file.
fn fast_import(
    git_dir: &Path,
    top: &Path,
    package: &str,
    version: &str,
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
        let message = format!("{package} {version}\n");
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
        bail!("git fast-import failed ({status})");
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

/// Notes in a file which source a result was made from.
pub(super) fn describe(source: &Source, file: &Path) -> Result<()> {
    Ok(fs::write(file, format!("{}\n", source.version))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_names_package_and_version() {
        let base = Base::parse("# why\npackage linux-source-6.12\nversion 6.12.1-1\n").unwrap();
        assert_eq!(
            base,
            Base {
                package: "linux-source-6.12".into(),
                version: "6.12.1-1".into()
            }
        );
    }

    #[test]
    fn a_failed_download_names_the_suite() {
        let base = Base::parse("package linux-source-6.12\nversion 6.12.1-1~deb12u1\n").unwrap();
        let told = not_downloaded(&base);
        assert!(
            told.contains("linux-source-6.12 6.12.1-1~deb12u1")
                && told.contains("bookworm-security"),
            "{told}"
        );
    }

    #[test]
    fn base_refuses_what_it_does_not_know() {
        assert!(Base::parse("package a\nversion 1\nbranch x\n").is_err());
        assert!(Base::parse("package a\n").is_err());
    }

    #[test]
    fn a_directory_becomes_one_commit() {
        let dir = tempfile::tempdir().unwrap();
        let (top, repository) = (dir.path().join("top"), dir.path().join("git"));
        std::fs::create_dir_all(top.join("a b")).unwrap();
        std::fs::write(top.join("a b/file"), "text\n").unwrap();
        std::os::unix::fs::symlink("a b/file", top.join("link")).unwrap();
        Run::new("git")
            .args(["init", "--quiet", "--bare"])
            .arg(&repository)
            .output()
            .unwrap();
        fast_import(
            &repository,
            &top,
            "package",
            "1",
            &Progress::spinner("a test"),
        )
        .unwrap();
        let list = git(
            &repository,
            ["ls-tree", "-r", "--format=%(objectmode) %(path)", "base"],
        );
        assert_eq!(list.text().unwrap(), "100644 a b/file\n120000 link");
    }
}
