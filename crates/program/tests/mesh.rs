//! Meshes from end to end: processes on pipeline x data x tensor train what one rank trains, resume on another mesh,
//! and name the rank that dies; plans and benches say what a mesh holds, sends and idles.

use crate::rig;
use std::time::{Duration, Instant};

use crate::rig::{Ended, Home, assert_as_planned, list, lives, number, pairs, ranks, signal, value};
use rustix::process::Signal;
use serde_json::{Value, json};

/// `--set` before each.
fn set(changes: &[&str]) -> Vec<String> {
    changes.iter().flat_map(|change| ["--set".to_string(), change.to_string()]).collect()
}

fn run(home: &Home, args: &[&str], changes: &[&str]) -> Ended {
    let sets = set(changes);
    home.run(&args.iter().copied().chain(sets.iter().map(String::as_str)).collect::<Vec<_>>())
}

/// Stops the test unless two runs have the same losses within rounding.
#[track_caller]
fn assert_alike(home: &Home, one: &str, other: &str) {
    let losses = |run: &str| -> Vec<f64> { home.losses(run).iter().map(|l| l.1.parse().unwrap()).collect() };
    let (one, other) = (losses(one), losses(other));
    for (a, b) in pairs(&one, &other) {
        // Sums of 128 tokens in another order differ by 128 * 2^-24 of themselves at most, and each of up to 14
        // updates carries as much into the parameters of the next: 15 * 128 * 2^-24 = 1.2e-4.
        assert!((a - b).abs() < 1.2e-4 * a, "{one:?} {other:?}");
    }
}

const CUBE: [&str; 5] = [
    "parallel.pipeline=2",
    "parallel.data=2",
    "parallel.tensor=2",
    "parallel.micro_batches=2",
    "parallel.zero=1",
];

#[test]
fn processes_on_a_mesh_train_what_one_rank_trains() {
    let home = Home::new();
    run(&home, &["train", "small.toml", "--run", "one", "--quiet"], &[]).ok();
    for (name, changes) in [
        ("cube", &CUBE[..]),
        ("tensor", &["parallel.tensor=2", "parallel.sequence_parallel=true"]),
        ("pipeline", &["parallel.pipeline=2", "parallel.schedule=zb-v", "parallel.micro_batches=4"]),
        ("model", &["parallel.pipeline=2", "parallel.schedule=model"]),
    ] {
        let ended = run(&home, &["train", "small.toml", "--run", name], changes).ok();
        assert!(ended.stdout.contains("peak == plan"), "{}", ended.stdout);
        assert_alike(&home, "one", name);
        let (plan, memory) =
            (home.json(&format!("{name}/plan.json")), home.json(&format!("{name}/memory.json")));
        assert_as_planned(&plan, &memory);
    }
    home.run(&["sample", "cube", "--prompt", "rank", "--tokens", "5"]).ok();
}

#[test]
fn a_bert_is_planned_before_there_are_tokens_as_it_trains() {
    let home = Home::new();
    let bert = |name: &str, mesh: &[&str]| {
        let changes = [&["model.arch=bert"], mesh].concat();
        let before = run(&home, &["plan", "small.toml", "--json"], &changes).ok().json();
        run(&home, &["train", "small.toml", "--run", name, "--quiet"], &changes).ok();
        let memory = home.json(&format!("{name}/memory.json"));
        assert_as_planned(&before, &memory);
    };
    bert("one", &[]);
    // 256 bytes and the mask: 257 rows, which two tensor ranks divide unevenly.
    bert("mesh", &["parallel.tensor=2", "parallel.pipeline=2", "parallel.micro_batches=2"]);
    assert_alike(&home, "one", "mesh");
}

#[test]
fn a_run_goes_on_on_another_mesh() {
    let home = Home::new();
    let more = |steps: u64| format!("train.steps={steps}");
    run(&home, &["train", "small.toml", "--run", "one", "--quiet"], &[&more(14)]).ok();
    run(&home, &["train", "small.toml", "--run", "r", "--quiet"], &CUBE).ok();
    let resume = ["train", "--run", "r", "--resume", "--quiet"];
    let flat =
        ["parallel.pipeline=1", "parallel.data=1", "parallel.zero=0", "parallel.sequence_parallel=true"];
    run(&home, &resume, &[&flat[..], &[&more(10)]].concat()).ok();
    let deep = ["parallel.pipeline=4", "parallel.tensor=1", "parallel.sequence_parallel=false"];
    run(&home, &resume, &[&deep[..], &["parallel.micro_batches=4", &more(12)]].concat()).ok();
    let ended =
        run(&home, &[&resume[..4], &["--nproc", "1"]].concat(), &["parallel.pipeline=1", &more(14)]).ok();
    assert!(ended.stderr.contains("resuming from step 12"), "{}", ended.stderr);
    assert_alike(&home, "one", "r");
}

#[test]
fn a_killed_rank_of_a_mesh_is_named() {
    let home = Home::new();
    let changes =
        ["parallel.pipeline=2", "parallel.tensor=2", "parallel.micro_batches=4", "train.steps=1000000"];
    let changes = set(&[&changes[..], &["train.save_every=10"]].concat());
    for rank in [3, 0] {
        let _ = std::fs::remove_dir_all(home.path("r"));
        let args = ["train", "small.toml", "--run", "r"];
        let child =
            home.start(&args.into_iter().chain(changes.iter().map(String::as_str)).collect::<Vec<_>>());
        home.wait_for_step("r", 12);
        let started = ranks(child.id());
        assert_eq!(started.len(), 4);
        let killed = Instant::now();
        signal(started.iter().find(|(number, _)| *number == rank).unwrap().1, Signal::KILL);
        let ended = rig::finish(child);
        // Named at once; a second is what ranks that hang may take to leave, another is for a busy machine.
        assert!(killed.elapsed() < Duration::from_secs(3), "{:?}", killed.elapsed());
        ended.refused(&[&format!("rank {rank} failed"), "SIGKILL", "step ", "--resume"]);
        assert!(started.iter().all(|(_, pid)| !lives(*pid)));
    }
}

#[test]
fn schedules_of_ones_own_are_kept_with_the_run() {
    let home = Home::new();
    home.run(&[
        "plan",
        "--schedule",
        "zb-h1",
        "--pipeline",
        "2",
        "--micro-batches",
        "4",
        "--text",
        "own.csv",
    ])
    .ok();
    let changes = ["parallel.pipeline=2", "parallel.micro_batches=4"];
    let own = [&changes[..], &["parallel.schedule=own.csv"]].concat();
    run(&home, &["train", "small.toml", "--run", "own", "--quiet"], &own).ok();
    std::fs::remove_file(home.path("own.csv")).unwrap();
    home.run(&["train", "--run", "own", "--resume", "--set", "train.steps=12", "--quiet"]).ok();
    let named = [&changes[..], &["parallel.schedule=zb-h1", "train.steps=12"]].concat();
    run(&home, &["train", "small.toml", "--run", "named", "--quiet"], &named).ok();
    assert_eq!(home.losses("own"), home.losses("named"));
    assert_eq!(home.losses("own").len(), 12);
}

#[test]
fn the_plan_of_a_mesh_says_who_holds_what() {
    let home = Home::new();
    let changes = [&CUBE[..4], &["parallel.zero=3"]].concat();
    let text = run(&home, &["plan", "small.toml"], &changes).ok().stdout;
    for words in [
        "8 ranks of 1 thread (pipeline 2 x data 2 x tensor 2, 1f1b)",
        "rank 5         1     0       1",
        "embedding to h.",
        "ranks 0 to 3",
        "bubble fraction",
        "in flight to B",
        "transformer.wte.weight is in several of them",
        "3, each (as configured)",
        "1, each",
    ] {
        assert!(text.contains(words), "no {words:?} in: {text}");
    }
    let plan = run(&home, &["plan", "small.toml", "--json"], &changes).ok().json();
    assert_eq!(plan["layout"]["mesh"], json!({ "pipeline": 2, "data": 2, "tensor": 2 }));
    let stages = plan["pipeline"]["stages"].as_array().unwrap();
    let shares: f64 = stages.iter().map(|stage| stage["share"].as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-9, "{stages:?}");
    assert_eq!(stages[0]["in_flight"]["to_weight"], json!(2));
    let sent = |of: &Value| of["collective_bytes_per_step"].as_u64().unwrap();
    // ZeRO-3 gathers parameters for every micro-batch, ZeRO-1 once a step.
    assert!(sent(&plan) > sent(&plan["zero_one"][0]));
    let one = run(&home, &["plan", "small.toml", "--json"], &CUBE).ok().json();
    assert_eq!(sent(&one), sent(&plan["zero_one"][0]));
}

#[test]
fn large_worlds_have_a_row_a_place_in_the_pipeline() {
    let home = Home::new();
    let changes = ["parallel.tensor=4", "parallel.pipeline=3", "parallel.micro_batches=4", "batch.global=64"];
    let text = run(&home, &["plan", "small.toml", "--nproc", "192"], &changes).ok().stdout;
    for words in ["pipeline 3 x data 16 x tensor 4", "ranks 64 to 127 (x 64 ranks)", "0 to 15  0 to 3"] {
        assert!(text.contains(words), "no {words:?} in: {text}");
    }
}

#[test]
fn schedules_are_drawn_with_and_without_a_configuration() {
    let home = Home::new();
    let of = |args: &[&str]| home.run(&[&["plan", "--schedule"], args].concat()).ok();
    let drawn =
        of(&["zb-h1", "--pipeline", "4", "--micro-batches", "8", "--svg", "a.svg", "--text", "a.csv"]);
    for words in ["zb-h1: 4 ranks, 4 stages, 8 micro-batches; bubble 11.1 %", "rank 3  .", "0F0,0F1", "gpipe"]
    {
        assert!(drawn.stdout.contains(words), "no {words:?} in: {}", drawn.stdout);
    }
    assert!(String::from_utf8(home.read("a.svg")).unwrap().starts_with("<svg"));
    let (named, read) = (
        of(&["zb-h1", "--pipeline", "4", "--micro-batches", "8", "--json"]).json(),
        of(&["a.csv", "--json"]).json(),
    );
    // p = 4, m = 8, F = I = W = 1: a rank computes 3m and idles (p - 1)(F + I - W) = 3.
    assert_eq!(named["bubble_fraction"].as_f64().unwrap(), 1.0 - 24.0 / 27.0);
    for key in ["text", "in_flight"] {
        assert_eq!(value(&named, key), value(&read, key));
    }
    assert_eq!(named["text"].as_str().unwrap().as_bytes(), home.read("a.csv"));
    let pytorch =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../plan/tests/schedules/interleaved-zero-bubble-p5-m10-v3.csv");
    let pytorch = of(&[pytorch]).stdout;
    assert!(pytorch.contains("5 ranks, 15 stages, 10 micro-batches; bubble 4.3 %"), "{pytorch}");
    let costed =
        ["plan", "small.toml", "--schedule", "gpipe", "--pipeline", "2", "--micro-batches", "4", "--json"];
    let costed = home.run(&costed).ok().json();
    // The head, which is in the last stage, computes in backward: its I takes longer than that of the first.
    let cost = |stage: usize| costed["costs"][stage][1].as_f64().unwrap();
    assert!(cost(1) > cost(0), "{costed}");
    assert!(!home.path("runs").exists());
}

/// Qi et al. (arXiv 2401.10241, table 5): 1F1B of 8 ranks idles 24.31 % of the time between the first and the last action.
#[test]
fn schedules_take_the_costs_that_are_given() {
    let home = Home::new();
    let of = |args: &[&str]| {
        let sizes = ["--pipeline", "8", "--micro-batches", "24", "--json"];
        home.run(&[&["plan", "--schedule", "1f1b"], &sizes[..], args].concat())
    };
    let times = ["--forward", "18.522", "--input", "18.086", "--weight", "9.337", "--message", "0.601"];
    let by_options = of(&times).ok().json();
    assert_eq!(by_options["costs"][7], json!([18.522, 18.086, 9.337]));
    assert_eq!((&by_options["message"], &by_options["depth"]), (&json!(0.601), &json!(1)));
    let makespan = by_options["makespan"].as_f64().unwrap();
    assert!((1.0 - 24.0 * 45.945 / makespan - 0.2431).abs() < 5e-3, "{makespan}");
    home.write("costs.toml", "forward = 18.522\ninput = 18.086\nweight = 9.337\nmessage = 0.601\n");
    let by_file = of(&["--costs", "costs.toml"]).ok().json();
    assert_eq!(by_file["makespan"], by_options["makespan"]);
    home.write("few.toml", "forward = [1, 2, 3]\n");
    of(&["--costs", "few.toml"]).refused(&["forward", "3 times", "8 stages"]);
    let negative = of(&["--forward=-1"]);
    assert_eq!(negative.code, Some(2));
    assert!(negative.stderr.contains("'-1' for '--forward <TIME>'"), "{}", negative.stderr);
    home.write("other.toml", "backward = 1\n");
    of(&["--costs", "other.toml"]).refused(&["other.toml", "backward", "forward, input, weight"]);
}

#[test]
fn steps_of_a_mesh_are_timed() {
    let home = Home::new();
    for changes in [&["parallel.tensor=2"][..], &["parallel.pipeline=2", "parallel.micro_batches=8"]] {
        let bench = ["bench", "step", "small.toml", "--nproc", "2", "--steps", "2", "--json"];
        let figures = run(&home, &bench, changes).ok().json();
        assert_eq!(figures["ranks"], json!(2));
        for key in ["step_s_median", "collective_bytes_per_step", "exposed_s", "flops_per_step"] {
            assert!(number(&figures, key) > 0.0, "{key}: {figures}");
        }
        let exposed = list(&figures, "exposed_s_by_rank");
        assert!(exposed.iter().any(|rank| *rank == figures["exposed_s"]), "{figures}");
        let plan = run(&home, &["plan", "small.toml", "--nproc", "2", "--json"], changes).ok().json();
        let sent = "collective_bytes_per_step";
        assert_eq!(value(&figures, sent), value(&plan, sent));
    }
}
