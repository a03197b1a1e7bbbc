//! `pagetide serve`.

mod settings;

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use pagetide_base::raise_descriptors;
use pagetide_base::units::ByteSize;
use pagetide_serve::control::channel::ControlSocket;
use pagetide_serve::{
    Binding, DESCRIPTORS_OF_A_VM, DescriptorStore, Exporter, Inherited, Metrics, Options, Seccomp,
    Server, StartError, StateOptions, Stopper,
};
use pagetide_sources::Location;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::failure::Failure;
use crate::log::Queue;
use crate::print;
use crate::service_manager::{News, tell, tell_surely};
use settings::Settings;
pub(crate) use settings::{BasesArgument, Failing, LogFormat, Switch, WorkingSet};

/// How long the end waits for the terminal to take the line away.
const TERMINAL: Duration = Duration::from_millis(500);

/// How long the end takes beside the drain of guests: what is missing after the drain is poisoned.
const END: Duration = Duration::from_millis(800);

/// How long the service manager waits after the drain, at least: pages that are missing then are poisoned, however many.
const PATIENCE: Duration = Duration::from_millis(6500);

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

  A host whose agent says what is served (pagetide ctl --help):
    pagetide serve --control /run/pagetide/control.sock

  A fleet's host, whose images change at SIGHUP:
    pagetide serve --config /etc/pagetide/serve.toml
    pagetide serve --config /etc/pagetide/serve.toml --check      # is anything wrong?
    # on-failure = \"kill\"
    # metrics = \"127.0.0.1:9409\"
    # [sockets]
    # \"/run/pagetide/web.sock\" = \"/snapshots/web.mem\"

Exit status: 0 after SIGTERM or SIGINT, or with --once when the last VM has gone; 1 if serving failed; \
2 if the command line or the file makes no sense, or an image or a socket of the command line cannot be \
opened. Those of the file are tried again until they can; and so are those of the command line where a \
former server has left VMs (--state), unless --once is given.";

#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    /// A Unix socket to listen at, and the image of the VMs that connect to it: a raw memory file, as
    /// Firecracker's snapshots have; a Pagetide image (pagetide image create); or the URL of either
    /// (file://, s3://, gs://, az://, http://, https://)
    #[arg(value_name = "SOCKET=IMAGE", required_unless_present_any = ["config", "control"])]
    bindings: Vec<Binding>,

    /// Read options from this TOML file, and again at SIGHUP: the long options without their dashes as
    /// keys, and the images in a table [sockets]. Options of the command line precede the file's
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Look for all that is wrong with the options, images and sockets, and end: with exit status 0 and a line on standard
    /// output, or with 2 and a line on standard error for each fault. Serves nothing, and disturbs no server that runs
    #[arg(long)]
    check: bool,

    #[command(flatten)]
    settings: Settings,
}

impl ServeArguments {
    /// How messages are written. An error of the file is reported later, when all options are read.
    pub(crate) fn log(&self) -> LogFormat {
        let file = || Settings::load(self.config.as_deref()?).ok()?.log;
        self.settings.log.or_else(file).unwrap_or(LogFormat::Text)
    }

    /// The options of the command line and of the file; and both together, for what only the start uses.
    fn options(&self) -> Result<(Options, Settings), Failure> {
        let settings = match &self.config {
            None => self.settings.clone(),
            Some(path) => {
                let file = Settings::load(path).map_err(Failure::bad_input)?;
                self.settings.or(file)
            }
        };
        let options = settings.options(&self.bindings);
        let mut options = options.map_err(Failure::bad_input)?;
        options.porter = porter().map_err(Failure::failed)?;
        if let Some(directory) = &settings.state {
            options.state = Some(state(directory).map_err(Failure::failed)?);
        }
        Ok((options, settings))
    }
}

/// The porter is this program, with another verb.
fn porter() -> io::Result<Vec<OsString>> {
    Ok(vec![std::env::current_exe()?.into(), "porter".into()])
}

/// The porter's process.
pub(crate) fn receive_descriptors() -> Result<(), Failure> {
    pagetide_serve::receive_descriptors().map_err(Failure::failed)
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
    // It holds four descriptors of each VM.
    let _ = raise_descriptors();
    pagetide_serve::keep(&arguments.directory).map_err(Failure::failed)
}

/// Serves until a signal, or with --once until the last VM has gone.
pub(crate) fn run(
    arguments: &ServeArguments,
    line: &ProgressBar,
    log: &Queue,
) -> Result<ExitCode, Failure> {
    let (options, settings) = arguments.options()?;
    if arguments.check {
        return check(&options);
    }
    // A service manager's soft limit is 1024, for programs that use select().
    let descriptors = raise_descriptors();
    let (max_vms, stop_limit) = (options.max_vms, options.stop_limit);
    // A write to a memfd for which the kernel has no page is then an error of one VM.
    pagetide_kvm::poison::install_sigbus_handler().map_err(Failure::failed)?;
    let is_starting = Arc::new(AtomicBool::new(true));
    for signal in [SIGTERM, SIGINT] {
        // A store may be silent while an image is opened, and no VM is served yet.
        signal_hook::flag::register_conditional_shutdown(signal, 0, Arc::clone(&is_starting))
            .map_err(Failure::failed)?;
    }
    // Later, a signal ends the server and not the process.
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(Failure::failed)?;
    let mut server = Server::bind_with(options, inherited()).map_err(|error| match error {
        StartError::Descriptor(_) => Failure::failed(error),
        error => Failure::bad_input(error),
    })?;
    is_starting.store(false, Ordering::Release);
    server.metrics().watch_log(log.dropped());
    let has_vms = server.has_vms();
    let exporter = settings.metrics.as_ref().map(|address| {
        let started = Exporter::start(address, server.metrics());
        beside("metrics", started, has_vms)
    });
    let exporter = exporter.transpose()?.flatten();
    if let Some(address) = exporter.as_ref().and_then(Exporter::address) {
        tracing::info!(%address, "metrics");
    }
    let control = settings.control.as_ref().map(|path| {
        let controller = server.controller();
        let started = ControlSocket::start(path, move |request, reply| {
            controller.handle(request, reply);
        });
        beside("a control socket", started, has_vms)
    });
    let _control = control.transpose()?.flatten();
    // An image that is added later may be an object.
    let network = server.uses_network() || settings.control.is_some();
    let seccomp = Seccomp::new(settings.seccomp(), network);
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
    warn_of_few_descriptors(descriptors.unwrap_or(u64::MAX), max_vms);
    let stopper = server.stopper();
    server.on_settled(move || {
        let stopper = stopper.clone();
        tell_surely(News::Ready, move || stopper.is_stopping());
    });
    let handle = signals.handle();
    let showing = show(server.metrics(), server.stopper(), line);
    let (stopper, metrics) = (server.stopper(), server.metrics());
    let result = thread::scope(|scope| {
        let obeying = thread::Builder::new().name("pt-signals".to_owned());
        let obey = || {
            obey_signals(
                signals,
                arguments,
                &settings,
                (&stopper, stop_limit),
                (&metrics, log),
                seccomp,
            );
        };
        if let Err(error) = obeying.spawn_scoped(scope, obey) {
            server.stopper().stop();
            return Err(Failure::failed(error));
        }
        // Also after a panic: the scope waits for the thread that waits for signals.
        let _closes = Closes(handle);
        server.run().map_err(Failure::failed)
    });
    if let Some(cleared) = showing {
        // A terminal that takes nothing does not hold the end up.
        let _ = cleared.recv_timeout(TERMINAL);
    }
    result?;
    Ok(ExitCode::SUCCESS)
}

/// Says at once what VMs would find out one by one, when the host is full.
fn warn_of_few_descriptors(descriptors: u64, max_vms: usize) {
    let vms = descriptors / DESCRIPTORS_OF_A_VM;
    if vms < max_vms as u64 {
        tracing::warn!(
            descriptors,
            vms,
            max_vms,
            "the limit of descriptors is enough for fewer VMs than --max-vms: raise it (ulimit -n, LimitNOFILE=), or lower \
             --max-vms"
        );
    }
}

/// What was started beside the server. If it was not, the server does not start either, unless a former server has left VMs:
/// they need nothing of this, and are asleep.
fn beside<T>(
    what: &str,
    started: Result<T, impl std::error::Error + 'static>,
    has_vms: bool,
) -> Result<Option<T>, Failure> {
    match started {
        Ok(started) => Ok(Some(started)),
        Err(error) if has_vms => {
            let error = &error as &dyn std::error::Error;
            tracing::error!(
                error,
                "VMs of a former server wait: the server runs without {what} until its next start"
            );
            Ok(None)
        }
        Err(error) => Err(Failure::bad_input(error)),
    }
}

/// Tells what is wrong with the options, all of it.
fn check(options: &Options) -> Result<ExitCode, Failure> {
    let mut ended = ExitCode::SUCCESS;
    for error in pagetide_serve::check(options) {
        ended = Failure::bad_input(error).tell();
    }
    if ended == ExitCode::SUCCESS {
        let sockets = options.bindings.len();
        print(&format!(
            "nothing is wrong, sockets that can be served: {sockets}\n"
        ))?;
    }
    Ok(ended)
}

/// Ends the wait for signals.
struct Closes(Handle);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn obey_signals(
    mut signals: Signals,
    arguments: &ServeArguments,
    started: &Settings,
    (stopper, stop_limit): (&Stopper, Duration),
    (metrics, log): (&Metrics, &Queue),
    seccomp: Seccomp,
) {
    for signal in signals.forever() {
        if signal != SIGHUP {
            if !stopper.is_stopping() {
                end_in_time(stop_limit + END, metrics.clone(), log.clone());
            }
            // First what was asked for, and then the news of it.
            stopper.stop();
            tracing::info!(signal, "ending");
            tell_surely(News::Stopping(stop_limit + PATIENCE), || false);
            continue;
        }
        tell(News::Reloading);
        match arguments.options() {
            Ok((options, _)) if !seccomp.allows_network() && has_url(&options) => {
                tracing::error!(
                    "SIGHUP: the options stay as they are: the filter of system calls has no network, since no \
                     image was at a URL when the server started; restart it"
                );
                tell(News::Ready);
            }
            Ok((options, settings)) => {
                if arguments.config.is_none() {
                    tracing::info!(
                        "SIGHUP: there is no file of options (--config), and they stay as they are"
                    );
                }
                let names = settings.needs_restart(started);
                if !names.is_empty() {
                    tracing::warn!(
                        options = names.join(", "),
                        "SIGHUP: changes of these options need a restart of the server"
                    );
                }
                stopper.reload(options);
            }
            Err(failure) => {
                tracing::error!(error = %failure, "SIGHUP: the options stay as they are");
                tell(News::Ready);
            }
        }
    }
}

/// Ends the process if the server has not ended in time, whatever holds it up. Not before the last VM has ended: a missing page that is not poisoned
/// yet could read as zeroes.
fn end_in_time(end: Duration, metrics: Metrics, log: Queue) {
    let wait = move || {
        thread::sleep(end);
        while metrics.totals().vms > 0 {
            thread::sleep(Duration::from_millis(50));
        }
        tracing::error!("the server had not ended in time: the process ends without it");
        log.flush();
        std::process::exit(0);
    };
    let started = thread::Builder::new().name("pt-end".into()).spawn(wait);
    if let Err(error) = started {
        tracing::warn!(%error, "nothing limits the time in which the server ends");
    }
}

fn has_url(options: &Options) -> bool {
    let is_url = |binding: &Binding| matches!(binding.image, Location::Url(_));
    options.bindings.iter().any(is_url)
}

/// What systemd has given to this process: listening sockets, and the descriptors of VMs that a former server has had
/// stored.
fn inherited() -> Inherited {
    let mut inherited = Inherited {
        listeners: Vec::new(),
        store: descriptor_store(),
    };
    let descriptors = match sd_notify::listen_fds_with_names() {
        Ok(descriptors) => descriptors,
        Err(error) => {
            tracing::warn!(%error, "what the service manager has opened is not used");
            return inherited;
        }
    };
    for (descriptor, name) in descriptors {
        // SAFETY: from_raw_fd requires an open descriptor without another owner: systemd has opened it for this process
        // (LISTEN_PID), and nothing else in this program looks at LISTEN_FDS.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        match &mut inherited.store {
            Some(store) if DescriptorStore::is_of_a_vm(&name) => store.take_back(&name, descriptor),
            None if DescriptorStore::is_of_a_vm(&name) => {
                tracing::error!(
                    name,
                    "a VM of a former server sleeps on: the unit gives no store of descriptors any more"
                );
                // Closed, it would let the guest read zeroes.
                let _ = descriptor.into_raw_fd();
            }
            _ => inherited.listeners.push(descriptor.into()),
        }
    }
    inherited
}

/// Systemd's store, if it has room for the descriptors of this service (`FileDescriptorStoreMax=`).
fn descriptor_store() -> Option<DescriptorStore> {
    let notify = std::env::var_os("NOTIFY_SOCKET")?;
    let room = std::env::var("FDSTORE").ok()?.parse().ok()?;
    match DescriptorStore::new(&notify, room) {
        Ok(store) => Some(store),
        Err(error) => {
            tracing::warn!(%error, "the service manager's store of descriptors is not used");
            None
        }
    }
}

/// Shows one line on a terminal, which is refreshed while the server runs. What is returned has a message when the line
/// was cleared.
fn show(metrics: Metrics, stopper: Stopper, line: &ProgressBar) -> Option<mpsc::Receiver<()>> {
    if line.is_hidden() {
        return None;
    }
    let line = line.clone();
    let (send, cleared) = mpsc::channel();
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
        line.finish_and_clear();
        let _ = send.send(());
    };
    let started = thread::Builder::new()
        .name("pt-progress".into())
        .spawn(refresh);
    started.ok().map(|_| cleared)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_vms_do_not_need_keeps_none_asleep() {
        let failed = || Err::<(), _>(io::Error::other("the address is in use"));
        assert!(matches!(beside("metrics", failed(), true), Ok(None)));
        assert!(beside("metrics", failed(), false).is_err());
        let started = Ok::<_, io::Error>(1);
        assert!(matches!(beside("metrics", started, false), Ok(Some(1))));
    }
}
