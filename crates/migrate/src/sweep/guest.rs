//! The guest, and what its memory should be.

use pagetide_memory::PageIndex;

use crate::message::Content;

/// Its pages.
pub(super) const PAGES: u64 = 240;

/// A page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Page {
    /// Nothing is there.
    Absent,
    /// Each word is the page's number and the count of its writes.
    Written(u32),
    Zero,
    Discarded,
    Poisoned,
}

impl Page {
    pub(super) fn content(self) -> Content {
        match self {
            Self::Written(_) => Content::Bytes,
            Self::Zero | Self::Absent => Content::Zero,
            Self::Discarded => Content::Discarded,
            Self::Poisoned => Content::Poisoned,
        }
    }

    /// The page's bytes.
    pub(super) fn write_to(self, page: PageIndex, out: &mut Vec<u8>) {
        let Self::Written(count) = self else { return };
        let begin = out.len();
        out.resize(begin + 4096, 0);
        let word = word(page, count).to_le_bytes();
        out[begin..]
            .chunks_exact_mut(8)
            .for_each(|bytes| bytes.copy_from_slice(&word));
    }

    /// What the bytes of a record say of a page.
    pub(super) fn read(content: Content, page: PageIndex, bytes: &[u8]) -> Self {
        match content {
            Content::Zero => Self::Zero,
            Content::Discarded => Self::Discarded,
            Content::Poisoned => Self::Poisoned,
            Content::Bytes | Content::Zstd => {
                let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                let count = u32::try_from(first & 0xffff_ffff).unwrap();
                let word = word(page, count).to_le_bytes();
                assert!(bytes.chunks_exact(8).all(|bytes| bytes == word));
                Self::Written(count)
            }
        }
    }
}

/// A number of a page, or of bytes, as an index.
pub(super) fn index(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

fn word(page: PageIndex, count: u32) -> u64 {
    (page.0 + 1) << 32 | u64::from(count)
}

/// The guest: what it has written, whoever runs it.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) truth: Vec<Page>,
    /// Its registers: the number of its steps.
    pub(super) state: u64,
}

impl Guest {
    pub(super) fn new() -> Self {
        let page = |page: u64| match page {
            40..80 => Page::Zero,
            120..126 => Page::Poisoned,
            126..140 => Page::Discarded,
            _ => Page::Written(1),
        };
        Self {
            truth: (0..PAGES).map(page).collect(),
            state: 0,
        }
    }

    /// The page of its next step. It never touches poison.
    pub(super) fn next_page(&self) -> PageIndex {
        // Every other step writes one of 16 hot pages.
        let page = match self.state % 2 {
            0 => self.state * 37 % PAGES,
            _ => 100 + self.state * 5 % 16,
        };
        PageIndex(if (120..126).contains(&page) { 0 } else { page })
    }

    /// One step: it writes a page, of which it reads `now` first.
    pub(super) fn step(&mut self, now: Page) -> Result<Page, String> {
        let page = self.next_page();
        let truth = &mut self.truth[index(page.0)];
        if now != *truth {
            return Err(format!(
                "the guest reads {now:?} at page {page}, and wrote {truth:?}"
            ));
        }
        let count = match now {
            Page::Written(count) => count,
            _ => 0,
        };
        *truth = Page::Written(count + 1);
        self.state += 1;
        Ok(*truth)
    }
}
