//! Drawings: small ones letter by letter, all of them by their measures.

use std::collections::BTreeMap;

use phalanx_drawing::{draw_svg, draw_terminal};
use phalanx_plan::{Costs, PipelineSchedule, Plan, StageCost, Timeline, generate, simulate};

fn run(plan: Plan, ranks: usize, micro_batches: usize) -> (PipelineSchedule, Timeline) {
    let schedule = generate(plan, ranks, micro_batches).expect("legal");
    let timeline = simulate(&schedule, &Costs::unit(schedule.stages()));
    (schedule, timeline)
}

#[test]
fn a_row_a_rank_a_cell_a_unit() {
    let (schedule, timeline) = run(Plan::OneForwardOneBackward, 2, 2);
    let expected = "\
1f1b: 2 ranks, 2 stages, 2 micro-batches; bubble 33.3 % of 9 time units
time    0
rank 0  F0 F1 .  .  B0--- .  B1---
rank 1  .  F0 B0--- F1 B1--- .  .
";
    assert_eq!(draw_terminal(&schedule, &timeline, 80), expected);
}

#[test]
fn what_is_wider_goes_on_below() {
    let (schedule, timeline) = run(Plan::OneForwardOneBackward, 2, 2);
    let expected = "\
1f1b: 2 ranks, 2 stages, 2 micro-batches; bubble 33.3 % of 9 time units
time    0
rank 0  F0 F1 .  .  B0-
rank 1  .  F0 B0--- F1
time    5
rank 0  -- .  B1---
rank 1  B1--- .  .
";
    assert_eq!(draw_terminal(&schedule, &timeline, 8 + 5 * 3), expected);
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    for plan in [Plan::GPipe, Plan::Interleaved { chunks: 3 }, Plan::ZeroBubbleV] {
        let (schedule, timeline) = run(plan, 12, 24);
        for width in [0, 20, 79, 80, 81, 1000] {
            let drawing = draw_terminal(&schedule, &timeline, width);
            let widest = drawing.lines().skip(1).map(|line| line.chars().count()).max();
            // One cell is always drawn: nine letters for the rank and six for `35B23-`.
            assert!(widest <= Some(width.max(15)), "{plan} {width}: {widest:?}");
            assert_eq!(drawing.matches("F23").count(), schedule.stages(), "{plan}: {width}");
        }
    }
}

/// Rank 0: F 1, W 0; rank 1: F 2.5. The unit is the shortest that takes time.
#[test]
fn uneven_times_are_rounded_to_cells() {
    let schedule = PipelineSchedule::parse("0F0,0I0,0W0\n1F0,1B0").expect("can be read");
    let stages = vec![
        StageCost { forward: 1.0, input: 1.0, weight: 0.0 },
        StageCost { forward: 2.5, input: 1.0, weight: 0.5 },
    ];
    let timeline = simulate(&schedule, &Costs { stages, message: 0.0 });
    let drawing = draw_terminal(&schedule, &timeline, 80);
    let rows: Vec<&str> = drawing.lines().skip(2).collect();
    assert_eq!(rows, ["rank 0  F0 .  .  .  .  I0", "rank 1  .  F0------ B0 ."], "{drawing}");
    let free = simulate(
        &schedule,
        &Costs { stages: vec![StageCost { forward: 0.0, input: 0.0, weight: 0.0 }; 2], message: 0.0 },
    );
    assert_eq!(draw_terminal(&schedule, &free, 80).lines().count(), 1);
    assert!(draw_svg(&schedule, &free).ends_with("</svg>\n"));
}

/// The value of an attribute in a line of the picture.
fn attribute(line: &str, name: &str) -> Option<f64> {
    let rest = line.split_once(&format!(" {name}=\""))?.1;
    rest.split_once('"')?.0.parse().ok()
}

#[test]
fn the_picture_holds_every_action_and_all_its_text() {
    for (plan, ranks, micro_batches) in [
        (Plan::ModelParallel, 2, 1),
        (Plan::GPipe, 2, 2),
        (Plan::OneForwardOneBackward, 4, 8),
        (Plan::Interleaved { chunks: 4 }, 8, 64),
        (Plan::ZeroBubbleH1, 16, 128),
        (Plan::ZeroBubbleV, 4, 8),
    ] {
        let (schedule, timeline) = run(plan, ranks, micro_batches);
        let svg = draw_svg(&schedule, &timeline);
        let actions = timeline.ranks.iter().flatten().count();
        assert_eq!(svg.matches("stroke=\"#fff\"").count(), actions, "{plan}");
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        assert_eq!(svg.matches(">rank ").count(), ranks, "{plan}");
        let [width, height] = ["width", "height"].map(|name| attribute(&svg, name).expect("a size"));
        let mut lines: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
        for line in svg.lines().filter(|line| line.starts_with("<text")) {
            let [x, y] = ["x", "y"].map(|name| attribute(line, name).expect("a place"));
            let content = line.split_once('>').expect("content").1.trim_end_matches("</text>");
            // No letter of a sans-serif face is wider than its size on average: 0.6 em, bold included.
            let size = attribute(line, "font-size").unwrap_or(11.0);
            let length = 0.6 * size * content.chars().count() as f64;
            let (left, right) = match line {
                _ if line.contains("\"middle\"") => (x - length / 2.0, x + length / 2.0),
                _ if line.contains("\"end\"") => (x - length, x),
                _ => (x, x + length),
            };
            assert!(left >= 0.0 && right <= width && y <= height, "{plan}: {line} beyond {width} x {height}");
            lines.entry(y as u64).or_default().push((left, right));
        }
        for (y, mut texts) in lines {
            texts.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!(texts.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{plan}: texts at {y} overlap");
        }
        let held = format!("micro-batches; bubble {:.1} %", 100.0 * timeline.bubble_fraction());
        assert!(svg.contains(&held), "{plan}");
    }
}

#[test]
fn names_are_escaped() {
    let mut schedule = PipelineSchedule::parse("0F0,0B0").expect("can be read");
    schedule.name = "a<b>&c".to_string();
    let svg = draw_svg(&schedule, &simulate(&schedule, &Costs::unit(1)));
    assert_eq!(svg.matches("a&lt;b&gt;&amp;c").count(), 2);
    assert!(!svg.contains("a<b>"));
}
