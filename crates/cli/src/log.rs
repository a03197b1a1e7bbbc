//! Where messages go: to standard error, by a thread of their own.
//!
//! A message is an aid. Whoever reads standard error may be slow, stopped or gone, its disk may be full, its terminal
//! closed: none of that holds or ends a thread that serves. Threads leave their lines in a queue with a bound, and one
//! thread writes them. Lines that find no room, or cannot be written, are counted and dropped, and the count is told
//! when lines are written again.

#[cfg(feature = "serve")]
mod json;
#[cfg(feature = "serve")]
mod queue;
#[cfg(feature = "serve")]
mod service;

use std::io::{self, IsTerminal};

use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

#[cfg(feature = "serve")]
pub(crate) use queue::Queue;
#[cfg(feature = "serve")]
pub(crate) use service::of_service;

/// What a message looks like.
#[derive(Clone, Copy)]
enum Form {
    Text,
    #[cfg(feature = "serve")]
    Json,
}

/// Sends the warnings of another verb to standard error.
pub(crate) fn of_verb() {
    start(Level::WARN, Form::Text, io::stderr);
}

fn start<W>(level: Level, form: Form, writer: W)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = filter(std::env::var("RUST_LOG").ok().as_deref(), level);
    let subscriber = tracing_subscriber::fmt()
        // The filter decides.
        .with_max_level(Level::TRACE)
        .with_ansi(has_colours())
        // It would be told by a macro that panics if standard error cannot be written.
        .log_internal_errors(false)
        .with_writer(writer);
    match form {
        Form::Text => subscriber.finish().with(filter).init(),
        #[cfg(feature = "serve")]
        Form::Json => {
            let subscriber = subscriber.event_format(json::Json);
            subscriber.finish().with(filter).init();
        }
    }
}

/// What RUST_LOG asks for, such as `debug` or `pagetide_serve=debug,warn`; else messages of this level and above.
fn filter(asked: Option<&str>, level: Level) -> Targets {
    let asked = asked.filter(|text| !text.trim().is_empty());
    let asked = asked.and_then(|text| text.parse().ok());
    asked.unwrap_or_else(|| Targets::new().with_default(level))
}

/// Whether messages may have colours: on a terminal that has some, unless its user wants none (no-color.org).
fn has_colours() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    cfg!(feature = "terminal") && io::stderr().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_chooses_messages() {
        let shows = |asked: Option<&str>, target: &str, level: Level| {
            filter(asked, Level::WARN).would_enable(target, &level)
        };
        let server = "pagetide_serve::vm";
        for nothing in [None, Some(""), Some("pagetide_serve=loud")] {
            assert!(shows(nothing, server, Level::WARN), "{nothing:?}");
            assert!(!shows(nothing, server, Level::INFO), "{nothing:?}");
        }
        assert!(shows(Some("debug"), server, Level::DEBUG));
        let one = Some("pagetide_serve=debug,error");
        assert!(shows(one, server, Level::DEBUG));
        assert!(!shows(one, "hyper", Level::WARN));
    }
}
