use super::*;

fn point(place: usize, middle: f64) -> Point {
    Point {
        place,
        low: middle * 0.9,
        middle,
        high: middle * 1.1,
        tell: vec![format!("{middle} <a> & b"); 3],
    }
}

fn chart(kind: Kind, scale: Axis, values: &[&[f64]]) -> Chart {
    let lines = values.iter().enumerate().map(|(index, values)| {
        let points = values.iter().enumerate();
        let mut points: Vec<Point> = points.map(|(place, value)| point(place, *value)).collect();
        if kind != Kind::Latencies {
            points.iter_mut().for_each(|point| point.tell.truncate(1));
        }
        Line {
            label: format!("series & {index}"),
            role: Role::Series(index),
            dashed: index == 1,
            points,
        }
    });
    Chart {
        title: "A title".to_owned(),
        subtitle: "unit < 1".to_owned(),
        axis: "vCPUs",
        places: (0..u32::try_from(values.first().map_or(0, |values| values.len())).unwrap())
            .map(|place| 1 << place.min(31))
            .collect(),
        kind,
        scale,
        format: short,
        lines: lines.collect(),
    }
}

const KINDS: [Kind; 3] = [Kind::Lines, Kind::Bars, Kind::Latencies];
const AXES: [Axis; 3] = [
    Axis::FromZero { at_least: 0.0 },
    Axis::Logarithmic,
    Axis::Doubling,
];

#[test]
fn every_point_tells_its_texts() {
    for (kind, texts) in KINDS.into_iter().zip([1, 1, 3]) {
        let drawn = draw(&chart(kind, AXES[1], &[&[10.0, 200.0], &[30.0, 4.0]])).unwrap();
        assert_eq!(drawn.matches("<title>").count(), 4 * texts, "{kind:?}");
        assert!(
            drawn.contains("<title>200 &lt;a> &amp; b</title>"),
            "{kind:?}"
        );
    }
}

#[test]
fn words_are_in_the_drawing() {
    let drawn = draw(&chart(Kind::Lines, AXES[0], &[&[10.0, 40.0]])).unwrap();
    for wanted in ["A title", "unit &lt; 1", "series &amp; 0", "vCPUs", "50"] {
        assert!(drawn.contains(wanted), "{wanted} in {drawn}");
    }
}

#[test]
fn a_page_gets_variables_and_a_file_gets_colours() {
    let charts = KINDS.map(|kind| chart(kind, AXES[0], &[&[1.0, 2.0], &[2.0, 3.0]]));
    let file = panels(&charts).unwrap();
    assert!(file.contains("xmlns=\"http://www.w3.org/2000/svg\"") && !file.contains("var("));
    assert!(file.contains("width=\"1860\" height=\"400\""));
    for chart in &charts {
        let page = for_page(&draw(chart).unwrap());
        assert!(
            page.contains("var(--series-1)") && !page.contains("xmlns"),
            "{page}"
        );
        // Every visible colour follows the page.
        let hidden = ["\"#000000\""];
        assert!(hidden.iter().all(|colour| !page.contains(colour)), "{page}");
        assert!(!page.contains("=\"#"), "{page}");
    }
}

#[test]
fn panels_stand_side_by_side() {
    let one = chart(Kind::Lines, AXES[0], &[&[1.0, 2.0]]);
    let file = panels(&[one.clone(), one]).unwrap();
    let spots: Vec<i32> = file
        .split("<circle cx=\"")
        .skip(1)
        .filter(|rest| rest.contains("<title>"))
        .filter_map(|rest| rest.split('"').next()?.parse().ok())
        .collect();
    assert_eq!(spots[spots.len() - 2], spots[spots.len() - 4] + 620);
}

#[test]
fn points_of_one_value_have_no_whisker() {
    let axis = Axis::FromZero { at_least: 5.0 };
    let mut one = chart(Kind::Lines, axis, &[&[1.0]]);
    let with = draw(&one).unwrap().matches("<line ").count();
    let point = &mut one.lines[0].points[0];
    (point.low, point.high) = (point.middle, point.middle);
    assert_eq!(draw(&one).unwrap().matches("<line ").count(), with - 3);
}

#[test]
fn odd_charts_are_drawn() {
    assert!(panels(&[]).unwrap().ends_with("</svg>\n"));
    let many = vec![1.0; 300];
    let lines = vec![&many[..]; 40];
    let odd: [&[&[f64]]; 9] = [
        &[],
        &[&[]],
        &[&[], &[]],
        &[&[0.0]],
        &[&[0.0, 0.0], &[1.0]],
        &[&[f64::MAX, f64::MIN_POSITIVE, 5e-324]],
        &[&[1e300], &[1e-300]],
        &[&[f64::INFINITY, 1.0, 0.0]],
        &lines,
    ];
    for kind in KINDS {
        for scale in AXES {
            for values in odd {
                let drawn = draw(&chart(kind, scale, values)).unwrap();
                assert!(
                    !drawn.contains("NaN") && !drawn.contains("inf\""),
                    "{drawn}"
                );
            }
        }
    }
    let mut long = chart(Kind::Lines, AXES[0], &[&[1.0]]);
    long.format = |_| "long ".repeat(1000);
    long.lines[0].label = "long ".repeat(1000);
    long.lines[0].points[0].place = 1000;
    draw(&long).unwrap();
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
    #[test]
    fn any_values_are_drawn(
        values in proptest::collection::vec(proptest::collection::vec(0.0..f64::MAX, 0..4), 0..9),
        scale in 0..3usize,
        kind in 0..3usize,
    ) {
        let values: Vec<&[f64]> = values.iter().map(Vec::as_slice).collect();
        let drawn = draw(&chart(KINDS[kind], AXES[scale], &values)).unwrap();
        proptest::prop_assert!(!drawn.contains("NaN"), "{}", drawn);
    }
}
