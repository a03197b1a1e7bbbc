//! The charts of a paging report.

mod canvas;
mod frame;
pub(crate) mod memcycler;
pub(crate) mod memslots;
pub(crate) mod populate;
mod scale;
mod theme;

pub use canvas::DrawError;
pub(crate) use theme::{Role, declarations, for_page};

use std::fmt::Display;

use canvas::{Anchor, Canvas, Shape, draw};
use frame::{Frame, Key, Words, aside, short};
use scale::Scale;

use crate::paging::{Delivery, PagingReport, Point, Published, Series};
use crate::stats::Spread;
use crate::timing::Timing;
use crate::units::{figure, float, latency};

/// Width and height of a chart in pixels.
const SIZE: (u32, u32) = (620, 400);
const WIDTH: i32 = 620;
const HEIGHT: i32 = 400;

/// A line of a chart: a value, and perhaps its extremes, at each place.
struct Line {
    key: Key,
    dashed: bool,
    /// Place on the horizontal axis, value, lowest and highest, and what to tell when pointed at.
    points: Vec<(usize, Spread, String)>,
}

/// Rates over vCPUs, ours.
pub(crate) fn rates(report: &PagingReport) -> Result<String, DrawError> {
    draw(SIZE, |canvas| rates_into(canvas, 0, report))
}

/// Rates over vCPUs, as published.
pub(crate) fn published_rates(published: &Published) -> Result<String, DrawError> {
    draw(SIZE, |canvas| published_into(canvas, 0, published))
}

/// The drawing for a file of its own: rates, ours beside the published ones.
pub(crate) fn standalone(report: &PagingReport) -> Result<String, DrawError> {
    let panels = if report.published.is_some() { 2 } else { 1 };
    draw((SIZE.0 * panels, SIZE.1), |canvas| {
        canvas.paper()?;
        rates_into(canvas, 0, report)?;
        match &report.published {
            Some(published) => published_into(canvas, WIDTH, published),
            None => Ok(()),
        }
    })
}

fn rates_into(canvas: &mut Canvas<'_>, x: i32, report: &PagingReport) -> Result<(), DrawError> {
    let per_vcpu = report
        .published
        .as_ref()
        .is_some_and(|published| published.per_vcpu);
    let value = |point: &Point| {
        if per_vcpu {
            point.rate_per_vcpu_kpages_per_s
        } else {
            point.rate_kpages_per_s
        }
    };
    let lines = lines_of(report, |point| Some(value(point)), "thousand pages/s");
    let subtitle = format!(
        "thousand pages/s, {}; median, lowest and highest run{}",
        rate_of(per_vcpu),
        if report.origin.timing == Timing::Instructions {
            "; 1 ns = 1 instruction"
        } else {
            ""
        },
    );
    let words = Words {
        title: "Rate, measured here",
        subtitle: &subtitle,
        places: &report.plan.vcpus,
        axis: "vCPUs",
    };
    let scale = Scale::from_zero(highest(&lines));
    line_chart(canvas, x, &words, &lines, scale, short)
}

fn published_into(canvas: &mut Canvas<'_>, x: i32, published: &Published) -> Result<(), DrawError> {
    let places: Vec<u32> = published.rates.iter().map(|rate| rate.vcpus).collect();
    let line = |delivery: Delivery, value: fn(&crate::paging::PublishedRate) -> u32| {
        let series = Series {
            delivery,
            fault_around: 1,
            populate: false,
        };
        let points = published
            .rates
            .iter()
            .enumerate()
            .filter_map(|(place, rate)| {
                let rate_value = f64::from(value(rate));
                let tell = format!(
                    "published, {delivery}, {} vCPUs: {} thousand pages/s",
                    rate.vcpus,
                    figure(rate_value)
                );
                Some((place, Spread::of(&[rate_value])?, tell))
            });
        let key = Key {
            label: delivery.to_string(),
            role: Role::of(series, &[series]),
        };
        Line {
            key,
            dashed: false,
            points: points.collect(),
        }
    };
    let lines = [
        line(Delivery::Uffd, |rate| rate.uffd_kpages_per_s),
        line(Delivery::Exit, |rate| rate.exit_kpages_per_s),
    ];
    let subtitle = format!(
        "thousand pages/s, {}; 256-core x86",
        rate_of(published.per_vcpu)
    );
    let words = Words {
        title: "Rate, published",
        subtitle: &subtitle,
        places: &places,
        axis: "vCPUs",
    };
    line_chart(
        canvas,
        x,
        &words,
        &lines,
        Scale::from_zero(highest(&lines)),
        short,
    )
}

fn rate_of(per_vcpu: bool) -> &'static str {
    if per_vcpu {
        "each vCPU"
    } else {
        "all vCPUs together"
    }
}

/// Exit over uffd, ours and published in one picture: a ratio can be compared across machines.
pub(crate) fn ratios(report: &PagingReport) -> Result<Option<String>, DrawError> {
    if report.ratios.is_empty() {
        return Ok(None);
    }
    let all = report.series();
    let mut lines: Vec<Line> = Vec::new();
    for &series in all
        .iter()
        .filter(|series| series.delivery == Delivery::Exit)
    {
        let points = report
            .plan
            .vcpus
            .iter()
            .enumerate()
            .filter_map(|(place, &vcpus)| {
                let paired = report.ratio(vcpus, series)?.rate.paired;
                let tell = format!(
                    "{series} over uffd, {vcpus} vCPUs: {}x ({}x to {}x)",
                    figure(paired.median),
                    figure(paired.min),
                    figure(paired.max)
                );
                Some((place, paired, tell))
            });
        let key = Key {
            label: series.to_string(),
            role: Role::of(series, &all),
        };
        lines.push(Line {
            key,
            dashed: false,
            points: points.collect(),
        });
    }
    lines.extend(report.published.as_ref().map(|published| {
        let points = report
            .plan
            .vcpus
            .iter()
            .enumerate()
            .filter_map(|(place, &vcpus)| {
                let ratio = published.at(vcpus)?.ratio();
                let tell = format!("published, {vcpus} vCPUs: {}x", figure(ratio));
                Some((place, Spread::of(&[ratio])?, tell))
            });
        let key = Key {
            label: "published exit".to_owned(),
            role: Role::Muted,
        };
        Line {
            key,
            dashed: true,
            points: points.collect(),
        }
    }));
    let values = || {
        lines
            .iter()
            .flat_map(|line| line.points.iter().map(|point| point.1))
    };
    let low = values().map(|spread| spread.min).fold(1.0, f64::min);
    let high = values().map(|spread| spread.max).fold(2.0, f64::max);
    let words = Words {
        title: "How many times the rate of uffd",
        subtitle: "median of the rounds' own ratios, lowest and highest round; logarithmic",
        places: &report.plan.vcpus,
        axis: "vCPUs",
    };
    let times = |value: f64| format!("{}x", crate::units::decimal(value, 3));
    let scale = Scale::doubling(low, high);
    draw(SIZE, |canvas| {
        line_chart(canvas, 0, &words, &lines, scale, times)
    })
    .map(Some)
}

/// One line for each series of a report.
fn lines_of(
    report: &PagingReport,
    value: impl Fn(&Point) -> Option<Spread>,
    unit: &str,
) -> Vec<Line> {
    let all = report.series();
    let line = |&series: &Series| {
        let points = report
            .plan
            .vcpus
            .iter()
            .enumerate()
            .filter_map(|(place, &vcpus)| {
                let spread = value(report.point(vcpus, series)?)?;
                let tell = format!(
                    "{series}, {vcpus} vCPUs: {} {unit} ({} to {})",
                    figure(spread.median),
                    figure(spread.min),
                    figure(spread.max)
                );
                Some((place, spread, tell))
            });
        let key = Key {
            label: series.to_string(),
            role: Role::of(series, &all),
        };
        Line {
            key,
            dashed: false,
            points: points.collect(),
        }
    };
    all.iter().map(line).collect()
}

fn highest(lines: &[Line]) -> f64 {
    let values = lines
        .iter()
        .flat_map(|line| line.points.iter().map(|point| point.1.max));
    values.fold(0.0, f64::max)
}

/// The lowest value of lines, for a logarithmic axis; 1 if there is none.
fn lowest(lines: &[Line]) -> f64 {
    let values = lines
        .iter()
        .flat_map(|line| line.points.iter().map(|point| point.1.min));
    let low = values.fold(f64::INFINITY, f64::min);
    if low.is_finite() { low } else { 1.0 }
}

/// What to tell of a value: the series, the number of vCPUs, median and extremes.
fn told(series: &dyn Display, vcpus: u32, spread: &Spread, tell: impl Fn(f64) -> String) -> String {
    format!(
        "{series}, {vcpus} vCPUs: {} ({} to {})",
        tell(spread.median),
        tell(spread.min),
        tell(spread.max)
    )
}

fn line_chart(
    canvas: &mut Canvas<'_>,
    x: i32,
    words: &Words<'_>,
    lines: &[Line],
    scale: Scale,
    tell: impl Fn(f64) -> String,
) -> Result<(), DrawError> {
    let keys: Vec<Key> = lines.iter().map(|line| line.key.clone()).collect();
    let frame = Frame::draw(canvas, (x, WIDTH, HEIGHT), words, &keys, scale, tell)?;
    for (index, line) in lines.iter().enumerate() {
        // A little beside each other, so that one series' extremes do not hide another's.
        let aside = aside(index, lines.len(), 0.05);
        let points: Vec<_> = line
            .points
            .iter()
            .map(|(place, spread, _)| frame.point(*place, aside, spread.median))
            .collect();
        if line.dashed {
            canvas.dashes(&points, line.key.role, 2)?;
        } else {
            canvas.path(&points, line.key.role, 2)?;
        }
        for (place, spread, _) in line.points.iter().filter(|point| point.1.count > 1) {
            whisker(canvas, &frame, (*place, aside), spread, line.key.role)?;
        }
        for (&at, (_, _, tell)) in points.iter().zip(&line.points) {
            canvas.marker(at, Shape::of(line.key.role), line.key.role, 4)?;
            canvas.spot(at, 11, tell);
        }
    }
    Ok(())
}

/// The extremes as a thin line with ends.
fn whisker(
    canvas: &Canvas<'_>,
    frame: &Frame,
    (place, aside): (usize, f64),
    spread: &Spread,
    role: Role,
) -> Result<(), DrawError> {
    let (x, top, bottom) = (
        frame.x(place, aside),
        frame.y(spread.max),
        frame.y(spread.min),
    );
    canvas.path(&[(x, top), (x, bottom)], role, 1)?;
    canvas.path(&[(x - 3, top), (x + 3, top)], role, 1)?;
    canvas.path(&[(x - 3, bottom), (x + 3, bottom)], role, 1)
}

/// Latencies of faults by vCPUs: median, 99th percentile, longest.
pub(crate) fn latencies(report: &PagingReport) -> Result<Option<String>, DrawError> {
    let known = || report.points.iter().filter_map(|point| point.latency);
    let (Some(low), Some(high)) = (
        known().map(|latency| latency.p50_ns).min(),
        known().map(|latency| latency.max_ns).max(),
    ) else {
        return Ok(None);
    };
    let all = report.series();
    let keys: Vec<Key> = all
        .iter()
        .map(|&series| Key {
            label: series.to_string(),
            role: Role::of(series, &all),
        })
        .collect();
    let words = Words {
        title: "Latency of a fault, seen by the guest",
        subtitle: "filled: median; ring: 99th percentile; tick: longest; logarithmic",
        places: &report.plan.vcpus,
        axis: "vCPUs",
    };
    let scale = Scale::logarithmic(float(low), float(high));
    let tell = |ns: f64| {
        let text = latency(crate::units::whole(ns));
        // Ticks are round numbers: "10 µs", not "10.0 µs".
        text.replace(".00 ", " ").replace(".0 ", " ")
    };
    let picture = draw(SIZE, |canvas| {
        let frame = Frame::draw(canvas, (0, WIDTH, HEIGHT), &words, &keys, scale, tell)?;
        for (index, (key, &series)) in keys.iter().zip(&all).enumerate() {
            let aside = aside(index, all.len(), 0.5);
            for (place, &vcpus) in report.plan.vcpus.iter().enumerate() {
                let Some(seen) = report.point(vcpus, series).and_then(|point| point.latency) else {
                    continue;
                };
                let at = |ns: u64| frame.point(place, aside, float(ns));
                let (p50, p99, max) = (at(seen.p50_ns), at(seen.p99_ns), at(seen.max_ns));
                canvas.path(&[p50, max], key.role, 1)?;
                canvas.path(&[(max.0 - 5, max.1), (max.0 + 5, max.1)], key.role, 2)?;
                canvas.marker(p99, Shape::Ring, key.role, 4)?;
                canvas.marker(p50, Shape::of(key.role), key.role, 5)?;
                for (point, name, ns) in [
                    (p50, "median", seen.p50_ns),
                    (p99, "99 %", seen.p99_ns),
                    (max, "longest", seen.max_ns),
                ] {
                    let told = latency(ns);
                    canvas.spot(
                        point,
                        8,
                        &format!("{series}, {vcpus} vCPUs, {name}: {told}"),
                    );
                }
            }
        }
        Ok(())
    });
    picture.map(Some)
}

/// Instructions per page by vCPUs, where they are known.
pub(crate) fn instructions(report: &PagingReport) -> Result<Option<String>, DrawError> {
    let lines = lines_of(
        report,
        |point| point.instructions_per_page,
        "instructions per page",
    );
    if lines.iter().all(|line| line.points.is_empty()) {
        return Ok(None);
    }
    let words = Words {
        title: "Instructions per page made present",
        subtitle: "host kernel, hypervisor, guest and Pagetide together; median and extremes",
        places: &report.plan.vcpus,
        axis: "vCPUs",
    };
    let keys: Vec<Key> = lines.iter().map(|line| line.key.clone()).collect();
    let scale = Scale::from_zero(highest(&lines) * 1.08);
    let picture = draw(SIZE, |canvas| {
        let frame = Frame::draw(canvas, (0, WIDTH, HEIGHT), &words, &keys, scale, short)?;
        let count = i32::try_from(lines.len()).unwrap_or(1).max(1);
        let half = (frame.pitch() * 7 / 10 / count / 2).clamp(2, 28);
        for (index, line) in lines.iter().enumerate() {
            let index = i32::try_from(index).unwrap_or(0);
            let beside = (2 * index - (count - 1)) * (half + 1);
            for (place, spread, tell) in &line.points {
                let middle = frame.x(*place, 0.0) + beside;
                let top = frame.y(spread.median);
                canvas.bar(
                    (middle - half, top),
                    (middle + half, frame.y(0.0)),
                    line.key.role,
                )?;
                let (high, low) = (frame.y(spread.max), frame.y(spread.min));
                canvas.path(&[(middle, high), (middle, low)], Role::Ink, 1)?;
                if half >= 12 {
                    let at = (middle, high - 10);
                    canvas.text(
                        &short_count(spread.median),
                        at,
                        Anchor::Middle,
                        Role::Ink,
                        12,
                    )?;
                }
                canvas.spot((middle, top), half.max(8), tell);
            }
        }
        Ok(())
    });
    picture.map(Some)
}

/// A count of instructions above a bar: `870`, `14.2k`.
fn short_count(value: f64) -> String {
    if value >= 1000.0 {
        format!("{:.1}k", value / 1000.0)
    } else {
        figure(value)
    }
}
