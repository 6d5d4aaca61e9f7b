//! `phalanx train`: runs, their files, and going on with them.

use crate::rig::{Home, assert_as_planned, list, lives, number, pairs, ranks, wait};
use serde_json::{Value, json};

#[test]
fn one_rank_and_two_leave_what_scripts_rely_on() {
    let home = Home::new();
    for (run, ranks, zero) in [("one", "1", "0"), ("two", "2", "2"), ("three", "2", "3")] {
        let zero = format!("parallel.zero={zero}");
        let ended = home.run(&["train", "small.toml", "--nproc", ranks, "--set", &zero, "--run", run]).ok();
        for word in ["peak == plan", "validation", run] {
            assert!(ended.stdout.contains(word), "{word}: {}", ended.stdout);
        }
        let metrics = home.metrics(run);
        let steps: Vec<&Value> = metrics.iter().filter(|line| line.get("loss").is_some()).collect();
        assert_eq!(
            steps.iter().map(|s| s["step"].as_u64().unwrap()).collect::<Vec<_>>(),
            Vec::from_iter(1..=8)
        );
        for key in
            ["grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "mfu", "comm_bytes", "exposed_comm_s"]
        {
            assert!(steps[0][key].is_number(), "{key}");
        }
        assert!(steps[0].get("hfu").is_none() && ended.stderr.contains("  mfu "), "{}", ended.stderr);
        assert!(number(steps[7], "loss") < number(steps[0], "loss"));
        let evaluations: Vec<&Value> = metrics.iter().filter(|line| line.get("val_loss").is_some()).collect();
        assert_eq!(evaluations.iter().map(|e| e["step"].as_u64().unwrap()).collect::<Vec<_>>(), [4, 8]);
        let (plan, memory) =
            (home.json(&format!("{run}/plan.json")), home.json(&format!("{run}/memory.json")));
        assert_as_planned(&plan, &memory);
        assert_eq!(list(&memory, "ranks").len().to_string(), ranks);
        for measured in list(&memory, "ranks") {
            assert!(number(measured, "resident_bytes_peak") > number(&measured["device"], "peak_bytes"));
        }
        assert_eq!(home.checkpoints(run).len(), 2);
        let resolved: toml::Table =
            toml::from_str(&String::from_utf8(home.read(&format!("{run}/config.toml"))).unwrap()).unwrap();
        assert_eq!(resolved["model"]["vocab"].as_integer(), Some(256));
    }
}

#[test]
fn processes_and_threads_compute_the_same_bits() {
    let home = Home::new();
    let base = ["train", "small.toml", "--nproc", "2", "--set", "parallel.zero=3", "--quiet", "--run"];
    home.run(&[&base[..], &["processes"]].concat()).ok();
    home.run(&[&base[..], &["threads", "--threads-as-ranks"]].concat()).ok();
    assert_eq!(home.losses("processes"), home.losses("threads"));
    assert_eq!(home.losses("processes").len(), 8);
}

#[test]
fn the_run_folder_is_named_after_the_configuration_and_never_overwritten() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--quiet"]).ok();
    let before = home.read("runs/small/metrics.jsonl");
    home.run(&["train", "small.toml"]).refused(&["runs/small", "--resume", "--run", "nothing was changed"]);
    assert_eq!(home.read("runs/small/metrics.jsonl"), before);
    // All steps are done: having nothing to do is not an error.
    home.run(&["train", "small.toml", "--resume"]).ok();
    assert_eq!(home.read("runs/small/metrics.jsonl"), before);
}

#[test]
fn a_resumed_run_may_grow_and_change_its_layout() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "a", "--set", "train.steps=16", "--quiet"]).ok();
    home.run(&["train", "small.toml", "--run", "b", "--quiet"]).ok();
    home.run(&["train", "--run", "b", "--resume", "--set", "train.steps=16", "--quiet"]).ok();
    assert_eq!(home.losses("a"), home.losses("b"));
    assert_eq!(home.losses("a").len(), 16);
    // On two ranks sums are added in another order: the same within rounding.
    home.run(&["train", "small.toml", "--run", "c", "--quiet"]).ok();
    let more = ["--set", "parallel.zero=3", "--set", "batch.micro=2", "--set", "memory.chunk=none"];
    let args = ["train", "--run", "c", "--resume", "--nproc", "2", "--set", "train.steps=16", "--quiet"];
    home.run(&[&args[..], &more[..]].concat()).ok();
    for (a, c) in pairs(&home.losses("a"), &home.losses("c")) {
        let (a, c): (f64, f64) = (a.1.parse().unwrap(), c.1.parse().unwrap());
        assert!((a - c).abs() < 1e-4 * a, "{a} {c}");
    }
}

#[test]
fn with_sums_by_a_tree_a_killed_run_goes_on_with_other_ranks_to_the_bit() {
    let home = Home::new();
    let tree = ["--set", "batch.sum=tree", "--set", "batch.micro=1", "--set", "model.dropout=0.1", "--quiet"];
    let train = |run: &'static str, nproc: &'static str, steps: String| {
        let steps = &*Box::leak(format!("train.steps={steps}").into_boxed_str());
        [&["train", "small.toml", "--run", run, "--nproc", nproc, "--set", steps][..], &tree].concat()
    };
    let mut child = home.start(&train("r", "8", "1000000".into()));
    home.wait_for_step("r", 6);
    let started = ranks(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    wait("the ranks to end", || started.iter().all(|(_, pid)| !lives(*pid)));
    let newest = home.newest("r");
    for (nproc, more, zero) in [("2", 4, "2"), ("1", 8, "0"), ("4", 12, "3")] {
        let zero = format!("parallel.zero={zero}");
        let args = train("r", nproc, (newest + more).to_string());
        home.run(&[&args[..], &["--resume", "--set", &zero]].concat()).ok();
    }
    home.run(&train("whole", "1", (newest + 12).to_string())).ok();
    assert_eq!(home.losses("r"), home.losses("whole"));
    let evaluated = |run: &str| -> Vec<String> {
        home.metrics(run).iter().filter_map(|line| Some(line.get("val_loss")?.to_string())).collect()
    };
    assert!(evaluated("r").len() > 3);
    assert_eq!(evaluated("r"), evaluated("whole"));
    let plan = |more: &[&str]| home.run(&[&["plan", "small.toml", "--set", "batch.sum=tree"], more].concat());
    let note = "1, 2, 4, ... replicas give the same bits";
    assert!(plan(&["--nproc", "2"]).ok().stdout.contains(note));
    let three = ["--nproc", "3", "--set", "batch.global=6", "--set", "batch.micro=1"];
    let other = plan(&three).ok().stdout;
    assert!(other.contains("the number of replicas changes bits: 3 replicas are no power of two"), "{other}");
    plan(&["--nproc", "2", "--set", "parallel.updates=asynchronous"]).refused(&["batch.sum = \"tree\""]);
}

#[test]
fn a_resumed_run_keeps_its_own_settings_but_for_what_changed_since() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--set", "optimizer.lr=3e-3", "--quiet"]).ok();
    let text = String::from_utf8(home.read("small.toml")).unwrap();
    home.write("small.toml", text.replace("steps = 8", "steps = 12"));
    home.run(&["train", "small.toml", "--resume", "--quiet"]).ok();
    let last = home.metrics("runs/small").into_iter().rfind(|line| line.get("loss").is_some()).unwrap();
    assert_eq!((&last["step"], &last["lr"]), (&json!(12), &json!(3e-3)));
}

#[test]
fn what_the_checkpoint_depends_on_is_refused_by_name() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--quiet"]).ok();
    let before = home.read("runs/small/config.toml");
    for (change, words) in [
        ("model.hidden=64", "model.hidden = 64"),
        ("model.layers=3", "model.layers = 3"),
        ("model.heads=2", "model.heads = 2"),
        ("model.seq=32", "model.seq = 32"),
        ("model.vocab=128", "model.vocab = 128"),
        ("optimizer.kind=sgd", "optimizer.kind"),
        ("data.tokenizer=char", "data.tokenizer"),
        ("train.steps=3", "train.steps = 3"),
    ] {
        let args = ["train", "small.toml", "--resume", "--set", change, "--set", "train.steps=20"];
        let args = if change == "train.steps=3" { &args[..5] } else { &args[..] };
        let checkpoint = if words == "optimizer.kind" { "its checkpoints" } else { "step-8" };
        home.run(args).refused(&[words, checkpoint]);
    }
    assert_eq!(home.read("runs/small/config.toml"), before);
}

#[test]
fn without_a_checkpoint_a_resumed_run_starts_anew_and_says_so() {
    let home = Home::new();
    let ended = home.run(&["train", "small.toml", "--resume"]).ok();
    assert!(ended.stderr.contains("starting from the beginning"), "{}", ended.stderr);
    std::fs::remove_dir_all(home.path("runs/small/checkpoints")).unwrap();
    let before = home.losses("runs/small");
    assert_eq!(before.len(), 8);
    let ended = home.run(&["train", "small.toml", "--resume"]).ok();
    assert!(ended.stderr.contains("no checkpoint yet: starting from the beginning"), "{}", ended.stderr);
    assert_eq!(home.losses("runs/small"), before);
}

#[test]
fn a_sample_ends_the_run() {
    let home = Home::new();
    let ended = home.run(&["train", "small.toml", "--set", "train.sample=\"chunk \""]).ok();
    assert!(ended.stdout.contains("sample of step 8") && ended.stdout.contains("chunk "), "{}", ended.stdout);
}

#[test]
fn help_has_examples() {
    let home = Home::new();
    for command in ["plan", "train", "sample", "tokenize", "import", "export", "inspect", "doctor"] {
        let help = home.run(&[command, "--help"]).ok().stdout;
        assert!(help.contains(&format!("phalanx {command}")), "{help}");
    }
    for what in ["step", "collectives"] {
        let help = home.run(&["bench", what, "--help"]).ok().stdout;
        assert!(help.contains(&format!("phalanx bench {what}")), "{help}");
    }
}

#[test]
fn json_lines_are_those_of_the_metrics_file_and_one_at_the_end() {
    let home = Home::new();
    for (run, ranks) in [("one", "1"), ("two", "2")] {
        let ended = home.run(&["train", "small.toml", "--nproc", ranks, "--run", run, "--json"]).ok();
        let lines: Vec<Value> = ended.stdout.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let (last, records) = lines.split_last().unwrap();
        assert_eq!(records, home.metrics(run));
        assert_eq!(records.len(), 10, "8 steps and 2 evaluations");
        assert_eq!(last["steps"], 8);
        assert!(last["checkpoint"].as_str().unwrap().ends_with("checkpoints/step-8"));
    }
}

/// The state that is evaluated is the initial one: nothing is learned at a rate of 0, which is said.
#[test]
fn the_validation_loss_does_not_depend_on_the_batch() {
    let home = Home::new();
    let mut losses: Vec<Vec<f64>> = Vec::new();
    for (i, (global, more)) in [
        ("1", &[][..]),
        ("3", &[]),
        ("8", &["--nproc", "2"]),
        ("24", &["--nproc", "2", "--set", "parallel.zero=3", "--set", "batch.micro=4"]),
        ("8", &["--nproc", "2", "--set", "parallel.updates=asynchronous"]),
    ]
    .into_iter()
    .enumerate()
    {
        let evaluate = |samples: usize| {
            let run = format!("r{i}-{samples}");
            let sets = [format!("batch.global={global}"), format!("train.eval_samples={samples}")];
            let base =
                ["train", "small.toml", "--run", &run, "--set", "train.steps=1", "--set", "optimizer.lr=0"];
            let ended = home.run(&[&base[..], &["--set", &sets[0], "--set", &sets[1]], more].concat()).ok();
            let words = format!("(the mean over {} targets in {samples} windows)", 16 * samples);
            assert!(ended.stderr.contains(&words), "no {words:?} in: {}", ended.stderr);
            assert!(ended.stderr.contains("the learning rate is 0 in steps 1 to 1"), "{}", ended.stderr);
            let metrics = home.metrics(&run);
            let evaluation = metrics.iter().find(|line| line.get("val_loss").is_some()).unwrap();
            assert_eq!(
                (number(evaluation, "windows"), number(evaluation, "targets")),
                (samples as f64, 16.0 * samples as f64)
            );
            number(evaluation, "val_loss")
        };
        losses.push([1, 5, 7].map(evaluate).to_vec());
    }
    for of_batch in &losses[1..] {
        // Sums of 112 losses in f32.
        assert!(pairs(of_batch, &losses[0]).all(|(a, b)| (a - b).abs() < 1e-6 * b), "{losses:?}");
    }
    home.run(&["train", "small.toml", "--set", "train.eval_samples=0"])
        .refused(&["train.eval_samples = 0", "data.validation = 0"]);
}

#[test]
fn checkpoints_that_go_and_stay_are_named() {
    let home = Home::new();
    let train = |run: &str, keep: &str| {
        let keep = format!("train.keep={keep}");
        let args = ["train", "small.toml", "--run", run, "--set", "train.save_every=2", "--set", &keep];
        home.run(&args).ok()
    };
    let ended = train("two", "2");
    let words = "saved every 2 steps; the newest 2 stay, older ones are removed (train.keep = 2; \"all\"";
    assert_eq!(ended.stderr.matches(words).count(), 1, "{}", ended.stderr);
    let words = "checkpoints step-6 step-8    the newest 2; older ones are removed";
    assert!(ended.stdout.contains(words), "{}", ended.stdout);
    for keep in ["all", "0"] {
        let ended = train(keep, keep);
        assert!(!ended.stderr.contains("are removed"), "{}", ended.stderr);
        assert!(ended.stdout.contains("checkpoints step-2 step-4 step-6 step-8    all"), "{}", ended.stdout);
        assert_eq!(home.checkpoints(keep).len(), 4);
    }
    home.run(&["train", "small.toml", "--set", "train.keep=some"]).refused(&["train.keep", "\"all\""]);
}

/// A rate with which the loss rises after some steps.
#[test]
fn the_best_checkpoint_stays_also_over_a_resume() {
    let home = Home::new();
    let evaluated = |run: &str| -> Vec<(u64, f64)> {
        let metrics = home.metrics(run).into_iter().filter(|line| line.get("val_loss").is_some());
        metrics.map(|line| (number(&line, "step") as u64, number(&line, "val_loss"))).collect()
    };
    let best = |of: &[(u64, f64)]| of.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
    let keep = ["--set", "train.keep=1", "--set", "train.keep_best=true", "--set", "train.eval_every=1"];
    for (run, engine) in [("sync", "synchronous"), ("async", "asynchronous")] {
        let engine = format!("parallel.updates={engine}");
        let first = [
            "train",
            "small.toml",
            "--nproc",
            "2",
            "--run",
            run,
            "--set",
            "train.save_every=0",
            "--set",
            &engine,
        ];
        home.run(&[&first[..], &keep, &["--set", "train.steps=3"]].concat()).ok();
        // From here on the rate is far too large.
        let large = ["train", "--run", run, "--resume", "--set", "optimizer.lr=3", "--set", "train.steps=6"];
        let ended = home.run(&large).ok();
        let found = evaluated(run);
        assert_eq!((found.len(), best(&found)), (6, 3), "{run}: {found:?}");
        let stay = |expected: &[u64]| {
            let mut steps = home.checkpoints(run);
            steps.sort_unstable();
            assert_eq!(steps, expected, "{run}");
        };
        stay(&[3, 6]);
        assert!(
            ended.stdout.contains("step-3 step-6") && ended.stdout.contains(", step-3\n"),
            "{}",
            ended.stdout
        );
        // Losses of other windows do not compare: the first one is the best.
        let other = ["--set", "train.eval_samples=4", "--set", "train.steps=7"];
        let ended = home.run(&[&["train", "--run", run, "--resume"][..], &other].concat()).ok();
        assert!(ended.stderr.contains("that of other windows, and does not compare"), "{}", ended.stderr);
        stay(&[7]);
    }
    home.run(&["train", "small.toml", "--set", "train.keep_best=true", "--set", "data.validation=0"])
        .refused(&["train.keep_best = true", "data.validation"]);
}

#[test]
fn several_prompts_are_continued_as_each_alone() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--set", "train.steps=2", "--quiet"]).ok();
    home.write("prompts.jsonl", "\"it is\"\n\n{\"prompt\": \"a chunk\"}\n");
    home.write("prompts.txt", "it is\na chunk\n");
    let sample = |args: &[&str]| home.run(&[&["sample", "r", "--tokens", "6"], args].concat());
    let alone = ["it is", "a chunk"].map(|prompt| sample(&["--prompt", prompt, "--json"]).ok().json());
    for file in ["prompts.jsonl", "prompts.txt"] {
        let texts = sample(&["--prompts", file, "--json"]).ok().stdout;
        let texts: Vec<serde_json::Value> =
            texts.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(texts, alone, "{file}");
        let shown = sample(&["--prompts", file]).ok().stdout;
        let expected = alone.each_ref().map(|alone| format!("{}\n", alone["text"].as_str().unwrap()));
        assert_eq!(shown, expected.join("\n"), "{file}");
    }
    home.write("wrong.jsonl", "\"it is\"\n{\"text\": 1}\n");
    home.write("empty.txt", "\n");
    sample(&["--prompts", "wrong.jsonl"]).refused(&["wrong.jsonl:2", "{\"prompt\": \"once\"}"]);
    sample(&["--prompts", "empty.txt"]).refused(&["empty.txt: expected a prompt in each line"]);
    sample(&["--prompts", "nowhere.txt"]).refused(&["--prompts nowhere.txt"]);
    assert_eq!(sample(&[]).code, Some(2));
}

#[test]
fn a_run_whose_validation_loss_no_longer_falls_ends_early() {
    let home = Home::new();
    let more = ["--set", "train.eval_every=1", "--set", "train.steps=60", "--set", "train.keep_best=true"];
    // Steps of this size soon lose what was learned.
    let early = ["--set", "train.patience=2", "--set", "train.eval_first=true", "--set", "optimizer.lr=1.0"];
    let warm = ["--set", "schedule.warmup_share=0.05"];
    let ended = home.run(&[&["train", "small.toml"][..], &more, &early, &warm].concat()).ok();
    let evaluated = evaluated(&home);
    assert_eq!(evaluated[0].0, 0, "before the first step");
    let best = evaluated[1..].iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    let last = evaluated.last().unwrap();
    assert_eq!(last.0, best.0 + 2, "{evaluated:?}");
    assert!(last.0 < 60);
    for words in [format!("ended after step {} of 60", last.0), format!("that of step {}", best.0)] {
        assert!(ended.stderr.contains(&words), "{words}: {}", ended.stderr);
    }
    assert_eq!(home.newest("runs/small"), last.0);
    let stored = String::from_utf8(home.read("runs/small/config.toml")).unwrap();
    assert!(stored.contains("warmup = 3\n") && !stored.contains("warmup_share"), "{stored}");
    // A resumed run counts anew.
    home.run(&["train", "small.toml", "--resume", "--quiet"]).ok();
    assert_eq!(home.newest("runs/small"), last.0 + 2);
    home.run(&["plan", "small.toml", "--set", "train.patience=2"])
        .refused(&["train.patience = 2", "train.keep_best"]);
}

#[test]
fn epochs_count_the_steps() {
    let home = Home::new();
    let text = String::from_utf8(home.read("small.toml")).unwrap();
    home.write("epochs.toml", text.replace("steps = 8", "epochs = 1.5"));
    let plan = home.run(&["plan", "epochs.toml", "--json"]).ok().json();
    let windows = plan["data"]["windows"].as_u64().unwrap();
    let steps = (1.5 * windows as f64 / 8.0).ceil() as u64;
    let ended = home
        .run(&["train", "epochs.toml", "--run", "r", "--set", "schedule.warmup_share=0.1", "--quiet"])
        .ok();
    assert_eq!(home.newest("r"), steps, "{}", ended.stderr);
    let stored = String::from_utf8(home.read("r/config.toml")).unwrap();
    assert!(stored.contains(&format!("steps = {steps}\n")) && !stored.contains("epochs"), "{stored}");
    assert!(stored.contains(&format!("warmup = {}\n", steps.div_ceil(10))), "{stored}");
    let more = ["train", "--run", "r", "--resume", "--set", "train.epochs=2", "--quiet"];
    home.run(&more).ok();
    assert_eq!(home.newest("r"), (2.0 * windows as f64 / 8.0).ceil() as u64);
    home.write("both.toml", text.replace("steps = 8", "steps = 8\nepochs = 2"));
    home.run(&["plan", "both.toml"]).refused(&["train.epochs and train.steps"]);
    let no_data = ["plan", "epochs.toml", "--unset", "data.text", "--set", "model.vocab=256"];
    home.run(&no_data).refused(&["train.epochs = 1.5", "data.text"]);
}

/// Step and validation loss of each evaluation.
fn evaluated(home: &Home) -> Vec<(u64, f64)> {
    let lines = home.metrics("runs/small").into_iter();
    lines.filter_map(|line| Some((line["step"].as_u64()?, line.get("val_loss")?.as_f64()?))).collect()
}
