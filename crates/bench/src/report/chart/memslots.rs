//! The charts of a memslot report.

use super::canvas::{Canvas, DrawError, draw};
use super::frame::{Key, Words, short};
use super::scale::Scale;
use super::theme::Role;
use super::{HEIGHT, Line, SIZE, WIDTH, highest, line_chart, lowest, told};
use crate::memslots::{MemslotsReport, Method, Op, Point, Published, Series};
use crate::stats::Spread;
use crate::units::{figure, latency, whole};

/// The colour of a method; `None` is without commits.
pub(crate) fn role(method: Option<Method>) -> Role {
    Role::Series(match method {
        None => 0,
        Some(Method::Plain) => 1,
        Some(Method::List) => 2,
        Some(Method::Quiesce) => 3,
    })
}

/// All charts: what each change keeps vCPUs for, and boots.
pub(crate) fn all(report: &MemslotsReport) -> Result<Vec<String>, DrawError> {
    let mut drawings = Vec::new();
    for &op in &report.plan.ops {
        drawings.push(draw(SIZE, |canvas| kept_into(canvas, 0, report, op))?);
    }
    if let Some(published) = &report.published {
        drawings.push(draw(SIZE, |canvas| boots_into(canvas, 0, report))?);
        drawings.push(draw(SIZE, |canvas| published_into(canvas, 0, published))?);
    }
    Ok(drawings)
}

/// The drawing for a file of its own: what the first change keeps vCPUs for, and boots beside the
/// published ones.
pub(crate) fn standalone(report: &MemslotsReport) -> Result<String, DrawError> {
    let panels = if report.published.is_some() { 3 } else { 1 };
    draw((SIZE.0 * panels, HEIGHT.unsigned_abs()), |canvas| {
        canvas.paper()?;
        if let Some(&op) = report.plan.ops.first() {
            kept_into(canvas, 0, report, op)?;
        }
        match &report.published {
            Some(published) => {
                boots_into(canvas, WIDTH, report)?;
                published_into(canvas, 2 * WIDTH, published)
            }
            None => Ok(()),
        }
    })
}

fn line(
    report: &MemslotsReport,
    series: Series,
    value: impl Fn(&Point) -> Option<Spread>,
    tell: impl Fn(f64) -> String,
) -> Line {
    let label = series
        .method()
        .map_or_else(|| series.to_string(), |method| method.to_string());
    let points = report.plan.vcpus.iter().enumerate();
    let points = points.filter_map(|(place, &vcpus)| {
        let spread = value(report.point(vcpus, series)?)?;
        let told = told(&series, vcpus, &spread, &tell);
        Some((place, spread, told))
    });
    Line {
        key: Key {
            label,
            role: role(series.method()),
        },
        dashed: series == Series::Idle,
        points: points.collect(),
    }
}

fn kept_into(
    canvas: &mut Canvas<'_>,
    x: i32,
    report: &MemslotsReport,
    op: Op,
) -> Result<(), DrawError> {
    let tell = |ns: f64| latency(whole(ns));
    let commits = report.plan.methods.iter();
    let commits = commits.map(|&method| Series::Commits { op, method });
    let lines: Vec<Line> = std::iter::once(Series::Idle)
        .chain(commits)
        .map(|series| line(report, series, |point| Some(point.kept_p50_ns), tell))
        .collect();
    let title = format!("Kept from the guest by a commit: {op}");
    let words = Words {
        title: &title,
        subtitle: "the vCPU that was kept longest, median commit; runs' median and extremes; log.",
        places: &report.plan.vcpus,
        axis: "vCPUs",
    };
    let scale = Scale::logarithmic(lowest(&lines), highest(&lines));
    let tick = |ns: f64| tell(ns).replace(".00 ", " ").replace(".0 ", " ");
    line_chart(canvas, x, &words, &lines, scale, tick)
}

fn boots_into(canvas: &mut Canvas<'_>, x: i32, report: &MemslotsReport) -> Result<(), DrawError> {
    let tell = |ms: f64| format!("{} ms", figure(ms));
    let methods = report.plan.methods.iter();
    let lines: Vec<Line> = methods
        .map(|&method| {
            let op = Op::Boot;
            line(
                report,
                Series::Commits { op, method },
                |point| point.boot_ms,
                tell,
            )
        })
        .collect();
    let words = Words {
        title: "All commits of a boot, measured here",
        subtitle: "milliseconds for 86 updates; median, lowest and highest run",
        places: &report.plan.vcpus,
        axis: "vCPUs",
    };
    let scale = Scale::from_zero(highest(&lines));
    line_chart(canvas, x, &words, &lines, scale, short)
}

fn published_into(canvas: &mut Canvas<'_>, x: i32, published: &Published) -> Result<(), DrawError> {
    let places: Vec<u32> = published.times.iter().map(|time| time.vcpus).collect();
    let line = |label: &str, method: Method| {
        let points = places.iter().enumerate().filter_map(|(place, &vcpus)| {
            let ms = published.at(vcpus, method)?;
            let told = format!("published, {label}, {vcpus} vCPUs: {} ms", figure(ms));
            Some((place, Spread::of(&[ms])?, told))
        });
        Line {
            key: Key {
                label: label.to_owned(),
                role: role(Some(method)),
            },
            dashed: false,
            points: points.collect(),
        }
    };
    let lines = [line("ioctl", Method::List), line("pause", Method::Quiesce)];
    let words = Words {
        title: "All commits of a boot, published",
        subtitle: "milliseconds; their hardware",
        places: &places,
        axis: "vCPUs",
    };
    let scale = Scale::from_zero(highest(&lines));
    line_chart(canvas, x, &words, &lines, scale, short)
}
