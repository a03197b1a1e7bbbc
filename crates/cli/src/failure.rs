//! How a command ends when it does not succeed.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use pagetide_base::one_line;

/// How a command ends when it does not succeed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line makes no sense, or this machine lacks something: nothing was done.
    BadInput(Box<dyn Error>),
    /// It was tried, and failed.
    Failed(Box<dyn Error>),
}

impl Failure {
    /// The command line makes no sense, or this machine lacks something.
    pub(crate) fn bad_input(error: impl Error + 'static) -> Self {
        Self::BadInput(Box::new(error))
    }

    /// It was tried, and failed.
    pub(crate) fn failed(error: impl Error + 'static) -> Self {
        Self::Failed(Box::new(error))
    }

    /// Tells why in one line on standard error, and returns the exit status.
    pub(crate) fn tell(&self) -> ExitCode {
        let (error, code) = match self {
            Self::BadInput(error) => (error, 2),
            Self::Failed(error) => (error, 1),
        };
        // Whoever would read it may have gone: the status says that something was wrong.
        let _ = writeln!(std::io::stderr(), "pagetide: {}", one_line(&**error));
        ExitCode::from(code)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::BadInput(error) | Self::Failed(error)) = self;
        f.write_str(&one_line(&**error))
    }
}

/// What the parser of the command line says, in one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Unparsable(String);

impl From<&clap::Error> for Unparsable {
    fn from(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        // "error: what", then its details, then usage and a pointer to --help, in paragraphs.
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let told: Vec<&str> = lines
            .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
            .collect();
        let told = told.join(" ");
        Self(format!(
            "{}; see --help",
            told.strip_prefix("error: ").unwrap_or(&told)
        ))
    }
}
