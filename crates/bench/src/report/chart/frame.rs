//! What all charts share: the title, a vertical axis, and one place on the horizontal axis for each
//! number of vCPUs.

use super::canvas::{Anchor, Canvas, DrawError, Pixel, Shape, pixel};
use super::scale::Scale;
use super::theme::Role;
use crate::units::figure;

const TITLE_SIZE: u32 = 17;
const LABEL_SIZE: u32 = 13;
/// The middle of the legend's first line, and how far the next one is below.
const LEGEND_TOP: i32 = 68;
const LEGEND_PITCH: i32 = 20;

/// What stands around a chart's content.
pub(crate) struct Words<'a> {
    /// What the chart shows.
    pub(crate) title: &'a str,
    /// Unit, scale and other remarks, under the title.
    pub(crate) subtitle: &'a str,
    /// Labels of the places on the horizontal axis.
    pub(crate) places: &'a [u32],
    /// What they count.
    pub(crate) axis: &'a str,
}

/// An entry of a chart's legend.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Key {
    pub(crate) label: String,
    pub(crate) role: Role,
}

/// The frame of a chart within a canvas.
#[derive(Debug)]
pub(crate) struct Frame {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
    scale: Scale,
    places: usize,
}

impl Frame {
    /// Draws title, legend, axes and grid into the part of the canvas that begins at `x` and is
    /// `width` by `height` pixels. `tell` writes a tick's value.
    pub(crate) fn draw(
        canvas: &Canvas<'_>,
        (x, width, height): (i32, i32, i32),
        words: &Words<'_>,
        keys: &[Key],
        scale: Scale,
        tell: impl Fn(f64) -> String,
    ) -> Result<Self, DrawError> {
        canvas.bold(
            words.title,
            (x + 12, 22),
            Anchor::Start,
            Role::Ink,
            TITLE_SIZE,
        )?;
        canvas.text(
            words.subtitle,
            (x + 12, 44),
            Anchor::Start,
            Role::Muted,
            LABEL_SIZE,
        )?;
        let widths: Vec<i32> = keys.iter().map(|key| text_width(&key.label)).collect();
        let places = legend(&widths, width - 32);
        for (key, (aside, line)) in keys.iter().zip(&places) {
            let at = (x + 18 + aside, LEGEND_TOP + line * LEGEND_PITCH);
            canvas.marker(at, Shape::of(key.role), key.role, 5)?;
            canvas.text(
                &key.label,
                (at.0 + 12, at.1),
                Anchor::Start,
                Role::Ink,
                LABEL_SIZE,
            )?;
        }
        let lines = places.last().map_or(0, |(_, line)| *line);
        let labels: Vec<String> = scale.ticks().iter().map(|tick| tell(*tick)).collect();
        let widest = labels
            .iter()
            .map(|label| text_width(label))
            .max()
            .unwrap_or(0);
        let frame = Self {
            left: x + 20 + widest,
            right: x + width - 14,
            top: LEGEND_TOP + lines * LEGEND_PITCH + 26,
            bottom: height - 50,
            scale,
            places: words.places.len().max(1),
        };
        frame.grid(canvas, &labels)?;
        frame.below(canvas, words)?;
        Ok(frame)
    }

    fn grid(&self, canvas: &Canvas<'_>, labels: &[String]) -> Result<(), DrawError> {
        for (tick, label) in self.scale.ticks().iter().zip(labels) {
            let y = self.y(*tick);
            canvas.path(&[(self.left, y), (self.right, y)], Role::Grid, 1)?;
            canvas.text(
                label,
                (self.left - 8, y),
                Anchor::End,
                Role::Muted,
                LABEL_SIZE,
            )?;
        }
        Ok(())
    }

    fn below(&self, canvas: &Canvas<'_>, words: &Words<'_>) -> Result<(), DrawError> {
        for (place, label) in words.places.iter().enumerate() {
            let at = (self.x(place, 0.0), self.bottom + 16);
            canvas.text(
                &label.to_string(),
                at,
                Anchor::Middle,
                Role::Muted,
                LABEL_SIZE,
            )?;
        }
        let middle = i32::midpoint(self.left, self.right);
        canvas.text(
            words.axis,
            (middle, self.bottom + 36),
            Anchor::Middle,
            Role::Muted,
            LABEL_SIZE,
        )
    }

    /// The horizontal position of a place; `aside` moves it by that part of the distance to the
    /// next one.
    pub(crate) fn x(&self, place: usize, aside: f64) -> i32 {
        let width = f64::from(self.right - self.left) / float(self.places);
        pixel(f64::from(self.left) + width * (float(place) + 0.5 + aside))
    }

    /// The vertical position of a value.
    pub(crate) fn y(&self, value: f64) -> i32 {
        let height = f64::from(self.bottom - self.top);
        pixel(f64::from(self.bottom) - height * self.scale.place(value))
    }

    /// The distance between two places in pixels.
    pub(crate) fn pitch(&self) -> i32 {
        (self.right - self.left) / i32::try_from(self.places).unwrap_or(i32::MAX)
    }

    /// The point of a value.
    pub(crate) fn point(&self, place: usize, aside: f64, value: f64) -> Pixel {
        (self.x(place, aside), self.y(value))
    }
}

/// How far series `index` of `count` stands beside the middle of its place, when together they take
/// the part `spread` of it.
pub(crate) fn aside(index: usize, count: usize, spread: f64) -> f64 {
    if count < 2 {
        return 0.0;
    }
    (float(index) / (float(count) - 1.0) - 0.5) * spread
}

/// A tick's value in few digits: whole numbers without decimals, thousands as 10k.
pub(crate) fn short(value: f64) -> String {
    if value >= 1e6 {
        format!("{}M", crate::units::decimal(value / 1e6, 1))
    } else if value >= 1e4 {
        format!("{}k", crate::units::decimal(value / 1e3, 1))
    } else if value >= 1.0 || value == 0.0 {
        crate::units::decimal(value, 1)
    } else {
        figure(value)
    }
}

fn float(count: usize) -> f64 {
    crate::units::float(u64::try_from(count).unwrap_or(u64::MAX))
}

/// Where the entries of a legend stand whose labels are so wide: how far aside, and in which line. A line
/// is at most `most` wide, unless a single entry is wider.
fn legend(labels: &[i32], most: i32) -> Vec<(i32, i32)> {
    let (mut aside, mut line) = (0, 0);
    let mut places = Vec::with_capacity(labels.len());
    for label in labels {
        let entry = 12 + label;
        if aside > 0 && aside + entry > most {
            (aside, line) = (0, line + 1);
        }
        places.push((aside, line));
        aside += entry + 24;
    }
    places
}

/// About how wide a text is in pixels; the drawing has no font to measure it with.
fn text_width(text: &str) -> i32 {
    i32::try_from(text.chars().count())
        .unwrap_or(0)
        .saturating_mul(7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_stand_beside_each_other() {
        assert_eq!(aside(0, 1, 0.5), 0.0);
        assert_eq!(
            [aside(0, 3, 0.5), aside(1, 3, 0.5), aside(2, 3, 0.5)],
            [-0.25, 0.0, 0.25]
        );
    }

    #[test]
    fn a_legend_goes_on_in_the_next_line() {
        assert_eq!(legend(&[20, 20, 20], 143), [(0, 0), (56, 0), (0, 1)]);
        assert_eq!(legend(&[20, 20, 20], 144), [(0, 0), (56, 0), (112, 0)]);
        assert_eq!(legend(&[500, 10], 100), [(0, 0), (0, 1)]);
        assert_eq!(legend(&[], 100), []);
    }

    #[test]
    fn ticks_are_short() {
        let cases = [
            (0.0, "0"),
            (0.5, "0.500"),
            (1.5, "1.5"),
            (2000.0, "2000"),
            (25_000.0, "25k"),
            (2_500_000.0, "2.5M"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
    }
}
