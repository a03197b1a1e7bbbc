//! The options that `pagetide serve` takes from its command line and from its file alike.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use pagetide_serve::{
    Binding, BindingTable, BindingTableError, MetricsAddress, OnFailure, Options, SeccompMode,
    SocketMode, SocketOwner, WorkingSetMode,
};
use pagetide_sources::{Bases, CacheOptions, OpenOptions, ParseLocationError};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::ByteSize;

/// What is done with working sets.
#[derive(Clone, Copy, Debug, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WorkingSet {
    /// Replay the image's working set if there is one; record one otherwise
    Auto,
    /// Record, and merge with the working set that is there
    Record,
    /// Replay
    Replay,
    /// Neither
    Off,
}

#[derive(Clone, Copy, Debug, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Switch {
    /// Fetch all missing pages while the guest runs; faults come first
    On,
    /// Fetch only what is touched, and the working set
    Off,
}

#[derive(Clone, Copy, Debug, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Failing {
    /// The guest's thread waits, and the server keeps trying
    Stall,
    /// The VMM's process is killed
    Kill,
}

impl From<WorkingSet> for WorkingSetMode {
    fn from(mode: WorkingSet) -> Self {
        match mode {
            WorkingSet::Auto => Self::Auto,
            WorkingSet::Record => Self::Record,
            WorkingSet::Replay => Self::Replay,
            WorkingSet::Off => Self::Off,
        }
    }
}

impl From<Switch> for pagetide_serve::Switch {
    fn from(switch: Switch) -> Self {
        match switch {
            Switch::On => Self::On,
            Switch::Off => Self::Off,
        }
    }
}

impl From<Failing> for OnFailure {
    fn from(policy: Failing) -> Self {
        match policy {
            Failing::Stall => Self::Stall,
            Failing::Kill => Self::Kill,
        }
    }
}

/// How messages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// What happens to system calls that the server does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Filter {
    /// They fail; those that only foreign code makes, such as execve, end the server
    On,
    /// The kernel logs and makes them
    Log,
    /// The kernel makes them
    Off,
}

/// The options that the command line and the file have in common.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(super) struct Settings {
    /// Whether the pages that guests touch are recorded, and fetched ahead of the next guest [default:
    /// auto]
    #[arg(long, value_enum, value_name = "MODE")]
    working_set: Option<WorkingSet>,

    /// The file of the working set, if there is one image [default: IMAGE.working-set]
    #[arg(long, value_name = "FILE")]
    working_set_file: Option<PathBuf>,

    /// The directory of working sets that are not named, each by the digest of its image: for any number of images, at
    /// URLs as well. It is made if there is none [default: beside each image]
    #[arg(long, value_name = "DIR")]
    working_set_dir: Option<PathBuf>,

    /// Let clients of the native protocol write the working set of their image, which all of its VMs replay
    #[arg(long)]
    clients_record: bool,

    /// Serve VMs whose memory has another length than their image. A guest that touches what the image does not have waits
    /// for ever, or is killed
    #[arg(long)]
    any_length: bool,

    /// Whether all missing pages are fetched while the guest runs. Not while the working set of a guest is
    /// recorded, which ends with the VM [default: on]
    #[arg(long, value_enum, value_name = "SWITCH")]
    prefetch: Option<Switch>,

    /// The pages of 4 KiB that one fault installs at most: a power of two up to 512 [default: 1]
    #[arg(long, value_name = "PAGES")]
    fault_around: Option<u64>,

    /// Serve metrics in Prometheus' format at this IP address or host name and port, or at a Unix socket
    #[arg(long, value_name = "ADDRESS:PORT|unix:PATH")]
    #[serde(deserialize_with = "from_text")]
    pub(super) metrics: Option<MetricsAddress>,

    /// What happens to a VM whose content cannot be read, or whose memory takes no content [default: stall]
    #[arg(long, value_enum, value_name = "POLICY")]
    on_failure: Option<Failing>,

    /// Permissions of the sockets, in octal [default: 600]
    #[arg(long, value_name = "MODE")]
    #[serde(deserialize_with = "from_text")]
    socket_mode: Option<SocketMode>,

    /// Owner of the sockets, as for a VMM in a jailer
    #[arg(long, value_name = "UID:GID")]
    #[serde(deserialize_with = "from_text")]
    socket_owner: Option<SocketOwner>,

    /// Cache objects of a store in this directory, which any number of processes may share
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,

    /// The size of the cache at most: bytes, or a number with K, M, G or T [default: 10G]
    #[arg(long, value_name = "SIZE")]
    #[serde(deserialize_with = "size")]
    cache_size: Option<ByteSize>,

    /// Where the bases of images may be: in the folder of the image that names them, or anywhere [default: beside]
    #[arg(long, value_enum, value_name = "WHERE")]
    bases: Option<BasesArgument>,

    /// The most bytes of the indexes of an image and its layers together [default: 256M]
    #[arg(long, value_name = "SIZE")]
    #[serde(deserialize_with = "size")]
    max_index: Option<ByteSize>,

    /// Keep VMs for a successor in this directory: after SIGTERM or `kill -9`, a server that starts with the
    /// same directory goes on with them. Until then, guests that touch missing pages wait
    #[arg(long, value_name = "DIR")]
    pub(super) state: Option<PathBuf>,

    /// Listen at this Unix socket for `pagetide ctl`, which adds and removes sockets, drains them, and tells what is served. Only
    /// root and the server's user are answered
    #[arg(long, value_name = "PATH")]
    pub(super) control: Option<PathBuf>,

    /// VMs at one time at most [default: 4096]
    #[arg(long, value_name = "COUNT")]
    max_vms: Option<usize>,

    /// VMs of one user at one time at most: others find room whatever that user's programs do [default: 3584, or
    /// --max-vms if that is given]
    #[arg(long, value_name = "COUNT")]
    max_vms_per_user: Option<usize>,

    /// Seconds for which guests are drained at SIGTERM and SIGINT, at most: what is missing then is poisoned, where an access
    /// raises SIGBUS. VMs that are kept for a successor wait for its start meanwhile. A second signal ends the drain
    /// [default: 3.5]
    #[arg(long, value_name = "SECONDS")]
    stop_limit: Option<u64>,

    /// End when the last VM has gone, with exit status 0
    #[arg(long)]
    pub(super) once: bool,

    /// How messages are written on standard error; RUST_LOG chooses which [default: text]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(super) log: Option<LogFormat>,

    /// What happens to system calls that the server does not need, once it listens (seccomp) [default: on,
    /// where the kernel has seccomp]
    #[arg(long, value_enum, value_name = "ACTION")]
    pub(super) seccomp: Option<Filter>,

    /// The images: SOCKET = IMAGE, or a table
    #[arg(skip)]
    sockets: BTreeMap<PathBuf, Served>,
}

/// What a socket serves.
#[derive(Clone, Debug)]
enum Served {
    /// An image.
    Image(String),
    /// An image with options.
    Table(BindingTable),
}

impl<'de> Deserialize<'de> for Served {
    /// By hand: an error of a table's key is then told as it is.
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        value.deserialize_any(ServedVisitor)
    }
}

struct ServedVisitor;

impl<'de> Visitor<'de> for ServedVisitor {
    type Value = Served;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an image, or a table with image and the options of its socket")
    }

    fn visit_str<E>(self, image: &str) -> Result<Served, E> {
        Ok(Served::Image(image.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<Served, A::Error> {
        BindingTable::deserialize(MapAccessDeserializer::new(table)).map(Served::Table)
    }
}

impl Served {
    fn binding(&self, socket: &Path) -> Result<Binding, OptionsError> {
        match self {
            Self::Image(image) => Ok(Binding::new(socket, image.parse()?)),
            Self::Table(table) => Ok(table.binding(socket)?),
        }
    }
}

/// Where the bases of images may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BasesArgument {
    /// In the folder of the image that names them
    Beside,
    /// At any path and any URL
    Anywhere,
}

impl From<BasesArgument> for Bases {
    fn from(bases: BasesArgument) -> Self {
        match bases {
            BasesArgument::Beside => Self::Beside,
            BasesArgument::Anywhere => Self::Anywhere,
        }
    }
}

/// A day.
const MOST_STOP_SECONDS: u64 = 86_400;

/// The size of the disk cache.
const CACHE_BYTES: u64 = 10 << 30;

/// A value that the file has as text.
fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    text: D,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(text)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// A size, which the file has as text or as a number of bytes.
fn size<'de, D: Deserializer<'de>>(value: D) -> Result<Option<ByteSize>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a number of bytes, or a text such as \"10G\"")]
    enum Size {
        Bytes(u64),
        Text(String),
    }
    let text = match Size::deserialize(value)? {
        Size::Bytes(bytes) => return Ok(Some(ByteSize(bytes))),
        Size::Text(text) => text,
    };
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// Why the file with the options is not used.
#[derive(Debug, thiserror::Error)]
#[error("the configuration {}", path.display())]
pub(super) struct ConfigError {
    path: PathBuf,
    #[source]
    source: Box<dyn std::error::Error>,
}

/// A text that has no number where one is needed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0:?} is not {1}")]
pub(super) struct NotA(String, &'static str);

/// Why options cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) enum OptionsError {
    /// A value is out of bounds.
    Value(#[from] NotA),
    /// No image can be there.
    Image(#[from] ParseLocationError),
    /// A table is no binding.
    Table(#[from] BindingTableError),
}

impl Settings {
    /// Reads a file.
    pub(super) fn load(path: &Path) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError {
            path: path.into(),
            source,
        };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.into()))?;
        Self::parse(&text).map_err(|error| failed(error.into()))
    }

    /// Reads a file's text.
    pub(super) fn parse(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }

    /// These options, and `other`'s where these have none.
    pub(super) fn or(&self, other: Self) -> Self {
        let mine = self.clone();
        Self {
            working_set: mine.working_set.or(other.working_set),
            working_set_file: mine.working_set_file.or(other.working_set_file),
            working_set_dir: mine.working_set_dir.or(other.working_set_dir),
            clients_record: mine.clients_record || other.clients_record,
            any_length: mine.any_length || other.any_length,
            bases: mine.bases.or(other.bases),
            max_index: mine.max_index.or(other.max_index),
            prefetch: mine.prefetch.or(other.prefetch),
            fault_around: mine.fault_around.or(other.fault_around),
            metrics: mine.metrics.or(other.metrics),
            on_failure: mine.on_failure.or(other.on_failure),
            socket_mode: mine.socket_mode.or(other.socket_mode),
            socket_owner: mine.socket_owner.or(other.socket_owner),
            cache: mine.cache.or(other.cache),
            cache_size: mine.cache_size.or(other.cache_size),
            state: mine.state.or(other.state),
            control: mine.control.or(other.control),
            max_vms: mine.max_vms.or(other.max_vms),
            max_vms_per_user: mine.max_vms_per_user.or(other.max_vms_per_user),
            stop_limit: mine.stop_limit.or(other.stop_limit),
            once: mine.once || other.once,
            log: mine.log.or(other.log),
            seccomp: mine.seccomp.or(other.seccomp),
            sockets: other.sockets,
        }
    }

    /// What a running server does not take from these options, in place of `before`.
    pub(super) fn needs_restart(&self, before: &Self) -> Vec<&'static str> {
        let size = |settings: &Self| settings.cache_size.map(|size| size.0);
        let changed = [
            ("metrics", self.metrics != before.metrics),
            ("state", self.state != before.state),
            ("control", self.control != before.control),
            ("seccomp", self.seccomp != before.seccomp),
            ("log", self.log != before.log),
            ("stop-limit", self.stop_limit != before.stop_limit),
            (
                "socket-mode (of open sockets)",
                self.socket_mode != before.socket_mode,
            ),
            (
                "socket-owner (of open sockets)",
                self.socket_owner != before.socket_owner,
            ),
            ("cache (of open images)", self.cache != before.cache),
            ("cache-size (of open images)", size(self) != size(before)),
        ];
        let changed = changed.into_iter().filter(|(_, is_changed)| *is_changed);
        changed.map(|(name, _)| name).collect()
    }

    /// Whether the server's system calls are filtered.
    pub(super) fn seccomp(&self) -> SeccompMode {
        match self.seccomp.unwrap_or(Filter::On) {
            Filter::On => SeccompMode::On,
            Filter::Log => SeccompMode::Log,
            Filter::Off => SeccompMode::Off,
        }
    }

    /// The options, with these bindings before those of the table `sockets`.
    pub(super) fn options(&self, bindings: &[Binding]) -> Result<Options, OptionsError> {
        let mut options = self.unbound();
        options.bindings.extend_from_slice(bindings);
        for (socket, image) in &self.sockets {
            // The command line precedes the file.
            if bindings.iter().any(|binding| binding.socket == *socket) {
                continue;
            }
            options.bindings.push(Binding {
                // One of many: the others do not wait for it.
                is_required: false,
                ..image.binding(socket)?
            });
        }
        check(&options)?;
        if let (None, Some(size)) = (&self.cache, self.cache_size) {
            let what = "the size of a cache: there is no --cache";
            return Err(NotA(size.to_string(), what).into());
        }
        Ok(options)
    }

    /// The options without bindings.
    fn unbound(&self) -> Options {
        let default = Options::default();
        Options {
            may_lack_bindings: self.control.is_some(),
            working_set: self
                .working_set
                .map_or(default.working_set, WorkingSetMode::from),
            working_set_file: self.working_set_file.clone(),
            working_set_directory: self.working_set_dir.clone(),
            clients_record: self.clients_record,
            any_length: self.any_length,
            prefetch: matches!(self.prefetch, None | Some(Switch::On)),
            on_failure: self.on_failure.map_or(default.on_failure, OnFailure::from),
            fault_around_pages: self.fault_around.unwrap_or(default.fault_around_pages),
            socket_mode: self.socket_mode.map_or(default.socket_mode, |mode| mode.0),
            socket_owner: self.socket_owner.map(|owner| (owner.0, owner.1)),
            max_vms: self.max_vms.unwrap_or(default.max_vms),
            max_vms_per_user: self
                .max_vms_per_user
                .or(self.max_vms)
                .unwrap_or(default.max_vms_per_user),
            stop_limit: self
                .stop_limit
                .map_or(default.stop_limit, Duration::from_secs),
            once: self.once,
            images: OpenOptions {
                cache: self.cache.as_ref().map(|directory| CacheOptions {
                    directory: directory.clone(),
                    bytes: self.cache_size.map_or(CACHE_BYTES, |size| size.0),
                }),
                bases: self.bases.map_or(default.images.bases, Bases::from),
                index_bytes: self
                    .max_index
                    .map_or(default.images.index_bytes, |size| size.0),
                ..default.images
            },
            ..default
        }
    }
}

fn check(options: &Options) -> Result<(), NotA> {
    let around = options.fault_around_pages;
    if !around.is_power_of_two() || around > 512 {
        let what = "a power of two up to 512, as --fault-around needs";
        return Err(NotA(around.to_string(), what));
    }
    let limits = [
        (
            options.max_vms,
            "a number of VMs that a server could serve: --max-vms is 1 at least",
        ),
        (
            options.max_vms_per_user,
            "a number of VMs that a user could have: --max-vms-per-user is 1 at least",
        ),
    ];
    if let Some((_, what)) = limits.into_iter().find(|(limit, _)| *limit == 0) {
        return Err(NotA("0".to_owned(), what));
    }
    let seconds = options.stop_limit.as_secs();
    if seconds > MOST_STOP_SECONDS {
        let what = "a number of seconds up to a day, as --stop-limit needs";
        return Err(NotA(seconds.to_string(), what));
    }
    let mut images: Vec<_> = options
        .bindings
        .iter()
        .map(|binding| &binding.image)
        .collect();
    images.sort_by_key(ToString::to_string);
    images.dedup();
    if let (Some(file), [_, _, ..]) = (&options.working_set_file, &images[..]) {
        let what = "the working set of several images: --working-set-file is for one, and --working-set-dir for any number";
        return Err(NotA(file.display().to_string(), what));
    }
    Ok(())
}
