use std::time::Duration;

use super::*;
use crate::benchmark::{BenchError, Job, Rig, RunFailure, run};
use crate::facts::Facts;
use crate::latency::LatencyLog;
use crate::model::Quantity;
use crate::model::{CPU_BY_OTHERS, CPU_PRESSURE, LOST_RUNS, Sample};
use crate::paging::{self, Delivery, Plan, Uffds};
use crate::progress::{Progress, Quiet};
use crate::timing::Timing;
use crate::units::{ByteSize, whole};

fn table(report: &Report<Plan>) -> String {
    report.table(None).unwrap()
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
        Ok(Sample::default()
            .time(paging::ELAPSED, Duration::from_nanos(elapsed_ns))
            .count(paging::PAGES, pages)
            .count(paging::EXITS, exits)
            .count(paging::MESSAGES, messages)
            .log(paging::LATENCY, latency))
    }
}

fn report(timing: Timing, change: impl FnOnce(&mut Plan)) -> Report<Plan> {
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
        ..Environment::of_made_up(timing)
    };
    let result: Result<_, BenchError> = run(&plan, &mut MadeUp, environment, &mut Quiet);
    result.unwrap()
}

fn from_json(text: &str) -> Report<Plan> {
    Report::from_json(text).unwrap()
}

#[test]
fn json_reads_back_as_the_same_report() {
    for timing in [Timing::Native, Timing::Instructions] {
        let report = report(timing, |_| {});
        let text = report.json().unwrap();
        // Ratios and rates are floating-point numbers; reading back must not change a bit of them.
        assert!(from_json(&text) == report, "{timing}");
    }
}

#[test]
fn json_is_a_record_a_line() {
    let report = report(Timing::Instructions, |plan| plan.runs = 3);
    let text = report.json().unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["schema"], SCHEMA);
    assert_eq!(
        (&value["benchmark"], &value["timing"]),
        (&"paging".into(), &"instructions".into())
    );
    assert_eq!(value["plan"]["per_vcpu_bytes"], 1 << 20);
    let lines = text
        .lines()
        .filter(|line| line.starts_with("    {\""))
        .count();
    assert_eq!(lines, report.records.len());
    let wanted = serde_json::json!({
        "run": 1, "series": "exit, 16 around", "quantity": "pages", "unit": "pages", "value": 256.0,
        "axes": {"vcpus": 1, "delivery": "exit", "fault_around": 16},
    });
    let records = value["records"].as_array().unwrap();
    assert!(records.contains(&wanted), "{text}");
    let published = value["published"]["records"].as_array().unwrap();
    assert!(published.iter().any(|record| record["value"] == 1239.0));
    for (quantity, over_runs) in [
        ("rate_kpages_per_s", "median"),
        ("instructions_per_page", "q1"),
        ("latency_ns", "p99"),
        ("rate_over_uffd", "of_medians"),
        ("instructions_over_uffd", "max"),
        ("lost_runs", "sum"),
    ] {
        let found = records
            .iter()
            .any(|record| record["quantity"] == quantity && record["over_runs"] == over_runs);
        assert!(found, "{quantity} {over_runs}");
    }
}

/// Every name in the data is explained where its readers look.
fn is_documented<B: Shown>(logs: &[Quantity]) {
    let documented = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/design/reports.md"
    ))
    .unwrap();
    let shared = [CPU_BY_OTHERS, CPU_PRESSURE, LOST_RUNS];
    let quantities = B::QUANTITIES
        .iter()
        .chain(logs)
        .chain(&shared)
        .map(|one| one.name);
    let columns = B::COLUMNS.iter().map(|one| one.name);
    let comparisons = B::COMPARISONS.iter().map(|one| one.name);
    for name in quantities
        .chain(columns)
        .chain(comparisons)
        .chain([SCHEMA, B::NAME])
    {
        assert!(
            documented.contains(&format!("`{name}`")),
            "{name} is not documented"
        );
    }
}

#[test]
fn every_quantity_is_documented() {
    use crate::{memcycler, memslots, pager, populate};
    is_documented::<Plan>(&[paging::LATENCY]);
    let logs = [
        memslots::view::COMMIT,
        memslots::view::INSIDE,
        memslots::view::KEPT,
        memslots::view::KEPT_EACH,
    ];
    is_documented::<memslots::Plan>(&logs);
    is_documented::<populate::Plan>(&[]);
    is_documented::<memcycler::Plan>(&[]);
    is_documented::<pager::Plan>(&[pager::view::LATENCY]);
}

/// The same runs, during which others took a share of the CPUs.
struct Shared(f64);

impl Rig<Plan> for Shared {
    fn run(
        &mut self,
        job: &Job<'_, Plan>,
        progress: &mut dyn Progress,
    ) -> Result<Sample, RunFailure> {
        let sample = MadeUp.run(job, progress)?;
        let busy = job.series.delivery == Delivery::Uffd && job.vcpus == 2;
        Ok(sample.value(CPU_BY_OTHERS, if busy { self.0 } else { 0.02 }))
    }
}

#[test]
fn runs_on_a_busy_machine_are_marked() {
    let plan = Plan {
        vcpus: vec![1, 2],
        per_vcpu: ByteSize(1 << 20),
        runs: 3,
        ..Plan::default()
    };
    let measure = |share| {
        // No clock of this machine's: the share comes from the made-up runs.
        let environment = Environment::of_made_up(Timing::Instructions);
        run(&plan, &mut Shared(share), environment, &mut Quiet).unwrap()
    };
    let busy = measure(0.4);
    let headline = "(on a busy machine: others took up to 40 % of its CPUs)";
    let text = table(&busy);
    assert!(text.lines().next().unwrap().ends_with(headline), "{text}");
    assert!(
        text.contains("during 3 of 12 runs others took more than 10 %"),
        "{text}"
    );
    let page = busy.html().unwrap();
    assert!(
        page.contains(headline) && page.matches("class=\"warn\"").count() == 2,
        "{page}"
    );
    assert!(page.contains("<td>40 %</td>"), "every run has its share");
    let idle = measure(0.05);
    assert!(!table(&idle).contains("busy") && !idle.html().unwrap().contains("busy"));
}

#[test]
fn the_page_needs_nothing_from_outside() {
    for timing in [
        Timing::Native,
        Timing::Function,
        Timing::Instructions,
        Timing::Parallel,
    ] {
        let page = report(timing, |_| {}).html().unwrap();
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
    let page = report.html().unwrap();
    let (_, rest) = page.split_once("id=\"paging-data\">").unwrap();
    let (data, _) = rest.split_once("</script>").unwrap();
    assert!(from_json(data) == report);
}

#[test]
fn the_page_escapes_what_it_shows() {
    let page = report(Timing::Native, |_| {}).html().unwrap();
    assert!(page.contains("A &lt;CPU&gt; &amp; &quot;more&quot;"));
    let (shown, _) = page.split_once("<script").unwrap();
    assert!(!shown.contains("A <CPU>"));
}

#[test]
fn the_page_is_light_and_dark_and_well_formed() {
    let page = report(Timing::Instructions, |_| {}).html().unwrap();
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
    let page = only_uffd.html().unwrap();
    assert_eq!(page.matches("<figure>").count(), 2, "rates and latencies");
    assert!(!page.contains("published") || !page.contains("Rate, published"));
    assert!(!table(&only_uffd).contains("times uffd"));
    assert!(only_uffd.svg().unwrap().contains("Rate, measured here"));
}

#[test]
fn the_drawing_is_a_file_of_its_own() {
    let drawing = report(Timing::Native, |_| {}).svg().unwrap();
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
    let text = table(&report(Timing::Native, |_| {}));
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
    let counted = table(&report(Timing::Instructions, |_| {}));
    assert!(counted.contains("instructions/page") && counted.contains("instructions, times uffd"));
}

#[test]
fn one_userfaultfd_per_vcpu_has_its_own_published_figures() {
    let text = table(&report(Timing::Native, |plan| plan.uffds = Uffds::PerVcpu));
    assert!(
        text.contains("published: thousand pages per second, each vCPU"),
        "{text}"
    );
}

#[test]
fn what_changes_the_experiment_is_named() {
    let plain = table(&report(Timing::Native, |_| {}));
    assert!(plain.contains("sequential writes\n"), "{plain}");
    assert!(!plain.contains("readers as vCPUs; here"), "{plain}");
    let report = report(Timing::Native, |plan| {
        plan.pre_fault = true;
        plan.pin = true;
        plan.readers = Some(1);
    });
    let text = table(&report);
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
    assert!(fixed.published.is_some() && table(&fixed).contains(note));
    let same = report(Timing::Native, |plan| {
        plan.readers = Some(2);
        plan.vcpus = vec![2];
    });
    assert!(!table(&same).contains("published: as many readers"));
}

#[test]
fn the_command_measures_the_same_again() {
    let report = report(Timing::Native, |plan| {
        plan.readers = Some(3);
        plan.overlap = true;
        plan.pin = true;
    });
    assert_eq!(
        report.command,
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
    report.write(&mut out).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(out.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["paging.html", "paging.json", "paging.svg"]);
    let text = std::fs::read_to_string(out.path().join("paging.json")).unwrap();
    assert!(from_json(&text) == report);
}
