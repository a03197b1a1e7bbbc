//! A population result as people read it.

use super::chart::{self, DrawError, Role};
use super::document::{Common, Shown};
use super::grid::{Grid, NOTHING, Table, extremes, extremes_ns, median_ns, times};
use super::html::{Figure, count};
use crate::populate::{Method, Plan, PopulateReport};
use crate::rounds::list;
use crate::stats::{RatioOf, Spread};
use crate::timing::Timing;
use crate::units::{ByteSize, figure, latency};

impl Shown for PopulateReport {
    const NAME: &'static str = "populate";
    const READING: &'static str = "\
        After a restore or a migration the host has a \
        virtual machine's memory, and the second-stage tables are empty: each first access of a \
        vCPU to a page is an exit. With <b>none</b> the vCPUs take them all. With <b>populate</b> \
        threads of the host fill the tables beforehand, with <b>pre-fault</b> idle vCPUs do, and \
        with <b>one-reader</b> one vCPU reads everything first. With <b>prefetch</b> memory itself \
        comes in while the vCPUs run, and with <b>prefetch-populate</b> it is mapped as it arrives.";
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
            "Population of second-stage tables: {} of {}, written to by all vCPUs",
            self.plan.memory,
            list(&self.plan.backings).replace(',', ", ")
        )
    }

    fn tables(&self) -> Vec<(&'static str, Option<Grid>)> {
        vec![
            ("Results", Some(results(self))),
            (
                "Against letting vCPUs fault, and against each other",
                comparison(self),
            ),
        ]
    }

    fn every_run(&self) -> Grid {
        let rows = self.points.iter().flat_map(|point| {
            let runs = point.runs.iter();
            runs.map(|run| (point.vcpus, point.series.to_string(), run))
        });
        Table::by_name("series", rows)
            .column("round", |run| run.round.to_string())
            .column("threads", |run| run.threads.to_string())
            .column("population", |run| latency(run.population_ns))
            .column("guest", |run| latency(run.guest_ns))
            .count("4K", |run| run.mappings_4k)
            .count("2M", |run| run.mappings_2m)
            .count("1G", |run| run.mappings_1g)
            .count("mappings after", |run| run.mappings_after)
            .count("exits populating", |run| run.population_exits)
            .count("exits", |run| run.exits)
            .count("prefetched", |run| run.prefetched_pages)
            .count("pager's faults", |run| run.pager_faults)
            .grid()
    }

    fn legend(&self) -> Vec<String> {
        let mut notes = vec![format!(
            "total: until all of memory is written to, population included; guest: without it, from \
             the vCPUs' release. Medians of {} rounds, lowest and highest round. GiB/s: all memory \
             slots, by the time of the population.",
            self.plan.runs
        )];
        if !self.ratios.is_empty() {
            notes.push(
                "of none: median of the ratios of runs of the same round; below 1, population pays. \
                 over faults: how many times as fast a mapping is made as by vCPUs that fault; over \
                 pre-fault, over 1 thread: as by KVM_PRE_FAULT_MEMORY with as many threads, as by one \
                 thread. of prefetch: the guest's time over that with prefetch that maps nothing."
                .to_owned(),
            );
            notes.push(format!("published: {}.", self.published.source));
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
        chart::populate::all(self)
    }

    fn drawing(&self) -> Result<String, DrawError> {
        chart::populate::standalone(self)
    }
}

/// The colour of a series, by its name: that of its method.
fn role(name: &str) -> Option<Role> {
    let method = name.split(", ").nth(1)?.parse::<Method>().ok()?;
    Some(chart::populate::role(method))
}

fn results(report: &PopulateReport) -> Grid {
    let median = |spread: Option<Spread>| spread.map(|spread| figure(spread.median));
    let rows = report.points.iter();
    let rows = rows.map(|point| (point.vcpus, point.series.to_string(), point));
    let table = Table::by_name("series", rows)
        .column("total", |point| median_ns(&point.total_ns))
        .column("low..high", |point| extremes_ns(&point.total_ns))
        .column("guest", |point| median_ns(&point.guest_ns))
        .maybe("population", |point| {
            point.population_ns.as_ref().map(median_ns)
        })
        .maybe("GiB/s", |point| median(point.rate_gib_per_s))
        .maybe("thousand mappings/s", |point| {
            median(point.rate_kmappings_per_s)
        })
        .column("exits", |point| figure(point.exits.median));
    if report.origin.timing == Timing::Instructions {
        table
            .maybe("instructions/mapping", |point| median(point.ns_per_mapping))
            .grid()
    } else {
        table.grid()
    }
}

fn comparison(report: &PopulateReport) -> Option<Grid> {
    let median = |ratio: &Option<RatioOf>| ratio.as_ref().map(|ratio| times(ratio.paired.median));
    let between = |ratio: &Option<RatioOf>| ratio.as_ref().map(|ratio| extremes(&ratio.paired));
    let rows = report.ratios.iter();
    let rows = rows.map(|found| (found.vcpus, found.series.to_string(), found));
    let mut grid = Table::by_name("series", rows)
        .maybe("total, of none", |found| median(&found.total))
        .maybe("low..high", |found| between(&found.total))
        .maybe("guest, of none", |found| median(&found.guest))
        .maybe("low..high", |found| between(&found.guest))
        .maybe("over faults", |found| median(&found.over_faults))
        .maybe("over pre-fault", |found| median(&found.over_pre_fault))
        .maybe("over 1 thread", |found| median(&found.over_one_thread))
        .maybe("of prefetch", |found| median(&found.of_prefetch))
        .maybe("low..high", |found| between(&found.of_prefetch))
        .if_any()?;
    let published = &report.published;
    let mut row = vec![NOTHING.to_owned(); grid.headings.len()];
    row[0] = published.vcpus.to_string();
    row[1] = format!(
        "published: {}, {} pages",
        ByteSize(published.memory_bytes),
        published.pages
    );
    row[4] = format!("about {} % faster", published.guest_faster_percent);
    grid.rows.push(row);
    Some(grid)
}

/// The figures that people look for: what is left of the guest's time.
fn lead(report: &PopulateReport) -> Vec<Figure> {
    let most = report.plan.threads.iter().copied().max();
    let ratios = report.ratios.iter();
    let ratios = ratios
        .filter(|ratio| ratio.series.method == Method::Populate && ratio.series.threads == most);
    let figures = ratios.filter_map(|ratio| {
        let (total, guest) = (ratio.total.as_ref()?, ratio.guest.as_ref()?);
        Some(Figure {
            role: chart::populate::role(Method::Populate),
            tag: ratio.series.to_string(),
            value: times(guest.paired.median),
            what: format!(
                "the guest's time, {} with the population, {}",
                times(total.paired.median),
                count(ratio.vcpus)
            ),
        })
    });
    figures.collect()
}
