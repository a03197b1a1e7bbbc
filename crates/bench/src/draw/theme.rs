//! Colours, and how a chart takes the colours of the page that it stands in.
//!
//! Charts are drawn in the light colours below. A file of its own keeps these colours. In a page,
//! [`for_page`] replaces each colour with the page's CSS variable of the same role, so that one
//! drawing serves a light and a dark page. The replacement is unambiguous because no two roles
//! share a colour; a test checks this.

use plotters::style::RGBColor;

/// What a colour is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Text that is read first.
    Ink,
    /// Axis labels and remarks.
    Muted,
    /// Grid lines.
    Grid,
    /// The page below the drawing.
    Paper,
    /// One of the series' colours; series beyond the last colour share that colour.
    Series(usize),
}

/// A role, its CSS variable, and its colours (0xRRGGBB) on a light and on a dark page.
type Colour = (Role, &'static str, u32, u32);

const COLOURS: [Colour; 11] = [
    (Role::Ink, "--ink", 0x1a_1e_24, 0xe8_ea_ed),
    (Role::Muted, "--muted", 0x5c_65_70, 0xa0_a8_b3),
    (Role::Grid, "--grid", 0xe1_e5_ea, 0x30_37_41),
    (Role::Paper, "--paper", 0xff_ff_ff, 0x16_1a_1f),
    // Grey, orange, blue, teal, violet, crimson, olive: distinct with the common colour-vision
    // deficiencies. The markers of the first five differ in shape as well.
    (Role::Series(0), "--series-0", 0x7c_86_93, 0x8d_97_a5),
    (Role::Series(1), "--series-1", 0xc4_4e_0a, 0xf5_96_56),
    (Role::Series(2), "--series-2", 0x1f_5f_c4, 0x6c_a8_ff),
    (Role::Series(3), "--series-3", 0x0b_7d_6e, 0x3f_c7_b1),
    (Role::Series(4), "--series-4", 0x7a_45_b8, 0xbd_93_f0),
    (Role::Series(5), "--series-5", 0xb0_24_60, 0xf2_86_b2),
    (Role::Series(6), "--series-6", 0x6b_64_0c, 0xc8_bd_4a),
];

impl Role {
    fn entry(self) -> Colour {
        let found = COLOURS.into_iter().find(|entry| entry.0 == self);
        found.unwrap_or(COLOURS[COLOURS.len() - 1])
    }

    /// The colour to draw with.
    pub(super) fn colour(self) -> RGBColor {
        let [_, red, green, blue] = self.entry().2.to_be_bytes();
        RGBColor(red, green, blue)
    }

    /// The CSS variable.
    pub fn variable(self) -> &'static str {
        self.entry().1
    }
}

/// The CSS declarations of all variables, light or dark.
pub fn declarations(dark: bool) -> String {
    let shown = |(_, variable, light, dark_colour): Colour| {
        let colour = if dark { dark_colour } else { light };
        format!("{variable}:#{colour:06X};")
    };
    COLOURS.into_iter().map(shown).collect()
}

/// Turns a drawing into one for a page: colours become the page's variables, and the XML
/// namespace, which only a file of its own needs, is removed.
pub fn for_page(svg: &str) -> String {
    let mut text = svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
    for (_, variable, light, _) in COLOURS {
        text = text.replace(
            &format!("\"#{light:06X}\""),
            &format!("\"var({variable})\""),
        );
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
                assert_ne!(one.1, other.1);
                assert_ne!(one.2, other.2);
            }
        }
    }

    #[test]
    fn series_beyond_the_last_colour_share_it() {
        assert_eq!(Role::Series(6).variable(), "--series-6");
        assert_eq!(Role::Series(60).variable(), "--series-6");
    }

    #[test]
    fn colours_become_variables() {
        let svg = "<svg xmlns=\"http://www.w3.org/2000/svg\"><text fill=\"#1A1E24\"/></svg>";
        assert_eq!(for_page(svg), "<svg><text fill=\"var(--ink)\"/></svg>");
        assert!(declarations(false).starts_with("--ink:#1A1E24;--muted:#5C6570;"));
        assert!(declarations(true).ends_with("--series-6:#C8BD4A;"));
    }

    /// WCAG 2 contrast between two colours.
    fn contrast(one: u32, other: u32) -> f64 {
        let luminance = |colour: u32| {
            let [_, red, green, blue] = colour.to_be_bytes().map(|channel| {
                let value = f64::from(channel) / 255.0;
                if value <= 0.03928 {
                    value / 12.92
                } else {
                    ((value + 0.055) / 1.055).powf(2.4)
                }
            });
            0.2126 * red + 0.7152 * green + 0.0722 * blue
        };
        let (one, other) = (luminance(one) + 0.05, luminance(other) + 0.05);
        one.max(other) / one.min(other)
    }

    #[test]
    fn everything_that_is_read_stands_out_from_the_page() {
        let (_, _, light_page, dark_page) = Role::Paper.entry();
        for (role, _, light, dark) in COLOURS {
            let least = match role {
                Role::Ink => 12.0,
                Role::Muted => 4.5,
                Role::Series(_) => 3.0,
                Role::Grid | Role::Paper => continue,
            };
            assert!(contrast(light, light_page) >= least, "{role:?} light");
            assert!(contrast(dark, dark_page) >= least, "{role:?} dark");
        }
    }
}
