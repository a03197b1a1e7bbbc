//! The charts of a report on memory errors.

use pagetide_memory::{Backing, FailurePolicy};

use super::canvas::{Canvas, DrawError, draw};
use super::frame::{Key, Words};
use super::scale::Scale;
use super::theme::Role;
use super::{HEIGHT, Line, SIZE, WIDTH, highest, line_chart, lowest, told};
use crate::memcycler::{MemcyclerReport, Series};
use crate::stats::Spread;
use crate::units::{ByteSize, decimal, whole};

/// The colour of a policy.
pub(crate) fn role(policy: FailurePolicy) -> Role {
    Role::Series(match policy {
        FailurePolicy::KernelDefault => 1,
        FailurePolicy::Keep => 2,
    })
}

/// All charts, by number of vCPUs and backing: the rate and the memory that errors cost.
pub(crate) fn all(report: &MemcyclerReport) -> Result<Vec<String>, DrawError> {
    let mut drawings = Vec::new();
    for &vcpus in &report.plan.vcpus {
        for &backing in &report.plan.backings {
            let place = (vcpus, backing);
            drawings.push(draw(SIZE, |canvas| rate_into(canvas, 0, report, place))?);
            drawings.push(draw(SIZE, |canvas| bytes_into(canvas, 0, report, place))?);
        }
    }
    Ok(drawings)
}

/// The drawing for a file of its own: those of the most vCPUs and the first backing.
pub(crate) fn standalone(report: &MemcyclerReport) -> Result<String, DrawError> {
    draw((SIZE.0 * 2, HEIGHT.unsigned_abs()), |canvas| {
        canvas.paper()?;
        let vcpus = report.plan.vcpus.iter().copied().max();
        let (Some(vcpus), Some(&backing)) = (vcpus, report.plan.backings.first()) else {
            return Ok(());
        };
        rate_into(canvas, 0, report, (vcpus, backing))?;
        bytes_into(canvas, WIDTH, report, (vcpus, backing))
    })
}

/// The shares of memory that were hit, ascending.
fn percent(report: &MemcyclerReport) -> Vec<u32> {
    let mut percent = report.plan.poison_percent.clone();
    percent.retain(|percent| *percent > 0);
    percent.sort_unstable();
    percent
}

/// One line for each policy, over the shares of memory that were hit.
fn lines(
    report: &MemcyclerReport,
    (vcpus, backing): (u32, Backing),
    value: impl Fn(Series) -> Option<Spread>,
    tell: impl Fn(f64) -> String,
) -> Vec<Line> {
    let policies = report.plan.policies.iter();
    let line = |&policy: &FailurePolicy| {
        let places = percent(report).into_iter().enumerate();
        let points = places.filter_map(|(place, poison_percent)| {
            let series = Series {
                backing,
                policy,
                poison_percent,
            };
            let spread = value(series)?;
            let told = told(&series, vcpus, &spread, &tell);
            Some((place, spread, told))
        });
        Line {
            key: Key {
                label: policy.to_string(),
                role: role(policy),
            },
            dashed: false,
            points: points.collect(),
        }
    };
    policies.map(line).collect()
}

fn rate_into(
    canvas: &mut Canvas<'_>,
    x: i32,
    report: &MemcyclerReport,
    (vcpus, backing): (u32, Backing),
) -> Result<(), DrawError> {
    let loss = |series| {
        let rate = report.ratio(vcpus, series)?.rate.paired;
        // What is gained by errors is noise, and would be below the axis.
        let loss = |ratio: f64| ((1.0 - ratio) * 100.0).max(0.0);
        Spread::of(&[rate.min, rate.median, rate.max].map(loss))
    };
    let tell = |percent: f64| format!("{} %", decimal(percent, 2));
    let mut lines = lines(report, (vcpus, backing), loss, tell);
    if backing == Backing::Thp {
        lines.push(published(report, tell));
    }
    let title = format!("Speed that errors cost: {backing}, {vcpus} vCPUs");
    let words = Words {
        title: &title,
        subtitle: "percent of the rate without errors; median of the rounds, lowest and highest",
        places: &percent(report),
        axis: "percent of the memory's 2 MiB pieces hit",
    };
    let scale = Scale::from_zero(highest(&lines).max(1.0));
    line_chart(canvas, x, &words, &lines, scale, tell)
}

fn published(report: &MemcyclerReport, tell: impl Fn(f64) -> String) -> Line {
    let places = percent(report).into_iter().enumerate();
    let points = places.filter_map(|(place, percent)| {
        let loss = report.published.at(percent)?.loss_percent;
        let told = format!("published, {percent} %: {}", tell(loss));
        Some((place, Spread::of(&[loss])?, told))
    });
    Line {
        key: Key {
            label: "published default".to_owned(),
            role: Role::Muted,
        },
        dashed: true,
        points: points.collect(),
    }
}

fn bytes_into(
    canvas: &mut Canvas<'_>,
    x: i32,
    report: &MemcyclerReport,
    (vcpus, backing): (u32, Backing),
) -> Result<(), DrawError> {
    let lost = |series| Some(report.point(vcpus, series)?.lost_bytes).filter(|l| l.min > 0.0);
    let tell = |bytes: f64| ByteSize(whole(bytes)).about();
    let lines = lines(report, (vcpus, backing), lost, tell);
    let title = format!("Memory that errors cost: {backing}, {vcpus} vCPUs");
    let words = Words {
        title: &title,
        subtitle: "lost, as measured; median, lowest and highest run; logarithmic",
        places: &percent(report),
        axis: "percent of the memory's 2 MiB pieces hit",
    };
    let scale = Scale::logarithmic(lowest(&lines), highest(&lines));
    line_chart(canvas, x, &words, &lines, scale, tell)
}
