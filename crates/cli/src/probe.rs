//! `pagetide probe`.

use pagetide_base::terminal_width;
use pagetide_uapi::probe::Probe;

use crate::args::ProbeArguments;
use crate::failure::Failure;
use crate::print;

/// Asks the kernel and prints what it says.
pub(crate) fn run(arguments: &ProbeArguments) -> Result<(), Failure> {
    let probe = Probe::run();
    let text = if arguments.json {
        serde_json::to_string_pretty(&probe).map_err(Failure::failed)? + "\n"
    } else {
        table(&probe, terminal_width())
    };
    print(&text)
}

/// A row of the table: the name, what was found, what replaces it, the number.
type Row = [String; 4];

/// What is between two columns.
const GAP: &str = "  ";

/// The least width of the column of what replaces an interface.
const LEAST: usize = 16;

/// What the kernel and the machine have, as a table for a terminal of this width.
fn table(probe: &Probe, width: Option<u16>) -> String {
    let moved = |[name, number, found, instead]: [String; 4]| [name, found, instead, number];
    let mut rows = vec![moved(Probe::COLUMNS.map(str::to_owned))];
    rows.extend(probe.capabilities.iter().map(|row| moved(row.row())));
    let (kernel, machine) = (&probe.kernel_release, &probe.architecture);
    let mut text = format!("Linux {kernel} ({machine})\n\n");
    let longest = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let mut widths: [usize; 4] = std::array::from_fn(|column| longest(column).unwrap_or(0));
    if let Some(width) = width {
        // The column of sentences takes what the others leave.
        let others = widths[0] + widths[1] + widths[3] + 3 * GAP.len();
        let left = usize::from(width).saturating_sub(others).max(LEAST);
        widths[2] = widths[2].min(left);
    }
    for row in &rows {
        write_row(&mut text, row, widths);
    }
    text
}

/// Writes a row; its sentence takes as many lines as it needs.
fn write_row(text: &mut String, row: &Row, [name, found, instead, number]: [usize; 4]) {
    for (line, part) in wrapped(&row[2], instead).iter().enumerate() {
        let first = |column: usize| if line == 0 { row[column].as_str() } else { "" };
        let line = format!(
            "{:<name$}{GAP}{:<found$}{GAP}{part:<instead$}{GAP}{:>number$}",
            first(0),
            first(1),
            first(3),
        );
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

/// A text in lines of at most so many characters, where its words allow that; at least one line.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let used = lines.last().map_or(0, |line| line.chars().count());
        match lines.last_mut() {
            Some(line) if used == 0 => line.push_str(word),
            Some(line) if used + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use pagetide_uapi::probe::Capability;

    use super::*;

    #[test]
    fn every_capability_has_its_row() {
        let probe = Probe {
            kernel_release: "6.12.0".to_owned(),
            architecture: "x86_64".to_owned(),
            capabilities: vec![Capability {
                name: "KVM_CAP_ABSENT_MAPPING_FAULT".to_owned(),
                number: Some(10001),
                present: false,
                value: Some(0),
                found: "no".to_owned(),
                fallback: "reader threads".to_owned(),
            }],
        };
        let text = table(&probe, None);
        assert!(text.starts_with("Linux 6.12.0 (x86_64)\n"), "{text}");
        let row = text
            .lines()
            .find(|line| line.contains("ABSENT_MAPPING"))
            .unwrap();
        let words: Vec<_> = row.split_whitespace().collect();
        assert_eq!(
            words,
            [
                "KVM_CAP_ABSENT_MAPPING_FAULT",
                "no",
                "reader",
                "threads",
                "10001"
            ]
        );
    }

    #[test]
    fn a_sentence_takes_the_lines_that_it_needs() {
        let row = ["NAME", "no", "reader threads instead", "7"].map(str::to_owned);
        let mut text = String::new();
        write_row(&mut text, &row, [5, 3, 14, 2]);
        assert_eq!(
            text,
            "NAME   no   reader threads   7\n            instead\n"
        );
    }
}
