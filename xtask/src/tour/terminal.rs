//! The picture of a terminal.

use std::fmt::Write as _;

/// Where a line wraps, in characters.
const COLUMNS: usize = 160;
/// How many rows a picture has at most.
const MOST_ROWS: usize = 90;
/// Of a character, in pixels.
const WIDTH: f64 = 7.2;
const HEIGHT: f64 = 17.0;
const MARGIN: f64 = 14.0;

/// The picture of what a terminal shows: lines that begin with `$ ` are what was typed.
pub(super) fn draw(text: &str) -> String {
    let text = text.trim_end();
    let mut rows: Vec<(bool, String)> = Vec::new();
    for line in text.lines() {
        let line = line.trim_end().replace('\t', "        ");
        let is_typed = line.starts_with("$ ");
        rows.extend(wrapped(&line).into_iter().map(|row| (is_typed, row)));
    }
    if rows.len() > MOST_ROWS {
        let left_out = rows.len() - (MOST_ROWS - 1);
        rows.truncate(MOST_ROWS - 1);
        rows.push((false, format!("... and {left_out} more lines")));
    }
    let longest = rows.iter().map(|(_, row)| row.chars().count()).max();
    let width = pixels(longest.unwrap_or(0).max(60)).mul_add(WIDTH, 2.0 * MARGIN);
    let height = pixels(rows.len()).mul_add(HEIGHT, 2.0 * MARGIN);
    let mut svg = format!(
        "<svg width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         xmlns=\"http://www.w3.org/2000/svg\" font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" \
         font-size=\"12\">\n<rect width=\"{width:.0}\" height=\"{height:.0}\" rx=\"6\" fill=\"#1A1E24\"/>\n"
    );
    for (number, (is_typed, row)) in rows.iter().enumerate() {
        let y = pixels(number).mul_add(HEIGHT, MARGIN + 12.0);
        let colour = if *is_typed { "#8FD18A" } else { "#E1E5EA" };
        // The length is given, so that columns stay below each other in any font.
        let length = pixels(row.chars().count()) * WIDTH;
        if !row.is_empty() {
            let _ = writeln!(
                svg,
                "<text x=\"{MARGIN}\" y=\"{y:.0}\" fill=\"{colour}\" textLength=\"{length:.0}\" \
                 xml:space=\"preserve\">{}</text>",
                escaped(row)
            );
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// The first row of a line, as it is in the picture.
#[cfg(test)]
pub(super) fn first_row(line: &str) -> String {
    escaped(&wrapped(line)[0])
}

/// A line as a terminal wraps it.
fn wrapped(line: &str) -> Vec<String> {
    let characters: Vec<char> = line.chars().collect();
    if characters.is_empty() {
        return vec![String::new()];
    }
    characters
        .chunks(COLUMNS)
        .map(|row| row.iter().collect())
        .collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// A count as a number of pixels is computed from it.
#[expect(clippy::cast_precision_loss, reason = "a picture is small")]
fn pixels(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_wrap_and_long_output_ends_with_a_count() {
        let text = format!("$ a <b>\n{}\n{}", "x".repeat(170), "y\n".repeat(100));
        let svg = draw(&text);
        assert!(svg.contains(">$ a &lt;b&gt;</text>"), "{svg}");
        assert!(
            svg.contains(&format!(">{}</text>", "x".repeat(160))),
            "{svg}"
        );
        assert!(
            svg.contains(&format!(">{}</text>", "x".repeat(10))),
            "{svg}"
        );
        assert!(svg.contains("... and 14 more lines"), "{svg}");
        assert_eq!(svg.matches("<text").count(), MOST_ROWS);
    }
}
