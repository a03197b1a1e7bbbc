//! Charts as SVG documents.
//!
//! plotters draws the grid, the axes with their labels, lines, whiskers and bars. This module adds
//! what plotters lacks: ticks that enclose the values ([`axis`]), markers and a legend above the
//! plot ([`plot`]), colours that follow the page ([`theme`]), and a text for each point that a
//! browser shows when the mouse points at it. `docs/decisions/0020-charts.md` says why.

mod axis;
mod plot;
mod theme;

use plotters::backend::SVGBackend;
use plotters::drawing::{DrawingAreaErrorKind, IntoDrawingArea};

pub use axis::{Axis, short};
pub use theme::{Role, declarations, for_page};

/// Width and height of a chart in pixels.
const SIZE: (u32, u32) = (620, 400);

/// A chart: series over places, which are equally spaced on the horizontal axis.
#[derive(Debug, Clone)]
pub struct Chart {
    /// What the chart shows.
    pub title: String,
    /// Unit, scale and other remarks, below the title.
    pub subtitle: String,
    /// What the places count: "vCPUs".
    pub axis: &'static str,
    /// The labels of the places.
    pub places: Vec<u32>,
    /// How the points are shown.
    pub kind: Kind,
    /// The vertical axis.
    pub scale: Axis,
    /// Writes the vertical axis's labels.
    pub format: Format,
    /// The series.
    pub lines: Vec<Line>,
}

/// How a chart shows its points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A marker at the middle, a whisker from low to high, and a line from point to point.
    Lines,
    /// A bar up to the middle, with a whisker and the middle as a number above the bar.
    Bars,
    /// A filled marker at low, a ring at middle and a tick at high, joined by a vertical line.
    Latencies,
}

/// A series.
#[derive(Debug, Clone)]
pub struct Line {
    /// The series' name in the legend.
    pub label: String,
    /// Its colour and marker.
    pub role: Role,
    /// Whether its line is dashed.
    pub dashed: bool,
    /// Its values.
    pub points: Vec<Point>,
}

/// A series' values at one place. No value is NaN.
#[derive(Debug, Clone)]
pub struct Point {
    /// The index of the place in [`Chart::places`].
    pub place: usize,
    /// The lowest value; of latencies the median.
    pub low: f64,
    /// The median; of latencies the 99th percentile.
    pub middle: f64,
    /// The highest value; of latencies the longest.
    pub high: f64,
    /// What a browser shows at the point: one text, for [`Kind::Latencies`] one for each value.
    pub tell: Vec<String>,
}

/// Writes a tick's label.
pub type Format = fn(f64) -> String;

/// The drawing library failed, which takes an error in the library: the target is a string.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw the chart")]
pub struct DrawError(#[from] DrawingAreaErrorKind<std::io::Error>);

/// Draws a chart without a background, for [`for_page`].
pub fn draw(chart: &Chart) -> Result<String, DrawError> {
    document(std::slice::from_ref(chart), false)
}

/// Draws charts side by side on paper, for a file of their own.
pub fn panels(charts: &[Chart]) -> Result<String, DrawError> {
    document(charts, true)
}

fn document(charts: &[Chart], paper: bool) -> Result<String, DrawError> {
    let width = charts.iter().map(|_| SIZE.0).sum::<u32>().max(SIZE.0);
    let (mut svg, mut spots) = (String::new(), String::new());
    let root = SVGBackend::with_string(&mut svg, (width, SIZE.1)).into_drawing_area();
    if paper {
        root.fill(&Role::Paper.colour())?;
    }
    let areas = root.split_evenly((1, charts.len().max(1)));
    for (chart, area) in charts.iter().zip(areas) {
        plot::draw(chart, &area, &mut spots)?;
    }
    root.present()?;
    drop(root);
    // Above everything else, where the mouse reaches them.
    if let Some(end) = svg.rfind("</svg>") {
        svg.insert_str(end, &spots);
    }
    Ok(svg)
}

#[cfg(test)]
mod tests;
