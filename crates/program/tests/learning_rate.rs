//! The learning rate when a run goes on: it stays where its decay ended, unless told otherwise.

use crate::rig;
use crate::rig::Home;
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

/// The default: a cosine to 0, after which more steps would change nothing.
#[test]
fn steps_that_would_learn_nothing_are_refused_or_named() {
    let home = Home::new();
    let kind = ["--set", "schedule.kind=cosine"];
    home.run(&[&["train", "small.toml", "--run", "r", "--quiet"][..], &kind].concat()).ok();
    let more = |keys: &[&str]| {
        let args = ["train", "--run", "r", "--resume", "--quiet", "--set", "train.steps=16"];
        let keys = keys.iter().flat_map(|key| ["--set", key]);
        home.run(&args.into_iter().chain(keys).collect::<Vec<_>>())
    };
    let before = home.snapshot("r");
    more(&[]).refused(&[
        "9 to 16",
        "--set schedule.min_lr=1e-4",
        "--set schedule.restart_step=8",
        "nothing was changed",
    ]);
    more(&["optimizer.lr=0"]).refused(&["9 to 16", "--set optimizer.lr="]);
    assert!(home.snapshot("r") == before);
    for (key, zeros) in [
        ("schedule.min_lr=1e-4", None),
        ("schedule.restart_step=8", None),
        ("schedule.decay_steps=16", None),
        ("schedule.decay_steps=12", Some("the learning rate is 0 in steps 13 to 16")),
    ] {
        home.copy("r", "copy");
        let ended = home
            .run(&["train", "--run", "copy", "--resume", "--quiet", "--set", "train.steps=16", "--set", key])
            .ok();
        assert_eq!(rates(&home, "copy").len(), 16);
        match zeros {
            None => assert!(!ended.stderr.contains("rate is 0"), "{key}: {}", ended.stderr),
            Some(words) => assert!(ended.stderr.contains(words), "{key}: {}", ended.stderr),
        }
    }
    let early = ["--set", "schedule.decay_steps=3"];
    let ended =
        home.run(&[&["train", "small.toml", "--run", "early", "--quiet"][..], &kind, &early].concat()).ok();
    assert!(
        ended.stderr.contains("the learning rate is 0 in steps 4 to 8: they change nothing"),
        "{}",
        ended.stderr
    );
}

/// Steps that f16 skips do not count for the rate, and so the advice of a finished run restarts in the next step.
#[test]
fn a_restart_begins_in_its_step_after_steps_that_were_skipped() {
    let home = Home::new();
    let f16 = ["precision.compute=f16", "precision.initial_scale_power=24", "precision.loss_scale_window=4"];
    let sets = f16.iter().flat_map(|key| ["--set", key]);
    let args: Vec<&str> =
        ["train", "small.toml", "--run", "r"].into_iter().chain(COSINE).chain(sets).collect();
    let ended = home.run(&args).ok();
    let skipped = |from: usize| {
        let lines = home.metrics("r").into_iter().filter(|line| line.get("step_s").is_some());
        lines.skip(from).map(|line| line["skipped"] == true).collect::<Vec<_>>()
    };
    let first = skipped(0);
    assert!(first[0] && !first[7], "{first:?}");
    follow(&home, &hint(&ended.stdout, "with a warm restart: the loss rises first"));
    let lines = home.metrics("r").into_iter().filter(|line| line.get("step_s").is_some());
    let rates: Vec<f64> = lines.map(|line| line["lr"].as_f64().unwrap()).collect();
    assert_eq!(rates.len(), 16);
    // Each run of the schedule has one rate for each step that was applied.
    let applied = |from: usize| {
        let skipped = skipped(from);
        rates[from..]
            .iter()
            .zip(skipped)
            .take(8)
            .filter(|(_, skipped)| !skipped)
            .map(|(lr, _)| *lr)
            .collect::<Vec<_>>()
    };
    let (once, again) = (applied(0), applied(8));
    assert_eq!(again[..once.len()], once, "{rates:?}");
}

const GROUPS: &str = "\n[[optimizer.group]]\nparameters = [\"*.bias\"]\nlr = 1e-3\n\n[[optimizer.group]]\n\
                      parameters = [\"*.wpe.*\", \"*.bias\"]\nlr = 0\nweight_decay = 0\n";

#[test]
fn groups_of_parameters_are_shown_recorded_and_resumed() {
    let home = Home::new();
    home.write("groups.toml", [home.read("small.toml"), GROUPS.into()].concat());
    let train = |more: &[&str]| home.run(&[&["train", "groups.toml", "--nproc", "2"], more].concat()).ok();
    let lines = [
        "group [\"*.bias\"]: 13 parameters with 736 elements, lr 0.001, weight decay 0.1 of matrices",
        "group [\"*.wpe.*\", \"*.bias\"]: 1 parameter with 512 elements, lr 0, weight decay 0 of all of them",
        "in no group: 14 parameters with 32.9k elements, lr 0.01, weight decay 0.1 of matrices",
    ];
    let plan = home.run(&["plan", "groups.toml"]).ok().stdout;
    let whole = train(&["--run", "whole", "--set", "train.steps=6"]).stdout;
    for line in lines {
        assert!(plan.contains(line) && whole.contains(line), "no {line:?} in: {plan}");
    }
    assert!(!home.run(&["plan", "small.toml"]).ok().stdout.contains("in no group"));
    train(&["--run", "r", "--set", "train.steps=3"]);
    let config = String::from_utf8(home.read("r/config.toml")).unwrap();
    assert!(config.contains("[[optimizer.group]]\nparameters = [\"*.bias\"]\nlr = 0.001\n"), "{config}");
    home.copy("r", "other");
    let resume = |run: &str, more: &[&str]| {
        home.run(&[&["train", "--run", run, "--resume", "--set", "train.steps=6"], more].concat()).ok()
    };
    resume("r", &["--set", "parallel.zero=3"]);
    assert_eq!(home.losses("r"), home.losses("whole"));
    // As other rates are: allowed.
    let text = resume("other", &["--set", "optimizer.group=[{ parameters = [\"*.bias\"], lr = 1 }]"]).stdout;
    assert!(text.contains("group [\"*.bias\"]: 13 parameters with 736 elements, lr 1,"), "{text}");
    assert!(home.losses("other")[..4] == home.losses("whole")[..4], "step 4 still sees the same parameters");
    assert!(home.losses("other")[4..] != home.losses("whole")[4..]);
    resume("other", &["--set", "optimizer.group=[]", "--set", "train.steps=7"]);
}

#[test]
fn groups_that_mean_nothing_are_refused() {
    let home = Home::new();
    let plan = |group: &str| home.run(&["plan", "small.toml", "--set", &format!("optimizer.group={group}")]);
    for (group, words) in [
        (
            "[{ parameters = [\"*\"], weight_deca = 0.1 }]",
            ["unknown key weight_deca", "did you mean weight_decay?"],
        ),
        ("[{ parameters = [\"*\"], beta1 = 0.1 }]", ["unknown key beta1", "parameters, lr, weight_decay"]),
        ("[{ parameters = \"*\", lr = 0.1 }]", ["optimizer.group.parameters = \"*\"", "a list of texts"]),
        ("[{ parameters = [\"*\"], lr = \"x\" }]", ["optimizer.group.lr = \"x\"", "a number"]),
        ("[{ parameters = [\"h.1.*\"], lr = 0.1 }]", ["\"h.1.*\"", "transformer.h.*.attn.c_attn.weight"]),
        ("[{ parameters = [\"*.bias\"], lr = -0.1 }]", ["optimizer.group.lr = -0.1", "0 or more"]),
        ("[{ parameters = [\"*.bias\"] }]", ["*.bias", "sets nothing"]),
        ("0.1", ["optimizer.group", "[[optimizer.group]]"]),
    ] {
        plan(group).refused(&words);
    }
    let text = [home.read("small.toml"), b"[optimizer.group]\nlr = 0.1\n".into()].concat();
    home.write("table.toml", text);
    home.run(&["plan", "table.toml"]).refused(&["optimizer.group", "[[optimizer.group]]"]);
}
