//! `pagetide ctl`: what a running server is told at its control socket.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{StringValueParser, TypedValueParser};
use clap::{ArgGroup, Args, Subcommand};
use pagetide_base::units::ByteSize;
use pagetide_serve::control::channel::{AskError, ask};
use pagetide_serve::control::message::{Answer, Request, Socket, Status};
use pagetide_serve::{Binding, BindingTable, ParseBindingError, SocketMode, SocketOwner};

use crate::failure::Failure;
use crate::image::{json, lines};
use crate::print;
use crate::serve::{Failing, Switch, WorkingSet};

pub(crate) const EXAMPLES: &str = "\
Examples:
  A server that its host's agent tells what to serve:
    pagetide serve --control /run/pagetide/control.sock
    pagetide ctl --control /run/pagetide/control.sock add /run/pagetide/web.sock=/snapshots/web.mem

  What is served, and whether all is well:
    pagetide ctl --control /run/pagetide/control.sock list
    pagetide ctl --control /run/pagetide/control.sock status --json

  Before the host is restarted: no further VM, and those that run get all of their memory:
    pagetide ctl --control /run/pagetide/control.sock drain --all --timeout 600

Exit status: 0 when it is done; 1 if the server refuses it, or does not answer in time; 2 if the command line \
makes no sense, or no server can be asked.";

#[derive(Debug, Args)]
pub(crate) struct CtlArguments {
    /// The control socket: what `pagetide serve --control` of the server names. It answers root, and the server's user
    #[arg(long, value_name = "PATH")]
    control: PathBuf,

    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Serve an image at a socket, and end when VMs can connect
    ///
    /// If the image or the socket cannot be opened, nothing is added. What is there already with the same options is no
    /// error. The socket stays until it is removed or the server ends, also when the server reads its file again.
    Add(AddArguments),
    /// Close a socket. VMs that have connected are served as long as they run
    Remove(RemoveArguments),
    /// Show all sockets: image, state, VMs, and why one cannot be opened
    List(ShowArguments),
    /// Close a socket, give its VMs all memory that they lack, and end when none needs the server any more
    ///
    /// A socket of the file comes back when the server reads the file again. With --all the server serves nothing more until
    /// it is started again: `GET /ready` says so.
    Drain(DrainArguments),
    /// Show how the server is: whether it takes VMs, what is wrong, and counts
    Status(ShowArguments),
}

#[derive(Debug, Args)]
struct Waiting {
    /// How long the answer is waited for
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    timeout: u64,
}

#[derive(Debug, Args)]
struct AddArguments {
    /// A Unix socket to listen at, and the image of the VMs that connect to it: a file, or a URL
    #[arg(value_name = "SOCKET=IMAGE", value_parser = pair)]
    pair: Pair,

    /// The digest that the image must have; `pagetide image info` shows it
    #[arg(long, value_name = "DIGEST")]
    digest: Option<String>,

    /// The state file of the snapshot, which is replaced together with the image
    #[arg(long, value_name = "FILE", value_parser = path())]
    state_file: Option<PathBuf>,

    /// As for `pagetide serve`, for this socket [default: the server's]
    #[arg(long, value_enum, value_name = "MODE")]
    working_set: Option<WorkingSet>,

    /// The file of the working set of this socket's VMs
    #[arg(long, value_name = "FILE", value_parser = path())]
    working_set_file: Option<PathBuf>,

    /// As for `pagetide serve`, for this socket [default: the server's]
    #[arg(long, value_enum, value_name = "SWITCH")]
    prefetch: Option<Switch>,

    /// As for `pagetide serve`, for this socket [default: the server's]
    #[arg(long, value_enum, value_name = "POLICY")]
    on_failure: Option<Failing>,

    /// Permissions of the socket, in octal [default: the server's]
    #[arg(long, value_name = "MODE")]
    socket_mode: Option<SocketMode>,

    /// Owner of the socket [default: the server's]
    #[arg(long, value_name = "UID:GID")]
    socket_owner: Option<SocketOwner>,

    #[command(flatten)]
    waiting: Waiting,
}

#[derive(Debug, Args)]
struct RemoveArguments {
    /// The socket
    #[arg(value_name = "SOCKET", value_parser = path())]
    socket: PathBuf,

    #[command(flatten)]
    waiting: Waiting,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(false))]
struct DrainArguments {
    /// The socket
    #[arg(value_name = "SOCKET", group = "which", value_parser = path())]
    socket: Option<PathBuf>,

    /// All sockets
    #[arg(long, group = "which")]
    all: bool,

    #[command(flatten)]
    waiting: Waiting,
}

#[derive(Debug, Args)]
struct ShowArguments {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    waiting: Waiting,
}

/// A path that the server is told, in JSON: UTF-8.
fn path() -> impl TypedValueParser<Value = PathBuf> {
    StringValueParser::new().map(PathBuf::from)
}

/// `SOCKET=IMAGE`, as it was written.
#[derive(Clone, Debug)]
struct Pair {
    socket: PathBuf,
    image: String,
}

fn pair(text: &str) -> Result<Pair, ParseBindingError> {
    let Binding { socket, image, .. } = text.parse()?;
    // A path is the server's, which has another directory.
    let image = match &image {
        pagetide_sources::Location::Path(path) => absolute(path).display().to_string(),
        pagetide_sources::Location::Url(_) => text[socket.as_os_str().len() + 1..].to_owned(),
    };
    Ok(Pair {
        socket: absolute(&socket),
        image,
    })
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// What the server answers, which is no answer to the question.
#[derive(Debug, thiserror::Error)]
#[error("the server has answered another question: is it of another version?")]
struct OtherAnswer;

/// Asks the server, and prints its answer.
pub(crate) fn run(arguments: &CtlArguments) -> Result<(), Failure> {
    let (request, waiting, is_json) = match &arguments.verb {
        Verb::Add(add) => (add.request(), &add.waiting, false),
        Verb::Remove(remove) => (
            Request::Remove {
                socket: absolute(&remove.socket),
            },
            &remove.waiting,
            false,
        ),
        Verb::List(list) => (Request::List, &list.waiting, list.json),
        Verb::Drain(drain) => (
            Request::Drain {
                socket: drain.socket.as_deref().map(absolute),
            },
            &drain.waiting,
            false,
        ),
        Verb::Status(status) => (Request::Status, &status.waiting, status.json),
    };
    let limit = Duration::from_secs(waiting.timeout);
    let answer = ask(&arguments.control, &request, limit).map_err(failed)?;
    print(&text(&request, answer, is_json)?)
}

fn failed(error: AskError) -> Failure {
    match error {
        AskError::Refused(_) | AskError::Late { .. } => Failure::failed(error),
        AskError::Ask { .. } | AskError::Answer { .. } => Failure::bad_input(error),
    }
}

impl AddArguments {
    fn request(&self) -> Request {
        Request::Add {
            socket: self.pair.socket.clone(),
            binding: BindingTable {
                image: self.pair.image.clone(),
                digest: self.digest.clone(),
                state_file: self.state_file.as_deref().map(absolute),
                working_set: self.working_set.map(Into::into),
                working_set_file: self.working_set_file.as_deref().map(absolute),
                prefetch: self.prefetch.map(Into::into),
                on_failure: self.on_failure.map(Into::into),
                socket_mode: self.socket_mode,
                socket_owner: self.socket_owner,
            },
        }
    }
}

/// What is printed.
fn text(request: &Request, answer: Answer, is_json: bool) -> Result<String, Failure> {
    Ok(match (request, answer) {
        (Request::Add { socket, .. }, Answer::Added { digest }) => {
            format!("{}: served, image {digest}\n", socket.display())
        }
        (Request::Remove { socket }, Answer::Removed { vms }) => {
            format!(
                "{}: closed, VMs that are still served: {vms}\n",
                socket.display()
            )
        }
        (Request::Drain { socket }, Answer::Drained) => {
            let what = socket
                .as_ref()
                .map_or("all".into(), |socket| socket.display().to_string());
            format!("{what}: drained, no VM needs the server\n")
        }
        (Request::List, Answer::Sockets(sockets)) if is_json => json(&sockets)?,
        (Request::List, Answer::Sockets(sockets)) => table(&sockets),
        (Request::Status, Answer::Status(status)) if is_json => json(&status)?,
        (Request::Status, Answer::Status(status)) => lines(&rows(&status)),
        _ => return Err(Failure::failed(OtherAnswer)),
    })
}

/// The sockets, below each other; why one cannot be opened is a line of its own.
fn table(sockets: &[Socket]) -> String {
    let titles = ["SOCKET", "STATE", "VMS", "IMAGE"].map(str::to_owned);
    let row = |socket: &Socket| {
        let state = socket.state.name().to_owned();
        [
            socket.socket.clone(),
            state,
            socket.vms.to_string(),
            socket.image.clone(),
        ]
    };
    let rows: Vec<_> = std::iter::once(titles)
        .chain(sockets.iter().map(row))
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let [first, second, third] = [0, 1, 2].map(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for (index, [socket, state, vms, image]) in rows.iter().enumerate() {
        let _ = writeln!(
            text,
            "{socket:first$}  {state:second$}  {vms:>third$}  {image}"
        );
        let error = index
            .checked_sub(1)
            .and_then(|index| sockets.get(index)?.error.as_ref());
        if let Some(error) = error {
            let _ = writeln!(text, "  {error}");
        }
    }
    text
}

fn rows(status: &Status) -> Vec<(&'static str, String)> {
    let is_ready = match status.ready {
        true => "yes",
        false => "no",
    };
    let mut rows = vec![
        ("version", status.version.clone()),
        ("process", status.pid.to_string()),
        ("takes VMs", is_ready.to_owned()),
        ("sockets", status.sockets.to_string()),
        ("sockets that wait", status.sockets_waiting.to_string()),
        ("VMs", status.vms.to_string()),
        ("VMs so far", status.vms_accepted.to_string()),
        ("VMs refused", status.vms_refused.to_string()),
        ("memory of VMs", ByteSize(status.memory_bytes).to_string()),
        ("stalled regions", status.stalled_regions.to_string()),
    ];
    rows.extend(
        status
            .troubles
            .iter()
            .map(|trouble| ("wrong", trouble.clone())),
    );
    rows
}

#[cfg(test)]
mod tests {
    use pagetide_serve::control::message::SocketState;

    use super::*;

    #[test]
    fn an_image_is_named_as_the_server_finds_it() {
        let here = std::env::current_dir().unwrap();
        let named = pair("a.sock=b.mem").unwrap();
        assert_eq!(named.socket, here.join("a.sock"));
        assert_eq!(named.image, here.join("b.mem").display().to_string());
        // With its credentials, which a location does not show.
        let url = "https://user:secret@host/b.mem?x=y";
        assert_eq!(pair(&format!("/a.sock={url}")).unwrap().image, url);
        assert!(pair("a.sock").is_err());
    }

    #[test]
    fn a_table_of_sockets_says_why_one_is_not_open() {
        let socket = |name: &str, state, error: Option<&str>| Socket {
            socket: name.to_owned(),
            image: "/a.mem".to_owned(),
            state,
            vms: 12,
            digest: None,
            error: error.map(str::to_owned),
        };
        let told = table(&[
            socket("/run/a.sock", SocketState::Served, None),
            socket("/b", SocketState::Waiting, Some("it is missing")),
        ]);
        let wanted = "SOCKET       STATE    VMS  IMAGE\n\
                      /run/a.sock  served    12  /a.mem\n\
                      /b           waiting   12  /a.mem\n  it is missing\n";
        assert_eq!(told, wanted);
    }
}
