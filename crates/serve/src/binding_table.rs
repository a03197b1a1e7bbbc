//! A binding as files and messages have it: an image with the options of its socket, as text.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pagetide_sources::{Digest, ParseDigestError, ParseLocationError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::options::{Binding, OnFailure, WorkingSetMode};

/// Permissions of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SocketMode(pub u32);

/// The owner of a socket: user and group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SocketOwner(pub u32, pub u32);

/// A text that is no option of a socket.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text:?} is not {wanted}")]
pub struct ParseSocketError {
    text: String,
    wanted: &'static str,
}

impl FromStr for SocketMode {
    type Err = ParseSocketError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mode = u32::from_str_radix(text, 8);
        let mode = mode.ok().filter(|&mode| mode <= 0o777);
        mode.map(Self).ok_or_else(|| ParseSocketError {
            text: text.into(),
            wanted: "a mode such as 660",
        })
    }
}

impl FromStr for SocketOwner {
    type Err = ParseSocketError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = text
            .split_once(':')
            .and_then(|(uid, gid)| Some(Self(uid.parse().ok()?, gid.parse().ok()?)));
        parsed.ok_or_else(|| ParseSocketError {
            text: text.into(),
            wanted: "UID:GID, two numbers",
        })
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:o}", self.0)
    }
}

impl fmt::Display for SocketOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0, self.1)
    }
}

macro_rules! as_text {
    ($($kind:ty)*) => {$(
        impl TryFrom<String> for $kind {
            type Error = ParseSocketError;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl From<$kind> for String {
            fn from(value: $kind) -> Self {
                value.to_string()
            }
        }
    )*};
}

as_text! { SocketMode SocketOwner }

/// Whether something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Switch {
    /// It is.
    On,
    /// It is not.
    Off,
}

/// The image of a socket, and the options of its VMs; those of the server where there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BindingTable {
    /// A path or a URL.
    pub image: String,
    /// The digest that the image must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The state file of the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_file: Option<PathBuf>,
    /// Recording and replay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set: Option<WorkingSetMode>,
    /// The file of the working set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set_file: Option<PathBuf>,
    /// Whether all missing pages are fetched while the guest runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<Switch>,
    /// What happens to a VM whose content is unavailable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_failure: Option<OnFailure>,
    /// The permissions of the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket_mode: Option<SocketMode>,
    /// The owner of the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket_owner: Option<SocketOwner>,
}

/// Why a table is no binding.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(transparent)]
pub enum BindingTableError {
    /// No image can be there.
    Image(#[from] ParseLocationError),
    /// The digest is none.
    Digest(#[from] ParseDigestError),
}

impl BindingTable {
    /// The binding of this socket.
    ///
    /// # Errors
    /// [`BindingTableError`].
    pub fn binding(&self, socket: &Path) -> Result<Binding, BindingTableError> {
        let digest = self.digest.as_deref().map(str::parse::<Digest>);
        Ok(Binding {
            digest: digest.transpose()?,
            state_file: self.state_file.clone(),
            working_set: self.working_set,
            working_set_file: self.working_set_file.clone(),
            prefetch: self.prefetch.map(|switch| switch == Switch::On),
            on_failure: self.on_failure,
            socket_mode: self.socket_mode.map(|mode| mode.0),
            socket_owner: self.socket_owner.map(|owner| (owner.0, owner.1)),
            ..Binding::new(socket, self.image.parse()?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_written_as_it_is_read() {
        let text = r#"{"image":"/a.mem","working-set":"off","prefetch":"on","on-failure":"kill","socket-mode":"660","socket-owner":"7:8"}"#;
        let table: BindingTable = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&table).unwrap(), text);
        let binding = table.binding(Path::new("/run/a.sock")).unwrap();
        assert_eq!(binding.socket_owner, Some((7, 8)));
        assert_eq!(binding.socket_mode, Some(0o660));
        assert_eq!(binding.prefetch, Some(true));
        assert_eq!(binding.on_failure, Some(OnFailure::Kill));
        assert_eq!(binding.working_set, Some(WorkingSetMode::Off));
        for bad in [
            r#"{}"#,
            r#"{"image":"/a","mode":"660"}"#,
            r#"{"image":"/a","socket-mode":"999"}"#,
            r#"{"image":"/a","socket-owner":"root"}"#,
            r#"{"image":"/a","prefetch":true}"#,
        ] {
            assert!(serde_json::from_str::<BindingTable>(bad).is_err(), "{bad}");
        }
        for bad in [
            r#"{"image":"ftp://a/b"}"#,
            r#"{"image":"/a","digest":"12"}"#,
        ] {
            let table: BindingTable = serde_json::from_str(bad).unwrap();
            assert!(table.binding(Path::new("a")).is_err(), "{bad}");
        }
    }
}
