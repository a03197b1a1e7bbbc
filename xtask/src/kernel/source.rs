//! The pristine source, as a git repository with one commit.
//!
//! It is the tree that kernel/BASE names, from whichever suite of Debian serves one of its versions, unless:
//!
//! - Debian serves none of them any more: then it is the newest source of the same series, a *substitute*. Every run
//!   says so, and the archive is asked again after a day.
//! - `PAGETIDE_KERNEL_SOURCE` names another: a tarball, a directory or a git repository.
//!
//! The cache has a directory for each, which gets its name when it is whole.

mod given;
mod import;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;

use super::{git::git, lock};
use crate::apt::{self, Archive, Kind, Lists, Suite};
use crate::files;
use crate::paths::Paths;
use crate::progress::Progress;

use import::Import;

/// The branch of the one commit.
pub(super) const BASE_BRANCH: &str = "base";

/// What names another source.
const GIVEN: &str = "PAGETIDE_KERNEL_SOURCE";

/// After how long the archive is asked again whether it serves the base.
const ASKED_AGAIN: Duration = Duration::from_secs(24 * 60 * 60);

/// What kernel/BASE names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Base {
    package: String,
    /// Of the package: all of them are one and the same tree.
    versions: Vec<String>,
    /// The tree's hash in git.
    tree: String,
}

/// A source that is in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    /// Its version, for people.
    pub(crate) version: String,
    /// The tree's hash in git.
    pub(crate) tree: String,
    pub(crate) origin: Origin,
    /// The name of its directories.
    pub(super) key: String,
    /// The repository.
    pub(super) git: PathBuf,
}

/// Why it is this source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// kernel/BASE names it, and its tree is the one named there.
    Base,
    /// Debian serves no version that kernel/BASE names any more.
    Substitute {
        /// The first of these versions.
        base: String,
    },
    /// `PAGETIDE_KERNEL_SOURCE` names this place.
    Given(PathBuf),
    /// A look ahead was asked for.
    Newest,
}

impl Base {
    /// The version that messages name.
    pub(crate) fn version(&self) -> &str {
        self.versions.first().map_or("", String::as_str)
    }

    /// Reads kernel/BASE.
    pub(crate) fn read(paths: &Paths) -> Result<Self> {
        let file = paths.in_root("kernel/BASE");
        let base = Self::parse(&fs::read_to_string(&file)?);
        base.with_context(|| format!("in {}", file.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let (mut packages, mut trees, mut versions) = (Vec::new(), Vec::new(), Vec::new());
        for line in files::lines(text) {
            let (word, value) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "package" => packages.push(value.trim().to_owned()),
                "version" => versions.push(value.trim().to_owned()),
                "tree" => trees.push(value.trim().to_owned()),
                _ => bail!(
                    "expected \"package NAME\", \"version VERSION\" or \"tree HASH\", found {line:?}"
                ),
            }
        }
        let one = |what: &str, mut values: Vec<String>| match values.len() {
            1 => Ok(values.remove(0)),
            count => bail!("there are {count} lines \"{what} …\", where there has to be one"),
        };
        let base = Self {
            package: one("package", packages)?,
            tree: one("tree", trees)?,
            versions,
        };
        ensure!(!base.versions.is_empty(), "there is no line \"version …\"");
        let is_hash = base.tree.len() == 40 && base.tree.bytes().all(|b| b.is_ascii_hexdigit());
        ensure!(is_hash, "{:?} is not the hash of a tree", base.tree);
        Ok(base)
    }

    /// An error unless a tree is the one that kernel/BASE names.
    fn check(&self, version: &str, tree: &str) -> Result<()> {
        ensure!(
            tree == self.tree,
            "{} {version} is not the source that kernel/BASE names: its tree is {tree}, and should be {}. If the \
             package is what you want, look at what has changed in it, and then write its tree into kernel/BASE; \
             otherwise the mirror, or the cache, has another content: remove it and try again",
            self.package,
            self.tree
        );
        Ok(())
    }

    /// The series of stable releases that the package is of: "6.12." for linux-source-6.12.
    fn stable_series(&self) -> String {
        let name = self.package.rsplit('-').next().unwrap_or_default();
        format!("{name}.")
    }
}

impl Source {
    /// What every run has to say of a source that is not the base.
    pub(crate) fn notice(&self, base: &Base) -> Option<String> {
        let version = &self.version;
        match &self.origin {
            Origin::Base => None,
            Origin::Substitute { base } => Some(format!(
                "on the substitute {version}, whose tree was not checked: Debian serves the base {base} no longer"
            )),
            Origin::Given(place) if self.tree == base.tree => Some(format!(
                "on {GIVEN}={}, whose tree is the base's",
                place.display()
            )),
            Origin::Given(place) => Some(format!(
                "on {GIVEN}={}, {version}, whose tree was not checked: it is not the base's",
                place.display()
            )),
            Origin::Newest => Some(format!("on the newest version, {version}")),
        }
    }

    /// A source in a directory of the cache, if it is there.
    fn cached(dir: &Path, key: &str, version: &str, origin: Origin) -> Result<Option<Self>> {
        let repository = dir.join(key).join("git");
        if !repository.exists() {
            return Ok(None);
        }
        let tree = git(&repository, ["rev-parse", "--verify"])
            .arg(format!("{BASE_BRANCH}^{{tree}}"))
            .text()
            .with_context(|| {
                let place = dir.join(key);
                format!(
                    "the source in the cache is damaged: remove {}",
                    place.display()
                )
            })?;
        Ok(Some(Self {
            version: version.to_owned(),
            tree,
            origin,
            key: key.to_owned(),
            git: repository,
        }))
    }
}

/// What [`ensure`] has found: one source serves a whole run.
static FOUND: Mutex<Option<(Source, Option<String>)>> = Mutex::new(None);

/// The source, fetched first if it is not in the cache.
pub(crate) fn ensure(paths: &Paths) -> Result<Source> {
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((source, _)) = &*found {
        return Ok(source.clone());
    }
    let base = Base::read(paths)?;
    let source = find(&paths.cache().join("source"), &base)?;
    let notice = source.notice(&base);
    if let Some(notice) = &notice {
        eprintln!("WARNING: {notice}");
    }
    *found = Some((source.clone(), notice));
    Ok(source)
}

/// What the last line of a run has to say of its source, if it was not the base.
pub(crate) fn notice() -> Option<String> {
    let found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    found.as_ref().and_then(|(_, notice)| notice.clone())
}

fn find(dir: &Path, base: &Base) -> Result<Source> {
    if let Some(place) = std::env::var_os(GIVEN).filter(|place| !place.is_empty()) {
        let place = std::path::absolute(place).context(GIVEN)?;
        let _lock = lock::take(dir)?;
        return given::ensure(dir, &place)
            .with_context(|| format!("{GIVEN} is {}", place.display()));
    }
    if let Some(source) = cached(dir, base)? {
        return Ok(source);
    }
    let _lock = lock::take(dir)?;
    if let Some(source) = cached(dir, base)? {
        return Ok(source);
    }
    let served = Archives::ask(dir, base)?;
    match served.choice(base)? {
        Choice::Base(version) => {
            served.import(dir, base, version, Some(base))?;
            cached(dir, base)?.context("the source that was just imported is not in the cache")
        }
        Choice::Substitute(version) => {
            if Source::cached(dir, version, version, Origin::Newest)?.is_none() {
                served.import(dir, base, version, None)?;
            }
            fs::write(substitute_note(dir, base), version)?;
            cached(dir, base)?.context("the source that was just imported is not in the cache")
        }
    }
}

/// The newest source of the base's series that Debian serves, for a look ahead.
pub(crate) fn newest(paths: &Paths) -> Result<Source> {
    let base = Base::read(paths)?;
    let dir = paths.cache().join("source");
    let _lock = lock::take(&dir)?;
    let served = Archives::ask(&dir, &base)?;
    let version = served.newest(&base)?;
    let cached = || Source::cached(&dir, version, version, Origin::Newest);
    if cached()?.is_none() {
        let checked = base.versions.iter().any(|named| named == version);
        served.import(&dir, &base, version, checked.then_some(&base))?;
    }
    cached()?.context("the source that was just imported is not in the cache")
}

/// Where it is noted which version was taken in place of the base.
fn substitute_note(dir: &Path, base: &Base) -> PathBuf {
    dir.join(format!("substitute-for-{}", base.version()))
}

/// The base, or a substitute of which the archive has not to be asked again yet.
fn cached(dir: &Path, base: &Base) -> Result<Option<Source>> {
    for version in &base.versions {
        if let Some(source) = Source::cached(dir, version, version, Origin::Base)? {
            base.check(version, &source.tree)
                .with_context(|| format!("in {}", dir.join(version).display()))?;
            return Ok(Some(source));
        }
    }
    let note = substitute_note(dir, base);
    let age = fs::metadata(&note)
        .and_then(|note| note.modified())
        .ok()
        .and_then(|written| written.elapsed().ok());
    if age.is_none_or(|age| age > ASKED_AGAIN) {
        return Ok(None);
    }
    let version = fs::read_to_string(&note)?;
    let origin = Origin::Substitute {
        base: base.version().to_owned(),
    };
    Source::cached(dir, version.trim(), version.trim(), origin)
}

/// What Debian serves now.
#[derive(Debug)]
struct Archives {
    lists: Option<Lists>,
    /// The versions of the package, the newest first.
    versions: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
enum Choice<'a> {
    Base(&'a str),
    Substitute(&'a str),
}

impl Archives {
    /// Fetches the lists of all suites that ever serve the package.
    fn ask(dir: &Path, base: &Base) -> Result<Self> {
        let suites = vec![
            Suite::new(Archive::Security, "bookworm-security"),
            Suite::new(Archive::Security, "trixie-security"),
            Suite::new(Archive::Main, "trixie"),
        ];
        let progress = Progress::spinner(&format!("asking Debian for {}", base.package));
        let help = || {
            format!(
                "the kernel's source, {} {}, is wanted. {GIVEN} can name a tarball, a directory or a git repository \
                 that has it",
                base.package,
                base.version()
            )
        };
        let lists =
            Lists::fetch(&dir.join("apt"), Kind::Binaries, suites, &progress).with_context(help)?;
        let versions = lists.versions(&base.package).with_context(help)?;
        progress.done();
        Ok(Self {
            lists: Some(lists),
            versions: versions.into_iter().map(|served| served.version).collect(),
        })
    }

    /// The newest version of the base's series.
    fn newest(&self, base: &Base) -> Result<&str> {
        let series = base.stable_series();
        let mut versions = self.versions.iter();
        let newest = versions.find(|version| version.starts_with(&series));
        newest.map(String::as_str).with_context(|| {
            format!(
                "Debian serves no {} at all: is the mirror whole? {GIVEN} can name another source",
                base.package
            )
        })
    }

    /// A version that kernel/BASE names, or, if Debian serves none of them any more, the newest one.
    fn choice(&self, base: &Base) -> Result<Choice<'_>> {
        let named = |version: &&String| base.versions.contains(version);
        if let Some(version) = self.versions.iter().find(named) {
            return Ok(Choice::Base(version));
        }
        let newest = self.newest(base)?;
        for version in &base.versions {
            ensure!(
                apt::compare(version, newest)?.is_lt(),
                "kernel/BASE names {} {version}, and the newest that Debian serves is {newest}: the version is not \
                 there yet, or the mirror is old. Correct kernel/BASE, wait for the mirror, or name the source by \
                 {GIVEN}",
                base.package
            );
        }
        Ok(Choice::Substitute(newest))
    }

    /// Downloads a version and makes its repository. Its tree has to be `checked`'s, if given.
    fn import(&self, dir: &Path, base: &Base, version: &str, checked: Option<&Base>) -> Result<()> {
        let imported = self.try_import(dir, base, version, checked);
        imported.with_context(|| {
            format!(
                "{} {version} is wanted in {}, and nothing of it was kept there. {}",
                base.package,
                dir.display(),
                import::room(dir)
            )
        })
    }

    fn try_import(
        &self,
        dir: &Path,
        base: &Base,
        version: &str,
        checked: Option<&Base>,
    ) -> Result<()> {
        let lists = self.lists.as_ref().context("there are no lists")?;
        let import = Import::begin(dir, version)?;
        let package = &base.package;
        let progress = Progress::spinner(&format!("downloading {package} {version}"));
        let file = lists.download(package, version, &import.place("dl"), &progress)?;
        progress.done();
        let top = import.unpack_package(package, version, &file)?;
        import.directory(&top, &format!("{package} {version}"))?;
        if let Some(base) = checked {
            base.check(version, &import.tree()?)?;
        }
        import.finish()
    }
}

/// Notes in a file which source a result was made from.
pub(super) fn describe(source: &Source, file: &Path) -> Result<()> {
    Ok(fs::write(file, format!("{}\n", source.version))?)
}

#[cfg(test)]
mod tests;
