//! What was seen, as a table and as JSON.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use pagetide_base::units::ByteSize;
use serde::Serialize;

use super::guest::Touches;
use super::plan::Order;

/// The result of one way to restore the image.
#[derive(Debug, Serialize)]
pub(super) struct Way {
    way: &'static str,
    /// Whether the image had been taken out of the page cache before.
    is_cold: bool,
    /// From the beginning of the restore.
    first_page_us: f64,
    touch_p50_us: f64,
    touch_p99_us: f64,
    longest_touch_us: f64,
    /// From the beginning of the restore to the end of the last touch.
    all_touches_us: f64,
    /// How much memory was there, from the beginning of the restore until the guest could run and had made its touches.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) arrivals: Vec<Arrival>,
    /// Touches of which no fault has reached the server: it had installed their pages before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pages_ahead: Option<u64>,
}

/// How much of the guest's memory was there at a time.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Arrival {
    /// From the beginning of the restore.
    pub(super) at_us: f64,
    pub(super) bytes: u64,
}

impl Arrival {
    pub(super) fn new(begun: Instant, bytes: u64) -> Self {
        Self {
            at_us: begun.elapsed().as_secs_f64() * 1e6,
            bytes,
        }
    }
}

/// What `--json` prints. Under one version of the program no field changes its meaning.
#[derive(Debug, Serialize)]
pub(super) struct Document {
    pub(super) image: String,
    pub(super) memory_bytes: u64,
    pub(super) order: Order,
    pub(super) touches: usize,
    pub(super) ways: Vec<Way>,
}

impl Way {
    pub(super) fn new(way: &'static str, is_cold: bool, touches: &Touches) -> Self {
        let mut took = touches.took.clone();
        took.sort_unstable();
        let us = |duration: Duration| duration.as_secs_f64() * 1e6;
        // The nearest rank.
        let rank = |percent: usize| (took.len() * percent).div_ceil(100).max(1) - 1;
        let at = |index: usize| us(took.get(index).copied().unwrap_or_default());
        Self {
            way,
            is_cold,
            first_page_us: us(touches.first_after),
            touch_p50_us: at(rank(50)),
            touch_p99_us: at(rank(99)),
            longest_touch_us: at(rank(100)),
            all_touches_us: us(touches.last_after),
            arrivals: Vec::new(),
            pages_ahead: None,
        }
    }

    fn cells(&self) -> [String; 7] {
        let ahead = self.pages_ahead.map(|pages| pages.to_string());
        [
            self.way.to_owned(),
            time(self.first_page_us),
            time(self.touch_p50_us),
            time(self.touch_p99_us),
            time(self.longest_touch_us),
            time(self.all_touches_us),
            ahead.unwrap_or_default(),
        ]
    }
}

/// A time of microseconds, with three digits.
fn time(us: f64) -> String {
    let (value, unit) = match us {
        us if us < 1e3 => (us, "us"),
        us if us < 1e6 => (us / 1e3, "ms"),
        us => (us / 1e6, "s"),
    };
    let digits = match value {
        value if value < 10.0 => 2,
        value if value < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

const HEADS: [&str; 7] = [
    "",
    "first page",
    "touch p50",
    "touch p99",
    "longest",
    "all touches",
    "ahead",
];

impl Document {
    pub(super) fn text(&self) -> String {
        let order = match self.order {
            Order::Recorded => "in the order of its working set",
            Order::Random => "at random",
            Order::Upwards => "upwards",
        };
        let mut text = format!(
            "{}: {} of guest memory, {} pages touched {order}\n\n",
            self.image,
            ByteSize(self.memory_bytes).about(),
            self.touches
        );
        let rows: Vec<_> = self.ways.iter().map(Way::cells).collect();
        let heads = HEADS.map(str::to_owned);
        let all = || std::iter::once(&heads).chain(&rows);
        let widths: [usize; 7] =
            std::array::from_fn(|column| all().map(|row| row[column].len()).max().unwrap_or(0));
        for row in all() {
            let [way, figures @ ..] = row;
            let _ = write!(text, "{way:<0$}", widths[0]);
            for (figure, width) in figures.iter().zip(&widths[1..]) {
                let _ = write!(text, "  {figure:>width$}");
            }
            text.truncate(text.trim_end_matches(' ').len());
            text.push('\n');
        }
        text.push_str(match self.ways.iter().all(|way| way.is_cold) {
            true => "\nEach began with the image out of the page cache.\n",
            false => "\nThe image was in the page cache, wholly or in part.\n",
        });
        let _ = write!(text, "{}", hint(&self.image));
        text
    }
}

/// How a Firecracker is restored from the same image.
fn hint(image: &str) -> String {
    format!(
        "\nWith Firecracker:\n  pagetide serve '/tmp/pagetide.sock={image}' &\n  \
         # and then, in PUT /snapshot/load:\n  \
         \"mem_backend\": {{\"backend_type\": \"Uffd\", \"backend_path\": \"/tmp/pagetide.sock\"}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_the_touches() {
        let touches = Touches {
            took: (1..=200).rev().map(Duration::from_micros).collect(),
            ..Touches::default()
        };
        let way = Way::new("", true, &touches);
        let found = [way.touch_p50_us, way.touch_p99_us, way.longest_touch_us];
        let found = found.map(pagetide_base::units::whole);
        assert_eq!(found, [100, 198, 200]);
    }

    #[test]
    fn times_have_three_digits() {
        let texts = [0.0412, 41.26, 412.6, 4126.0, 41_260.0, 4_126_000.0].map(time);
        assert_eq!(
            texts,
            [
                "0.04 us", "41.3 us", "413 us", "4.13 ms", "41.3 ms", "4.13 s"
            ]
        );
    }
}
