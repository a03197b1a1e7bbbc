//! A memslot result as people read it.

use std::fmt::Write;

use super::chart::{self, Role, for_page};
use super::grid::{Grid, NOTHING, bullet, extremes, lines, times};
use super::{OutDir, ReportError, escape, html as page_parts, json};
use crate::memslots::{MemslotsReport, Method, Point, Series};
use crate::stats::Spread;
use crate::units::{figure, float, latency, whole};

/// Appends formatted text; writing to a string cannot fail.
macro_rules! push {
    ($page:expr, $($rest:tt)+) => { let _ = write!($page, $($rest)+); };
}

/// The report as a table for a terminal. `width` is that of the terminal in characters; `None` lets
/// lines be as long as they are.
#[must_use]
pub fn table(report: &MemslotsReport, width: Option<u16>) -> String {
    let mut text = format!("{}\n\n{}\n", title(report), lines(&results(report), width));
    for grid in [comparison(report), boot(report)].into_iter().flatten() {
        text.push_str(&format!("\n{}\n", lines(&grid, width)));
    }
    text.push('\n');
    let wrap = usize::from(width.unwrap_or(100)).clamp(40, 110);
    for note in legend(report).iter().chain(&report.notes) {
        text.push_str(&bullet(note, wrap));
    }
    text.push('\n');
    let timing = ("Timing", report.origin.timing.to_string());
    for (name, value) in report.origin.facts.lines().into_iter().chain([timing]) {
        text.push_str(&format!("{name:<15}{value}\n"));
    }
    text
}

/// The times kept as a drawing in SVG, and boots beside the published ones.
///
/// # Errors
/// The drawing failed.
pub fn svg(report: &MemslotsReport) -> Result<String, ReportError> {
    Ok(chart::memslots::standalone(report)?)
}

/// Writes `memslots.json`, `memslots.svg` and `memslots.html` into `out`, each as a whole or not at
/// all.
///
/// # Errors
/// A drawing failed, or a file could not be written.
pub fn write(report: &MemslotsReport, out: &mut OutDir) -> Result<(), ReportError> {
    let files = [
        ("memslots.json", json(report)?),
        ("memslots.svg", svg(report)?),
        ("memslots.html", html(report)?),
    ];
    for (name, content) in &files {
        out.write(name, content)?;
    }
    Ok(())
}

/// The report as one HTML page that needs no other file.
///
/// # Errors
/// A drawing failed, or the data is none that JSON knows.
pub fn html(report: &MemslotsReport) -> Result<String, ReportError> {
    let mut page = String::new();
    let title = title(report);
    page_parts::head(&mut page, &title);
    page.push_str("<main>\n");
    let about = (&report.origin.facts, report.origin.timing, report.plan.runs);
    page_parts::header(&mut page, &title, about);
    page_parts::warning(&mut page, report.origin.timing);
    lead(&mut page, report);
    page.push_str("<h2>Charts</h2>\n<div class=\"charts\">\n");
    for drawing in chart::memslots::all(report)? {
        push!(page, "<figure>{}</figure>\n", for_page(&drawing));
    }
    page.push_str("</div>\n<h2>Results</h2>\n");
    page_parts::table(&mut page, &results(report), role);
    for (heading, grid) in [
        ("Quiesce over list", comparison(report)),
        ("A boot", boot(report)),
    ] {
        if let Some(grid) = grid {
            push!(page, "<h2>{heading}</h2>\n");
            page_parts::table(&mut page, &grid, role);
        }
    }
    page.push_str("<details><summary>Every run</summary>\n");
    page_parts::table(&mut page, &every_run(report), role);
    page.push_str(
        "</details>\n<h2>How to read this</h2>\n<p>A virtual machine's vCPUs walk its memory while \
         the memory slots below it change. With <b>list</b> the kernel changes all slots at once and \
         vCPUs run on. With <b>quiesce</b> every vCPU is stopped outside KVM_RUN, slots are deleted \
         and created, and the vCPUs go on. With <b>plain</b> slots are deleted and created while \
         vCPUs run, and a guest that looks in between sees a hole.</p>\n<ul class=\"notes\">\n",
    );
    for note in legend(report).iter().chain(&report.notes) {
        push!(page, "<li>{}</li>\n", escape(note));
    }
    page.push_str("</ul>\n");
    let place = (&report.origin.facts, report.origin.timing);
    page_parts::environment(&mut page, place, &report.plan.command());
    page.push_str("</main>\n");
    page_parts::data(&mut page, "memslots-data", report)?;
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

/// What was measured, in a line.
fn title(report: &MemslotsReport) -> String {
    format!(
        "Memory slots changed below running vCPUs: {} commits a run, guest: {}",
        report.plan.commits, report.plan.guest
    )
}

/// The colour of a series, by its name: that of its method.
fn role(name: &str) -> Option<Role> {
    if name == Series::Idle.to_string() {
        return Some(chart::memslots::role(None));
    }
    let method = [Method::List, Method::Quiesce, Method::Plain];
    method
        .into_iter()
        .find(|method| name.ends_with(&format!("by {method}")))
        .map(|method| chart::memslots::role(Some(method)))
}

fn spread_ns(spread: &Spread) -> String {
    latency(whole(spread.median))
}

fn ns_extremes(spread: &Spread) -> String {
    format!(
        "{}..{}",
        latency(whole(spread.min)),
        latency(whole(spread.max))
    )
}

fn results(report: &MemslotsReport) -> Grid {
    let rows = report.points.iter().map(|point: &Point| {
        let or_nothing = |text: Option<String>| text.unwrap_or_else(|| NOTHING.to_owned());
        vec![
            point.vcpus.to_string(),
            point.series.to_string(),
            spread_ns(&point.kept_p50_ns),
            ns_extremes(&point.kept_p50_ns),
            latency(point.kept.max_ns),
            or_nothing(point.commit.map(|times| latency(times.p50_ns))),
            or_nothing(point.commit.map(|times| latency(times.p99_ns))),
            or_nothing(point.inside.map(|times| latency(times.p50_ns))),
            or_nothing(point.lost_percent.map(|lost| figure(lost.median))),
            or_nothing(point.holes_per_commit.map(|holes| figure(holes.median))),
        ]
    });
    let headings = [
        "vCPUs",
        "change",
        "kept p50",
        "low..high",
        "kept max",
        "commit p50",
        "commit p99",
        "inside p50",
        "work lost %",
        "holes/commit",
    ];
    Grid {
        headings: headings.map(str::to_owned).to_vec(),
        words: 2,
        rows: rows.collect(),
    }
}

fn comparison(report: &MemslotsReport) -> Option<Grid> {
    let rows: Vec<Vec<String>> = report
        .ratios
        .iter()
        .map(|ratio| {
            vec![
                ratio.vcpus.to_string(),
                ratio.op.to_string(),
                times(ratio.kept_p50.paired.median),
                extremes(&ratio.kept_p50.paired),
                times(ratio.kept_max.paired.median),
                times(ratio.commit_p50.paired.median),
                extremes(&ratio.commit_p50.paired),
            ]
        })
        .collect();
    let headings = [
        "vCPUs",
        "quiesce over list",
        "kept p50",
        "low..high",
        "kept max",
        "commit p50",
        "low..high",
    ];
    (!rows.is_empty()).then(|| Grid {
        headings: headings.map(str::to_owned).to_vec(),
        words: 2,
        rows,
    })
}

/// All commits of a boot, ours beside the published ones.
fn boot(report: &MemslotsReport) -> Option<Grid> {
    let published = report.published.as_ref()?;
    let rows = report.points.iter().filter_map(|point| {
        let time = point.boot_ms?;
        let method = point.series.method()?;
        Some(vec![
            point.vcpus.to_string(),
            point.series.to_string(),
            figure(time.median),
            extremes(&time),
            published
                .at(point.vcpus, method)
                .map_or_else(|| NOTHING.to_owned(), figure),
        ])
    });
    Some(Grid {
        headings: ["vCPUs", "all 86 updates", "ms", "low..high", "published ms"]
            .map(str::to_owned)
            .to_vec(),
        words: 2,
        rows: rows.collect(),
    })
}

fn every_run(report: &MemslotsReport) -> Grid {
    let rows = report.points.iter().flat_map(|point| {
        point.runs.iter().map(|run| {
            vec![
                point.vcpus.to_string(),
                point.series.to_string(),
                run.round.to_string(),
                latency(run.elapsed_ns),
                figure(float(run.steps)),
                latency(run.commit_p50_ns),
                latency(run.kept_p50_ns),
                latency(run.kept_max_ns),
                figure(float(run.holes)),
            ]
        })
    });
    let headings = [
        "vCPUs",
        "change",
        "round",
        "elapsed",
        "steps",
        "commit p50",
        "kept p50",
        "kept max",
        "holes",
    ];
    Grid {
        headings: headings.map(str::to_owned).to_vec(),
        words: 2,
        rows: rows.collect(),
    }
}

/// What the columns mean.
fn legend(report: &MemslotsReport) -> Vec<String> {
    let mut notes = vec![
        format!(
            "kept: the longest time that any vCPU was kept from the guest by a commit, as the guest \
             sees it; p50 over the commits of a run, median of {} rounds, lowest and highest round; \
             max over all commits. Without commits: in stretches of 5 ms; what is seen there is the \
             machine's own.",
            report.plan.runs
        ),
        "commit: from asking until it is done. inside: how long the gate was closed (quiesce), or the \
         time of the ioctls (list, plain)."
            .to_owned(),
        "work lost: steps of the guest, against those in the same time without commits. \
         holes/commit: accesses that left the guest because there was no slot."
            .to_owned(),
    ];
    if !report.ratios.is_empty() {
        notes.push(
            "quiesce over list: median of the ratios of runs of the same round; above 1, the list \
             keeps vCPUs for a shorter time."
                .to_owned(),
        );
    }
    if let Some(published) = &report.published {
        notes.push(format!("published: {}.", published.source));
    }
    notes
}

/// The figures that people look for: how much longer quiesce keeps vCPUs.
fn lead(page: &mut String, report: &MemslotsReport) {
    let Some(op) = report.ratios.first().map(|ratio| ratio.op) else {
        return;
    };
    page.push_str("<ul class=\"lead\" style=\"margin-bottom:14px\">\n");
    for ratio in report.ratios.iter().filter(|ratio| ratio.op == op) {
        push!(
            page,
            "<li style=\"--series:var({})\"><span class=\"tag\">{op}</span><b>{}</b><span>as long \
             kept by quiesce as by list, {}</span></li>\n",
            chart::memslots::role(Some(Method::Quiesce)).variable(),
            times(ratio.kept_p50.paired.median),
            page_parts::count(ratio.vcpus),
        );
    }
    page.push_str("</ul>\n");
}
