//! The vCPUs' and devices' state at the destination, which comes in parts.

use crate::journal::KeptState;
use crate::message::StatePart;

impl KeptState {
    /// What *sealed* says of a state: in the record, and in the message.
    pub fn of(state: &[u8]) -> Self {
        Self {
            bytes: u64::try_from(state.len()).unwrap_or(u64::MAX),
            digest: *blake3::hash(state).as_bytes(),
        }
    }
}

/// The parts that have come. Which of them are taken is the machine's to say
/// ([`DestinationAction::TakeState`](crate::DestinationAction::TakeState)), so that what is kept has a bound and no hole.
#[derive(Clone, Debug, Default)]
pub struct CollectedState {
    hasher: blake3::Hasher,
    bytes: Vec<u8>,
}

impl CollectedState {
    fn hasher_with(&self, part: StatePart, bytes: &[u8]) -> blake3::Hasher {
        let mut hasher = match part.offset {
            0 => blake3::Hasher::new(),
            _ => self.hasher.clone(),
        };
        hasher.update(bytes);
        hasher
    }

    /// The digest of the state up to the end of a part that has come and is not taken yet.
    pub fn digest_with(&self, part: StatePart, bytes: &[u8]) -> [u8; 32] {
        *self.hasher_with(part, bytes).finalize().as_bytes()
    }

    /// Takes a part. The first part of a state drops what was there.
    pub fn take(&mut self, part: StatePart, bytes: &[u8]) {
        self.hasher = self.hasher_with(part, bytes);
        if part.offset == 0 {
            self.bytes.clear();
        }
        self.bytes.extend(bytes);
    }

    /// The bytes that were taken: the whole state once the machine wants it loaded.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_of_the_last_part_is_that_of_the_whole() {
        let state: Vec<u8> = (0..=255).collect();
        let mut collected = CollectedState::default();
        // A connection was lost after two parts, and the state comes again.
        for repeats in [2, 8] {
            let chunks = (0_u64..).step_by(32).zip(state.chunks(32));
            for (offset, chunk) in chunks.take(repeats) {
                let part = StatePart {
                    offset,
                    bytes: 32,
                    has_more: true,
                };
                let end = usize::try_from(offset).unwrap() + chunk.len();
                let so_far = KeptState::of(&state[..end]);
                assert_eq!(collected.digest_with(part, chunk), so_far.digest);
                collected.take(part, chunk);
                assert_eq!(collected.bytes(), &state[..end]);
            }
        }
    }
}
