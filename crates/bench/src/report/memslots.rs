//! A memslot result as people read it.

use super::chart::{self, DrawError, Role};
use super::document::{Common, Shown};
use super::grid::{Grid, Table, extremes, extremes_ns, median_ns, times};
use super::html::{Figure, count};
use crate::memslots::{MemslotsReport, Method, Plan, Series};
use crate::units::{figure, latency};

impl Shown for MemslotsReport {
    const NAME: &'static str = "memslots";
    const READING: &'static str = "\
        A virtual machine's vCPUs walk its memory while \
        the memory slots below it change. With <b>list</b> the kernel changes all slots at once and \
        vCPUs run on. With <b>quiesce</b> every vCPU is stopped outside KVM_RUN, slots are deleted \
        and created, and the vCPUs go on. With <b>plain</b> slots are deleted and created while \
        vCPUs run, and a guest that looks in between sees a hole.";
    type Plan = Plan;

    fn common(&self) -> Common<'_, Plan> {
        Common {
            plan: &self.plan,
            origin: &self.origin,
            notes: &self.notes,
        }
    }

    fn title(&self) -> String {
        format!(
            "Memory slots changed below running vCPUs: {} commits a run, guest: {}",
            self.plan.commits, self.plan.guest
        )
    }

    fn tables(&self) -> Vec<(&'static str, Option<Grid>)> {
        vec![
            ("Results", Some(results(self))),
            ("Quiesce over list", comparison(self)),
            ("With more vCPUs", growth(self)),
            ("A boot", boot(self)),
        ]
    }

    fn every_run(&self) -> Grid {
        let rows = self.points.iter().flat_map(|point| {
            let runs = point.runs.iter();
            runs.map(|run| (point.vcpus, point.series.to_string(), run))
        });
        Table::by_name("change", rows)
            .column("round", |run| run.round.to_string())
            .column("elapsed", |run| latency(run.elapsed_ns))
            .count("steps", |run| run.steps)
            .column("commit p50", |run| latency(run.commit_p50_ns))
            .column("kept p50", |run| latency(run.kept_p50_ns))
            .column("each p50", |run| latency(run.kept_each_p50_ns))
            .column("kept max", |run| latency(run.kept_max_ns))
            .count("holes", |run| run.holes)
            .grid()
    }

    fn legend(&self) -> Vec<String> {
        let mut notes = vec![
            format!(
                "kept: the longest time that any vCPU was kept from the guest by a commit, as the guest \
                 sees it; p50 over the commits of a run, median of {} rounds, lowest and highest round; \
                 max over all commits. Without commits: in stretches of 5 ms; what is seen there is the \
                 machine's own. each: the same of every vCPU by itself, p50 over commits and vCPUs; \
                 the longest of many is longer than that of few.",
                self.plan.runs
            ),
            "commit: from asking until it is done. inside: how long the gate was closed (quiesce), or the \
             time of the ioctls (list, plain)."
                .to_owned(),
            "work lost: steps of the guest, against those in the same time without commits. \
             holes/commit: accesses that left the guest because there was no slot."
                .to_owned(),
        ];
        if !self.ratios.is_empty() {
            notes.push(
                "quiesce over list: median of the ratios of runs of the same round; above 1, the list \
                 keeps vCPUs for a shorter time."
                .to_owned(),
            );
        }
        if !self.growth.is_empty() {
            notes.push(
                "over fewer vCPUs: median of the ratios of runs of the same round; 1 where vCPUs are kept as \
                 long however many there are. The row without commits is the machine's own growth."
                .to_owned(),
            );
        }
        if let Some(published) = &self.published {
            notes.push(format!("published: {}.", published.source));
        }
        notes
    }

    fn role(&self, name: &str) -> Option<Role> {
        role(name)
    }

    fn lead(&self) -> Vec<Vec<Figure>> {
        vec![lead(self)]
    }

    fn charts(&self) -> Result<Vec<String>, DrawError> {
        chart::memslots::all(self)
    }

    fn drawing(&self) -> Result<String, DrawError> {
        chart::memslots::standalone(self)
    }
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

fn results(report: &MemslotsReport) -> Grid {
    let rows = report.points.iter();
    let rows = rows.map(|point| (point.vcpus, point.series.to_string(), point));
    Table::by_name("change", rows)
        .column("kept p50", |point| median_ns(&point.kept_p50_ns))
        .column("low..high", |point| extremes_ns(&point.kept_p50_ns))
        .column("each p50", |point| median_ns(&point.kept_each_p50_ns))
        .column("kept max", |point| latency(point.kept.max_ns))
        .maybe("commit p50", |point| {
            point.commit.map(|times| latency(times.p50_ns))
        })
        .maybe("commit p99", |point| {
            point.commit.map(|times| latency(times.p99_ns))
        })
        .maybe("inside p50", |point| {
            point.inside.map(|times| latency(times.p50_ns))
        })
        .maybe("work lost %", |point| {
            point.lost_percent.map(|lost| figure(lost.median))
        })
        .maybe("holes/commit", |point| {
            point.holes_per_commit.map(|holes| figure(holes.median))
        })
        .grid()
}

fn comparison(report: &MemslotsReport) -> Option<Grid> {
    let rows = report.ratios.iter();
    let rows = rows.map(|ratio| (ratio.vcpus, ratio.op.to_string(), ratio));
    Table::by_name("quiesce over list", rows)
        .column("kept p50", |ratio| times(ratio.kept_p50.paired.median))
        .column("low..high", |ratio| extremes(&ratio.kept_p50.paired))
        .column("each p50", |ratio| times(ratio.kept_each_p50.paired.median))
        .column("kept max", |ratio| times(ratio.kept_max.paired.median))
        .column("commit p50", |ratio| times(ratio.commit_p50.paired.median))
        .column("low..high", |ratio| extremes(&ratio.commit_p50.paired))
        .if_any()
}

fn growth(report: &MemslotsReport) -> Option<Grid> {
    let rows = report.growth.iter();
    let rows = rows.map(|growth| (growth.vcpus, growth.series.to_string(), growth));
    Table::by_name("over fewer vCPUs", rows)
        .column("over vCPUs", |growth| growth.over_vcpus.to_string())
        .column("kept p50", |growth| times(growth.kept_p50.paired.median))
        .column("low..high", |growth| extremes(&growth.kept_p50.paired))
        .column("each p50", |growth| {
            times(growth.kept_each_p50.paired.median)
        })
        .column("low..high", |growth| extremes(&growth.kept_each_p50.paired))
        .if_any()
}

/// All commits of a boot, ours beside the published ones.
fn boot(report: &MemslotsReport) -> Option<Grid> {
    let published = report.published.as_ref()?;
    let rows = report.points.iter().filter_map(|point| {
        let row = (point, point.boot_ms?, point.series.method()?);
        Some((point.vcpus, point.series.to_string(), row))
    });
    Some(
        Table::by_name("all 86 updates", rows)
            .column("ms", |(_, time, _)| figure(time.median))
            .column("low..high", |(_, time, _)| extremes(time))
            .maybe("published ms", |(point, _, method)| {
                published.at(point.vcpus, *method).map(figure)
            })
            .grid(),
    )
}

/// The figures that people look for: how much longer quiesce keeps vCPUs.
fn lead(report: &MemslotsReport) -> Vec<Figure> {
    let first = report.ratios.first().map(|ratio| ratio.op);
    let ratios = report.ratios.iter();
    let ratios = ratios.filter(|ratio| Some(ratio.op) == first);
    let figures = ratios.map(|ratio| Figure {
        role: chart::memslots::role(Some(Method::Quiesce)),
        tag: ratio.op.to_string(),
        value: times(ratio.kept_p50.paired.median),
        what: format!("as long kept by quiesce as by list, {}", count(ratio.vcpus)),
    });
    figures.collect()
}
