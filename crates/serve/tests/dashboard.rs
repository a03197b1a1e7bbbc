//! The dashboard asks for metrics that exist.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use pagetide_serve::Metrics;

const DASHBOARD: &str = include_str!("../../../docs/grafana/pagetide.json");
const ALERTS: &str = include_str!("../../../docs/grafana/pagetide-alerts.yaml");
const GUIDE: &str = include_str!("../../../docs/guide/fleet.md");

/// The names in a text that begin with `pagetide_`.
fn names(text: &str) -> Vec<&str> {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
    let starts = text.match_indices("pagetide_").map(|(at, _)| at);
    starts
        .map(|at| {
            let rest = &text[at..];
            &rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())]
        })
        .collect()
}

#[test]
fn every_metric_of_the_dashboard_the_alerts_and_the_guide_exists() {
    let _: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let text = Metrics::default().text();
    let wanted = [names(DASHBOARD), names(ALERTS), names(GUIDE)].concat();
    assert!(wanted.len() > 20);
    for name in wanted {
        // A gauge by socket has no sample without a socket, and a histogram or an info has samples of other names.
        let bucket = name.strip_suffix("_bucket");
        let base = bucket.or(name.strip_suffix("_info")).unwrap_or(name);
        let is_there = text.contains(&format!("\n{name} "))
            || text.contains(&format!("\n{name}{{"))
            || text.contains(&format!("# TYPE {base} "));
        assert!(is_there, "{name} is no metric");
    }
}
