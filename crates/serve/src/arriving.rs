//! A message of which parts arrive, and when it is worth parsing.
//!
//! A client may send a byte at a time. Looking at each byte once, and parsing only when there is twice as much as before or
//! when the array has ended, takes time in proportion to the message, however it comes.

/// What has arrived of a JSON array.
#[derive(Debug, Default)]
pub(crate) struct Arriving {
    pub(crate) bytes: Vec<u8>,
    array: Array,
    /// The bytes that were looked at.
    seen: usize,
    /// The length at which it is parsed next, complete or not.
    parse_at: usize,
}

/// Where a look has come to.
#[derive(Debug, Default)]
struct Array {
    depth: usize,
    is_in_text: bool,
    is_escaped: bool,
    has_ended: bool,
}

impl Array {
    fn see(&mut self, byte: u8) {
        if self.is_escaped {
            self.is_escaped = false;
            return;
        }
        match (self.is_in_text, byte) {
            (true, b'\\') => self.is_escaped = true,
            (_, b'"') => self.is_in_text = !self.is_in_text,
            (true, _) => {}
            (false, b'[' | b'{') => self.depth += 1,
            (false, b']' | b'}') => {
                self.depth = self.depth.saturating_sub(1);
                self.has_ended |= self.depth == 0;
            }
            (false, _) => {}
        }
    }
}

impl Arriving {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether a parser may find something new: the end of the array, or an error in a message that will never end.
    pub(crate) fn is_worth_parsing(&mut self) -> bool {
        for &byte in self.bytes.get(self.seen..).unwrap_or_default() {
            self.array.see(byte);
        }
        self.seen = self.bytes.len();
        let is_due = self.seen >= self.parse_at;
        if is_due {
            self.parse_at = self.seen.saturating_mul(2);
        }
        is_due || self.array.has_ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::{Parsed, parse};

    /// The bytes that are parsed of a message that comes in pieces of so many bytes.
    fn parsed_bytes(message: &[u8], piece: usize) -> usize {
        let mut arriving = Arriving::default();
        let mut parsed = 0;
        for piece in message.chunks(piece) {
            arriving.push(piece);
            if arriving.is_worth_parsing() {
                parsed += arriving.bytes.len();
            }
        }
        parsed
    }

    /// Each piece ends with what could be the end of the array.
    #[test]
    fn a_message_in_pieces_is_parsed_in_time_in_proportion_to_its_length() {
        let message = ["[", &",[]".repeat(300_000)].concat();
        for piece in [1, 3, 4096] {
            let parsed = parsed_bytes(message.as_bytes(), piece);
            assert!(parsed <= 2 * message.len(), "{piece}: {parsed}");
        }
    }

    #[test]
    fn a_message_is_parsed_when_its_array_ends_however_it_comes() {
        let message = br#" [{"base_host_virt_addr":4096,"size":4096,"new":["a]\"]",{"x":[]}]}]"#;
        for piece in 1..message.len() {
            let mut arriving = Arriving::default();
            let mut pieces = message.chunks(piece).peekable();
            while let Some(next) = pieces.next() {
                arriving.push(next);
                let is_worth = arriving.is_worth_parsing();
                let found = parse(&arriving.bytes).unwrap();
                let is_complete = matches!(found, Parsed::Complete(..));
                assert_eq!(is_complete, pieces.peek().is_none());
                assert!(is_worth || !is_complete, "{piece}");
            }
        }
    }

    #[test]
    fn what_is_no_array_is_parsed_at_once() {
        for message in ["{}", "x", "null", "]"] {
            assert_eq!(parsed_bytes(message.as_bytes(), 64), message.len());
        }
    }
}
