//! The drawing: how much memory is there over time, and when the guest runs.

use std::fmt::Write as _;

use anyhow::Result;

use super::{Report, Way};

/// The plot's edges within the drawing, in pixels.
const LEFT: f64 = 52.0;
const RIGHT: f64 = 748.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 264.0;
/// The bars that show when a guest runs, below the plot.
const BARS: f64 = 304.0;
const BAR: f64 = 18.0;
/// The colours of the two ways, which pages with a light and a dark ground both bear.
const COLOURS: [&str; 2] = ["#1F5FC4", "#C44E0A"];
const GREY: &str = "#5C6570";

/// From times and shares to pixels.
struct Scale {
    last_us: f64,
}

impl Scale {
    fn x(&self, at_us: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * (at_us / self.last_us).min(1.0)
    }

    fn y(share: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * share
    }
}

/// The drawing of a report.
pub(super) fn draw(report: &Report) -> Result<String> {
    let ways = report.ways()?;
    let last_us = ways
        .map(|way| way.all_touches_us)
        .into_iter()
        .fold(1.0, f64::max);
    let scale = Scale { last_us };
    let mut svg = String::from(
        "<svg width=\"760\" height=\"372\" viewBox=\"0 0 760 372\" xmlns=\"http://www.w3.org/2000/svg\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"760\" height=\"372\" fill=\"#FFFFFF\"/>\n",
    );
    head(&mut svg, report, ways);
    axes(&mut svg, &scale);
    for (number, (way, colour)) in ways.into_iter().zip(COLOURS).enumerate() {
        let row = if number == 0 { 0.0 } else { 1.0 };
        curve(&mut svg, &scale, report, way, colour);
        bar(&mut svg, &scale, way, colour, BARS + row * (BAR + 14.0));
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

fn text(svg: &mut String, (x, y): (f64, f64), more: &str, content: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.0}\" y=\"{y:.0}\" {more}>{content}</text>"
    );
}

/// What is shown, in which state the file was, and the colours.
fn head(svg: &mut String, report: &Report, ways: [&Way; 2]) {
    let gib = report.memory_bytes >> 30;
    let cache = match ways.iter().all(|way| way.is_cold) {
        true => "not in the page cache",
        false => "in the page cache, wholly or in part",
    };
    let title = format!("Restoring {gib} GiB of guest memory from a file that is {cache}");
    text(
        svg,
        (12.0, 24.0),
        "font-size=\"15\" font-weight=\"bold\" fill=\"#1A1E24\"",
        &title,
    );
    let touches = report.touches;
    let remark = format!(
        "Memory that is there, over time; the guest touches {touches} pages at random. One run of `pagetide try`."
    );
    text(svg, (12.0, 44.0), &format!("fill=\"{GREY}\""), &remark);
    for (way, (colour, x)) in ways.into_iter().zip(COLOURS.into_iter().zip([12.0, 380.0])) {
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"56\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
        );
        let after = time(way.first_page_us);
        let label = format!("{}: first page after {after}", way.way);
        text(svg, (x + 18.0, 67.0), "fill=\"#1A1E24\"", &label);
    }
}

/// Shares at the left, times below.
fn axes(svg: &mut String, scale: &Scale) {
    for percent in [0_u8, 50, 100] {
        let y = Scale::y(f64::from(percent) / 100.0);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"#E1E5EA\" fill=\"none\"/>"
        );
        let style = format!("text-anchor=\"end\" fill=\"{GREY}\"");
        text(svg, (LEFT - 6.0, y + 4.0), &style, &format!("{percent} %"));
    }
    for part in 0..=4_u8 {
        let at_us = scale.last_us * f64::from(part) / 4.0;
        let anchor = if part == 4 { "end" } else { "middle" };
        let style = format!("text-anchor=\"{anchor}\" fill=\"{GREY}\"");
        text(svg, (scale.x(at_us), BOTTOM + 18.0), &style, &time(at_us));
    }
}

/// How much of the memory is there.
fn curve(svg: &mut String, scale: &Scale, report: &Report, way: &Way, colour: &str) {
    let mut path = String::new();
    for (number, arrival) in way.arrivals.iter().enumerate() {
        let command = if number == 0 { 'M' } else { 'L' };
        #[expect(clippy::cast_precision_loss, reason = "a pixel is coarser")]
        let share = arrival.bytes as f64 / report.memory_bytes as f64;
        let _ = write!(
            path,
            "{command}{:.1} {:.1}",
            scale.x(arrival.at_us),
            Scale::y(share)
        );
    }
    let _ = writeln!(
        svg,
        "<path d=\"{path}\" stroke=\"{colour}\" stroke-width=\"2.5\" fill=\"none\"/>"
    );
}

/// When the guest waits for its first page, and when it runs.
fn bar(svg: &mut String, scale: &Scale, way: &Way, colour: &str, y: f64) {
    let (start, first, last) = (
        scale.x(0.0),
        scale.x(way.first_page_us),
        scale.x(way.all_touches_us),
    );
    for (from, to, fill) in [(start, first, "#D5D9DF"), (first, last, colour)] {
        let width = to - from;
        let _ = writeln!(
            svg,
            "<rect x=\"{from:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{fill}\"/>"
        );
    }
    let inside = |from: f64, to: f64| to - from > 100.0;
    if inside(start, first) {
        let style = "fill=\"#1A1E24\"";
        text(svg, (start + 8.0, y + 13.0), style, "the guest waits");
    }
    if inside(first, last) {
        text(
            svg,
            (first + 8.0, y + 13.0),
            "fill=\"#FFFFFF\"",
            "the guest runs",
        );
    }
}

/// A time of microseconds, with three digits at most.
fn time(us: f64) -> String {
    match us {
        0.0 => "0 s".to_owned(),
        us if us < 1e3 => format!("{us:.0} µs"),
        us if us < 1e4 => format!("{:.1} ms", us / 1e3),
        us if us < 1e6 => format!("{:.0} ms", us / 1e3),
        us => format!("{:.2} s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(arrivals: &str) -> Report {
        let way = |name: &str, first: u32| {
            format!(
                "{{\"way\":\"{name}\",\"is_cold\":true,\"first_page_us\":{first},\"all_touches_us\":2e6,\
                 \"arrivals\":{arrivals}}}"
            )
        };
        let ways = [
            way("pagetide serve", 400),
            way("all of it read first", 900_000),
        ]
        .join(",");
        let text = format!("{{\"memory_bytes\":4294967296,\"touches\":7,\"ways\":[{ways}]}}");
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn both_ways_are_drawn_with_what_was_measured() {
        let arrivals = "[{\"at_us\":0,\"bytes\":0},{\"at_us\":1e6,\"bytes\":4294967296}]";
        let svg = draw(&report(arrivals)).unwrap();
        for part in [
            "Restoring 4 GiB",
            "not in the page cache",
            "pagetide serve: first page after 400 µs",
            "read first: first page after 900 ms",
            "M52.0 264.0L400.0 84.0",
        ] {
            assert!(svg.contains(part), "{part} in {svg}");
        }
    }

    #[test]
    fn a_report_without_arrivals_is_refused() {
        assert!(draw(&report("[]")).is_err());
    }
}
