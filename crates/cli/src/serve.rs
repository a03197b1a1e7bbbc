//! `pagetide serve`.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::os::fd::FromRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use pagetide_bench::units::ByteSize;
use pagetide_serve::{
    Binding, Exporter, Metrics, MetricsAddress, OnFailure, Options, Seccomp, SeccompError,
    SeccompMode, Server, StartError, StateOptions, Stopper, WorkingSetMode,
};
use pagetide_sources::{CacheOptions, Location, OpenOptions};
use sd_notify::NotifyState;
use serde::{Deserialize, Deserializer};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::fmt::MakeWriter;

use crate::failure::Failure;

pub(crate) const EXAMPLES: &str = "\
Examples:
  Restore Firecracker VMs from one snapshot, any number at a time:
    pagetide serve /run/pagetide/web.sock=/snapshots/web.mem
    # then, for each VM: PUT /snapshot/load with
    #   \"mem_backend\": {\"backend_type\": \"Uffd\", \"backend_path\": \"/run/pagetide/web.sock\"}

  Two snapshots, metrics for Prometheus, and VMMs that are killed rather than left waiting:
    pagetide serve a.sock=a.mem b.sock=b.mem --metrics 127.0.0.1:9409 --on-failure kill

  Serve one VM, record what it touches, and end with it:
    pagetide serve web.sock=web.mem --working-set record --once

  A fleet's host, whose images change at SIGHUP:
    pagetide serve --config /etc/pagetide/serve.toml
    # on-failure = \"kill\"
    # metrics = \"127.0.0.1:9409\"
    # [sockets]
    # \"/run/pagetide/web.sock\" = \"/snapshots/web.mem\"

Exit status: 0 after SIGTERM or SIGINT, or with --once when the last VM has gone; 1 if serving failed;
2 if the command line or the file makes no sense, an image cannot be read or a socket cannot be bound.";

/// What is done with working sets.
#[derive(Clone, Copy, Debug, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum WorkingSet {
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
enum Switch {
    /// Fetch all missing pages while the guest runs; faults come first
    On,
    /// Fetch only what is touched, and the working set
    Off,
}

#[derive(Clone, Copy, Debug, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Failing {
    /// The guest's thread waits, and the server keeps trying
    Stall,
    /// The VMM's process is killed
    Kill,
}

/// What happens to system calls that the server does not need.
#[derive(Clone, Copy, Debug, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Filter {
    /// They fail; those that only foreign code makes, such as execve, end the server
    On,
    /// The kernel logs and makes them
    Log,
    /// The kernel makes them
    Off,
}

/// How messages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    /// A Unix socket to listen at, and the image of the VMs that connect to it: a raw memory file, as
    /// Firecracker's snapshots have; a Pagetide image (pagetide image create); or the URL of either
    /// (file://, s3://, gs://, az://, http://, https://)
    #[arg(value_name = "SOCKET=IMAGE", required_unless_present = "config")]
    bindings: Vec<Binding>,

    /// Read options from this TOML file, and again at SIGHUP: the long options without their dashes as
    /// keys, and the images in a table [sockets]. Options of the command line precede the file's
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(flatten)]
    settings: Settings,

    /// End when the last VM has gone, with exit status 0
    #[arg(long)]
    once: bool,

    /// How messages are written on standard error; RUST_LOG chooses which
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub(crate) log: LogFormat,
}

/// The options that the command line and the file have in common.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
struct Settings {
    /// Whether the pages that guests touch are recorded, and fetched ahead of the next guest [default:
    /// auto]
    #[arg(long, value_enum, value_name = "MODE")]
    working_set: Option<WorkingSet>,

    /// The file of the working set, if there is one image [default: IMAGE.working-set]
    #[arg(long, value_name = "FILE")]
    working_set_file: Option<PathBuf>,

    /// Whether all missing pages are fetched while the guest runs. While a working set is recorded, this
    /// begins when the guest has touched no missing page for a second [default: on]
    #[arg(long, value_enum, value_name = "SWITCH")]
    prefetch: Option<Switch>,

    /// The pages of 4 KiB that one fault installs at most: a power of two up to 512 [default: 1]
    #[arg(long, value_name = "PAGES")]
    fault_around: Option<u64>,

    /// Serve metrics in Prometheus' format at this IP address and port, or at a Unix socket
    #[arg(long, value_name = "ADDRESS:PORT|unix:PATH")]
    #[serde(deserialize_with = "from_text")]
    metrics: Option<MetricsAddress>,

    /// What happens to a VM whose content cannot be read [default: stall]
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
    #[serde(deserialize_with = "from_text")]
    cache_size: Option<ByteSize>,

    /// Keep VMs for a successor in this directory: after SIGTERM or `kill -9`, a server that starts with the
    /// same directory goes on with them. Until then, guests that touch missing pages wait
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,

    /// VMs at one time at most [default: 4096]
    #[arg(long, value_name = "COUNT")]
    max_vms: Option<usize>,

    /// What happens to system calls that the server does not need, once it listens (seccomp) [default: on,
    /// where the kernel has seccomp]
    #[arg(long, value_enum, value_name = "ACTION")]
    seccomp: Option<Filter>,

    /// The images: SOCKET = IMAGE
    #[arg(skip)]
    sockets: BTreeMap<PathBuf, String>,
}

/// The size of the disk cache.
const CACHE_BYTES: u64 = 10 << 30;

/// A value that the file has as text.
fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    text: D,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(text)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// Permissions of a socket.
#[derive(Clone, Copy, Debug)]
struct SocketMode(u32);

impl FromStr for SocketMode {
    type Err = NotA;

    fn from_str(text: &str) -> Result<Self, NotA> {
        let mode = u32::from_str_radix(text, 8);
        let mode = mode.ok().filter(|&mode| mode <= 0o777);
        mode.map(Self)
            .ok_or_else(|| NotA(text.into(), "a mode such as 660"))
    }
}

/// The owner of a socket: user and group.
#[derive(Clone, Copy, Debug)]
struct SocketOwner(u32, u32);

impl FromStr for SocketOwner {
    type Err = NotA;

    fn from_str(text: &str) -> Result<Self, NotA> {
        let parsed = text
            .split_once(':')
            .and_then(|(uid, gid)| Some(Self(uid.parse().ok()?, gid.parse().ok()?)));
        parsed.ok_or_else(|| NotA(text.into(), "UID:GID, two numbers"))
    }
}

/// Why the file with the options is not used.
#[derive(Debug, thiserror::Error)]
#[error("the configuration {}", path.display())]
struct ConfigError {
    path: PathBuf,
    #[source]
    source: Box<dyn std::error::Error>,
}

/// A text that has no number where one is needed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0:?} is not {1}")]
struct NotA(String, &'static str);

impl Settings {
    /// Reads a file.
    fn load(path: &Path) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError {
            path: path.into(),
            source,
        };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.into()))?;
        toml::from_str(&text).map_err(|error| failed(error.into()))
    }

    /// These options, and `other`'s where these have none.
    fn or(&self, other: Self) -> Self {
        let mine = self.clone();
        Self {
            working_set: mine.working_set.or(other.working_set),
            working_set_file: mine.working_set_file.or(other.working_set_file),
            prefetch: mine.prefetch.or(other.prefetch),
            fault_around: mine.fault_around.or(other.fault_around),
            metrics: mine.metrics.or(other.metrics),
            on_failure: mine.on_failure.or(other.on_failure),
            socket_mode: mine.socket_mode.or(other.socket_mode),
            socket_owner: mine.socket_owner.or(other.socket_owner),
            cache: mine.cache.or(other.cache),
            cache_size: mine.cache_size.or(other.cache_size),
            state: mine.state.or(other.state),
            max_vms: mine.max_vms.or(other.max_vms),
            seccomp: mine.seccomp.or(other.seccomp),
            sockets: other.sockets,
        }
    }

    fn seccomp(&self) -> SeccompMode {
        match self.seccomp.unwrap_or(Filter::On) {
            Filter::On => SeccompMode::On,
            Filter::Log => SeccompMode::Log,
            Filter::Off => SeccompMode::Off,
        }
    }

    fn options(&self) -> Options {
        let default = Options::default();
        Options {
            working_set: match self.working_set.unwrap_or(WorkingSet::Auto) {
                WorkingSet::Auto => WorkingSetMode::Auto,
                WorkingSet::Record => WorkingSetMode::Record,
                WorkingSet::Replay => WorkingSetMode::Replay,
                WorkingSet::Off => WorkingSetMode::Off,
            },
            working_set_file: self.working_set_file.clone(),
            prefetch: matches!(self.prefetch, None | Some(Switch::On)),
            on_failure: match self.on_failure.unwrap_or(Failing::Stall) {
                Failing::Stall => OnFailure::Stall,
                Failing::Kill => OnFailure::Kill,
            },
            fault_around_pages: self.fault_around.unwrap_or(default.fault_around_pages),
            socket_mode: self.socket_mode.map_or(default.socket_mode, |mode| mode.0),
            socket_owner: self.socket_owner.map(|owner| (owner.0, owner.1)),
            max_vms: self.max_vms.unwrap_or(default.max_vms),
            images: OpenOptions {
                cache: self.cache.as_ref().map(|directory| CacheOptions {
                    directory: directory.clone(),
                    bytes: self.cache_size.map_or(CACHE_BYTES, |size| size.0),
                }),
                ..default.images
            },
            ..default
        }
    }
}

impl ServeArguments {
    /// The options of the command line and of the file; and both together, for what only the start uses.
    fn options(&self) -> Result<(Options, Settings), Failure> {
        let settings = match &self.config {
            None => self.settings.clone(),
            Some(path) => {
                let file = Settings::load(path).map_err(Failure::bad_input)?;
                self.settings.or(file)
            }
        };
        let mut options = settings.options();
        if let Some(directory) = &settings.state {
            options.state = Some(state(directory).map_err(Failure::failed)?);
        }
        options.once = self.once;
        options.bindings.clone_from(&self.bindings);
        for (socket, image) in &settings.sockets {
            options.bindings.push(Binding {
                socket: socket.clone(),
                image: image.parse().map_err(Failure::bad_input)?,
            });
        }
        check(&options).map_err(Failure::bad_input)?;
        if let (None, Some(size)) = (&settings.cache, settings.cache_size) {
            let what = "the size of a cache: there is no --cache";
            return Err(Failure::bad_input(NotA(size.to_string(), what)));
        }
        Ok((options, settings))
    }
}

/// The keeper is this program, with another verb.
fn state(directory: &Path) -> io::Result<StateOptions> {
    let program = std::env::current_exe()?;
    Ok(StateOptions {
        directory: directory.into(),
        keeper: vec![program.into(), "keep".into(), directory.into()],
    })
}

#[derive(Debug, Args)]
pub(crate) struct KeepArguments {
    /// The directory of the state
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// The keeper's process.
pub(crate) fn keep(arguments: &KeepArguments) -> Result<(), Failure> {
    pagetide_serve::keep(&arguments.directory).map_err(Failure::failed)
}

fn check(options: &Options) -> Result<(), NotA> {
    let around = options.fault_around_pages;
    if !around.is_power_of_two() || around > 512 {
        let what = "a power of two up to 512, as --fault-around needs";
        return Err(NotA(around.to_string(), what));
    }
    let mut images: Vec<_> = options
        .bindings
        .iter()
        .map(|binding| &binding.image)
        .collect();
    images.sort_by_key(ToString::to_string);
    images.dedup();
    if let (Some(file), [_, _, ..]) = (&options.working_set_file, &images[..]) {
        let what = "the working set of several images: --working-set-file is for one";
        return Err(NotA(file.display().to_string(), what));
    }
    Ok(())
}

/// Serves until a signal, or with --once until the last VM has gone.
pub(crate) fn run(arguments: &ServeArguments, line: &ProgressBar) -> Result<ExitCode, Failure> {
    let (options, settings) = arguments.options()?;
    // A write to a memfd for which the kernel has no page is then an error of one VM.
    pagetide_kvm::poison::install_sigbus_handler().map_err(Failure::failed)?;
    // From here on, a signal ends the server and not the process.
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(Failure::failed)?;
    let bindings = options.bindings.clone();
    let server = Server::bind_with(options, inherited()).map_err(|error| match error {
        StartError::Descriptor(_) | StartError::Readers { .. } => Failure::failed(error),
        error => Failure::bad_input(error),
    })?;
    let exporter = match &settings.metrics {
        None => None,
        Some(address) => {
            let started = Exporter::start(address, server.metrics());
            Some(started.map_err(Failure::bad_input)?)
        }
    };
    if let Some(address) = exporter.as_ref().and_then(Exporter::address) {
        tracing::info!(%address, "metrics");
    }
    for Binding { socket, image } in &bindings {
        tracing::info!(socket = %socket.display(), %image, "listening");
    }
    let seccomp = Seccomp::new(settings.seccomp(), server.uses_network());
    if let Err(error) = seccomp.confine_process() {
        // Who asked for a filter does not run without.
        if settings.seccomp.is_some() || !error.is_lack_of_support() {
            return Err(Failure::failed(error));
        }
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            "the server runs without a filter of its system calls"
        );
    }
    tell_service_manager(NotifyState::Ready);
    let handle = signals.handle();
    let showing = show(server.metrics(), server.stopper(), line);
    let stopper = server.stopper();
    let result = thread::scope(|scope| {
        scope.spawn(|| obey_signals(signals, arguments, &stopper, seccomp));
        let result = server.run();
        handle.close();
        result
    });
    if let Some(showing) = showing {
        // It does not panic.
        let _ = showing.join();
    }
    line.finish_and_clear();
    result.map_err(Failure::failed)?;
    Ok(ExitCode::SUCCESS)
}

fn obey_signals(
    mut signals: Signals,
    arguments: &ServeArguments,
    stopper: &Stopper,
    seccomp: Seccomp,
) {
    for signal in signals.forever() {
        if signal != SIGHUP {
            tracing::info!(signal, "ending");
            tell_service_manager(NotifyState::Stopping);
            stopper.stop();
            continue;
        }
        match arguments.options() {
            Ok((options, _)) if !seccomp.allows_network() && has_url(&options) => tracing::error!(
                "SIGHUP: the options stay as they are: the filter of system calls has no network, since no \
                 image was at a URL when the server started; restart it"
            ),
            Ok((options, _)) => stopper.reload(options),
            Err(failure) => {
                tracing::error!(error = %failure, "SIGHUP: the options stay as they are");
            }
        }
    }
}

fn has_url(options: &Options) -> bool {
    let is_url = |binding: &Binding| matches!(binding.image, Location::Url(_));
    options.bindings.iter().any(is_url)
}

/// Tells systemd, if it has started the process and asks to be told.
fn tell_service_manager(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager was not told");
    }
}

/// The listening sockets that systemd has opened.
fn inherited() -> Vec<UnixListener> {
    let descriptors = match sd_notify::listen_fds() {
        Ok(descriptors) => descriptors,
        Err(error) => {
            tracing::warn!(%error, "the service manager's sockets are not used");
            return Vec::new();
        }
    };
    let adopt = |descriptor| {
        // SAFETY: from_raw_fd requires an open descriptor without another owner: systemd has opened it
        // for this process (LISTEN_PID), and nothing else in this program looks at LISTEN_FDS.
        unsafe { UnixListener::from_raw_fd(descriptor) }
    };
    descriptors.map(adopt).collect()
}

/// Shows one line on a terminal, which is refreshed while the server runs.
fn show(metrics: Metrics, stopper: Stopper, line: &ProgressBar) -> Option<thread::JoinHandle<()>> {
    if line.is_hidden() {
        return None;
    }
    let line = line.clone();
    let refresh = move || {
        let (mut before, mut at) = (metrics.totals(), Instant::now());
        while !stopper.is_stopping() {
            thread::sleep(Duration::from_millis(250));
            let (now, seconds) = (metrics.totals(), at.elapsed().as_secs_f64());
            #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
            let rate = (now.faults - before.faults) as f64 / seconds;
            if seconds >= 1.0 {
                (before, at) = (now, Instant::now());
            }
            line.set_message(format!(
                "{} VMs ({} so far), {rate:.0} faults/s, {} pages ahead, {} stalls",
                now.vms, now.vms_accepted, now.pages_ahead, now.stalls
            ));
            line.tick();
        }
    };
    thread::Builder::new()
        .name("pt-progress".into())
        .spawn(refresh)
        .ok()
}

/// The line of [`show`]; hidden if standard error is no terminal.
pub(crate) fn line() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let line = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
        line.set_style(style);
    }
    line
}

/// Standard error, above the line.
#[derive(Clone)]
pub(crate) struct AboveLine(pub(crate) ProgressBar);

impl Write for AboveLine {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

impl MakeWriter<'_> for AboveLine {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
