//! apt with lists of its own: packages of suites that this system's apt need not know of.
//!
//! The lists are fetched anew, signed by Debian's keyring, so that what they do not name does not exist. The
//! archive's address is that of this system's apt, as are its proxies. Nothing takes root, and nothing is installed.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use crate::command::Run;
use crate::files;
use crate::outside::Service;
use crate::progress::{self, Progress};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// What an archive's address is if this system's apt has none of Debian's.
const DEFAULT: &str = "http://deb.debian.org";

/// What apt does differently here: it writes nothing into this system's caches, reads no other list of archives,
/// prefers no release, and takes a list that it could not fetch for an error.
const SETTINGS: &str = "-q -o APT::Sandbox::User=root -o Dir::Cache::srcpkgcache= -o Dir::Cache::pkgcache= \
    -o Dir::Etc::SourceParts=/dev/null -o APT::Default-Release= -o APT::Update::Error-Mode=any \
    -o Acquire::Languages=none -o Acquire::Retries=3";

/// One of Debian's archives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Archive {
    Main,
    Security,
}

/// What is asked for in an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Binaries,
    Sources,
}

/// A suite of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Suite {
    pub(crate) archive: Archive,
    pub(crate) name: String,
}

/// A package as an archive has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) version: String,
}

/// Lists that were just fetched, in a directory that goes with them.
#[derive(Debug)]
pub(crate) struct Lists {
    directory: PathBuf,
    log: PathBuf,
    suites: Vec<Suite>,
}

impl Suite {
    pub(crate) fn new(archive: Archive, name: impl Into<String>) -> Self {
        Self {
            archive,
            name: name.into(),
        }
    }
}

impl Lists {
    /// Fetches the lists of `suites` into `directory`, which is emptied first. A mirror may have no sources: these are
    /// then asked for where Debian has them.
    pub(crate) fn fetch(
        directory: &Path,
        kind: Kind,
        suites: Vec<Suite>,
        progress: &Progress,
    ) -> Result<Self> {
        let targets = targets()?;
        let fetched = Self::fetch_from(&targets, directory, kind, suites.clone(), progress);
        let is_there = suites
            .iter()
            .all(|suite| address(suite.archive, &targets) == address(suite.archive, ""));
        match fetched {
            Err(error) if kind == Kind::Sources && !is_there => {
                progress::warn(&format!("trying {DEFAULT}: {error:#}"));
                Self::fetch_from("", directory, kind, suites, progress)
            }
            fetched => fetched,
        }
    }

    fn fetch_from(
        targets: &str,
        directory: &Path,
        kind: Kind,
        suites: Vec<Suite>,
        progress: &Progress,
    ) -> Result<Self> {
        files::fresh_dir(directory)?;
        fs::create_dir_all(directory.join("lists/partial"))?;
        let lists = Self {
            directory: directory.to_owned(),
            log: directory.join("apt.log"),
            suites,
        };
        let text = sources_list(kind, &lists.suites, targets);
        fs::write(directory.join("sources.list"), text)?;
        let update = || {
            let update = lists.run("apt-get").arg("update");
            update.logged(&lists.log, progress)
        };
        Service::Debian
            .again("fetching Debian's lists", update)
            .with_context(|| {
                format!(
                    "the lists of {} could not be fetched: does the mirror have these suites, and does the package \
                     debian-archive-keyring have their keys?",
                    lists.names()
                )
            })?;
        Ok(lists)
    }

    /// The suites, for people.
    pub(crate) fn names(&self) -> String {
        let names: Vec<_> = self.suites.iter().map(|s| s.name.as_str()).collect();
        names.join(", ")
    }

    /// Every version of a binary package, the newest first.
    pub(crate) fn versions(&self, package: &str) -> Result<Vec<Served>> {
        let text = self.run("apt-cache").args(["madison", package]).text()?;
        let mut versions = madison(&text);
        newest_first(&mut versions, |served| &served.version)?;
        versions.dedup();
        Ok(versions)
    }

    /// What the newest version of a binary package depends on.
    pub(crate) fn depends(&self, package: &str) -> Result<Vec<String>> {
        let depends = self.run("apt-cache").args(["depends", "--important"]);
        let text = depends.arg(package).text()?;
        Ok(dependencies(&text))
    }

    /// Downloads a binary package into a directory, and compares it with the list. A cut or different file is an error.
    pub(crate) fn download(
        &self,
        package: &str,
        version: &str,
        into: &Path,
        progress: &Progress,
    ) -> Result<PathBuf> {
        fs::create_dir_all(into)?;
        let what = format!("{package}={version}");
        let download = || {
            let download = self.run("apt-get").args(["download", &what]);
            download.dir(into).logged(&self.log, progress)
        };
        Service::Debian
            .again(&format!("downloading {package}"), download)
            .with_context(|| {
                format!(
                    "{what}, which {} list, could not be downloaded whole",
                    self.names()
                )
            })?;
        let only = fs::read_dir(into)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|file| file.extension().is_some_and(|extension| extension == "deb"));
        only.context("apt-get download left no file")
    }

    /// Downloads a source package into a directory. Returns its description.
    pub(crate) fn source(
        &self,
        package: &str,
        version: &str,
        into: &Path,
        progress: &Progress,
    ) -> Result<PathBuf> {
        fs::create_dir_all(into)?;
        Service::Debian.again(&format!("downloading {package}'s source"), || {
            self.run("apt-get")
                .args(["source", "--download-only"])
                .arg(format!("{package}={version}"))
                .dir(into)
                .logged(&self.log, progress)
        })?;
        let description = fs::read_dir(into)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|file| file.extension().is_some_and(|extension| extension == "dsc"));
        description.context("apt-get source left no .dsc file")
    }

    fn run(&self, program: &str) -> Run {
        let option = |name: &str, file: &str| {
            let value = self.directory.join(file);
            ["-o".to_owned(), format!("{name}={}", value.display())]
        };
        Run::new(program)
            .words(SETTINGS)
            .args(option("Dir::Etc::SourceList", "sources.list"))
            .args(option("Dir::State::Lists", "lists"))
            // This system may have other architectures, whose lists nobody needs.
            .args([
                "-o",
                "APT::Architectures=amd64",
                "-o",
                "APT::Architecture=amd64",
            ])
    }
}

/// How Debian's versions are ordered, which dpkg knows.
pub(crate) fn compare(a: &str, b: &str) -> Result<Ordering> {
    let is = |relation: &str| {
        Run::new("dpkg")
            .args(["--compare-versions", a, relation, b])
            .succeeds()
    };
    Ok(if is("lt")? {
        Ordering::Less
    } else if is("gt")? {
        Ordering::Greater
    } else {
        Ordering::Equal
    })
}

/// Puts versions in order, the newest first.
pub(crate) fn newest_first<T>(list: &mut [T], version: impl Fn(&T) -> &String) -> Result<()> {
    let mut failure = None;
    list.sort_by(|a, b| {
        compare(version(b), version(a)).unwrap_or_else(|error| {
            failure = Some(error);
            Ordering::Equal
        })
    });
    failure.map_or(Ok(()), Err)
}

/// The code name of this machine's Debian.
pub(crate) fn release() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release")?;
    match code_name(&text) {
        Some(name) => Ok(name),
        None => bail!("/etc/os-release has no VERSION_CODENAME: is this Debian?"),
    }
}

fn code_name(os_release: &str) -> Option<String> {
    let mut lines = os_release.lines();
    let name = lines.find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
    Some(name.trim_matches('"').to_owned())
}

/// What this system's apt knows of archives: a line `ORIGIN|RELEASE|ADDRESS` for each. The origin is empty where no list
/// was fetched yet.
fn targets() -> Result<String> {
    let format = "$(ORIGIN)|$(RELEASE)|$(REPO_URI)";
    let asked = Run::new("apt-get")
        .args(["indextargets", "--no-release-info", "--format", format])
        .arg("Created-By: Packages");
    let known = Run::new("apt-get")
        .args(["indextargets", "--format", format])
        .arg("Created-By: Packages");
    // What was fetched first: there, the origin is signed.
    Ok(format!("{}\n{}", known.text()?, asked.text()?))
}

/// The address from which this system takes one of Debian's archives.
fn address(archive: Archive, targets: &str) -> String {
    let directory = match archive {
        Archive::Main => "/debian",
        Archive::Security => "/debian-security",
    };
    let is_it = |line: &&str| {
        let mut fields = line.split('|');
        let (Some(origin), Some(release), Some(address)) =
            (fields.next(), fields.next(), fields.next())
        else {
            return false;
        };
        let is_debians = match origin {
            "Debian" => true,
            origin if origin.is_empty() || origin.starts_with('$') => {
                address.trim_end_matches('/').ends_with(directory)
            }
            _ => false,
        };
        let is_over_a_network = address.contains("://") && !address.starts_with("file:");
        is_debians
            && is_over_a_network
            && !release.ends_with("-debug")
            && release.ends_with("-security") == (archive == Archive::Security)
    };
    let line = targets.lines().find(is_it);
    let known = line.and_then(|line| line.rsplit('|').next());
    known.map_or_else(
        || format!("{DEFAULT}{directory}"),
        |address| address.trim_end_matches('/').to_owned(),
    )
}

fn sources_list(kind: Kind, suites: &[Suite], targets: &str) -> String {
    let word = match kind {
        Kind::Binaries => "deb",
        Kind::Sources => "deb-src",
    };
    let line = |Suite { archive, name }: &Suite| {
        let address = address(*archive, targets);
        format!("{word} [signed-by={KEYRING}] {address} {name} main\n")
    };
    suites.iter().map(line).collect()
}

/// The versions in what `apt-cache madison` prints: `PACKAGE | VERSION | WHERE`.
fn madison(text: &str) -> Vec<Served> {
    let version = |line: &str| Some(line.split('|').nth(1)?.trim().to_owned());
    text.lines()
        .filter_map(version)
        .map(|version| Served { version })
        .collect()
}

/// The packages in what `apt-cache depends` prints: `  Depends: PACKAGE`.
fn dependencies(text: &str) -> Vec<String> {
    let name = |line: &str| {
        line.trim_start()
            .strip_prefix("Depends: ")
            .map(str::to_owned)
    };
    text.lines().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: &str = "Debian|bookworm|cdrom:[Debian 12]/\n\
                        Debian|bookworm-debug|http://mirror.example/debian-debug/\n\
                        Debian|bookworm|http://mirror.example/debian/\n\
                        Docker|bookworm|https://download.docker.example/linux/debian/\n\
                        Debian|bookworm-security|http://mirror.example/security/\n";

    #[test]
    fn an_archives_address_is_this_systems() {
        assert_eq!(address(Archive::Main, HERE), "http://mirror.example/debian");
        assert_eq!(
            address(Archive::Security, HERE),
            "http://mirror.example/security"
        );
    }

    #[test]
    fn without_lists_the_directory_tells() {
        let fresh = "|bookworm|https://packages.example/apt/\n\
                     $(ORIGIN)|trixie|http://deb.example/debian\n\
                     $(ORIGIN)|trixie-security|http://deb.example/debian-security/\n";
        assert_eq!(address(Archive::Main, fresh), "http://deb.example/debian");
        assert_eq!(
            address(Archive::Security, fresh),
            "http://deb.example/debian-security"
        );
        assert_eq!(address(Archive::Main, ""), "http://deb.debian.org/debian");
        let other = "Ubuntu|noble|http://archive.example/debian/\n";
        assert_eq!(
            address(Archive::Security, other),
            "http://deb.debian.org/debian-security"
        );
    }

    #[test]
    fn a_line_for_each_suite_names_the_keyring() {
        let suites = [
            Suite::new(Archive::Security, "trixie-security"),
            Suite::new(Archive::Main, "trixie"),
        ];
        assert_eq!(
            sources_list(Kind::Sources, &suites, HERE),
            format!(
                "deb-src [signed-by={KEYRING}] http://mirror.example/security trixie-security main\n\
                 deb-src [signed-by={KEYRING}] http://mirror.example/debian trixie main\n"
            )
        );
    }

    #[test]
    fn only_debian_has_a_code_name() {
        let name = code_name("ID=debian\nVERSION_CODENAME=bookworm\n").unwrap();
        assert_eq!(name, "bookworm");
        assert_eq!(code_name("ID=arch\n"), None);
    }

    #[test]
    fn dependencies_are_read() {
        let text = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n  Suggests: other\n";
        assert_eq!(dependencies(text), ["linux-image-6.1.0-56-amd64"]);
    }

    #[test]
    fn versions_are_read_and_ordered_as_dpkg_does() {
        let text =
            "pkg | 6.12.9-1 | http://a b/main\n pkg | 6.12.118-1~deb12u1 | http://c d/main\n";
        let found = madison(text);
        assert_eq!(found[1].version, "6.12.118-1~deb12u1");
        let mut versions = ["6.12.9-1", "6.12.118-1~deb12u1", "6.12.118-1"].map(str::to_owned);
        newest_first(&mut versions, |version| version).unwrap();
        assert_eq!(versions, ["6.12.118-1", "6.12.118-1~deb12u1", "6.12.9-1"]);
        assert_eq!(
            compare("6.12.118-1~deb12u1", "6.12.118-1").unwrap(),
            Ordering::Less
        );
        assert_eq!(
            compare("6.12.118-1", "6.12.9-1").unwrap(),
            Ordering::Greater
        );
        assert_eq!(compare("6.12.9-1", "6.12.9-1").unwrap(), Ordering::Equal);
    }
}
