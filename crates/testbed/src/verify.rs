//! Verification by the host that memory holds what it should, every byte of it.

use pagetide_memory::{AccessError, GuestAddress, PageIndex, Region};

use crate::layout::PAGE;
use crate::machine::Machine;
use crate::pattern::{self, Seed};

/// What words should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// [`pattern::word`] of this seed.
    Pattern(Seed),
    /// Zero.
    Zero,
}

impl Content {
    fn word(self, gpa: u64) -> u64 {
        match self {
            Content::Pattern(seed) => pattern::word(gpa, seed),
            Content::Zero => 0,
        }
    }
}

/// What the data region should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The first word of each touched page.
    pub touched: Content,
    /// All other words.
    pub rest: Content,
}

impl Expected {
    /// The same content everywhere, as after a read-only run.
    #[must_use]
    pub const fn all(content: Content) -> Self {
        Self {
            touched: content,
            rest: content,
        }
    }
}

/// The result of a verification without errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Bytes that were compared.
    pub bytes: u64,
}

/// Memory does not hold what it should, or cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// At least one word is wrong.
    #[error(
        "wrong content in {wrong_pages} pages, first at gpa {gpa}: found {found:#x}, expected \
         {expected:#x}"
    )]
    Mismatch {
        /// How many 4 KiB pages have a wrong word.
        wrong_pages: u64,
        /// The first wrong word.
        gpa: GuestAddress,
        /// What it holds.
        found: u64,
        /// What it should hold.
        expected: u64,
    },
    /// A page of anonymous memory is absent; to read it would wait for ever.
    #[error("the page at gpa {gpa} is not present")]
    Absent {
        /// The page.
        gpa: GuestAddress,
    },
    /// The system does not report whether anonymous memory is present.
    #[error("mincore of the data region failed")]
    Residency(#[source] std::io::Error),
    /// The region cannot be read.
    #[error("the data region cannot be read at gpa {gpa}")]
    Access {
        /// Where.
        gpa: GuestAddress,
        /// The region's error.
        #[source]
        source: AccessError,
    },
}

impl Machine {
    /// Reads the whole data region and compares it with the expected content. Memory with a file is read
    /// through the service mapping, anonymous memory through the guest's, where an absent page is an error.
    /// No vCPU may be running, which `&mut self` of a run ensures.
    ///
    /// # Errors
    /// See [`VerifyError`].
    pub fn verify(&self, expected: Expected) -> Result<Verified, VerifyError> {
        let stride_bytes = self.config.walk(0).stride_bytes;
        let base = self.data().gpa().0;
        let word = |gpa: u64| match (gpa - base).is_multiple_of(stride_bytes) {
            true => expected.touched.word(gpa),
            false => expected.rest.word(gpa),
        };
        verify(self.data(), |_| false, word)
    }
}

/// Compares each word of a region with `word` of its gpa, but for the 4 KiB pages that `skip` selects by
/// their gpas.
pub(crate) fn verify(
    region: &Region,
    skip: impl Fn(u64) -> bool,
    word: impl Fn(u64) -> u64,
) -> Result<Verified, VerifyError> {
    let mut page = vec![0; usize::try_from(PAGE).unwrap_or(0)];
    let (mut bytes, mut wrong_pages, mut first) = (0, 0, None);
    let range = region.range();
    for gpa in (range.start().0..range.end().0).step_by(page.len()) {
        if skip(gpa) {
            continue;
        }
        read(region, gpa, &mut page)?;
        bytes += PAGE;
        let words = (gpa..).step_by(8).zip(page.as_chunks::<8>().0);
        let mut words = words.map(|(gpa, found)| (gpa, u64::from_le_bytes(*found), word(gpa)));
        if let Some(wrong) = words.find(|(_, found, expected)| found != expected) {
            wrong_pages += 1;
            first.get_or_insert(wrong);
        }
    }
    match first {
        None => Ok(Verified { bytes }),
        Some((gpa, found, expected)) => Err(VerifyError::Mismatch {
            wrong_pages,
            gpa: GuestAddress(gpa),
            found,
            expected,
        }),
    }
}

/// The page of the backing that has a gpa, and the offset in it.
pub(crate) fn place(region: &Region, gpa: u64) -> (PageIndex, u64) {
    let (offset, page) = (gpa - region.gpa().0, region.page_size().bytes());
    (PageIndex(offset / page), offset % page)
}

fn read(region: &Region, gpa: u64, bytes: &mut [u8]) -> Result<(), VerifyError> {
    let (page, offset) = place(region, gpa);
    let result = if region.service().is_some() {
        region.read_service(page, offset, bytes)
    } else {
        check_present(region, gpa)?;
        region.read_guest(page, offset, bytes)
    };
    let gpa = GuestAddress(gpa);
    result.map_err(|source| VerifyError::Access { gpa, source })
}

/// Anonymous memory: `mincore` looks at the page tables, and touches nothing.
fn check_present(region: &Region, gpa: u64) -> Result<(), VerifyError> {
    let mut present = 0_u8;
    let start = region.guest().start().as_u64() + (gpa - region.gpa().0);
    let start = usize::try_from(start).unwrap_or(usize::MAX) as *mut libc::c_void;
    // SAFETY: mincore requires a page-aligned start, which a multiple of 4 KiB in a page-aligned mapping
    // is, and one byte of room for the page; it reads no memory there.
    let status = unsafe { libc::mincore(start, 4096, &raw mut present) };
    if status != 0 {
        return Err(VerifyError::Residency(std::io::Error::last_os_error()));
    }
    if present & 1 == 0 {
        let gpa = GuestAddress(gpa);
        return Err(VerifyError::Absent { gpa });
    }
    Ok(())
}
