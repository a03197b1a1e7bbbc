//! What the plugin counted: instructions by the address of their block.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

/// The counters of one boot.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// Windows that were counted: the benchmark's measured runs.
    pub(super) windows: u64,
    /// Instructions executed in them, by the address of the block.
    pub(super) blocks: BTreeMap<u64, u64>,
}

impl Counters {
    /// Reads the plugin's file.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines();
        let windows = lines
            .next()
            .and_then(|line| line.strip_prefix("windows ")?.parse().ok())
            .context("the counters do not begin with a number of windows")?;
        let mut blocks = BTreeMap::new();
        for line in lines {
            if line == "end" {
                return Ok(Self { windows, blocks });
            }
            let (address, instructions) =
                block(line).with_context(|| format!("{line:?} is no counter"))?;
            let sum: &mut u64 = blocks.entry(address).or_default();
            *sum = sum
                .checked_add(instructions)
                .with_context(|| format!("{line:?}: too many"))?;
        }
        bail!("the counters are cut short")
    }
}

fn block(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split(' ');
    let address = u64::from_str_radix(words.next()?, 16).ok()?;
    let instructions: u64 = words.next()?.parse().ok()?;
    let executed = words.next()?.parse().ok()?;
    let product = instructions.checked_mul(executed)?;
    words.next().is_none().then_some((address, product))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_one_address_are_added() {
        let counters =
            Counters::parse("windows 3\nffffffff81000000 4 10\n1000 2 5\n1000 1 7\nend\n").unwrap();
        assert_eq!(counters.windows, 3);
        let expected = BTreeMap::from([(0x1000, 17), (0xffff_ffff_8100_0000, 40)]);
        assert_eq!(counters.blocks, expected);
    }

    #[test]
    fn counters_that_are_not_whole_are_refused() {
        for text in [
            "",
            "windows x\nend\n",
            "windows 1\n1000 2 5\n",
            "windows 1\n1000 2\nend\n",
            "windows 1\n1000 2 5 6\nend\n",
            "windows 1\nx 2 5\nend\n",
            "windows 1\n1000 18446744073709551615 2\nend\n",
        ] {
            assert!(Counters::parse(text).is_err(), "{text:?}");
        }
    }
}
