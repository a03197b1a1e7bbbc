//! The streams of a session, as a machine knows them.

use crate::event::Refused;
use crate::message::StreamIndex;

/// All streams of a session, each with what the machine keeps of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Streams<S>(Vec<Slot<S>>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Slot<S> {
    is_up: bool,
    kept: S,
}

impl<S: Clone + Default> Streams<S> {
    /// So many streams, at least one, that are down.
    pub(crate) fn new(count: u16) -> Self {
        let slot = Slot {
            is_up: false,
            kept: S::default(),
        };
        Self(vec![slot; usize::from(count.max(1))])
    }

    pub(crate) fn is_up(&self, index: StreamIndex) -> bool {
        self.0
            .get(usize::from(index.0))
            .is_some_and(|slot| slot.is_up)
    }

    /// What is kept of a stream.
    ///
    /// # Errors
    /// The session has no such stream. `message` is what belongs to it.
    pub(crate) fn get(
        &mut self,
        index: StreamIndex,
        message: &'static str,
    ) -> Result<&mut S, Refused> {
        Ok(&mut self.slot(index, message)?.kept)
    }

    /// Notes whether a stream is up.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(crate) fn set_up(
        &mut self,
        index: StreamIndex,
        is_up: bool,
        message: &'static str,
    ) -> Result<(), Refused> {
        self.slot(index, message)?.is_up = is_up;
        Ok(())
    }

    fn slot(&mut self, index: StreamIndex, message: &'static str) -> Result<&mut Slot<S>, Refused> {
        let slot = self.0.get_mut(usize::from(index.0));
        slot.ok_or(Refused::Stream {
            message,
            stream: index,
        })
    }

    /// All streams, with their numbers.
    pub(crate) fn all(&self) -> impl Iterator<Item = (StreamIndex, &S)> {
        let slots = (0..).map(StreamIndex).zip(&self.0);
        slots.map(|(index, slot)| (index, &slot.kept))
    }

    /// The streams that are up, with their numbers.
    pub(crate) fn up(&self) -> impl Iterator<Item = (StreamIndex, &S)> {
        self.all().filter(|(index, _)| self.is_up(*index))
    }
}
