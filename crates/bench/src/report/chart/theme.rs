//! Colours, and how a chart gets those of the page that it stands in.
//!
//! Charts are drawn with the light colours below. A file of its own keeps them; in a page each is
//! replaced by the page's CSS variable of the same role, so that one drawing serves a light and a
//! dark page. Every role has a colour of its own, which makes the replacement unambiguous; a test
//! pins that.

use plotters::style::RGBColor;

use crate::paging::{Delivery, Series};

/// What a colour is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Text that is read first.
    Ink,
    /// Axis labels and remarks.
    Muted,
    /// Grid lines.
    Grid,
    /// The page below the drawing.
    Paper,
    /// One of the series' colours.
    Series(usize),
}

/// Red, green, blue.
type Rgb = (u8, u8, u8);

/// A role's colours.
struct Colour {
    role: Role,
    light: Rgb,
    dark: Rgb,
    /// The CSS variable.
    variable: &'static str,
}

const fn colour(role: Role, light: Rgb, dark: Rgb, variable: &'static str) -> Colour {
    Colour {
        role,
        light,
        dark,
        variable,
    }
}

const COLOURS: [Colour; 11] = [
    colour(Role::Ink, (0x1a, 0x1e, 0x24), (0xe8, 0xea, 0xed), "--ink"),
    colour(
        Role::Muted,
        (0x5c, 0x65, 0x70),
        (0xa0, 0xa8, 0xb3),
        "--muted",
    ),
    colour(Role::Grid, (0xe1, 0xe5, 0xea), (0x30, 0x37, 0x41), "--grid"),
    colour(
        Role::Paper,
        (0xff, 0xff, 0xff),
        (0x16, 0x1a, 0x1f),
        "--paper",
    ),
    // Orange, blue, teal, violet, crimson, olive: told apart with the common colour-vision deficiencies.
    // The first five series have markers of different shapes as well. The floor is grey.
    colour(
        Role::Series(0),
        (0x7c, 0x86, 0x93),
        (0x8d, 0x97, 0xa5),
        "--series-0",
    ),
    colour(
        Role::Series(1),
        (0xc4, 0x4e, 0x0a),
        (0xf5, 0x96, 0x56),
        "--series-1",
    ),
    colour(
        Role::Series(2),
        (0x1f, 0x5f, 0xc4),
        (0x6c, 0xa8, 0xff),
        "--series-2",
    ),
    colour(
        Role::Series(3),
        (0x0b, 0x7d, 0x6e),
        (0x3f, 0xc7, 0xb1),
        "--series-3",
    ),
    colour(
        Role::Series(4),
        (0x7a, 0x45, 0xb8),
        (0xbd, 0x93, 0xf0),
        "--series-4",
    ),
    colour(
        Role::Series(5),
        (0xb0, 0x24, 0x60),
        (0xf2, 0x86, 0xb2),
        "--series-5",
    ),
    colour(
        Role::Series(6),
        (0x6b, 0x64, 0x0c),
        (0xc8, 0xbd, 0x4a),
        "--series-6",
    ),
];

/// The last colour for a fault-around size; further sizes take it as well.
const LAST_AROUND: usize = 6;

impl Role {
    /// The role of a series: its colour follows from what it is, so that it is the same in every
    /// chart whatever else was measured. `around` is its place among the fault-around sizes.
    pub(crate) fn of(series: Series, all: &[Series]) -> Self {
        let place = match series.delivery {
            Delivery::None => 0,
            Delivery::Uffd => 1,
            Delivery::Exit if series.fault_around == 1 => 2,
            Delivery::Exit => {
                let wide = all.iter().filter(|other| other.fault_around > 1);
                3 + wide.take_while(|other| **other != series).count()
            }
        };
        Self::Series(place.min(LAST_AROUND))
    }

    /// The colour to draw with.
    pub(crate) fn colour(self) -> RGBColor {
        let (red, green, blue) = COLOURS
            .iter()
            .find(|entry| entry.role == self)
            .map_or((0, 0, 0), |entry| entry.light);
        RGBColor(red, green, blue)
    }

    /// The CSS variable.
    pub(crate) fn variable(self) -> &'static str {
        COLOURS
            .iter()
            .find(|entry| entry.role == self)
            .map_or("--ink", |entry| entry.variable)
    }
}

fn hex((red, green, blue): Rgb) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// The CSS declarations of all variables, light or dark.
pub(crate) fn declarations(dark: bool) -> String {
    COLOURS
        .iter()
        .map(|colour| {
            let shown = if dark { colour.dark } else { colour.light };
            format!("{}:{};", colour.variable, hex(shown))
        })
        .collect()
}

/// A drawing for a page: colours become the page's variables, and what only a separate file needs
/// (the XML namespace) goes.
pub(crate) fn for_page(svg: &str) -> String {
    let mut text = svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
    for colour in COLOURS {
        let (from, to) = (hex(colour.light), colour.variable);
        text = text.replace(&format!("\"{from}\""), &format!("\"var({to})\""));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_roles_share_a_light_colour_or_a_variable() {
        for (index, one) in COLOURS.iter().enumerate() {
            for other in &COLOURS[..index] {
                assert_ne!(one.light, other.light);
                assert_ne!(one.variable, other.variable);
            }
        }
    }

    #[test]
    fn a_series_keeps_its_colour_whatever_else_was_measured() {
        let exit = |fault_around| Series {
            delivery: Delivery::Exit,
            fault_around,
            populate: false,
        };
        let uffd = Series {
            delivery: Delivery::Uffd,
            fault_around: 1,
            populate: false,
        };
        let around = [16, 32, 64, 128, 256];
        let all: Vec<_> = [uffd, exit(1)]
            .into_iter()
            .chain(around.map(exit))
            .collect();
        let roles: Vec<_> = all.iter().map(|&series| Role::of(series, &all)).collect();
        assert_eq!(roles, [1, 2, 3, 4, 5, 6, 6].map(Role::Series));
        assert_eq!(Role::of(exit(1), &[exit(1)]), Role::Series(2));
    }

    #[test]
    fn colours_become_variables() {
        let svg = "<svg xmlns=\"http://www.w3.org/2000/svg\"><text fill=\"#1A1E24\"/></svg>";
        assert_eq!(for_page(svg), "<svg><text fill=\"var(--ink)\"/></svg>");
    }

    /// WCAG 2 contrast between two colours.
    fn contrast(one: Rgb, other: Rgb) -> f64 {
        let luminance = |(red, green, blue): Rgb| {
            let linear = |channel: u8| {
                let value = f64::from(channel) / 255.0;
                if value <= 0.03928 {
                    value / 12.92
                } else {
                    ((value + 0.055) / 1.055).powf(2.4)
                }
            };
            0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)
        };
        let (one, other) = (luminance(one) + 0.05, luminance(other) + 0.05);
        one.max(other) / one.min(other)
    }

    #[test]
    fn everything_that_is_read_stands_out_from_the_page() {
        let paper = COLOURS
            .iter()
            .find(|colour| colour.role == Role::Paper)
            .unwrap();
        for colour in &COLOURS {
            let least = match colour.role {
                Role::Ink => 12.0,
                Role::Muted => 4.5,
                Role::Series(_) => 3.0,
                Role::Grid | Role::Paper => continue,
            };
            assert!(
                contrast(colour.light, paper.light) >= least,
                "{:?} light",
                colour.role
            );
            assert!(
                contrast(colour.dark, paper.dark) >= least,
                "{:?} dark",
                colour.role
            );
        }
    }
}
