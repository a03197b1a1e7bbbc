//! The charts of a population report.

use pagetide_memory::Backing;

use super::canvas::{Canvas, DrawError, draw};
use super::frame::{Key, Words, short};
use super::scale::Scale;
use super::theme::Role;
use super::{HEIGHT, Line, SIZE, WIDTH, highest, line_chart, lowest, told};
use crate::populate::{Method, Point, PopulateReport, Series};
use crate::stats::Spread;
use crate::units::{figure, latency, whole};

/// The colour of a method.
pub(crate) fn role(method: Method) -> Role {
    Role::Series(match method {
        Method::None => 0,
        Method::PreFault => 1,
        Method::Populate => 2,
        Method::OneReader => 3,
        Method::Prefetch => 4,
        Method::PrefetchPopulate => 5,
    })
}

/// All charts, backing by backing: what the guest has to wait for, and how fast tables fill.
pub(crate) fn all(report: &PopulateReport) -> Result<Vec<String>, DrawError> {
    let mut drawings = Vec::new();
    for backing in report.backings() {
        drawings.push(draw(SIZE, |canvas| total_into(canvas, 0, report, backing))?);
        drawings.push(draw(SIZE, |canvas| guest_into(canvas, 0, report, backing))?);
        if report
            .points
            .iter()
            .any(|point| point.rate_gib_per_s.is_some())
        {
            drawings.push(draw(SIZE, |canvas| rate_into(canvas, 0, report, backing))?);
        }
    }
    Ok(drawings)
}

/// The drawing for a file of its own: the first backing's times, with and without the population.
pub(crate) fn standalone(report: &PopulateReport) -> Result<String, DrawError> {
    draw((SIZE.0 * 2, HEIGHT.unsigned_abs()), |canvas| {
        canvas.paper()?;
        let Some(&backing) = report.backings().first() else {
            return Ok(());
        };
        total_into(canvas, 0, report, backing)?;
        guest_into(canvas, WIDTH, report, backing)
    })
}

fn total_into(
    canvas: &mut Canvas<'_>,
    x: i32,
    report: &PopulateReport,
    backing: Backing,
) -> Result<(), DrawError> {
    let title = format!("Until all memory is written to: {backing}");
    let words = Words {
        title: &title,
        subtitle: "population included; median, lowest and highest run; logarithmic",
        places: &report.plan.vcpus,
        axis: "vCPUs",
    };
    times_into(canvas, x, report, backing, &words, |point| point.total_ns)
}

fn guest_into(
    canvas: &mut Canvas<'_>,
    x: i32,
    report: &PopulateReport,
    backing: Backing,
) -> Result<(), DrawError> {
    let title = format!("The guest's part of it: {backing}");
    let words = Words {
        title: &title,
        subtitle: "population not counted; median, lowest and highest run; logarithmic",
        places: &report.plan.vcpus,
        axis: "vCPUs",
    };
    times_into(canvas, x, report, backing, &words, |point| point.guest_ns)
}

fn times_into(
    canvas: &mut Canvas<'_>,
    x: i32,
    report: &PopulateReport,
    backing: Backing,
    words: &Words<'_>,
    value: impl Fn(&Point) -> Spread,
) -> Result<(), DrawError> {
    let tell = |ns: f64| latency(whole(ns));
    let lines = lines_of(report, backing, |point| Some(value(point)), tell);
    let scale = Scale::logarithmic(lowest(&lines), highest(&lines));
    let tick = |ns: f64| tell(ns).replace(".00 ", " ").replace(".0 ", " ");
    line_chart(canvas, x, words, &lines, scale, tick)
}

fn rate_into(
    canvas: &mut Canvas<'_>,
    x: i32,
    report: &PopulateReport,
    backing: Backing,
) -> Result<(), DrawError> {
    let tell = |rate: f64| format!("{} GiB/s", figure(rate));
    let lines = lines_of(report, backing, |point| point.rate_gib_per_s, tell);
    let title = format!("How fast tables fill: {backing}");
    let words = Words {
        title: &title,
        subtitle: "GiB/s; median, lowest and highest run",
        places: &report.plan.vcpus,
        axis: "vCPUs",
    };
    let scale = Scale::from_zero(highest(&lines));
    line_chart(canvas, x, &words, &lines, scale, short)
}

/// One line for each series of a backing that has the value.
fn lines_of(
    report: &PopulateReport,
    backing: Backing,
    value: impl Fn(&Point) -> Option<Spread>,
    tell: impl Fn(f64) -> String,
) -> Vec<Line> {
    let most = report.plan.threads.iter().copied().max();
    let line = |series: Series| {
        let places = report.plan.vcpus.iter().enumerate();
        let points = places.filter_map(|(place, &vcpus)| {
            let spread = value(report.point(vcpus, series)?)?;
            let told = told(&series, vcpus, &spread, &tell);
            Some((place, spread, told))
        });
        let label = match series.threads {
            Some(threads) if report.plan.threads.len() > 1 => {
                format!("{} {threads}", series.method)
            }
            _ => series.method.to_string(),
        };
        Line {
            key: Key {
                label,
                role: role(series.method),
            },
            // The fewer threads, in the same colour.
            dashed: series.threads.is_some() && series.threads != most,
            points: points.collect(),
        }
    };
    let all = report.series(backing).into_iter().map(line);
    all.filter(|line| !line.points.is_empty()).collect()
}
