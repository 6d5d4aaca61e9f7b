//! `model.trainable` and `model.frozen` from end to end: what is planned, trained, resumed and exported, and what is refused.

use crate::rig::Home;

const LAST: &str = "model.trainable=[\"*.h.1.*\", \"*.ln_f.*\"]";

#[test]
fn a_plan_counts_trained_and_frozen_parameters_apart() {
    let home = Home::new();
    let plan = |more: &[&str]| home.run(&[&["plan", "small.toml"], more].concat()).ok();
    let (all, last) = (plan(&["--json"]).json(), plan(&["--json", "--set", LAST]).json());
    let count = |plan: &serde_json::Value, key: &str| plan[key].as_u64().unwrap();
    assert_eq!(count(&all, "trained_parameters"), count(&all, "parameters"));
    assert_eq!(count(&last, "parameters"), count(&all, "parameters"));
    assert!(count(&last, "trained_parameters") < count(&all, "parameters") / 2);
    // Two moments of trained parameters.
    assert_eq!(last["textbook"]["state"]["optimizer"], 8 * count(&last, "trained_parameters"));
    assert!(last["arena_bytes"][0].as_u64().unwrap() < all["arena_bytes"][0].as_u64().unwrap());
    let text = plan(&["--set", LAST]).stdout;
    assert!(text.contains("of them trained") && text.contains("of which frozen"), "{text}");
    assert!(!plan(&[]).stdout.contains("frozen") && !text.contains("rounded to"));
    let in_16_bits = plan(&["--set", LAST, "--set", "precision.compute=bf16"]).stdout;
    assert!(in_16_bits.contains("of them trained and the others rounded to bf16"), "{in_16_bits}");
}

#[test]
fn a_run_keeps_what_it_trains() {
    let home = Home::new();
    let train = |more: &[&str]| home.run(&[&["train", "small.toml", "--nproc", "2"], more].concat());
    train(&["--run", "whole", "--set", LAST, "--set", "train.steps=6"]).ok();
    train(&["--run", "r", "--set", LAST, "--set", "train.steps=3"]).ok();
    let resume = |more: &[&str]| home.run(&[&["train", "--run", "r", "--resume"], more].concat());
    resume(&["--set", "model.frozen=[\"*.ln_f.*\"]"]).refused(&[
        "model.frozen",
        "optimizer states",
        "new run",
    ]);
    resume(&["--set", "model.trainable=[]"]).refused(&["model.trainable"]);
    resume(&["--set", "train.steps=6", "--set", "parallel.zero=3"]).ok();
    assert_eq!(home.losses("r"), home.losses("whole"));
    home.run(&["export", "r", "--out", "hf"]).ok();
    train(&["--run", "next", "--set", "model.init=hf", "--set", "train.steps=1"]).ok();
}

#[test]
fn patterns_that_mean_nothing_are_refused_with_the_names_that_there_are() {
    let home = Home::new();
    let plan = |set: &str| home.run(&["plan", "small.toml", "--set", set]);
    plan("model.trainable=[\"h.1.*\"]").refused(&[
        "model.trainable",
        "h.1.*",
        "transformer.h.*.attn.c_attn.weight",
    ]);
    plan("model.frozen=[\"*\"]").refused(&["model.frozen", "no parameter to train"]);
    plan("model.trainabel=[\"*\"]").refused(&["model.trainabel", "model.trainable"]);
    let asynchronous = ["--nproc", "2", "--set", "parallel.updates=asynchronous", "--set", LAST];
    home.run(&[&["plan", "small.toml"][..], &asynchronous].concat())
        .refused(&["parallel.updates = \"asynchronous\"", "needs model.trainable left out"]);
}
