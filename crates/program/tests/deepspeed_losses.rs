//! Losses, rates and loss scales of twenty steps beside DeepSpeed's, from one configuration and one initial folder.
//! `tools/peer_deepspeed.py` wrote their side.
#![allow(clippy::print_stdout, reason = "for who runs the test")]

use serde_json::Value;

use crate::rig::{Home, list, number, pairs, value};

const CASES: &str = include_str!("golden/deepspeed/cases.json");
const TOKENS: &[u8] = include_bytes!("golden/deepspeed/tokens.bin");
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/gpt2");

/// f32 sums in another order, as for the losses of PyTorch's twenty steps of this model (`train/tests/goldens.rs`).
const F32: f64 = 2e-6;

/// In 16 bits, errors of the same distribution as theirs, drawn anew: of twenty normal errors the greatest is twice the
/// greatest of two such runs once in seven hundred times.
const TIMES_DEEPSPEED: f64 = 2.0;

/// Losses in double precision of the steps that DeepSpeed took, and how far its own are from them.
fn check(case: &Value) {
    let home = Home::new();
    home.write("tokens.bin", TOKENS);
    let (name, config) = (value(case, "name").as_str().unwrap(), value(case, "config"));
    home.write("ds_config.json", config.to_string());
    let model = format!(
        "[model]\ninit = {MODEL:?}\nseq = 16\n[data]\ntokens = \"tokens.bin\"\norder = \"sequential\"\n"
    );
    home.write(
        "my.toml",
        format!("{model}validation = 0.0\nunusual_tokens = true\n[train]\nsteps = 20\nthreads = 1\n"),
    );
    let ranks = value(case, "ranks").to_string();
    home.run(&["train", "my.toml", "--deepspeed", "ds_config.json", "--nproc", &ranks, "--run", "run"]).ok();
    let steps: Vec<Value> =
        home.metrics("run").into_iter().filter(|line| line.get("loss").is_some()).collect();

    let is_f32 = config.get("fp16").or(config.get("bf16")).is_none();
    let error = number(case, "error");
    let allowed = if is_f32 { F32 } else { TIMES_DEEPSPEED * error };
    assert!(!is_f32 || error < F32, "{name}: DeepSpeed itself is {error} from double precision");
    let mut worst = 0f64;
    for (step, exact) in pairs(&steps, list(case, "exact")) {
        let (loss, exact) = (number(step, "loss"), exact.as_f64().unwrap());
        worst = worst.max((loss - exact).abs());
        // Also fails for NaN.
        assert!((loss - exact).abs() <= allowed, "{name}: {loss} for {exact} +- {allowed:.1e} in {step}");
    }
    println!("{name}: within {worst:.1e} of double precision, {allowed:.1e} allowed, DeepSpeed {error:.1e}");
    for (step, rate) in pairs(&steps, list(case, "rates")) {
        assert!((number(step, "lr") - rate.as_f64().unwrap()).abs() < 1e-12, "{name}: rate {rate}: {step}");
    }
    let scale = |step: &Value| step.get("loss_scale").map_or(1.0, |scale| scale.as_f64().unwrap());
    let scales: Vec<f64> = list(case, "scales").iter().map(|scale| scale.as_f64().unwrap()).collect();
    assert_eq!(steps.iter().map(scale).collect::<Vec<_>>(), scales, "{name}: loss scales");
    let skipped: Vec<bool> = list(case, "skipped").iter().map(|skipped| skipped.as_bool().unwrap()).collect();
    let ours = steps.iter().map(|step| step.get("skipped").is_some());
    assert_eq!(ours.collect::<Vec<_>>(), skipped, "{name}: skipped steps");
}

/// Checks the cases with these ranks.
fn check_all(ranks: u64) {
    let cases: Value = serde_json::from_str(CASES).unwrap();
    let own: Vec<&Value> = list(&cases, "cases").iter().filter(|case| case["ranks"] == ranks).collect();
    assert!(own.len() > 10);
    own.into_iter().for_each(check);
}

#[test]
fn one_rank_has_the_losses_of_deepspeed() {
    check_all(1);
}

#[test]
fn two_ranks_have_the_losses_of_deepspeed() {
    check_all(2);
}
