//! Sizes as people write them, and numbers as people read them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A size in bytes; written with a binary suffix: `4096`, `64K`, `16M`, `1G`, `2T` (an `iB` after
/// the suffix is accepted).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

/// Suffixes and what they multiply by, largest first.
const SUFFIXES: [(char, u64); 4] = [
    ('T', 1 << 40),
    ('G', 1 << 30),
    ('M', 1 << 20),
    ('K', 1 << 10),
];

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseSizeError {
    /// No digits, or something that is neither digits nor a known suffix.
    #[error("'{0}' is not a size; write bytes, or a number with K, M, G or T, such as 64M")]
    Malformed(String),
    /// More bytes than an unsigned 64-bit number holds.
    #[error("'{0}' is more bytes than 64 bits hold")]
    TooLarge(String),
}

impl FromStr for ByteSize {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || ParseSizeError::Malformed(text.to_owned());
        let bare = text.strip_suffix("iB").unwrap_or(text);
        let suffix = bare.chars().last().and_then(|last| {
            SUFFIXES
                .iter()
                .find(|(letter, _)| last.eq_ignore_ascii_case(letter))
        });
        let (digits, factor) = match suffix {
            Some((_, factor)) => (&bare[..bare.len() - 1], *factor),
            // "64iB" names no unit.
            None if bare.len() != text.len() => return Err(malformed()),
            None => (bare, 1),
        };
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(malformed());
        }
        // Only digits are left, so the one way to fail is a number that is too large.
        let number: u64 = digits
            .parse()
            .map_err(|_| ParseSizeError::TooLarge(text.to_owned()))?;
        number
            .checked_mul(factor)
            .map(ByteSize)
            .ok_or_else(|| ParseSizeError::TooLarge(text.to_owned()))
    }
}

impl fmt::Display for ByteSize {
    /// The largest suffix that divides the size exactly; the result parses back to the same size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = SUFFIXES
            .iter()
            .find(|(_, factor)| self.0 != 0 && self.0.is_multiple_of(*factor));
        match exact {
            Some((letter, factor)) => write!(f, "{}{letter}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

impl ByteSize {
    /// For sentences: one decimal, the unit spelt out ("23.5 GiB").
    #[must_use]
    pub fn about(self) -> String {
        SUFFIXES
            .iter()
            .find(|(_, factor)| self.0 >= *factor)
            .map_or_else(
                || format!("{} bytes", self.0),
                |(letter, factor)| {
                    format!("{} {letter}iB", decimal(float(self.0) / float(*factor), 1))
                },
            )
    }
}

/// A count as a floating-point number. Exact below 2^53, which no count here reaches; beyond that
/// the nearest value, which is what a rate or an axis wants.
#[must_use]
pub fn float(count: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "the nearest value is wanted")]
    let value = count as f64;
    value
}

/// A nearby whole number of a value that is not negative: 0 for what is below or no number at all,
/// `u64::MAX` for what is beyond.
#[must_use]
pub fn whole(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast saturates, and saturation is what the contract says"
    )]
    let number = value.round() as u64;
    number
}

/// Rounded to `digits` decimals, a trailing `.0` dropped.
#[must_use]
pub fn decimal(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// About three significant digits, thousands separated: `0.123`, `4.56`, `78.9`, `1234`, `12 345`.
#[must_use]
pub fn figure(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        "n/a".to_owned()
    } else if size >= 99.95 {
        grouped(whole(size), value < 0.0)
    } else if size >= 9.995 {
        format!("{value:.1}")
    } else if size >= 0.9995 || size == 0.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

/// Five digits and more in groups of three, separated by a no-break thin space (SI brochure,
/// 5.4.4).
fn grouped(number: u64, negative: bool) -> String {
    let digits = number.to_string();
    let mut text = String::from(if negative { "-" } else { "" });
    for (index, digit) in digits.chars().enumerate() {
        if digits.len() > 4 && index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// A latency with the unit that suits it: `850 ns`, `12.3 µs`, `4.56 ms`, `1.20 s`.
#[must_use]
pub fn latency(ns: u64) -> String {
    let value = float(ns);
    if ns < 1_000 {
        format!("{ns} ns")
    } else if ns < 1_000_000 {
        format!("{} µs", figure(value / 1e3))
    } else if ns < 1_000_000_000 {
        format!("{} ms", figure(value / 1e6))
    } else {
        format!("{} s", figure(value / 1e9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse() {
        let cases = [
            ("0", 0),
            ("4096", 4096),
            ("64K", 64 << 10),
            ("64k", 64 << 10),
            ("16M", 16 << 20),
            ("16MiB", 16 << 20),
            ("1G", 1 << 30),
            ("2T", 2 << 40),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "", "M", "iB", "64iB", "-1", "+1", "1.5G", "64 M", "64MB", "µ", "0x10",
        ] {
            assert_eq!(
                text.parse::<ByteSize>(),
                Err(ParseSizeError::Malformed(text.to_owned()))
            );
        }
        for text in ["18446744073709551616", "16777216T", "99999999999999999999G"] {
            assert_eq!(
                text.parse::<ByteSize>(),
                Err(ParseSizeError::TooLarge(text.to_owned()))
            );
        }
    }

    #[test]
    fn sizes_print_what_parses_back() {
        for (bytes, text) in [
            (0, "0"),
            (4095, "4095"),
            (4096, "4K"),
            (64 << 20, "64M"),
            (3 << 29, "1536M"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(ByteSize(bytes)));
        }
        assert_eq!(ByteSize(25_276_092 << 10).about(), "24.1 GiB");
        assert_eq!(ByteSize(12).about(), "12 bytes");
    }

    #[test]
    fn figures_have_about_three_digits() {
        let cases = [
            (0.0, "0.00"),
            (0.1234, "0.123"),
            (1.2345, "1.23"),
            (12.345, "12.3"),
            (123.45, "123"),
            (1234.4, "1234"),
            (12_345.0, "12\u{202f}345"),
            (1_234_567.0, "1\u{202f}234\u{202f}567"),
            (99.96, "100"),
            (-12_345.0, "-12\u{202f}345"),
            (f64::NAN, "n/a"),
        ];
        for (value, text) in cases {
            assert_eq!(figure(value), text);
        }
    }

    #[test]
    fn latencies_name_their_unit() {
        let cases = [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_000, "1.00 µs"),
            (12_345, "12.3 µs"),
            (4_560_000, "4.56 ms"),
            (1_200_000_000, "1.20 s"),
        ];
        for (ns, text) in cases {
            assert_eq!(latency(ns), text);
        }
    }
}
