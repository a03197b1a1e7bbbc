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

/// The time until a fault is tried again for which the kernel installs nothing, as it normally does within microseconds.
const SHORT_PAUSE: Duration = Duration::from_millis(1);

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

    /// Has faults tried again, which were put back, after a short pause.
    #[cold]
    pub(crate) fn try_later(&self) {
        self.wake_at(Instant::now() + SHORT_PAUSE);
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

    use pagetide_memory::{Backing, GuestAddress, Region};
    use pagetide_uapi::userfaultfd::{EventBuffer, Features, Mode, PageFault, Userfaultfd};

    use super::*;
    use crate::{Contents, PatternSource, RegionConfig, Serving, UffdLayout};

    /// Kind: what is left to a thread that has just gone by. One thread puts faults back, because a message behind them stays
    /// unread; another one, which began before, has read that message since.
    #[test]
    fn faults_that_were_put_back_are_reported_although_nothing_is_unread() {
        if let Err(error) = Userfaultfd::available() {
            println!("SKIP: {error}");
            return;
        }
        let memory = Region::new(GuestAddress(0), 4 << 12, Backing::Anonymous).unwrap();
        let memory = Arc::new(memory);
        let content = Contents::Local(Arc::new(PatternSource::new(|_, _: &mut [u8]| {})));
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&memory), Mode::Missing, content);
        let config = config.userfaultfds(UffdLayout::WithEvents);
        pager.add(config).unwrap();
        let table = pager.table();
        let channel = &table.channels()[0];
        channel.defer([PageFault {
            address: memory.guest().start().as_u64(),
            write: false,
            minor: false,
            write_protected: false,
            thread: 0,
        }]);
        assert!(!channel.unread.is_some());
        let mut serving = Serving::new(&pager, 1);
        assert_eq!(serving.process_ready().unwrap(), 0);
        pager.report_unread();
        assert_eq!(serving.process_ready().unwrap(), 1);
    }

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
