//! `phalanx plan --search`: what it proposes fits and trains, limits are kept, and what cannot be is refused by name.

use phalanx_system::random::SplitMix64;

use crate::rig::Home;

/// Searches of random runs, of which all must be proposals that `train` accepts; the whole sweep makes 500.
const SEARCHES: usize = 12;
const SEARCHES_OF_SWEEP: usize = 500;

/// A small GPT-2, without data.
const SMALL: &str = "[model]\nlayers = 4\nhidden = 64\nheads = 4\nvocab = 256\nseq = 32\n[batch]\nglobal = 16\n[train]\nsteps = 2\n";

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn the_winner_is_a_configuration_that_trains() {
    let home = Home::new();
    home.write("small.toml", format!("{SMALL}[data]\ntext = [\"text.txt\"]\nvalidation = 0.0\n"));
    home.write("text.txt", "to be or not to be, that is the question. ".repeat(100));
    let line = "plan small.toml --search --machine laptop --nproc 4 --write best.toml";
    let text = home.run(&words(line)).ok().stdout;
    for said in ["The fastest that fits", "train best.toml", "tokens a second", "The next", "Why others lost"]
    {
        assert!(text.contains(said), "no {said:?}: {text}");
    }
    for (columns, line) in
        [80, 140].into_iter().flat_map(|columns| text.lines().map(move |line| (columns, line)))
    {
        let is_row = line.starts_with("  1 ") || line.starts_with("  10 ");
        assert!(!is_row || line.chars().count() <= columns.max(110), "{columns}: {line}");
    }
    home.run(&words(line)).refused(&["best.toml", "exists"]);
    home.run(&["train", "best.toml", "--run", "run"]).ok();
}

/// One device fewer does not suffice, and the configuration that is proposed fits.
#[test]
fn the_fewest_devices_hold_the_run() {
    let home = Home::new();
    home.write("small.toml", SMALL);
    let options = "--machine h100 --device-memory 2MiB --set device.kind=simulated";
    let answers = home.run(&words(&format!("plan small.toml --min-devices {options} --json"))).ok().json();
    let of = |at: usize, key: &str| answers["answers"][at][key].as_u64();
    let (fewest, too_few) = (of(0, "devices").unwrap(), of(0, "too_few").unwrap());
    assert!(fewest > 1 && too_few < fewest, "{answers}");
    assert!(of(1, "devices").unwrap() <= fewest, "{answers}");
    let line =
        format!("plan small.toml --min-devices {options} --keep memory.optimizer=device --write best.toml");
    let text = home.run(&words(&line)).ok().stdout;
    assert!(text.contains("At least so many devices"), "{text}");
    let line = format!("plan best.toml {options} --json");
    assert_eq!(home.run(&words(&line)).ok().json()["verdict"]["fits"], true);
    for (options, said) in [
        ("", &["--min-devices needs --machine"][..]),
        (
            "--machine h100 --device-memory 1KiB --set device.kind=simulated",
            &["no number of devices", "lacks"],
        ),
    ] {
        home.run(&words(&format!("plan small.toml --min-devices {options}"))).refused(said);
    }
}

/// The streams of a step as text, as a picture and as events; no file of somebody else is replaced.
#[test]
fn a_timeline_shows_what_streams_do() {
    let home = Home::new();
    home.write("small.toml", SMALL);
    let plan = |options: &str| {
        let line = format!(
            "plan small.toml --machine h100 --nproc 4 --set parallel.pipeline=2 --set batch.micro=2 {options}"
        );
        home.run(&words(&line))
    };
    let text = plan("--timeline").ok().stdout;
    for said in ["Streams over a step", "rank 0", "rank 2", "compute", "data", "pipeline"] {
        assert!(text.contains(said), "no {said}: {text}");
    }
    plan("--timeline step.svg").ok();
    assert!(std::fs::read_to_string(home.path("step.svg")).unwrap().contains("rank 2"));
    plan("--timeline step.json").ok();
    plan("--timeline step.json").ok();
    let events = std::fs::read_to_string(home.path("step.json")).unwrap();
    let events: serde_json::Value = serde_json::from_str(&events).unwrap();
    let all = events["traceEvents"].as_array().unwrap();
    let seconds = plan("--json").ok().json()["step_time"]["time"]["seconds"].as_f64().unwrap();
    let end = |event: &serde_json::Value| {
        event["ts"].as_f64().unwrap_or(0.0) + event["dur"].as_f64().unwrap_or(0.0)
    };
    let last = all.iter().map(end).fold(0.0, f64::max);
    assert!((last * 1e-6 / seconds - 1.0).abs() < 0.01, "{last} us of {seconds} s");
    home.write("mine.json", "{}");
    for (options, said) in [
        ("--timeline mine.json", &["mine.json", "not written"][..]),
        ("--timeline step.txt", &["step.txt", ".svg", ".json"]),
    ] {
        plan(options).refused(said);
    }
}

/// Keys that are kept have their values in what is proposed, and only others are tried.
#[test]
fn limits_are_kept() {
    let home = Home::new();
    home.write("small.toml", SMALL);
    let search = |options: &str| {
        let line = format!("plan small.toml --search --machine h100 --json {options}");
        home.run(&words(&line)).ok().json()
    };
    let of = |found: &serde_json::Value, key: &str| found["found"][0]["keys"][key].clone();
    let kept = search(
        "--keep parallel.tensor=2 --keep batch.micro=1 --keep batch.micro=2 --keep parallel.pipeline=1",
    );
    assert_eq!((of(&kept, "parallel.tensor"), of(&kept, "parallel.data")), (2.into(), 4.into()));
    for found in kept["found"].as_array().unwrap() {
        assert!([1, 2].contains(&found["keys"]["batch.micro"].as_u64().unwrap()), "{found}");
    }
    let only = search("--only parallel.zero --nproc 2");
    for (key, value) in [("parallel.data", 2), ("parallel.tensor", 1), ("batch.micro", 8)] {
        assert_eq!(of(&only, key), value, "{key}");
    }
    let stages: Vec<u64> = only["found"]
        .as_array()
        .unwrap()
        .iter()
        .map(|found| found["keys"]["parallel.zero"].as_u64().unwrap())
        .collect();
    assert!(!stages.is_empty(), "{only}");
    let lost: Vec<&str> =
        only["lost"].as_array().unwrap().iter().map(|lost| lost["key"].as_str().unwrap()).collect();
    assert!(lost.iter().all(|key| *key == "parallel.zero"), "{lost:?}");
    let batches = search("--global 16..64 --keep model.seq=16");
    assert!(of(&batches, "batch.global").as_u64().unwrap() >= 16, "{batches}");
    assert!(batches["configuration"].as_str().unwrap().contains("seq = 16"), "{batches}");
}

#[test]
fn what_cannot_be_is_refused_with_the_limit_that_is_in_the_way() {
    let home = Home::new();
    home.write("small.toml", SMALL);
    home.write("zero.toml", ZERO);
    for (options, said) in [
        ("--machine h10", &["did you mean h100"][..]),
        (
            "--machine h100 --keep parallel.tensor=3",
            &["no configuration of 8 devices", "--keep parallel.tensor=3 excludes most"],
        ),
        (
            "--machine h100 --keep parallel.pipeline=8 --keep batch.micro=16",
            &["no configuration of 8 devices", "excludes most"],
        ),
        (
            "--machine h100 --nproc 13",
            &["no configuration divides batch.global = 16", "13 devices", "13, 26"],
        ),
        ("--machine h100 --keep parallel.tensr=3", &["--keep: unknown key", "tensor"]),
        ("--machine h100 --only model.seq", &["--only model.seq", "a search tries"]),
        ("--machine zero.toml", &["zero.toml:5", "memory_gb_per_s", "more than 0"]),
        (
            "--machine h100 --set model.layers=96 --set model.hidden=12288 --set model.heads=96 --nproc 1",
            &["fits 1 device", "too large"],
        ),
        ("--machine h100x9", &["1 to 8"]),
    ] {
        let line = format!("plan small.toml --search {options}");
        home.run(&words(&line)).refused(said);
    }
}

/// A profile with a memory that moves nothing.
const ZERO: &str = r#"name = "still"
memory_bytes = 8_000_000_000
host_bytes = 16_000_000_000
host_gb_per_s = 70.0
memory_gb_per_s = 0.0
copy = { latency_us = 10.0, gb_per_s = 50.0 }
[tflops]
f32 = 60.0
"#;

/// Random models, batches, devices and memories: what is proposed was planned, fits, and is read by `plan` as it was found.
#[test]
fn nothing_that_is_proposed_fails_to_fit() {
    let searches = match std::env::var("PHALANX_TEST_SWEEPS").as_deref() {
        Ok("whole") => SEARCHES_OF_SWEEP,
        _ => SEARCHES,
    };
    let home = Home::new();
    let mut random = SplitMix64::new(17);
    let (mut found, mut refused) = (0, 0);
    for number in 0..searches {
        let mut pick = |values: &[usize]| values[(random.next_u64() % values.len() as u64) as usize];
        let (layers, heads) = (pick(&[1, 2, 3, 4, 6]), pick(&[1, 2, 3, 4, 8]));
        let text = format!(
            "[model]\nlayers = {layers}\nheads = {heads}\nhidden = {}\nvocab = {}\nseq = {}\n[batch]\nglobal = {}\n[precision]\ncompute = \"{}\"\n\
             [memory]\nchunk = {}\n",
            heads * pick(&[16, 32, 64]),
            pick(&[61, 256, 1000]),
            pick(&[8, 64, 128]),
            pick(&[4, 8, 12, 16, 32]),
            ["f32", "bf16"][pick(&[0, 1])],
            ["\"auto\"", "\"none\"", "0.5"][pick(&[0, 1, 2])],
        );
        home.write("random.toml", &text);
        let (ranks, kind) = (pick(&[1, 2, 3, 4, 6, 8, 16]), ["simulated", "cuda"][pick(&[0, 0, 1])]);
        // Cards need nearly a GiB for the driver alone.
        let memory = if kind == "cuda" { pick(&[900, 1200, 4000]) } else { pick(&[2, 5, 20, 100]) };
        let best = format!("best-{number}.toml");
        let options =
            format!("--machine h100 --device-memory {memory}MiB --nproc {ranks} --set device.kind={kind}");
        let line = format!("plan random.toml --search {options} --write {best}");
        let run = home.run(&words(&line));
        if run.code != Some(0) {
            assert!(
                ["fits", "divides batch.global"].iter().any(|said| run.stderr.contains(said)),
                "{options} {text}: {}",
                run.stderr
            );
            refused += 1;
            continue;
        }
        let line = format!("plan {best} --machine h100 --device-memory {memory}MiB --json");
        let plan = home.run(&words(&line)).ok().json();
        assert_eq!(plan["verdict"]["fits"], true, "{options} {text}: {}", plan["verdict"]);
        assert_eq!(plan["layout"]["ranks"], ranks, "{options} {text}");
        found += 1;
    }
    assert!(found > searches / 3 && refused < searches, "{found} found, {refused} refused");
}

/// `batch.micro = "auto"` is the largest size that fits, by the plan, and a run keeps it.
#[test]
fn the_largest_micro_batch_that_fits_is_chosen_once() {
    let home = Home::new();
    let text = "to be or not to be, that is the question. ".repeat(100);
    home.write("text.txt", text);
    // The rate of steps that a resume adds is not 0.
    let data = "[schedule]\nmin_lr = 6e-6\n[data]\ntext = [\"text.txt\"]\nvalidation = 0.0\n";
    home.write(
        "auto.toml",
        format!("{}{data}", SMALL.replace("global = 16", "global = 16\nmicro = \"auto\"")),
    );
    let needed = |micro: usize| {
        let line = format!("plan auto.toml --set batch.micro={micro} --json");
        home.run(&words(&line)).ok().json()["needed_bytes"].as_u64().unwrap()
    };
    let limit = (needed(4) + needed(8)) as f64 / 2.0 / f64::from(1 << 20);
    let set = format!("memory.limit_mb={limit}");
    let plan = home.run(&["plan", "auto.toml", "--set", &set]).ok();
    assert!(plan.stderr.contains("\"auto\": 4, the largest that fits; 8 would need"), "{}", plan.stderr);
    let train = home.run(&["train", "auto.toml", "--run", "run", "--set", &set]).ok();
    assert!(train.stderr.contains("\"auto\": 4, the largest that fits"), "{}", train.stderr);
    let micro = |home: &Home| {
        let config = home.run(&["inspect", "run", "--json"]).ok().json();
        assert!(!config.is_null());
        std::fs::read_to_string(home.path("run/config.toml")).unwrap()
    };
    assert!(micro(&home).contains("micro = 4"), "{}", micro(&home));
    // More memory changes nothing, and less is refused with the choice.
    home.run(&[
        "train",
        "auto.toml",
        "--run",
        "run",
        "--resume",
        "--set",
        "train.steps=3",
        "--set",
        "memory.limit_mb=4000",
    ])
    .ok();
    assert!(micro(&home).contains("micro = 4"), "{}", micro(&home));
    let limit = format!("memory.limit_mb={}", (needed(2) + needed(4)) as f64 / 2.0 / f64::from(1 << 20));
    let less = ["train", "auto.toml", "--run", "run", "--resume", "--set", "train.steps=4", "--set", &limit];
    home.run(&less).refused(&["the run keeps batch.micro = 4", "\"auto\" chose", "--set batch.micro=auto"]);
    home.run(&[&less[..], &["--set", "batch.micro=auto"]].concat()).ok();
    assert!(micro(&home).contains("micro = 2"), "{}", micro(&home));
    home.run(&words("bench step auto.toml")).refused(&["batch.micro = \"auto\"", "give a number here"]);
}

#[test]
fn a_sweep_compares_values_and_formulas_stand_beside_the_plan() {
    let home = Home::new();
    home.write("small.toml", SMALL);
    let text = home.run(&words("plan small.toml --sweep batch.micro=1,2,3,16 --machine h100")).ok().stdout;
    let rows: Vec<&str> = text.lines().collect();
    assert!(rows.len() == 5 && rows[0].contains("mfu") && rows[3].contains("batch.micro"), "{text}");
    let json =
        home.run(&words("plan small.toml --sweep batch.micro=1,2,3,16 --machine h100 --json")).ok().json();
    let values = json["values"].as_array().unwrap();
    let of = |at: usize, key: &str| values[at][key].as_f64().unwrap();
    assert!(
        of(0, "needed_bytes") < of(1, "needed_bytes") && of(1, "needed_bytes") < of(3, "needed_bytes"),
        "{json}"
    );
    assert!(of(0, "step_s") > of(3, "step_s"), "fewer kernels of more work: {json}");
    for (options, said) in [
        ("--sweep batch.micro", &["--sweep", "batch.micro=1,2,4,8"][..]),
        ("--sweep batch.mikro=1", &["--sweep: unknown key"]),
        ("--sweep batch.micro=,", &["expected 1 to 64 values"]),
    ] {
        home.run(&words(&format!("plan small.toml {options}"))).refused(said);
    }
    let explained = home.run(&words("plan small.toml --explain")).ok().stdout;
    for said in ["4nh(13+12h)", "ZeRO-0", "nblh(67+9ml/h)", "Korthikanti", "72BLsh^2"] {
        assert!(explained.contains(said), "no {said}: {explained}");
    }
}
