//! A small drawing surface over plotters: text, lines and markers in whole pixels, and invisible
//! spots that show a text when pointed at.

use std::fmt::Write;

use super::theme::Role;
use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Polygon, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, IntoFont, ShapeStyle, TextStyle};

/// A drawing failed. With a string as its target that takes an error in the drawing library.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw the chart: {0}")]
pub struct DrawError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for DrawError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// A point in pixels, from the upper left corner.
pub(crate) type Pixel = (i32, i32);

/// The nearest pixel; far outside values stay at the ends of an `i32`.
pub(crate) fn pixel(value: f64) -> i32 {
    #[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
    let pixel = value.round() as i32;
    pixel
}

/// Which end of a text its point is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// The shape of a marker, told apart without colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    Disc,
    Square,
    Triangle,
    Diamond,
    Ring,
}

impl Shape {
    /// The shape that goes with a role.
    pub(crate) fn of(role: Role) -> Self {
        match role {
            Role::Series(1) => Self::Square,
            Role::Series(3 | 6) => Self::Triangle,
            Role::Series(0 | 4) => Self::Diamond,
            _ => Self::Disc,
        }
    }
}

/// A drawing surface.
pub(crate) struct Canvas<'a> {
    area: DrawingArea<SVGBackend<'a>, Shift>,
    spots: String,
}

/// Draws something and returns the SVG document.
pub(crate) fn draw(
    (width, height): (u32, u32),
    paint: impl FnOnce(&mut Canvas<'_>) -> Result<(), DrawError>,
) -> Result<String, DrawError> {
    let mut svg = String::new();
    let spots = {
        let area = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
        let mut canvas = Canvas {
            area,
            spots: String::new(),
        };
        paint(&mut canvas)?;
        canvas.area.present()?;
        canvas.spots
    };
    // The spots lie over everything else.
    if let Some(end) = svg.rfind("</svg>") {
        svg.insert_str(end, &spots);
    }
    Ok(svg)
}

impl Canvas<'_> {
    /// Fills everything with the page's colour; for drawings that stand alone.
    pub(crate) fn paper(&self) -> Result<(), DrawError> {
        Ok(self.area.fill(&Role::Paper.colour())?)
    }

    /// Writes a line of text, its point being vertically in the middle.
    pub(crate) fn text(
        &self,
        text: &str,
        at: Pixel,
        anchor: Anchor,
        role: Role,
        size: u32,
    ) -> Result<(), DrawError> {
        self.styled_text(text, at, anchor, role, (size, FontStyle::Normal))
    }

    /// As [`Canvas::text`], in bold.
    pub(crate) fn bold(
        &self,
        text: &str,
        at: Pixel,
        anchor: Anchor,
        role: Role,
        size: u32,
    ) -> Result<(), DrawError> {
        self.styled_text(text, at, anchor, role, (size, FontStyle::Bold))
    }

    fn styled_text(
        &self,
        text: &str,
        at: Pixel,
        anchor: Anchor,
        role: Role,
        (size, style): (u32, FontStyle),
    ) -> Result<(), DrawError> {
        let horizontal = match anchor {
            Anchor::Start => HPos::Left,
            Anchor::Middle => HPos::Center,
            Anchor::End => HPos::Right,
        };
        let font = ("sans-serif", size)
            .into_font()
            .style(style)
            .color(&role.colour());
        let style = TextStyle {
            pos: Pos::new(horizontal, VPos::Center),
            ..font
        };
        Ok(self.area.draw(&Text::new(text.to_owned(), at, style))?)
    }

    /// Draws a path of straight lines.
    pub(crate) fn path(&self, points: &[Pixel], role: Role, width: u32) -> Result<(), DrawError> {
        let style = ShapeStyle {
            color: role.colour().to_rgba(),
            filled: false,
            stroke_width: width,
        };
        Ok(self.area.draw(&PathElement::new(points.to_vec(), style))?)
    }

    /// Draws a path of dashes.
    pub(crate) fn dashes(&self, points: &[Pixel], role: Role, width: u32) -> Result<(), DrawError> {
        const DASH: f64 = 6.0;
        for pair in points.windows(2) {
            let [from, to] = [pair[0], pair[1]].map(|(x, y)| (f64::from(x), f64::from(y)));
            let length = (to.0 - from.0).hypot(to.1 - from.1);
            let along = |distance: f64| {
                let part = (distance / length).min(1.0);
                (
                    pixel(from.0 + (to.0 - from.0) * part),
                    pixel(from.1 + (to.1 - from.1) * part),
                )
            };
            let mut start = 0.0;
            while start < length {
                self.path(&[along(start), along(start + DASH)], role, width)?;
                start += DASH * 1.8;
            }
        }
        Ok(())
    }

    /// Fills a rectangle between two corners.
    pub(crate) fn bar(&self, from: Pixel, to: Pixel, role: Role) -> Result<(), DrawError> {
        Ok(self
            .area
            .draw(&Rectangle::new([from, to], role.colour().filled()))?)
    }

    /// Draws a marker, set off from what it lies on by a rim in the page's colour.
    pub(crate) fn marker(
        &self,
        (x, y): Pixel,
        shape: Shape,
        role: Role,
        radius: i32,
    ) -> Result<(), DrawError> {
        for (radius, role) in [(radius + 2, Role::Paper), (radius, role)] {
            let fill = role.colour().filled();
            let far = radius + 1;
            let corners = match shape {
                Shape::Disc | Shape::Ring => {
                    self.area.draw(&Circle::new((x, y), radius, fill))?;
                    continue;
                }
                Shape::Square => {
                    vec![
                        (x - radius, y - radius),
                        (x + radius, y - radius),
                        (x + radius, y + radius),
                        (x - radius, y + radius),
                    ]
                }
                Shape::Triangle => vec![(x, y - far), (x + far, y + radius), (x - far, y + radius)],
                Shape::Diamond => vec![(x, y - far), (x + far, y), (x, y + far), (x - far, y)],
            };
            self.area.draw(&Polygon::new(corners, fill))?;
        }
        if shape == Shape::Ring {
            self.area.draw(&Circle::new(
                (x, y),
                radius - 2,
                Role::Paper.colour().filled(),
            ))?;
        }
        Ok(())
    }

    /// Makes a place tell `text` when pointed at.
    pub(crate) fn spot(&mut self, (x, y): Pixel, radius: i32, text: &str) {
        let text = super::super::escape(text);
        // Writing to a string cannot fail.
        let _ = write!(
            self.spots,
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"none\" pointer-events=\"all\">\
             <title>{text}</title></circle>"
        );
    }
}
