//! Checking from the host that memory holds what it should, every byte of it.

use pagetide_memory::{AccessError, GuestAddress, PageIndex, Region};

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

/// What was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Bytes, all of which were as expected.
    pub bytes: u64,
}

/// The data region is not as expected.
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
    /// A page of anonymous memory is not there; reading it would wait for a page that nobody
    /// brings.
    #[error("the page at gpa {gpa} is not present")]
    Absent {
        /// The page.
        gpa: GuestAddress,
    },
    /// Whether anonymous memory is present cannot be found out.
    #[error("mincore of the data region failed")]
    Residency(#[source] std::io::Error),
    /// The region could not be read.
    #[error("the data region cannot be read at gpa {gpa}")]
    Access {
        /// Where.
        gpa: GuestAddress,
        /// Why.
        #[source]
        source: AccessError,
    },
}

const CHUNK: usize = 64 << 10;
const PAGE: usize = 4096;

impl Machine {
    /// Reads the whole data region and compares it with what is expected. Memory with a file
    /// behind it is read through the service mapping, anonymous memory through the guest's, where
    /// an absent page is an error. No vCPU may be running, which `&mut self` of a run ensures.
    ///
    /// # Errors
    /// See [`VerifyError`].
    pub fn verify(&self, expected: Expected) -> Result<Verified, VerifyError> {
        let stride_bytes = self.config.walk(0).stride_bytes;
        verify_region(self.data(), expected, stride_bytes)
    }
}

fn verify_region(
    region: &Region,
    expected: Expected,
    stride_bytes: u64,
) -> Result<Verified, VerifyError> {
    let mut buffer = vec![0; CHUNK];
    let mut wrong_pages = 0;
    let mut first = None;
    let mut offset = 0;
    while offset < region.bytes() {
        let rest = usize::try_from(region.bytes() - offset).unwrap_or(usize::MAX);
        let chunk = &mut buffer[..rest.min(CHUNK)];
        read(region, offset, chunk)?;
        for page in chunk.chunks(PAGE) {
            let gpa = region.gpa().0 + offset;
            let wrong = first_wrong_word(page, gpa, region.gpa().0, expected, stride_bytes);
            if let Some(wrong) = wrong {
                wrong_pages += 1;
                first.get_or_insert(wrong);
            }
            offset += page.len() as u64;
        }
    }
    match first {
        None => Ok(Verified { bytes: offset }),
        Some((gpa, found, expected)) => Err(VerifyError::Mismatch {
            wrong_pages,
            gpa: GuestAddress(gpa),
            found,
            expected,
        }),
    }
}

/// The first word of `page`, which is at `gpa`, that is wrong: (gpa, found, expected).
fn first_wrong_word(
    page: &[u8],
    gpa: u64,
    base: u64,
    expected: Expected,
    stride_bytes: u64,
) -> Option<(u64, u64, u64)> {
    // The next touched word at or after this page's start.
    let mut touched = base + (gpa - base).next_multiple_of(stride_bytes);
    let mut address = gpa;
    for word in page.as_chunks::<8>().0 {
        let content = if address == touched {
            touched += stride_bytes;
            expected.touched
        } else {
            expected.rest
        };
        let (found, wanted) = (u64::from_le_bytes(*word), content.word(address));
        if found != wanted {
            return Some((address, found, wanted));
        }
        address += 8;
    }
    None
}

fn read(region: &Region, offset: u64, bytes: &mut [u8]) -> Result<(), VerifyError> {
    let gpa = GuestAddress(region.gpa().0 + offset);
    let page_bytes = region.page_size().bytes();
    let (page, within) = (PageIndex(offset / page_bytes), offset % page_bytes);
    let result = if region.service().is_some() {
        region.read_service(page, within, bytes)
    } else {
        check_present(region, offset, bytes.len())?;
        region.read_guest(page, within, bytes)
    };
    result.map_err(|source| VerifyError::Access { gpa, source })
}

/// Anonymous memory: `mincore` looks at the page tables, without touching anything.
fn check_present(region: &Region, offset: u64, len: usize) -> Result<(), VerifyError> {
    let mut present = vec![0_u8; len.div_ceil(PAGE)];
    let start = region.guest().start().as_u64() + offset;
    let start = usize::try_from(start).unwrap_or(usize::MAX);
    // SAFETY: mincore requires a page-aligned start, which multiples of CHUNK in a page-aligned
    // mapping are, and one byte of room for each page of the length; it reads no memory there.
    let status = unsafe { libc::mincore(start as *mut libc::c_void, len, present.as_mut_ptr()) };
    if status != 0 {
        return Err(VerifyError::Residency(std::io::Error::last_os_error()));
    }
    match present.iter().position(|page| page & 1 == 0) {
        None => Ok(()),
        Some(index) => {
            let gpa = GuestAddress(region.gpa().0 + offset + (index * PAGE) as u64);
            Err(VerifyError::Absent { gpa })
        }
    }
}
