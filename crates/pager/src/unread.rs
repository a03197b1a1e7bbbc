//! Messages that stay unread for a while.
//!
//! A fork's message carries a descriptor. If this process has none left, the read fails, and the message stays where it is. The
//! thread that has tried goes on, because others wait for it; the pager's timer reports the channel again.

use std::time::{Duration, Instant};

use crate::channel::Channel;
use crate::log_limit::log_limited;
use crate::pager::Pager;

/// The time until a message is tried again.
const PAUSE: Duration = Duration::from_millis(50);

impl Pager {
    /// Has a channel's messages read again after a pause.
    #[cold]
    pub(crate) fn read_later(&self, channel: &Channel) {
        if channel.unread.begin() {
            log_limited!(
                warn,
                "no descriptor, or no memory, for the message of a fork: it waits"
            );
        }
        self.wake_at(Instant::now() + PAUSE);
    }

    /// Reports the channels again of which a message stayed unread; or was read meanwhile by a thread that did not see the
    /// faults that were put back.
    pub(crate) fn report_unread(&self) {
        let table = self.table();
        let has_unread = |channel: &Channel| channel.unread.is_some() || channel.has_deferred();
        let own = table
            .channels()
            .iter()
            .filter(|&channel| has_unread(channel));
        for channel in own.chain(&self.others.which(has_unread)) {
            self.poller.report_again(channel);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pagetide_uapi::userfaultfd::{EventBuffer, Features, Userfaultfd};

    use super::*;

    /// Kind: a line of the log for each of something that happens again and again.
    #[test]
    fn a_message_that_stays_unread_is_told_of_once() {
        if let Err(error) = Userfaultfd::available() {
            println!("SKIP: {error}");
            return;
        }
        let uffd = Userfaultfd::open(Features::NONE).unwrap();
        let channel = Channel::new(Arc::new(uffd), 0);
        let mut buffer = EventBuffer::new(1);
        let told = |times| (0..times).filter(|_| channel.unread.begin()).count();
        assert_eq!((told(3), told(3)), (1, 0));
        // The forking thread may have been killed.
        let batch = channel.read(&mut buffer, &mut Vec::new(), |_, _| {});
        assert_eq!(batch.unwrap().messages, 0);
        assert_eq!(told(3), 1);
    }
}
