//! A file of guest memory, made up, for what restores a guest that never ran.

use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::Result;
use fs_err as fs;

const PAGE_BYTES: usize = 4096;

/// Writes memory as of a guest: a quarter of its pages is zero, and half of the words of each other page can be compressed.
pub(crate) fn write(place: &Path, bytes: usize) -> Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, fs::File::create(place)?);
    write_to(&mut file, bytes)?;
    file.into_inner()
        .map_err(std::io::IntoInnerError::into_error)?
        .sync_all()?;
    Ok(())
}

/// The same to anything.
pub(crate) fn write_to(file: &mut impl Write, bytes: usize) -> Result<()> {
    let mut word = 1_u64;
    for page in 0..bytes / PAGE_BYTES {
        let mut content = [0; PAGE_BYTES];
        if page % 4 != 0 {
            for (number, piece) in content.chunks_exact_mut(size_of::<u64>()).enumerate() {
                let bytes = match number % 2 {
                    0 => next(&mut word).to_ne_bytes(),
                    _ => (page as u64).to_ne_bytes(),
                };
                piece.copy_from_slice(&bytes);
            }
        }
        file.write_all(&content)?;
    }
    Ok(())
}

/// The next number of xorshift64 (Marsaglia 2003).
fn next(word: &mut u64) -> u64 {
    *word ^= *word << 13;
    *word ^= *word >> 7;
    *word ^= *word << 17;
    *word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_is_zero_and_no_other_two_pages_are_equal() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("mem");
        write(&place, 64 * PAGE_BYTES).unwrap();
        let content = std::fs::read(&place).unwrap();
        let mut pages: Vec<_> = content.chunks(PAGE_BYTES).collect();
        assert_eq!(pages.len(), 64);
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages.len(), 48 + 1);
        assert_eq!(pages[0], [0; PAGE_BYTES]);
    }
}
