//! Bounds the lines of the log that clients can cause.

pub(crate) use pagetide_pager::log_limit::LogLimit;

use crate::native::label::VmLabel;

/// Logs a line on a VM: `log_vm!(level, charge, fields, "text")`. A client can cause any number of such lines, so they have a
/// bound for each user, and the next line says how many were dropped.
macro_rules! log_vm {
    ($level:ident, $charge:expr, $($line:tt)+) => {
        $crate::log_limit::log_within!($level, $charge.may_log_vm(), $charge.label(), $($line)+)
    };
}

/// The same of a client that is refused.
macro_rules! log_refusal {
    ($level:ident, $charge:expr, $($line:tt)+) => {
        $crate::log_limit::log_within!($level, $charge.may_log_refusal(), $charge.label(), $($line)+)
    };
}

/// The same of clients whose user is not known, or is refused whatever he does: `log_limited!(level, limit, fields, "text")`.
macro_rules! log_limited {
    ($level:ident, $limit:expr, $($line:tt)+) => {
        $crate::log_limit::log_within!($level, $limit.pass(), None, $($line)+)
    };
}

/// The same of a VM with this label, if it has one: `log_within!(level, may_log, label, fields, "text")`.
macro_rules! log_within {
    ($level:ident, $may_log:expr, $label:expr, $($line:tt)+) => {
        if let Some(dropped) = $may_log {
            let dropped = (dropped > 0).then_some(dropped);
            $crate::log_limit::log_labelled!($level, $label, dropped, $($line)+);
        }
    };
}

/// Logs a line on a VM, with its label if it has one, and without a bound: `log_labelled!(level, label, fields, "text")`. All lines
/// on VMs come by here.
macro_rules! log_labelled {
    ($level:ident, $label:expr, $($line:tt)+) => {
        // What the label is taken from lives as long as the line.
        match $crate::log_limit::fields_of($label) {
            (id, trace_id) => tracing::$level!(id, trace_id, $($line)+),
        }
    };
}

/// The fields `id` and `trace_id` of a line: those that there are.
pub(crate) fn fields_of(label: Option<&VmLabel>) -> (Option<&str>, Option<&str>) {
    let trace_id = label.and_then(VmLabel::trace_id);
    (label.map(VmLabel::id), trace_id)
}

pub(crate) use {log_labelled, log_limited, log_refusal, log_vm, log_within};

#[cfg(test)]
mod tests {
    use std::path::Path;

    use pagetide_test_support::unbounded_log_lines;

    /// The sources, beside those of vm/, that deal with clients and nothing else.
    const OF_CLIENTS: [&str; 14] = [
        "arriving.rs",
        "connection.rs",
        "control/channel.rs",
        "exporter.rs",
        "handshake.rs",
        "image.rs",
        "inbox.rs",
        "intake.rs",
        "parking.rs",
        "porter/wire.rs",
        "receive.rs",
        "state/book.rs",
        "turned_away.rs",
        "vm.rs",
    ];

    /// Kind: a line of the log for each of something that a client can make any number of.
    #[test]
    fn no_line_on_a_client_is_without_a_bound() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let (within, files) = (
            sources.join("vm"),
            OF_CLIENTS.map(|file| sources.join(file)),
        );
        for (path, unbounded) in unbounded_log_lines(&sources).into_iter().flatten() {
            if path.starts_with(&within) || files.contains(&path) {
                assert_eq!(unbounded, 0, "{}: use log_limit's macros", path.display());
            }
        }
    }
}
