//! `pagetide serve`.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use pagetide_serve::{
    Binding, Exporter, Metrics, MetricsAddress, OnFailure, Options, Server, StartError, Stopper,
    WorkingSetMode,
};
use signal_hook::consts::{SIGINT, SIGTERM};
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

Exit status: 0 after SIGTERM or SIGINT, or with --once when the last VM has gone; 1 if serving failed;
2 if the command line makes no sense, an image cannot be read or a socket cannot be bound.";

/// What is done with working sets.
#[derive(Clone, Copy, Debug, ValueEnum)]
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

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Switch {
    /// Fetch all missing pages while the guest runs; faults come first
    On,
    /// Fetch only what is touched, and the working set
    Off,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Failing {
    /// The guest's thread waits, and the server keeps trying
    Stall,
    /// The VMM's process is killed
    Kill,
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
    /// Firecracker's snapshots have
    #[arg(value_name = "SOCKET=IMAGE", required = true)]
    bindings: Vec<Binding>,

    /// Whether the pages that guests touch are recorded, and fetched ahead of the next guest
    #[arg(long, value_enum, value_name = "MODE", default_value = "auto")]
    working_set: WorkingSet,

    /// The file of the working set, if there is one image [default: IMAGE.working-set]
    #[arg(long, value_name = "FILE")]
    working_set_file: Option<PathBuf>,

    /// Whether all missing pages are fetched while the guest runs. While a working set is recorded, this
    /// begins when the guest has touched no missing page for a second
    #[arg(long, value_enum, value_name = "SWITCH", default_value = "on")]
    prefetch: Switch,

    /// The pages of 4 KiB that one fault installs at most: a power of two up to 512
    #[arg(long, value_name = "PAGES", default_value_t = 1)]
    fault_around: u64,

    /// Serve metrics in Prometheus' format at this IP address and port, or at a Unix socket
    #[arg(long, value_name = "ADDRESS:PORT|unix:PATH")]
    metrics: Option<MetricsAddress>,

    /// What happens to a VM whose content cannot be read
    #[arg(long, value_enum, value_name = "POLICY", default_value = "stall")]
    on_failure: Failing,

    /// End when the last VM has gone, with exit status 0
    #[arg(long)]
    once: bool,

    /// Permissions of the sockets, in octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = octal)]
    socket_mode: u32,

    /// Owner of the sockets, as for a VMM in a jailer
    #[arg(long, value_name = "UID:GID", value_parser = owner)]
    socket_owner: Option<(u32, u32)>,

    /// VMs at one time at most
    #[arg(long, value_name = "COUNT", default_value_t = Options::default().max_vms)]
    max_vms: usize,

    /// How messages are written on standard error; RUST_LOG chooses which
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub(crate) log: LogFormat,
}

/// A text that has no number where one is needed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0:?} is not {1}")]
struct NotA(String, &'static str);

fn octal(text: &str) -> Result<u32, NotA> {
    let mode = u32::from_str_radix(text, 8);
    let mode = mode.ok().filter(|&mode| mode <= 0o777);
    mode.ok_or_else(|| NotA(text.into(), "a mode such as 660"))
}

fn owner(text: &str) -> Result<(u32, u32), NotA> {
    let parsed = text
        .split_once(':')
        .and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)));
    parsed.ok_or_else(|| NotA(text.into(), "UID:GID, two numbers"))
}

impl ServeArguments {
    fn options(&self) -> Options {
        Options {
            bindings: self.bindings.clone(),
            working_set: match self.working_set {
                WorkingSet::Auto => WorkingSetMode::Auto,
                WorkingSet::Record => WorkingSetMode::Record,
                WorkingSet::Replay => WorkingSetMode::Replay,
                WorkingSet::Off => WorkingSetMode::Off,
            },
            working_set_file: self.working_set_file.clone(),
            prefetch: matches!(self.prefetch, Switch::On),
            on_failure: match self.on_failure {
                Failing::Stall => OnFailure::Stall,
                Failing::Kill => OnFailure::Kill,
            },
            once: self.once,
            fault_around_pages: self.fault_around,
            socket_mode: self.socket_mode,
            socket_owner: self.socket_owner,
            max_vms: self.max_vms,
            ..Options::default()
        }
    }

    fn check(&self) -> Result<(), NotA> {
        let around = self.fault_around;
        if !around.is_power_of_two() || around > 512 {
            let what = "a power of two up to 512, as --fault-around needs";
            return Err(NotA(around.to_string(), what));
        }
        let mut images: Vec<_> = self.bindings.iter().map(|binding| &binding.image).collect();
        images.sort_by_key(ToString::to_string);
        images.dedup();
        if let (Some(file), [_, _, ..]) = (&self.working_set_file, &images[..]) {
            let what = "the working set of several images: --working-set-file is for one";
            return Err(NotA(file.display().to_string(), what));
        }
        Ok(())
    }
}

/// Serves until a signal, or with --once until the last VM has gone.
pub(crate) fn run(arguments: &ServeArguments, line: &ProgressBar) -> Result<ExitCode, Failure> {
    arguments.check().map_err(Failure::bad_input)?;
    // From here on, a signal ends the server and not the process.
    let signals = Signals::new([SIGTERM, SIGINT]).map_err(Failure::failed)?;
    let server = Server::bind(arguments.options()).map_err(|error| match error {
        StartError::Descriptor(_) | StartError::Readers { .. } => Failure::failed(error),
        error => Failure::bad_input(error),
    })?;
    let exporter = match &arguments.metrics {
        None => None,
        Some(address) => {
            let started = Exporter::start(address, server.metrics());
            Some(started.map_err(Failure::bad_input)?)
        }
    };
    if let Some(address) = exporter.as_ref().and_then(Exporter::address) {
        tracing::info!(%address, "metrics");
    }
    for Binding { socket, image } in &arguments.bindings {
        tracing::info!(socket = %socket.display(), %image, "listening");
    }
    let handle = signals.handle();
    let listening = listen_for_signals(signals, server.stopper());
    let showing = show(server.metrics(), server.stopper(), line);
    let result = server.run();
    handle.close();
    for thread in [listening, showing].into_iter().flatten() {
        // Neither panics.
        let _ = thread.join();
    }
    line.finish_and_clear();
    result.map_err(Failure::failed)?;
    Ok(ExitCode::SUCCESS)
}

fn listen_for_signals(mut signals: Signals, stopper: Stopper) -> Option<thread::JoinHandle<()>> {
    let listen = move || {
        for signal in signals.forever() {
            tracing::info!(signal, "ending");
            stopper.stop();
        }
    };
    thread::Builder::new()
        .name("pt-signals".into())
        .spawn(listen)
        .ok()
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
