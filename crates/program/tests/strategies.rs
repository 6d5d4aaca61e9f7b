//! `phalanx bench strategies`: every strategy runs, holds what was planned, and says the same.

use crate::rig::{Home, list, number, value};
use serde_json::Value;

/// Names of strategies for `--only`.
const STRATEGIES: [&str; 13] = [
    "one-device",
    "data-parallel",
    "data-parallel-loss",
    "ddp",
    "zero-1",
    "zero-2",
    "zero-3",
    "tensor",
    "tensor-sequence",
    "model-parallel",
    "pipeline-1f1b",
    "pipeline-zb-h1",
    "asynchronous",
];

const COMMAND: [&str; 3] = ["bench", "strategies", "small.toml"];

fn strategy<'a>(figures: &'a Value, name: &str) -> &'a Value {
    let strategies = figures["ways"].as_array().unwrap();
    strategies
        .iter()
        .find(|strategy| strategy["way"] == name)
        .unwrap_or_else(|| panic!("no {name} in {figures}"))
}

#[test]
fn every_way_holds_what_was_planned_and_all_synchronous_ones_say_the_same() {
    let home = Home::new();
    let more = ["--steps", "1", "--warmup", "1", "--bert-steps", "2", "--svg", "ways.svg", "--json"];
    let figures = home.run(&[&COMMAND[..], &more].concat()).ok().json();
    let names: Vec<&str> = figures["ways"]
        .as_array()
        .unwrap()
        .iter()
        .map(|strategy| strategy["way"].as_str().unwrap())
        .collect();
    assert_eq!(names, STRATEGIES);
    let reference = strategy(&figures, "one-device")["losses"][0].as_f64().unwrap();
    // The longest sums have 257 terms (the bytes and the end of a text): f32 errs by 2^-24 sqrt(257) = 1e-6 of each. A
    // token of the second step has passed 2 x (2 x 2 layers + 2) = 12 such sums, whose errors are independent, and two
    // strategies are compared: 2 sqrt(12) of that.
    let allowed = 2.0 * 12f64.sqrt() * 257f64.sqrt() * f64::powi(2.0, -24) * reference;
    for name in STRATEGIES {
        let strategy = strategy(&figures, name);
        let devices = if name == "one-device" { 1 } else { 2 };
        assert_eq!(
            (strategy["ranks"].as_u64(), strategy["threads"].as_u64()),
            (Some(devices), Some(2 / devices)),
            "{strategy}"
        );
        let by_rank = list(strategy, "by_rank");
        assert_eq!(by_rank.len() as u64, devices);
        for rank in by_rank {
            assert!(number(&rank["planned"], "bytes") > 0.0, "{strategy}");
            assert_eq!(rank["planned"], rank["measured"], "{name}");
        }
        assert_eq!(strategy["as_planned"], true);
        assert!(number(strategy, "step_s_median") >= number(strategy, "step_s_min"), "{strategy}");
        assert!(
            number(strategy, "step_s_min") > 0.0 && number(strategy, "of_one_device") > 0.0,
            "{strategy}"
        );
        assert_eq!(number(strategy, "sent_bytes_per_step") > 0.0, name != "one-device", "{strategy}");
        let staged = name.starts_with("pipeline") || name == "model-parallel";
        assert_eq!(strategy.get("bubble_fraction").is_some_and(Value::is_number), staged, "{strategy}");
        assert!(!staged || number(strategy, "bubble_fraction") > 0.0, "{strategy}");
        if name != "asynchronous" {
            let loss = strategy["losses"][0].as_f64().unwrap();
            assert!(
                (loss - reference).abs() <= allowed,
                "{name}: {loss}, one device {reference} +- {allowed}"
            );
        }
    }
    let agreement = value(&figures, "agreement");
    assert_eq!(
        (value(agreement, "agree"), value(agreement, "compared")),
        (&true.into(), &11.into()),
        "{agreement}"
    );
    // In f32 a gradient differs by a few roundings, and the bound is below any fault of interest.
    let gradients = value(agreement, "gradients");
    let (found, allowed) = (number(gradients, "largest"), number(gradients, "allowed"));
    assert!(found > 0.0 && found <= allowed && allowed < 1e-3, "{agreement}");
    less_where_it_is_sharded(&figures);
    classic(&figures["classic"]);
    let svg = String::from_utf8(home.read("ways.svg")).unwrap();
    assert!(STRATEGIES.iter().all(|name| svg.contains(&format!(">{name}</text>"))), "{svg}");
    assert!(!home.path("runs").exists());
}

/// Checks the purpose of the strategies: parts that are sharded take less memory.
fn less_where_it_is_sharded(figures: &Value) {
    let held = |name: &str, rank: usize, category: &str| {
        strategy(figures, name)["by_rank"][rank]["measured"]["categories"][category].as_u64().unwrap()
    };
    assert_eq!(2 * held("zero-1", 0, "optimizer"), held("ddp", 0, "optimizer"));
    assert_eq!(2 * held("zero-2", 0, "gradients"), held("zero-1", 0, "gradients"));
    assert_eq!(2 * held("zero-3", 0, "parameters"), held("zero-2", 0, "parameters"));
    assert!(held("tensor-sequence", 0, "activations") < held("tensor", 0, "activations"));
    assert!(held("data-parallel-loss", 0, "activations") < held("data-parallel", 0, "activations"));
    // The first device alone has optimizer states.
    assert!(held("data-parallel", 0, "optimizer") > 0 && held("data-parallel", 1, "optimizer") == 0);
}

fn classic(classic: &Value) {
    assert_eq!((&classic["batch"], &classic["ranks"], &classic["steps"]), (&16.into(), &2.into(), &2.into()));
    let runs = classic["runs"].as_array().unwrap();
    let micro_batches: Vec<u64> = runs.iter().map(|run| run["micro_batches"].as_u64().unwrap()).collect();
    assert_eq!(micro_batches, [1, 4, 4]);
    assert_eq!(runs[0]["speed_up"], 1.0);
    for run in runs {
        assert_eq!(
            (run["as_planned"].as_bool(), run["step_s"].as_array().unwrap().len()),
            (Some(true), 2),
            "{run}"
        );
        assert!(number(run, "bubble_fraction_measured") > 0.0, "{run}");
    }
    // One of two ranks waits, whatever the halves are; cut in four, at most as long as the other fills or drains.
    let simulated = |run: usize| runs[run]["bubble_fraction"].as_f64().unwrap();
    assert!(
        (simulated(0) - 0.5).abs() < 1e-12 && simulated(1) < 0.4 && simulated(2) <= simulated(1),
        "{classic}"
    );
}

#[test]
fn only_those_that_are_named_run_and_what_cannot_is_a_row() {
    let home = Home::new();
    let more = ["--nproc", "3", "--steps", "1", "--warmup", "0", "--only", "tensor,zero-2,one-device"];
    let set = ["--set", "batch.global=6"];
    let ended = home.run(&[&COMMAND[..], &more, &set].concat()).ok();
    for words in [
        "tensor does not run: parallel.tensor = 3: cannot divide model.heads = 4; numbers of ranks that can: 1, 2, 4",
        "zero-2, ranks 0 to 2",
        "All 2 synchronous strategies compute the same gradients in step 1",
    ] {
        assert!(ended.stdout.contains(words), "no {words:?} in {}", ended.stdout);
    }
    assert!(!ended.stdout.contains("asynchronous") && !ended.stdout.contains("BERT"), "{}", ended.stdout);
    let lines: Vec<&str> = ended.stderr.lines().collect();
    let rounding = "[rounding] one-device in another precision";
    assert_eq!(lines, ["[1 of 3] one-device", "[2 of 3] zero-2", "[3 of 3] tensor", rounding]);
}

#[test]
fn wrong_input_is_refused_with_what_is_near() {
    let home = Home::new();
    let refused = |more: &[&str], words: &[&str]| {
        home.run(&[&COMMAND[..], more].concat()).refused(words);
    };
    refused(&["--only", "ddp,zero3"], &["--only zero3", "did you mean zero-3?", "pipeline-1f1b"]);
    refused(&["--nproc", "1"], &["--nproc 1", "2 ranks or more"]);
    refused(&["--set", "model.heads=5"], &["model.heads = 5", "must divide model.hidden"]);
}
