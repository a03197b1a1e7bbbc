//! What a VMM's side calls its VM, for the log and the metrics.

use thiserror::Error;

/// The longest id of a VM, in bytes.
pub const MAX_ID_BYTES: usize = 64;

/// Why a text is no part of a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LabelError {
    /// The id is empty or too long.
    #[error("the VM's id has {bytes} bytes, and may have 1 to {MAX_ID_BYTES}")]
    IdBytes {
        /// Its length.
        bytes: usize,
    },
    /// The id has a character that could be taken for something else in a line of a log.
    #[error(
        "the VM's id has at byte {at} none of the characters that it may have: A-Z, a-z, 0-9 and . _ - :"
    )]
    IdCharacter {
        /// The place of its first such byte.
        at: usize,
    },
    /// The traceparent is not that of W3C Trace Context 1.
    #[error(
        "the traceparent is not that of W3C Trace Context 1: 00-TRACE-PARENT-FLAGS, which are 32, 16 and 2 of the digits 0-9 and a-f, \
         and neither TRACE nor PARENT is zero"
    )]
    Traceparent,
}

/// What the VMM, or who has started it, calls a VM. It identifies nothing to the server, and two VMs may have the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmLabel {
    id: String,
    /// Empty without one.
    traceparent: String,
}

impl VmLabel {
    /// An id, and the `traceparent` of W3C Trace Context 1, which may be empty.
    ///
    /// # Errors
    /// [`LabelError`].
    pub fn new(id: impl Into<String>, traceparent: impl Into<String>) -> Result<Self, LabelError> {
        let (id, traceparent) = (id.into(), traceparent.into());
        let bytes = id.len();
        if !(1..=MAX_ID_BYTES).contains(&bytes) {
            return Err(LabelError::IdBytes { bytes });
        }
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:".contains(&byte);
        if let Some(at) = id.bytes().position(|byte| !is_plain(byte)) {
            return Err(LabelError::IdCharacter { at });
        }
        if !traceparent.is_empty() && trace_id_of(&traceparent).is_none() {
            return Err(LabelError::Traceparent);
        }
        Ok(Self { id, traceparent })
    }

    /// The VM's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The `traceparent` as it was given; empty without one.
    pub fn traceparent(&self) -> &str {
        &self.traceparent
    }

    /// The trace's id: 32 digits.
    pub fn trace_id(&self) -> Option<&str> {
        trace_id_of(&self.traceparent)
    }
}

/// The trace's id in a traceparent; `None` if it is none.
fn trace_id_of(traceparent: &str) -> Option<&str> {
    let mut parts = traceparent.split('-');
    let [version, trace, parent, flags] = [(); 4].map(|()| parts.next().unwrap_or_default());
    let is_hex = |text: &str, digits: usize| {
        text.len() == digits && text.bytes().all(|byte| b"0123456789abcdef".contains(&byte))
    };
    let is_id = |text: &str, digits| is_hex(text, digits) && text.bytes().any(|byte| byte != b'0');
    let is_whole = parts.next().is_none();
    let is_sound = is_id(trace, 32) && is_id(parent, 16) && is_hex(flags, 2);
    (version == "00" && is_whole && is_sound).then_some(trace)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    #[test]
    fn an_id_has_nothing_that_could_forge_a_line() {
        let longest = "a".repeat(MAX_ID_BYTES);
        for id in ["a", "web-7.eu_1:3", "0", &longest] {
            assert_eq!(VmLabel::new(id, "").unwrap().id(), id);
        }
        let longer = "a".repeat(MAX_ID_BYTES + 1);
        for id in ["", &longer] {
            let bytes = id.len();
            assert_eq!(VmLabel::new(id, ""), Err(LabelError::IdBytes { bytes }));
        }
        let others = (0..=255_u8).map(char::from);
        for other in
            others.filter(|other| !other.is_ascii_alphanumeric() && !"._-:".contains(*other))
        {
            let found = VmLabel::new(format!("a{other}b"), "");
            assert_eq!(found, Err(LabelError::IdCharacter { at: 1 }), "{other:?}");
        }
    }

    #[test]
    fn a_traceparent_is_that_of_w3c_trace_context_or_empty() {
        let good = format!("00-{TRACE}-00f067aa0ba902b7-01");
        let label = VmLabel::new("a", good.clone()).unwrap();
        assert_eq!(
            (label.traceparent(), label.trace_id()),
            (&*good, Some(TRACE))
        );
        assert_eq!(VmLabel::new("a", "").unwrap().trace_id(), None);
        let none = "0".repeat(32);
        for bad in [
            "00",
            "00---",
            &good[1..],
            &good[..good.len() - 1],
            &format!("{good}-"),
            &format!("{good}\n"),
            &format!(" {good}"),
            &good.to_uppercase(),
            &good.replacen("00-", "01-", 1),
            &good.replacen("00-", "ff-", 1),
            &good.replace('4', "g"),
            &good.replace(TRACE, &none),
            &good.replace("00f067aa0ba902b7", &none[16..]),
        ] {
            assert_eq!(
                VmLabel::new("a", bad),
                Err(LabelError::Traceparent),
                "{bad:?}"
            );
        }
    }
}
