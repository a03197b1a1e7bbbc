//! What a kernel and machine have, as a table.

use pagetide_uapi::probe::{Capability, Probe};

use super::grid::{Grid, lines};

/// The table of `pagetide probe`.
#[must_use]
pub fn probe_table(probe: &Probe, width: Option<u16>) -> String {
    let rows = probe.capabilities.iter().map(|capability: &Capability| {
        let [name, number, found, instead] = capability.row();
        // Feature bits and capability numbers stand at the right, like all numbers.
        vec![name, found, instead, number]
    });
    let [name, number, found, instead] = Probe::COLUMNS.map(str::to_owned);
    let grid = Grid {
        headings: vec![name, found, instead, number],
        words: 3,
        rows: rows.collect(),
    };
    format!(
        "Linux {} ({})\n\n{}\n",
        probe.kernel_release,
        probe.architecture,
        lines(&grid, width)
    )
}

#[cfg(test)]
mod tests {
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
        let text = probe_table(&probe, None);
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
}
