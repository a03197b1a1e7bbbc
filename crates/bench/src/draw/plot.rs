//! One chart in its panel: title and legend, then the plot itself.

use std::fmt::Write;

use plotters::backend::{DrawingBackend, SVGBackend};
use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::drawing::DrawingArea;
use plotters::element::{
    Circle, DynElement, EmptyElement, ErrorBar, IntoDynElement, PathElement, Polygon, Rectangle,
    Text,
};
use plotters::series::{DashedLineSeries, LineSeries};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, IntoFont, TRANSPARENT, TextStyle};

use super::axis::{Scale, number};
use super::theme::Role;
use super::{Chart, DrawError, Kind, Line, Point, SIZE};
use crate::units::{figure, whole};

/// The size of labels; plotters divides it by 1.24 for SVG.
const LABEL: u32 = 13;
/// The middle of the legend's first row, the distance to the next row, and an entry's label from
/// the middle of its marker, in pixels.
const LEGEND: i32 = 68;
const ROW: i32 = 20;
const KEY: i32 = 12;

type Area<'s> = DrawingArea<SVGBackend<'s>, Shift>;

/// Draws a chart into its panel. Appends the invisible circles that have the points' texts to
/// `spots`.
pub(super) fn draw(chart: &Chart, area: &Area<'_>, spots: &mut String) -> Result<(), DrawError> {
    let top = heading(chart, area)?;
    let points = chart.lines.iter().flat_map(|line| &line.points);
    let values = points.flat_map(|point| [point.low, point.middle, point.high]);
    // A logarithmic axis has no place for zero.
    let values = values.filter(|value| *value > 0.0);
    let low = values.clone().fold(f64::INFINITY, f64::min);
    // The number above the highest bar takes some room.
    let room = if chart.kind == Kind::Bars { 1.08 } else { 1.0 };
    let high = values.fold(0.0, f64::max) * room;
    let ticks = chart.scale.ticks(low.min(high), high);
    let style = text(Role::Muted, HPos::Right);
    let mut widest = 0;
    for tick in &ticks {
        widest = width(area, &(chart.format)(*tick), &style)?.max(widest);
    }
    let places = Scale::places(chart.places.len());
    let values = Scale::values(ticks, chart.scale);
    let plot = ChartBuilder::on(area)
        .margin_top(top)
        .margin_right(14)
        .margin_bottom(8)
        .x_label_area_size(42)
        .y_label_area_size(20 + widest.min(200))
        .build_cartesian_2d(places, values)?;
    Content { chart, plot, spots }.draw()
}

/// Writes title, subtitle and legend; returns where the plot begins.
fn heading(chart: &Chart, area: &Area<'_>) -> Result<i32, DrawError> {
    let font = ("sans-serif", 17).into_font().style(FontStyle::Bold);
    let title = TextStyle {
        font,
        ..text(Role::Ink, HPos::Left)
    };
    area.draw_text(&chart.title, &title, (12, 22))?;
    area.draw_text(&chart.subtitle, &text(Role::Muted, HPos::Left), (12, 44))?;
    let style = text(Role::Ink, HPos::Left);
    let mut widths = Vec::new();
    for line in &chart.lines {
        widths.push(width(area, &line.label, &style)?);
    }
    let (places, rows) = legend(&widths, pixels(SIZE.0) - 32);
    for (line, (x, row)) in chart.lines.iter().zip(places) {
        let at = (18 + x, LEGEND + row * ROW);
        area.draw(&marker(at, line.role, 5))?;
        area.draw_text(&line.label, &style, (at.0 + KEY, at.1))?;
    }
    Ok(LEGEND + (rows + 1) * ROW + 6)
}

/// Where a legend's entries begin whose labels are so wide: the distance from the left, and the
/// row. A row is at most `most` wide, unless a single entry is wider. Returns the last row as well.
fn legend(labels: &[i32], most: i32) -> (Vec<(i32, i32)>, i32) {
    let (mut x, mut row) = (0, 0);
    let mut places = Vec::with_capacity(labels.len());
    for label in labels {
        let entry = KEY.saturating_add(*label);
        if x > 0 && entry > most - x {
            (x, row) = (0, row + 1);
        }
        places.push((x, row));
        x = x.saturating_add(entry).saturating_add(24);
    }
    (places, row)
}

/// A chart's plot, and what it shows.
struct Content<'c, 'p, 's> {
    chart: &'c Chart,
    plot: ChartContext<'p, SVGBackend<'s>, Cartesian2d<Scale, Scale>>,
    spots: &'c mut String,
}

impl Content<'_, '_, '_> {
    fn draw(mut self) -> Result<(), DrawError> {
        let chart = self.chart;
        let place = |place: &f64| {
            let index = usize::try_from(whole(*place)).unwrap_or(usize::MAX);
            let label = chart.places.get(index);
            label.map_or_else(String::new, u32::to_string)
        };
        self.plot
            .configure_mesh()
            .disable_x_mesh()
            .axis_style(TRANSPARENT)
            .light_line_style(TRANSPARENT)
            .bold_line_style(Role::Grid.colour())
            .label_style(text(Role::Muted, HPos::Left))
            .set_all_tick_mark_size(4)
            .x_label_formatter(&place)
            .y_label_formatter(&|value| (chart.format)(*value))
            .x_desc(chart.axis)
            .draw()?;
        for (index, line) in chart.lines.iter().enumerate() {
            match chart.kind {
                Kind::Lines => self.line(line, beside(index, chart.lines.len(), 0.05))?,
                Kind::Bars => self.bars(line, index)?,
                Kind::Latencies => self.latencies(line, beside(index, chart.lines.len(), 0.5))?,
            }
        }
        Ok(())
    }

    fn line(&mut self, line: &Line, aside: f64) -> Result<(), DrawError> {
        let at = |point: &Point| (number(point.place) + aside, point.middle);
        let points: Vec<_> = line.points.iter().map(at).collect();
        let style = line.role.colour().stroke_width(2);
        if line.dashed {
            let dashes = DashedLineSeries::new(points.clone(), 6, 5, style);
            self.plot.draw_series(dashes)?;
        } else {
            let path = LineSeries::new(points.clone(), style);
            self.plot.draw_series(path)?;
        }
        let area = self.plot.plotting_area();
        for (&(x, middle), &Point { low, high, .. }) in points.iter().zip(&line.points) {
            if low != high {
                // The marker covers the dot at the middle.
                let style = line.role.colour().filled();
                area.draw(&ErrorBar::new_vertical(x, low, middle, high, style, 6))?;
            }
            area.draw(&marker((x, middle), line.role, 4))?;
        }
        for (at, point) in points.iter().zip(&line.points) {
            self.spots(&[*at], 11, &point.tell);
        }
        Ok(())
    }

    fn bars(&mut self, line: &Line, index: usize) -> Result<(), DrawError> {
        let count = number(self.chart.lines.len());
        let pixel = number(self.chart.places.len().max(1))
            / f64::from(self.plot.plotting_area().dim_in_pixel().0.max(1));
        let half = (0.35 / count / pixel).floor().clamp(2.0, 28.0);
        let aside = (2.0 * number(index) - (count - 1.0)) * (half + 1.0) * pixel;
        let label = text(Role::Ink, HPos::Center);
        for point in &line.points {
            let x = number(point.place) + aside;
            let top = (x, point.middle);
            let area = self.plot.plotting_area();
            let corners = [(x - half * pixel, top.1), (x + half * pixel, 0.0)];
            area.draw(&Rectangle::new(corners, line.role.colour().filled()))?;
            let whisker = [(x, point.low), (x, point.high)];
            area.draw(&PathElement::new(whisker, Role::Ink.colour()))?;
            if half >= 12.0 {
                let count = Text::new(count_of(point.middle), (0, -10), label.clone());
                area.draw(&(EmptyElement::at(whisker[1]) + count))?;
            }
            self.spots(&[top], half.max(8.0), &point.tell);
        }
        Ok(())
    }

    fn latencies(&mut self, line: &Line, aside: f64) -> Result<(), DrawError> {
        let style = |width| line.role.colour().stroke_width(width);
        for point in &line.points {
            let x = number(point.place) + aside;
            let at = [point.low, point.middle, point.high].map(|value| (x, value));
            let [median, most, longest] = at;
            let area = self.plot.plotting_area();
            area.draw(&PathElement::new([median, longest], style(1)))?;
            let tick = PathElement::new([(-5, 0), (5, 0)], style(2));
            area.draw(&(EmptyElement::at(longest) + tick))?;
            let rim = Circle::new((0, 0), 6, Role::Paper.colour().filled());
            area.draw(&(EmptyElement::at(most) + rim + Circle::new((0, 0), 3, style(2))))?;
            area.draw(&marker(median, line.role, 5))?;
            self.spots(&at, 8, &point.tell);
        }
        Ok(())
    }

    /// Makes points show their texts.
    fn spots(&mut self, points: &[(f64, f64)], radius: impl Into<f64>, texts: &[String]) {
        let radius = radius.into().round();
        for (point, text) in points.iter().zip(texts) {
            let (x, y) = self.plot.backend_coord(point);
            let text = text.replace('&', "&amp;").replace('<', "&lt;");
            // Writing to a string cannot fail.
            let _ = write!(
                self.spots,
                "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"none\" pointer-events=\"all\">\
                 <title>{text}</title></circle>"
            );
        }
    }
}

/// How far series `index` of `count` is from the middle of its place, in distances between places,
/// when all series together take the part `width` of the distance.
fn beside(index: usize, count: usize, width: f64) -> f64 {
    if count < 2 {
        return 0.0;
    }
    (number(index) / (number(count) - 1.0) - 0.5) * width
}

/// A marker whose shape goes with the role, set off from what is below it by a rim in the page's
/// colour.
fn marker<'a, B: DrawingBackend + 'a, C: Clone + 'a>(
    at: C,
    role: Role,
    radius: i32,
) -> DynElement<'a, B, C> {
    let (paper, fill) = (Role::Paper.colour().filled(), role.colour().filled());
    let at = EmptyElement::at(at);
    match (corners(role, radius + 2), corners(role, radius)) {
        (Some(rim), Some(shape)) => {
            (at + Polygon::new(rim, paper) + Polygon::new(shape, fill)).into_dyn()
        }
        _ => (at + Circle::new((0, 0), radius + 2, paper) + Circle::new((0, 0), radius, fill))
            .into_dyn(),
    }
}

/// The corners of a role's marker; none if the marker is a disc.
fn corners(role: Role, radius: i32) -> Option<Vec<(i32, i32)>> {
    let (near, far) = (radius, radius + 1);
    Some(match role {
        Role::Series(1) => vec![(-near, -near), (near, -near), (near, near), (-near, near)],
        Role::Series(3 | 6) => vec![(0, -far), (far, near), (-far, near)],
        Role::Series(0 | 4) => vec![(0, -far), (far, 0), (0, far), (-far, 0)],
        _ => return None,
    })
}

/// A style for labels, vertically centred on their point.
fn text(role: Role, anchor: HPos) -> TextStyle<'static> {
    let style = ("sans-serif", LABEL).into_font().color(&role.colour());
    style.pos(Pos::new(anchor, VPos::Center))
}

/// About how wide a text is; no font is at hand to measure the text with.
fn width(area: &Area<'_>, text: &str, style: &TextStyle<'_>) -> Result<i32, DrawError> {
    Ok(pixels(area.estimate_text_size(text, style)?.0))
}

/// A number above a bar: `870`, `14.2k`.
fn count_of(value: f64) -> String {
    if value >= 1000.0 {
        format!("{:.1}k", value / 1000.0)
    } else {
        figure(value)
    }
}

fn pixels(size: u32) -> i32 {
    i32::try_from(size).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_stand_beside_each_other() {
        assert_eq!(beside(0, 1, 0.5), 0.0);
        let three = [0, 1, 2].map(|index| beside(index, 3, 0.5));
        assert_eq!(three, [-0.25, 0.0, 0.25]);
    }

    #[test]
    fn a_legend_wraps() {
        let three = [20, 20, 20];
        assert_eq!(legend(&three, 143), (vec![(0, 0), (56, 0), (0, 1)], 1));
        assert_eq!(legend(&three, 144), (vec![(0, 0), (56, 0), (112, 0)], 0));
        assert_eq!(legend(&[500, 10], 100), (vec![(0, 0), (0, 1)], 1));
        assert_eq!(legend(&[], 100), (vec![], 0));
    }

    #[test]
    fn bars_have_short_numbers() {
        assert_eq!([870.0, 14_230.0].map(count_of), ["870", "14.2k"]);
    }
}
