//! A paging result as people read it.

use super::chart::{self, DrawError, Role};
use super::document::{Common, Shown};
use super::grid::{Grid, NOTHING, Table, extremes, times};
use super::html::{Figure, count};
use crate::paging::{Access, Delivery, PagingReport, Plan, PublishedRate, Series};
use crate::timing::Timing;
use crate::units::{ByteSize, figure, latency};

impl Shown for PagingReport {
    const NAME: &'static str = "paging";
    const READING: &'static str = "\
        A virtual machine starts with memory that is not there yet. \
        Each vCPU touches its pages one by one; each first touch is a fault that somebody must \
        resolve. With <b>uffd</b> the fault becomes a message in a userfaultfd, the vCPU sleeps \
        in the kernel, and a reader thread makes the page present and wakes it. With <b>exit</b> \
        the vCPU leaves KVM_RUN and its own thread makes the page present: no queue, no lock that \
        all vCPUs share, nobody to wake. <b>none</b> is the floor: the host has the page, and \
        only the second-stage tables are filled.";
    type Plan = Plan;

    fn common(&self) -> Common<'_, Plan> {
        Common {
            plan: &self.plan,
            origin: &self.origin,
            notes: &self.notes,
        }
    }

    fn title(&self) -> String {
        let plan = &self.plan;
        let switches = [
            (plan.overlap, ", all vCPUs over all of memory"),
            (plan.pre_fault, ", exits pre-fault"),
            (plan.populate, ", exits with and without population"),
            (plan.pin, ", vCPUs pinned"),
        ];
        let switches = switches.map(|(on, words)| if on { words } else { "" });
        format!(
            "Demand paging: {} per vCPU, {} {}, {} {}{}",
            plan.per_vcpu,
            plan.backing,
            plan.mode.to_string().to_uppercase(),
            plan.order,
            match plan.access {
                Access::Write => "writes",
                Access::Read => "reads",
            },
            switches.concat(),
        )
    }

    fn tables(&self) -> Vec<(&'static str, Option<Grid>)> {
        vec![
            ("Results", Some(results(self))),
            ("Exits over userfaultfd", comparison(self)),
        ]
    }

    fn every_run(&self) -> Grid {
        let rows = self.points.iter().flat_map(|point| {
            let runs = point.runs.iter();
            runs.map(|run| (point.vcpus, point.series.to_string(), run))
        });
        Table::by_name("delivery", rows)
            .column("round", |run| run.round.to_string())
            .column("elapsed", |run| latency(run.elapsed_ns))
            .count("pages", |run| run.pages)
            .count("exits", |run| run.exits)
            .count("messages", |run| run.messages)
            .column("thousand pages/s", |run| figure(run.rate_kpages_per_s()))
            .grid()
    }

    fn legend(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "rate: thousand pages of {} made present per second, all vCPUs together; median of {} \
             rounds, lowest and highest round, interquartile range. p50, p99, max: latency of a fault \
             as the guest sees it; {NOTHING} where nobody knows which touches faulted.",
            ByteSize(self.plan.backing.page_size().bytes()),
            self.plan.runs
        )];
        if !self.ratios.is_empty() {
            lines.push(
                "times uffd: median of the ratios of runs of the same round, and the ratio of the two \
                 medians. Rate: above 1, exits are faster. Instructions: below 1, exits are cheaper."
                .to_owned(),
            );
        }
        if let Some(published) = &self.published {
            lines.push(format!(
                "published: thousand pages per second, {}; {}.",
                if published.per_vcpu {
                    "each vCPU"
                } else {
                    "all vCPUs together"
                },
                published.source
            ));
        }
        lines
    }

    fn role(&self, name: &str) -> Option<Role> {
        let all = self.series();
        let found = all.iter().find(|series| series.to_string() == name);
        found.map(|&series| Role::of(series, &all))
    }

    fn lead(&self) -> Vec<Vec<Figure>> {
        lead(self)
    }

    fn charts(&self) -> Result<Vec<String>, DrawError> {
        charts(self)
    }

    fn drawing(&self) -> Result<String, DrawError> {
        chart::standalone(self)
    }
}

/// The figures that people look for: exits over userfaultfd, by vCPUs.
fn lead(report: &PagingReport) -> Vec<Vec<Figure>> {
    let all = report.series();
    let exits = all
        .iter()
        .filter(|series| series.delivery == Delivery::Exit);
    let list = |&series: &Series| {
        let figures = report.plan.vcpus.iter().filter_map(|&vcpus| {
            let ratio = report.ratio(vcpus, series)?;
            let (value, what) = match &ratio.instructions {
                Some(cost) => (cost.paired.median, "the instructions of uffd"),
                None => (ratio.rate.paired.median, "the rate of uffd"),
            };
            let published = published_ratio(report, vcpus, series)
                .filter(|_| ratio.instructions.is_none())
                .map_or_else(String::new, |ratio| format!(", published {}", times(ratio)));
            Some(Figure {
                role: Role::of(series, &all),
                tag: series.to_string(),
                value: times(value),
                what: format!("{what}, {}{published}", count(vcpus)),
            })
        });
        figures.collect()
    };
    exits.map(list).collect()
}

/// The main table.
fn results(report: &PagingReport) -> Grid {
    let rows = report.points.iter();
    let rows = rows.map(|point| (point.vcpus, point.series.to_string(), point));
    let mut table = Table::by_name("delivery", rows)
        .column("rate", |point| figure(point.rate_kpages_per_s.median))
        .column("low..high", |point| extremes(&point.rate_kpages_per_s))
        .column("IQR", |point| figure(point.rate_kpages_per_s.iqr()))
        .column("per vCPU", |point| {
            figure(point.rate_per_vcpu_kpages_per_s.median)
        })
        .maybe("p50", |point| {
            point.latency.map(|seen| latency(seen.p50_ns))
        })
        .maybe("p99", |point| {
            point.latency.map(|seen| latency(seen.p99_ns))
        })
        .maybe("max", |point| {
            point.latency.map(|seen| latency(seen.max_ns))
        });
    if report.origin.timing == Timing::Instructions {
        table = table.maybe("instructions/page", |point| {
            point.instructions_per_page.map(|cost| figure(cost.median))
        });
    }
    if let Some(published) = &report.published {
        table = table.maybe("published", |point| {
            let rate = published
                .at(point.vcpus)
                .filter(|_| point.series.fault_around == 1)?;
            match point.series.delivery {
                Delivery::None => None,
                Delivery::Uffd => Some(figure(f64::from(rate.uffd_kpages_per_s))),
                Delivery::Exit => Some(figure(f64::from(rate.exit_kpages_per_s))),
            }
        });
    }
    table.grid()
}

/// Exits over userfaultfd; `None` if they were not both measured.
fn comparison(report: &PagingReport) -> Option<Grid> {
    let rows = report.ratios.iter();
    let rows = rows.map(|ratio| (ratio.vcpus, ratio.series.to_string(), ratio));
    let mut table = Table::by_name("delivery", rows)
        .column("rate, times uffd", |ratio| times(ratio.rate.paired.median))
        .column("low..high", |ratio| extremes(&ratio.rate.paired))
        .column("of medians", |ratio| times(ratio.rate.of_medians));
    if report.origin.timing == Timing::Instructions {
        table = table
            .maybe("instructions, times uffd", |ratio| {
                ratio.instructions.map(|cost| times(cost.paired.median))
            })
            .maybe("low..high", |ratio| {
                ratio.instructions.map(|cost| extremes(&cost.paired))
            })
            .maybe("of medians", |ratio| {
                ratio.instructions.map(|cost| times(cost.of_medians))
            });
    }
    if report.published.is_some() {
        table = table.maybe("published", |ratio| {
            published_ratio(report, ratio.vcpus, ratio.series).map(times)
        });
    }
    table.if_any()
}

/// The published ratio that belongs beside one of ours.
fn published_ratio(report: &PagingReport, vcpus: u32, series: Series) -> Option<f64> {
    let published = report
        .published
        .as_ref()
        .filter(|_| series.fault_around == 1)?;
    published.at(vcpus).map(PublishedRate::ratio)
}

fn charts(report: &PagingReport) -> Result<Vec<String>, DrawError> {
    let mut drawings = Vec::new();
    let instructions = chart::instructions(report)?;
    // Where a nanosecond is an instruction, the cost is the result and the rate follows from it.
    let cost_first = report.origin.timing == Timing::Instructions;
    if cost_first {
        drawings.extend(instructions.clone());
        drawings.extend(chart::ratios(report)?);
    }
    drawings.push(chart::rates(report)?);
    if let Some(published) = &report.published {
        drawings.push(chart::published_rates(published)?);
    }
    if !cost_first {
        drawings.extend(chart::ratios(report)?);
        drawings.extend(instructions);
    }
    drawings.extend(chart::latencies(report)?);
    Ok(drawings)
}
