//! The pristine source, as a git repository with one commit.
//!
//! It is the tree that kernel/BASE names, from whichever suite of Debian serves one of its versions (or that version as
//! another release names it: 6.12.118-1 is 6.12.118-1~deb12u1 in Debian 12), unless:
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

use anyhow::{Context, Error, Result, bail, ensure};
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

    /// The tree's hash in git.
    pub(crate) fn tree(&self) -> &str {
        &self.tree
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

    /// Whether a version is one that kernel/BASE names, or what another release of Debian calls it.
    fn has(&self, version: &str) -> bool {
        let rest = |named: &String| version.strip_prefix(named.as_str());
        let mut rests = self.versions.iter().filter_map(rest);
        rests.any(|rest| rest.is_empty() || rest.starts_with("~deb"))
    }

    /// Whether a source is the one that kernel/BASE names.
    pub(crate) fn is_of(&self, source: &Source) -> bool {
        source.tree == self.tree
    }

    /// An error unless a tree is the one that kernel/BASE names; `otherwise` is what to do if BASE is right.
    fn check(&self, version: &str, tree: &str, otherwise: &str) -> Result<()> {
        ensure!(
            tree == self.tree,
            "{} {version} is not the source that kernel/BASE names: its tree is {tree}, and should be {}. If this is \
             the source that you want, look at what has changed in it, and then write its tree into kernel/BASE; \
             otherwise {otherwise}",
            self.package,
            self.tree
        );
        Ok(())
    }

    /// Another package of the same kernel: "linux-config-6.12" for linux-source-6.12.
    pub(super) fn sibling(&self, name: &str) -> String {
        format!("{name}-{}", self.stable_series().trim_end_matches('.'))
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
                "on the substitute {version}, whose tree was not checked: Debian serves the base {base} no longer. Move \
                 kernel/BASE, or name the base by {GIVEN}"
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
    let mut served = Archives::ask(dir, base)?;
    match served.choice(base)? {
        Choice::Base(version, lists) => {
            served.import(dir, base, (&version, lists), Some(base))?;
            cached(dir, base)?.context("the source that was just imported is not in the cache")
        }
        Choice::Substitute(version, lists) => {
            if Source::cached(dir, &version, &version, Origin::Newest)?.is_none() {
                served.import(dir, base, (&version, lists), None)?;
            }
            files::replace(&substitute_note(dir, base), |note| {
                Ok(fs::write(note, &version)?)
            })?;
            cached(dir, base)?.context("the source that was just imported is not in the cache")
        }
    }
}

/// The newest source of the base's series that Debian serves, for a look ahead.
pub(crate) fn newest(paths: &Paths) -> Result<Source> {
    let base = Base::read(paths)?;
    let dir = paths.cache().join("source");
    let _lock = lock::take(&dir)?;
    let mut served = Archives::ask(&dir, &base)?;
    let (version, lists) = served.newest(&base)?.clone();
    let cached = || Source::cached(&dir, &version, &version, Origin::Newest);
    if cached()?.is_none() {
        let checked = base.has(&version).then_some(&base);
        served.import(&dir, &base, (&version, lists), checked)?;
    }
    cached()?.context("the source that was just imported is not in the cache")
}

/// Where it is noted which version was taken in place of the base.
fn substitute_note(dir: &Path, base: &Base) -> PathBuf {
    dir.join(format!("substitute-for-{}", base.version()))
}

/// The base, or a substitute of which the archive has not to be asked again yet.
fn cached(dir: &Path, base: &Base) -> Result<Option<Source>> {
    for version in versions_in(dir)?.iter().filter(|name| base.has(name)) {
        if let Some(source) = Source::cached(dir, version, version, Origin::Base)? {
            let otherwise = format!("remove {}, and try again", dir.join(version).display());
            base.check(version, &source.tree, &otherwise)?;
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

/// The names of a directory's entries, in their order.
fn versions_in(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    if dir.exists() {
        for entry in fs::read_dir(dir)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// What Debian serves now.
#[derive(Debug, Default)]
struct Archives {
    /// The lists of the suites that could be reached.
    lists: Vec<Lists>,
    /// The others, with the reason.
    unreachable: Vec<(String, Error)>,
    /// The versions of the package, the newest first, with the number of their lists.
    versions: Vec<(String, usize)>,
}

/// A version, and the number of its lists.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    Base(String, usize),
    Substitute(String, usize),
}

impl Archives {
    /// Fetches the lists of all suites that ever serve the package. One that cannot be reached matters only if the others
    /// do not have the base.
    fn ask(dir: &Path, base: &Base) -> Result<Self> {
        let progress = Progress::spinner(&format!("asking Debian for {}", base.package));
        let mut archives = Self::default();
        for (archive, name) in [
            (Archive::Security, "bookworm-security"),
            (Archive::Security, "trixie-security"),
            (Archive::Main, "trixie"),
        ] {
            let place = dir.join("apt").join(name);
            let suites = vec![Suite::new(archive, name)];
            let asked = Lists::fetch(&place, Kind::Binaries, suites, &progress)
                .and_then(|lists| Ok((lists.versions(&base.package)?, lists)));
            match asked {
                Ok((versions, lists)) => {
                    let number = archives.lists.len();
                    let numbered = versions.into_iter().map(|served| (served.version, number));
                    archives.versions.extend(numbered);
                    archives.lists.push(lists);
                }
                Err(error) => archives.unreachable.push((name.into(), error)),
            }
        }
        progress.done();
        apt::newest_first(&mut archives.versions, |(version, _)| version)?;
        Ok(archives)
    }

    /// An error that names a suite that could not be reached, if there is one: what it has is not known.
    fn all_reached(&mut self, base: &Base) -> Result<()> {
        if self.unreachable.is_empty() {
            return Ok(());
        }
        let (name, error) = self.unreachable.swap_remove(0);
        Err(error.context(format!(
            "the kernel's source, {} {}, is wanted, and whether {name} has it is not known. {GIVEN} can name a tarball, \
             a directory or a git repository that has it",
            base.package,
            base.version()
        )))
    }

    /// The newest version of the base's series.
    fn newest(&mut self, base: &Base) -> Result<&(String, usize)> {
        self.all_reached(base)?;
        let series = base.stable_series();
        let mut versions = self.versions.iter();
        let newest = versions.find(|(version, _)| version.starts_with(&series));
        newest.with_context(|| {
            format!(
                "Debian serves no {} at all: is the mirror whole? {GIVEN} can name another source",
                base.package
            )
        })
    }

    /// A version that kernel/BASE names, or, if Debian serves none of them any more, the newest one.
    fn choice(&mut self, base: &Base) -> Result<Choice> {
        if let Some((version, lists)) = self.versions.iter().find(|(name, _)| base.has(name)) {
            return Ok(Choice::Base(version.clone(), *lists));
        }
        let (newest, lists) = self.newest(base)?;
        for version in &base.versions {
            ensure!(
                apt::compare(version, newest)?.is_lt(),
                "kernel/BASE names {} {version}, and the newest that Debian serves is {newest}: the version is not \
                 there yet, or the mirror is old. Correct kernel/BASE, wait for the mirror, or name the source by \
                 {GIVEN}",
                base.package
            );
        }
        Ok(Choice::Substitute(newest.clone(), *lists))
    }

    /// Downloads a version and makes its repository. Its tree has to be `checked`'s, if given.
    fn import(
        &self,
        dir: &Path,
        base: &Base,
        (version, lists): (&str, usize),
        checked: Option<&Base>,
    ) -> Result<()> {
        let fetch = |into: &Path| {
            let lists = self.lists.get(lists).context("there are no lists")?;
            let progress = Progress::spinner(&format!("downloading {} {version}", base.package));
            let file = lists.download(&base.package, version, into, &progress)?;
            progress.done();
            Ok(file)
        };
        import_package(dir, base, version, checked, fetch).with_context(|| {
            format!(
                "{} {version} is wanted in {}, and nothing of it was kept there{}",
                base.package,
                dir.display(),
                import::room(dir)
            )
        })
    }
}

/// Makes the repository of a package that `fetch` puts into a directory.
fn import_package(
    dir: &Path,
    base: &Base,
    version: &str,
    checked: Option<&Base>,
    fetch: impl FnOnce(&Path) -> Result<PathBuf>,
) -> Result<()> {
    let import = Import::begin(dir, version)?;
    let file = fetch(&import.place("dl"))?;
    let top = import.unpack_package(&base.package, version, &file)?;
    import.directory(&top, &format!("{} {version}", base.package))?;
    if let Some(base) = checked {
        let otherwise = "the mirror has another content under this name: try another mirror";
        base.check(version, &import.tree()?, otherwise)?;
    }
    import.finish()
}

/// Notes in a file which source a result was made from.
pub(super) fn describe(source: &Source, file: &Path) -> Result<()> {
    Ok(fs::write(file, format!("{}\n", source.version))?)
}

#[cfg(test)]
mod tests;
