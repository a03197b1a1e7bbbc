//! Lines and charts over the numbers of vCPUs.

use std::fmt::Display;

use super::{Shown, View};
use crate::draw::{Axis, Chart, Format, Kind, Line, Point, Role};
use crate::model::Cell;
use crate::stats::Spread;
use crate::units::{latency, whole};

/// A point of a line: a spread, and what it says when pointed at. `name` is what the point belongs to.
pub(crate) fn point(
    place: usize,
    name: &dyn Display,
    spread: &Spread,
    show: impl Fn(f64) -> String,
) -> Point {
    let [middle, low, high] = [spread.median, spread.min, spread.max].map(show);
    let text = if spread.count > 1 {
        format!("{name}: {middle} ({low} to {high})")
    } else {
        format!("{name}: {middle}")
    };
    Point {
        place,
        low: spread.min,
        middle: spread.median,
        high: spread.max,
        tell: vec![text],
    }
}

/// Nanoseconds at a tick: "10 µs", not "10.0 µs".
pub(crate) fn tick_ns(ns: f64) -> String {
    let text = latency(whole(ns));
    text.replace(".00 ", " ").replace(".0 ", " ")
}

impl<B: Shown> View<'_, B> {
    /// The line of a series over the plan's numbers of vCPUs, as far as it has the value.
    pub(crate) fn line(
        &self,
        series: B::Series,
        label: String,
        value: impl Fn(&Cell<B::Series>) -> Option<Spread>,
        show: impl Fn(f64) -> String,
    ) -> Line {
        let places = self.plan().vcpus().iter().enumerate();
        let points = places.filter_map(|(place, &vcpus)| {
            let spread = value(self.cell(vcpus, series)?)?;
            Some(point(
                place,
                &format!("{series}, {vcpus} vCPUs"),
                &spread,
                &show,
            ))
        });
        Line {
            label,
            role: B::role(self, series),
            dashed: false,
            points: points.collect(),
        }
    }

    /// A chart of lines over the plan's numbers of vCPUs.
    pub(crate) fn chart(
        &self,
        [title, subtitle]: [String; 2],
        scale: Axis,
        format: Format,
        lines: Vec<Line>,
    ) -> Chart {
        Chart {
            title,
            subtitle,
            axis: "vCPUs",
            places: self.plan().vcpus().to_vec(),
            kind: Kind::Lines,
            scale,
            format,
            lines,
        }
    }
}

/// A line of published figures.
pub(crate) fn published(
    label: &str,
    role: Role,
    figures: impl IntoIterator<Item = (usize, String, f64)>,
    show: impl Fn(f64) -> String,
) -> Line {
    let figures = figures.into_iter();
    let points = figures.filter_map(|(place, name, figure)| {
        let spread = Spread::of(&[figure])?;
        Some(point(place, &name, &spread, &show))
    });
    Line {
        label: label.to_owned(),
        role,
        dashed: role == Role::Muted,
        points: points.collect(),
    }
}
