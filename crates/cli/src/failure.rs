//! How a command ends when it does not succeed.

use std::error::Error;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
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
        if error.kind() == ErrorKind::InvalidUtf8 {
            return Self::not_utf8(std::env::args_os());
        }
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

impl Unparsable {
    /// The parser does not say which word it was.
    fn not_utf8(words: impl Iterator<Item = OsString>) -> Self {
        let words = words.filter(|word| word.to_str().is_none());
        let words: Vec<String> = words.map(|word| format!("{word:?}")).collect();
        Self(format!(
            "not UTF-8, and not taken here: {}; give a file another name, or a link; see --help",
            words.join(", ")
        ))
    }
}
