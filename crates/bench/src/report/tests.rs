use std::time::Duration;

use super::*;
use crate::benchmark::{Benchmark, Job, Rig, run};
use crate::facts::Facts;
use crate::latency::LatencyLog;
use crate::paging::{Delivery, Plan, Sample, Uffds};
use crate::progress::{Progress, Quiet};
use crate::rounds::{BenchError, Environment, RunFailure};
use crate::timing::Timing;
use crate::units::{ByteSize, whole};

fn table(report: &PagingReport, width: Option<u16>) -> String {
    report.table(width)
}

fn svg(report: &PagingReport) -> Result<String, ReportError> {
    report.svg()
}

fn html(report: &PagingReport) -> Result<String, ReportError> {
    report.html()
}

/// Makes up runs in the shape of real ones: exits cheaper, a little noise, latencies with a tail.
struct MadeUp;

impl Rig<Plan> for MadeUp {
    fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        let pages = job.plan.total_pages(job.vcpus);
        let noise = 1.0 + 0.03 * (job.seed % 5) as f64;
        let ns_per_page = noise
            * match (job.series.delivery, job.series.fault_around) {
                (Delivery::None, _) => 3_000.0,
                (Delivery::Uffd, _) => 24_000.0,
                (Delivery::Exit, 1) => 13_500.0,
                (Delivery::Exit, _) => 4_100.0,
            };
        let elapsed_ns = whole(ns_per_page * pages as f64 / f64::from(job.vcpus.min(2)));
        let mut latency = LatencyLog::new().unwrap();
        (0..pages).for_each(|page| {
            let tail = if page % 200 == 0 {
                9.0
            } else {
                1.0 + (page % 16) as f64 / 16.0
            };
            latency.record(whole(ns_per_page * tail));
        });
        let (exits, messages) = match job.series.delivery {
            Delivery::None => (0, 0),
            Delivery::Uffd => (0, pages),
            Delivery::Exit => (pages / u64::from(job.series.fault_around), 0),
        };
        Ok(Sample {
            elapsed: Duration::from_nanos(elapsed_ns),
            pages,
            exits,
            messages,
            latency,
        })
    }
}

fn report(timing: Timing, change: impl FnOnce(&mut Plan)) -> PagingReport {
    let mut plan = Plan {
        per_vcpu: ByteSize(1 << 20),
        deliveries: vec![Delivery::None, Delivery::Uffd, Delivery::Exit],
        fault_around: vec![1, 16],
        ..Plan::default()
    };
    change(&mut plan);
    let facts = Facts {
        cpu_model: Some("A <CPU> & \"more\"".to_owned()),
        ..Facts::gather(timing)
    };
    let environment = Environment {
        facts,
        ..Environment::gather(timing)
    };
    let result: Result<_, BenchError> = run(&plan, &mut MadeUp, environment, &mut Quiet);
    result.unwrap()
}

#[test]
fn json_reads_back_as_the_same_report() {
    for timing in [Timing::Native, Timing::Instructions] {
        let report = report(timing, |_| {});
        let text = json(&report).unwrap();
        // Ratios and rates are floating-point numbers; reading back must not change a bit of them.
        assert!(from_json(&text).unwrap() == report, "{timing}");
    }
}

#[test]
fn json_has_the_documented_fields() {
    let text = json(&report(Timing::Instructions, |_| {})).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["schema"], "pagetide.paging/1");
    assert_eq!(value["timing"], "instructions");
    assert_eq!(value["plan"]["per_vcpu_bytes"], 1 << 20);
    let point = &value["points"][1];
    assert_eq!(
        point["series"],
        serde_json::json!({"delivery": "uffd", "fault_around": 1})
    );
    let known = [
        &point["rate_kpages_per_s"]["median"],
        &point["rate_per_vcpu_kpages_per_s"]["q1"],
        &point["instructions_per_page"]["max"],
        &point["latency"]["p99_ns"],
        &point["runs"][0]["elapsed_ns"],
        &value["ratios"][0]["rate"]["paired"]["median"],
        &value["ratios"][0]["instructions"]["of_medians"],
        &value["published"]["rates"][0]["uffd_kpages_per_s"],
    ];
    for (index, value) in known.iter().enumerate() {
        assert!(value.is_number(), "{index}");
    }
    let documented = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/guide/benchmarks.md"
    ))
    .unwrap();
    let mut fields = Vec::new();
    names(&value, &mut fields);
    for field in fields {
        assert!(
            documented.contains(&format!("`{field}`")),
            "{field} is not documented"
        );
    }
}

/// The names of all fields in a JSON value.
fn names(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                if !found.contains(name) {
                    found.push(name.clone());
                }
                names(value, found);
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|value| names(value, found)),
        _ => {}
    }
}

#[test]
fn the_page_needs_nothing_from_outside() {
    for timing in [
        Timing::Native,
        Timing::Function,
        Timing::Instructions,
        Timing::Parallel,
    ] {
        let page = html(&report(timing, |_| {})).unwrap();
        for outside in [
            "http:", "https:", "//", "src=", "href=", "@import", "url(", "<link",
        ] {
            assert!(!page.contains(outside), "{outside} in the page");
        }
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    }
}

#[test]
fn the_page_holds_the_data_itself() {
    let report = report(Timing::Native, |_| {});
    let page = html(&report).unwrap();
    let (_, rest) = page.split_once("id=\"paging-data\">").unwrap();
    let (data, _) = rest.split_once("</script>").unwrap();
    assert!(from_json(data).unwrap() == report);
}

#[test]
fn the_page_escapes_what_it_shows() {
    let page = html(&report(Timing::Native, |_| {})).unwrap();
    assert!(page.contains("A &lt;CPU&gt; &amp; &quot;more&quot;"));
    let (shown, _) = page.split_once("<script").unwrap();
    assert!(!shown.contains("A <CPU>"));
}

#[test]
fn the_page_is_light_and_dark_and_well_formed() {
    let page = html(&report(Timing::Instructions, |_| {})).unwrap();
    assert!(page.contains("prefers-color-scheme:dark"));
    assert!(page.contains("var(--series-1)"));
    for element in [
        "figure", "table", "svg", "ul", "li", "dl", "main", "details", "td", "tr",
    ] {
        let opened = page.matches(&format!("<{element}>")).count()
            + page.matches(&format!("<{element} ")).count();
        assert_eq!(
            opened,
            page.matches(&format!("</{element}>")).count(),
            "{element}"
        );
    }
    assert_eq!(page.matches("<figure>").count(), 5);
    assert!(!page.contains('\u{0}') && !page.contains("NaN") && !page.contains("inf\""));
}

#[test]
fn pictures_that_have_no_data_are_left_out() {
    let only_uffd = report(Timing::Native, |plan| {
        plan.deliveries = vec![Delivery::Uffd];
        plan.fault_around = vec![1];
        plan.backing = pagetide_memory::Backing::Hugetlb2M;
        plan.per_vcpu = ByteSize(2 << 20);
    });
    let page = html(&only_uffd).unwrap();
    assert_eq!(page.matches("<figure>").count(), 2, "rates and latencies");
    assert!(!page.contains("published") || !page.contains("Rate, published"));
    assert!(!table(&only_uffd, None).contains("times uffd"));
    assert!(svg(&only_uffd).unwrap().contains("Rate, measured here"));
}

#[test]
fn the_drawing_is_a_file_of_its_own() {
    let drawing = svg(&report(Timing::Native, |_| {})).unwrap();
    assert!(drawing.contains("xmlns=\"http://www.w3.org/2000/svg\""));
    assert!(
        !drawing.contains("var("),
        "a viewer of files has no variables"
    );
    assert!(drawing.contains("Rate, measured here") && drawing.contains("Rate, published"));
    // 4 series at 4 numbers of vCPUs here, 2 at 9 there.
    assert_eq!(drawing.matches("<title>").count(), 4 * 4 + 2 * 9);
}

#[test]
fn the_table_shows_ours_and_the_published_figures() {
    let text = table(&report(Timing::Native, |_| {}), None);
    for wanted in [
        "exit, 16 around",
        "published",
        "1239",
        "thousand pages",
        "No run was lost.",
    ] {
        assert!(text.contains(wanted), "{wanted} in\n{text}");
    }
    assert!(!text.contains("instructions/page"));
    assert!(text.contains("Timing         native"));
    let counted = table(&report(Timing::Instructions, |_| {}), None);
    assert!(counted.contains("instructions/page") && counted.contains("instructions, times uffd"));
}

#[test]
fn one_userfaultfd_per_vcpu_has_its_own_published_figures() {
    let text = table(
        &report(Timing::Native, |plan| plan.uffds = Uffds::PerVcpu),
        None,
    );
    assert!(
        text.contains("published: thousand pages per second, each vCPU"),
        "{text}"
    );
}

#[test]
fn what_changes_the_experiment_is_named() {
    let plain = table(&report(Timing::Native, |_| {}), None);
    assert!(plain.contains("sequential writes\n"), "{plain}");
    assert!(!plain.contains("readers as vCPUs; here"), "{plain}");
    let report = report(Timing::Native, |plan| {
        plan.pre_fault = true;
        plan.pin = true;
        plan.readers = Some(1);
    });
    let text = table(&report, None);
    assert!(
        text.contains("sequential writes, exits pre-fault, vCPUs pinned\n"),
        "{text}"
    );
    for note in ["(--pre-fault)", "(--pin)"] {
        assert!(
            report.notes.iter().any(|told| told.contains(note)),
            "{text}"
        );
    }
    assert!(report.published.is_none());
}

#[test]
fn other_numbers_of_readers_than_published_are_named() {
    let fixed = report(Timing::Native, |plan| plan.readers = Some(1));
    let note = "published: as many readers as vCPUs; here 1 for any number of vCPUs.";
    assert!(fixed.published.is_some() && table(&fixed, None).contains(note));
    let same = report(Timing::Native, |plan| {
        plan.readers = Some(2);
        plan.vcpus = vec![2];
    });
    assert!(!table(&same, None).contains("published: as many readers"));
}

#[test]
fn the_command_measures_the_same_again() {
    let report = report(Timing::Native, |plan| {
        plan.readers = Some(3);
        plan.overlap = true;
        plan.pin = true;
    });
    assert_eq!(
        report.plan.command(),
        "pagetide bench paging --vcpus 1,2,4,8 --per-vcpu 1M --delivery none,uffd,exit \
         --fault-around 1,16 --backing shmem --mode minor --uffds single --order sequential \
         --access write --runs 7 --readers 3 --overlap --pin"
    );
}

#[test]
fn results_are_written_as_three_files() {
    let temporary = tempfile::tempdir().unwrap();
    let report = report(Timing::Native, |_| {});
    let mut out = OutDir::prepare(&temporary.path().join("results")).unwrap();
    write(&report, &mut out).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(out.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["paging.html", "paging.json", "paging.svg"]);
    let text = std::fs::read_to_string(out.path().join("paging.json")).unwrap();
    assert!(from_json(&text).unwrap() == report);
}
