//! What the learning rate does when a run goes on: it stays where its decay ended, unless told otherwise.

mod rig;

use rig::Home;
use serde_json::Value;

const MIN_LR: f64 = 1e-3;
const COSINE: [&str; 6] =
    ["--set", "schedule.kind=cosine", "--set", "schedule.warmup=2", "--set", "schedule.min_lr=1e-3"];
const ENGINES: [&[&str]; 2] = [&[], &["--nproc", "2", "--set", "parallel.updates=asynchronous"]];

/// Learning rate and loss of every step.
fn steps(home: &Home, run: &str) -> Vec<(f64, f64)> {
    let lines: Vec<Value> = home.metrics(run).into_iter().filter(|line| line.get("loss").is_some()).collect();
    let number = |line: &Value, key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key} of {line}"));
    lines.iter().map(|line| (number(line, "lr"), number(line, "loss"))).collect()
}

fn rates(home: &Home, run: &str) -> Vec<f64> {
    steps(home, run).into_iter().map(|(lr, _)| lr).collect()
}

fn mean(losses: &[(f64, f64)]) -> f64 {
    losses.iter().map(|(_, loss)| loss).sum::<f64>() / losses.len() as f64
}

/// The arguments of the line with `words` that a finished run prints, without the program's name.
fn hint(stdout: &str, words: &str) -> Vec<String> {
    let line = stdout.lines().find(|line| line.trim_end().ends_with(words));
    let line = line.unwrap_or_else(|| panic!("no hint that ends with {words:?} in: {stdout}"));
    let command = line.split("    ").find_map(|part| part.trim().strip_prefix("phalanx "));
    command.unwrap_or_else(|| panic!("no command in: {line}")).split(' ').map(String::from).collect()
}

fn follow(home: &Home, hint: &[String]) -> rig::Ended {
    home.run(&hint.iter().map(String::as_str).collect::<Vec<_>>()).ok()
}

#[test]
fn the_hint_of_a_finished_run_keeps_the_rate_at_its_minimum() {
    let home = Home::new();
    for (engine, run) in ENGINES.into_iter().zip(["synchronous", "asynchronous"]) {
        let args = [&["train", "small.toml", "--run", run], &COSINE[..], engine].concat();
        let ended = home.run(&args).ok();
        let resumed = follow(&home, &hint(&ended.stdout, "train on"));
        let steps = steps(&home, run);
        assert_eq!(steps.len(), 16, "{run}");
        assert!(steps[3..8].iter().all(|(lr, _)| *lr > MIN_LR), "{run}: {steps:?}");
        assert!(steps[8..].iter().all(|(lr, _)| *lr == MIN_LR), "{run}: {steps:?}");
        assert!(mean(&steps[8..]) <= mean(&steps[4..8]), "{run}: the loss rose: {steps:?}");
        for words in
            ["in step 8, 1.0e-3 in step 9, 1.0e-3 in step 16", "restart_step=8", "schedule.decay_steps=16"]
        {
            assert!(resumed.stderr.contains(words), "{run}: no {words:?} in: {}", resumed.stderr);
        }
        // A second time, too.
        follow(&home, &hint(&resumed.stdout, "train on"));
        let rates = rates(&home, run);
        assert_eq!(rates.len(), 32, "{run}");
        assert!(rates[16..].iter().all(|lr| *lr == MIN_LR), "{run}: {rates:?}");
    }
}

#[test]
fn a_minimum_of_zero_is_not_trained_on_with() {
    let home = Home::new();
    let ended = home.run(&["train", "small.toml", "--run", "r", "--set", "schedule.kind=linear"]).ok();
    follow(&home, &hint(&ended.stdout, "train on"));
    let rates = rates(&home, "r");
    assert_eq!(rates.len(), 16);
    assert!(rates[8..].iter().all(|lr| *lr == 1e-4), "a hundredth of optimizer.lr: {rates:?}");
    // The same advice when all steps are done.
    let done = home.run(&["train", "--run", "r", "--resume"]).ok();
    assert!(done.stderr.contains("--set train.steps=32"), "{}", done.stderr);
}

#[test]
fn a_warm_restart_is_the_schedule_once_more() {
    let home = Home::new();
    for (engine, run) in ENGINES.into_iter().zip(["synchronous", "asynchronous"]) {
        let args = [&["train", "small.toml", "--run", run], &COSINE[..], engine].concat();
        let ended = home.run(&args).ok();
        follow(&home, &hint(&ended.stdout, "with a warm restart: the loss rises first"));
        let rates = rates(&home, run);
        assert_eq!(rates.len(), 16, "{run}");
        assert_eq!(rates[8..], rates[..8], "{run}");
        assert!(rates[10] > rates[7], "{run}: {rates:?}");
    }
}

#[test]
fn one_decay_over_all_steps_is_asked_for_by_name() {
    let home = Home::new();
    let train = |run: &str, more: &[&str]| {
        home.run(&[&["train", "small.toml", "--quiet", "--run", run], &COSINE[..], more].concat()).ok();
    };
    train("whole", &["--set", "train.steps=16"]);
    train("parts", &["--set", "schedule.decay_steps=16"]);
    home.run(&["train", "--run", "parts", "--resume", "--quiet", "--set", "train.steps=16"]).ok();
    assert_eq!(rates(&home, "parts"), rates(&home, "whole"));
    assert_eq!(home.losses("parts"), home.losses("whole"));
    assert_eq!(home.losses("whole").len(), 16);
}

#[test]
fn a_schedule_that_cannot_work_is_refused_by_key() {
    let home = Home::new();
    for (set, words) in [
        ("schedule.decay_steps=0", ["schedule.decay_steps = 0", "at least 1"]),
        ("schedule.decay_steps=1", ["schedule.decay_steps = 1", "schedule.warmup = 2"]),
        ("schedule.decay_step=9", ["schedule.decay_step", "schedule.decay_steps"]),
        ("schedule.decay_steps=many", ["schedule.decay_steps", "a whole number"]),
        ("schedule.restart_step=8", ["schedule.restart_step = 8", "train.steps = 8"]),
    ] {
        home.run(&[&["train", "small.toml"], &COSINE[..], &["--set", set]].concat()).refused(&words);
    }
    home.run(&["train", "small.toml", "--set", "schedule.decay_steps=5"]).refused(&["constant", "cosine"]);
}
