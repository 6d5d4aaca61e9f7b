//! `phalanx plan` shows a configuration, says whether it fits and what would make it fit.

use crate::rig;
use crate::rig::Home;
use phalanx_drawing::report::bytes;
use phalanx_testing::sweeps;
use serde_json::json;

#[test]
fn json_has_what_scripts_rely_on() {
    let home = Home::new();
    for (nproc, zero) in [("1", "0"), ("2", "2"), ("4", "3")] {
        let zero = format!("parallel.zero={zero}");
        let plan = home.run(&["plan", "small.toml", "--nproc", nproc, "--set", &zero, "--json"]).ok().json();
        let ranks = plan["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), nproc.parse::<usize>().unwrap());
        for (number, rank) in ranks.iter().enumerate() {
            assert_eq!(rank["rank"], json!(number));
            let categories = rank["device"]["categories"].as_object().unwrap();
            for name in ["parameters", "gradients", "optimizer", "activations", "communication", "workspace"]
            {
                assert!(categories[name].is_u64(), "{name}");
            }
            let sum: u64 = categories.values().map(|bytes| bytes.as_u64().unwrap()).sum();
            assert_eq!(rank["device"]["peak_bytes"], json!(sum));
        }
        // 256 x 32 tokens, 16 x 32 positions, two blocks of 12 * 32^2 + 13 * 32, the last norm.
        assert_eq!(plan["parameters"], json!(256 * 32 + 16 * 32 + 2 * (12 * 1024 + 13 * 32) + 64));
        assert!(
            plan["flops_per_step"].as_u64().unwrap() > 6 * 128 * plan["parameters"].as_u64().unwrap() / 2
        );
        assert_eq!(plan["collective_bytes_per_step"].as_u64().unwrap() > 0, nproc != "1");
    }
    assert!(!home.path("runs").exists());
}

#[test]
fn tables_name_ranks_phases_chunks_and_the_textbook() {
    let home = Home::new();
    let args = ["plan", "small.toml", "--nproc", "2", "--set", "parallel.zero=2", "--set", "batch.micro=1"];
    let text = home.run(&args).ok().stdout;
    for word in
        ["0 to 1", "textbook", "evaluate", "reduce_scatter", "chunks", "defer", "each (as configured)"]
    {
        assert!(text.contains(word), "{word}: {text}");
    }
    let rule = "sizes, the one with the fewest chunks whose peak is within 1% of the smallest";
    assert!(text.contains(rule), "{text}");
    let sizes: Vec<&str> =
        text.lines().filter(|line| line.contains(" chunk") && line.contains("need ")).collect();
    assert!(sizes.len() > 1, "{text}");
    assert_eq!(sizes.iter().filter(|line| line.ends_with("chosen")).count(), 1, "{text}");
}

#[test]
fn a_chunk_program_is_printed_and_drawn() {
    let home = Home::new();
    let plan = |more: &[&str]| {
        home.run(&[&["plan", "small.toml", "--nproc", "2", "--chunk-program"], more].concat())
    };
    let with =
        |more: &[&'static str]| [&["1", "--set", "parallel.zero=3", "--set", "batch.micro=1"], more].concat();
    let text = plan(&with(&[])).ok().stdout;
    for word in [
        "Chunks of rank 1 of 2",
        "all_gather(P0<p0)#1",
        "reduce_scatter(s0<g0)",
        "[apply] update(",
        "evaluate: ",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let json = plan(&with(&["--json"])).ok().json();
    let taken = json["phases"][0]["actions"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|action| action.as_str() == Some("+P0"));
    // Two micro-batches, forward and backward of each.
    assert!(taken.count() >= 4, "{json}");
    plan(&["2"]).refused(&["--chunk-program 2", "2 ranks"]);
    plan(&["0,7"]).refused(&["--chunk-program 7", "2 ranks"]);
    let both = plan(&["0,1", "--set", "parallel.zero=2", "--svg", "step.svg"]).ok().stdout;
    assert!(both.contains("Chunks of rank 0 of 2") && both.contains("Chunks of rank 1 of 2"), "{both}");
    let svg = String::from_utf8(home.read("step.svg")).unwrap();
    for word in
        ["<svg", "rank 0: ", "rank 1: ", "reduce_scatter(s0&lt;g0)", "device memory", "gradient_bucket"]
    {
        assert!(svg.contains(word), "{word}");
    }
    let without = home.run(&["plan", "small.toml", "--svg", "step.svg"]);
    assert!(without.code == Some(2) && without.stderr.contains("--chunk-program"), "{}", without.stderr);
}

#[test]
fn sharding_holds_less() {
    let home = Home::new();
    let state = |zero: &str| {
        let zero = format!("parallel.zero={zero}");
        let plan = home.run(&["plan", "small.toml", "--nproc", "4", "--set", &zero, "--json"]).ok().json();
        let of = |name: &str| plan["ranks"][0]["device"]["categories"][name].as_u64().unwrap();
        of("parameters") + of("gradients") + of("optimizer")
    };
    let states = ["0", "1", "2", "3"].map(state);
    assert!(states.is_sorted_by(|more, less| more > less), "{states:?}");
}

const LARGE: [&str; 6] =
    ["--set", "model.hidden=16384", "--set", "model.heads=16", "--set", "model.layers=60"];

#[test]
fn a_plan_of_what_does_not_fit_is_an_answer() {
    let home = Home::new();
    let args = |more: &[&'static str]| [&["plan", "small.toml", "--nproc", "2"], more].concat();
    let text = home.run(&args(&LARGE)).ok().stdout;
    for part in ["Memory of each rank", "All ranks together need", "train` would refuse", "parallel.zero=3"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("does not fit"), "ranks share this machine, so no rank is judged alone: {text}");
    let plan = home.run(&[&args(&LARGE)[..], &["--device-memory", "80GiB", "--json"]].concat()).ok().json();
    let verdict = &plan["verdict"];
    assert_eq!((&verdict["fits"], &verdict["device_memory_bytes"]), (&json!(false), &json!(80u64 << 30)));
    let text = home.run(&args(&["--set", "memory.limit_mb=1"])).ok().stdout;
    assert!(text.contains("memory.limit_mb") && text.contains("too much"), "{text}");
    let text = home.run(&args(&["--device-memory", "80GiB"])).ok().stdout;
    assert!(text.contains("Each rank has 80.00 GiB (--device-memory)") && text.contains("left"), "{text}");
    let refused = home.run(&args(&["--device-memory", "80 apples"]));
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("apples") && refused.stderr.contains("80GiB"), "{}", refused.stderr);
}

/// A machine with small cards, two to a host, in the form of a profile.
const TINY: &str = r#"
name = "a tiny machine"
memory_bytes = 8_000_000
host_bytes = 16_000_000_000
memory_gb_per_s = 3000.0
host_gb_per_s = 70.0
copy = { latency_us = 10.0, gb_per_s = 50.0 }
disk_read = { latency_us = 100.0, gb_per_s = 6.5 }
disk_write = { latency_us = 100.0, gb_per_s = 3.5 }
devices_per_host = 2
[[links]]
name = "within a host"
devices = 2
time = { latency_us = 20.0, gb_per_s = 400.0 }
[[links]]
name = "network"
time = { latency_us = 30.0, gb_per_s = 50.0 }
[tflops]
f32 = 60.0
bf16 = 900.0
"#;

/// The lines of proposals in a printed plan: commands, and the figures below each.
fn proposed(text: &str) -> Vec<(&str, &str)> {
    let lines: Vec<&str> = text.lines().collect();
    let pairs = lines.windows(2).filter(|pair| pair[0].trim_start().starts_with("phalanx plan "));
    pairs.map(|pair| (pair[0].trim(), pair[1].trim())).collect()
}

/// The bytes behind `words` in figures for people: `each needs 466.8 MiB, ...`.
fn bytes_after(text: &str, words: &str) -> f64 {
    let (_, rest) = text.split_once(words).unwrap_or_else(|| panic!("no {words:?} in: {text}"));
    let mut parts = rest.split_whitespace();
    let number: f64 = parts.next().unwrap().parse().unwrap();
    let unit = parts.next().unwrap().trim_end_matches([',', ';']);
    number
        * 1024f64
            .powi(["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|known| *known == unit).unwrap() as i32)
}

/// Runs what a shell would run for a line.
fn run_line(home: &Home, line: &str) -> rig::Ended {
    let line = line.replacen("phalanx", "exec \"$0\"", 1);
    let mut command = phalanx_testing::process::command("sh");
    command.args(["-c", &line, env!("CARGO_BIN_EXE_phalanx")]).current_dir(home.path("."));
    command.env("CUDA_VISIBLE_DEVICES", "");
    rig::ended(command)
}

/// Every proposal, applied as the text that was printed, needs what was said and fits.
#[test]
fn every_proposal_is_a_command_that_fits() {
    let home = Home::new();
    home.write("tiny.toml", TINY);
    home.write("a text.txt", home.read("text.txt"));
    let small = String::from_utf8(home.read("small.toml")).unwrap();
    let with = |name: &str, tables: &str| home.write(name, format!("{small}\n{tables}"));
    with("ranks.toml", "[parallel]\nranks = 4\nzero = 1\n");
    with("data.toml", "[parallel]\ndata = 2\n[memory]\ncheckpointing = \"selective\"\n");
    with(
        "mesh.toml",
        "[parallel]\npipeline = 2\ndata = 2\ntensor = 2\nschedule = \"zb-h1\"\nmicro_batches = 4\nzero = 1\n",
    );
    with("placed.toml", "[device]\nkind = \"simulated\"\n[memory]\nplacement = \"device\"\n");
    // The share of its arena that each run has, and words of which one proposal must have each.
    let model = "--set model.hidden=128 --set model.heads=8 --set memory.buffer_mb=0.25";
    let cases = [
        ("small.toml --nproc 4", 0.75, &["parallel.zero=1", "--nproc 8"][..]),
        ("small.toml --nproc 4 --set parallel.data=4 --set parallel.tensor=1", 0.75, &["parallel.zero"]),
        ("ranks.toml", 0.9, &["parallel.zero=2"]),
        ("ranks.toml --nproc 2 --set parallel.ranks=2", 0.8, &["--nproc 4"]),
        ("data.toml", 0.9, &["parallel.zero", "memory.optimizer=nvme"]),
        ("mesh.toml", 0.9, &["--nproc 16"]),
        ("mesh.toml --set parallel.schedule=1f1b --nproc 4", 0.8, &[]),
        ("small.toml --set precision.compute=f16", 0.9, &["memory.optimizer=nvme"]),
        ("small.toml --set model.arch=bert --nproc 2 --data 'a text.txt'", 0.8, &["--data 'a text.txt'"]),
        (
            "small.toml --set batch.micro=4 --set 'train.sample=it is'",
            0.97,
            &["batch.micro=2", "'train.sample=it is'"],
        ),
        ("small.toml --set parallel.micro_batches=1", 0.95, &["batch.micro=4"]),
        ("small.toml --set memory.checkpointing=selective", 0.95, &["batch.micro=4"]),
        ("small.toml --set device.kind=simulated", 0.6, &["memory.optimizer=host"]),
        ("placed.toml", 0.5, &["memory.placement=host", "memory.placement=nvme"]),
        ("small.toml --set device.kind=cuda --set precision.compute=bf16", 0.7, &["memory.optimizer=host"]),
        ("small.toml --set device.kind=cuda --nproc 4", 0.7, &["parallel.zero"]),
    ];
    for (number, (options, share, words)) in sweeps::share(&cases, 0, 2).enumerate() {
        let line = format!("phalanx plan {options} {model}");
        let plan = run_line(&home, &format!("{line} --device-memory 1TiB --json")).ok().json();
        let needed = plan["verdict"]["needed_bytes"].as_f64().unwrap();
        let arena = plan["arena_bytes"].as_array().unwrap().iter().map(|bytes| bytes.as_f64().unwrap());
        let short = (1.0 - share) * arena.fold(0.0, f64::max);
        let line = format!("{line} --device-memory {}", (needed - short) as u64);
        assert_proposals(&home, &line, words, number % 3 == 0);
    }
    // The memory of a machine, where states are larger than what NCCL takes of a card, of a rank, and of this machine.
    let tiny = "phalanx plan small.toml --machine tiny.toml --set model.hidden=4096 --set model.heads=16";
    let of_card = |bytes: u64| home.write("tiny.toml", TINY.replace("8_000_000", &bytes.to_string()));
    of_card(1 << 40);
    let plan = run_line(&home, &format!("{tiny} --json")).ok().json();
    let (needed, arena) = (plan["verdict"]["needed_bytes"].as_u64(), plan["arena_bytes"][0].as_u64());
    of_card(needed.unwrap() - arena.unwrap() / 5);
    assert_proposals(&home, tiny, &["--machine tiny.toml", "memory.optimizer=host", "--nproc 2"], true);
    assert_proposals(
        &home,
        "phalanx plan small.toml --nproc 2 --set memory.limit_mb=26 --set model.hidden=128",
        &[],
        true,
    );
}

#[track_caller]
fn assert_proposals(home: &Home, line: &str, words: &[&str], also_json: bool) {
    let text = run_line(home, line).ok().stdout;
    let all = proposed(&text);
    assert!((1..=6).contains(&all.len()), "{} proposals of {line}: {text}", all.len());
    assert!(text.contains("What would make it fit"), "{line}: {text}");
    for word in words {
        assert!(all.iter().any(|(command, _)| command.contains(word)), "no {word:?} for {line}: {text}");
    }
    let is_processor = !["device.kind", "--machine", "placed.toml"].iter().any(|word| line.contains(word));
    for (command, figures) in &all {
        assert!(!(is_processor && command.contains("=host")), "host memory is the device's: {command}");
        let applied = run_line(home, &format!("{command} --json")).ok().json();
        let verdict = &applied["verdict"];
        assert_eq!(verdict["fits"], json!(true), "{command}: {verdict}");
        let (said, needs) = (bytes_after(figures, "needs "), verdict["needed_bytes"].as_f64().unwrap());
        assert!((said / needs - 1.0).abs() < 0.01, "{command} needs {needs}, and not {said}: {figures}");
        let ranks = applied["layout"]["ranks"].as_u64().unwrap();
        assert!(figures.starts_with(&format!("{ranks} rank")), "{command}: {figures}");
        if ranks > 1 {
            let sent = bytes(applied["collective_bytes_per_step"].as_u64().unwrap());
            assert!(figures.contains(&format!("a step sends {sent} between")), "{command}: {figures}");
        }
        assert_eq!(
            line.contains("--machine"),
            figures.contains(" between memories, in "),
            "{command}: {figures}"
        );
    }
    if also_json {
        let told = run_line(home, &format!("{line} --json")).ok().json();
        let proposals = told["verdict"]["proposals"].as_array().unwrap();
        assert_eq!(proposals.len(), all.len());
        for (proposal, (command, figures)) in proposals.iter().zip(&all) {
            let words = proposal["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
            assert_eq!(words.collect::<Vec<_>>().join(" "), command.replace('\'', ""));
            let needs = proposal["needed_bytes"].as_f64().unwrap();
            assert!((bytes_after(figures, "needs ") / needs - 1.0).abs() < 0.01, "{proposal}");
        }
    }
}

/// A profile brings its device, its memory and its links, and the line above the figures says so.
#[test]
#[allow(clippy::too_many_lines, reason = "a list of cases")]
fn a_machine_brings_what_it_has_and_the_plan_says_it() {
    let home = Home::new();
    home.write("tiny.toml", TINY);
    home.write(
        "alone.toml",
        TINY.replace("[[links]]\nname = \"network\"\ntime = { latency_us = 30.0, gb_per_s = 50.0 }\n", ""),
    );
    home.write("unsaid.toml", TINY.replace("devices_per_host = 2\n", ""));
    home.write(
        "cores.toml",
        TINY.replace("memory_bytes = 8_000_000", "computes_on_host = true\nmemory_bytes = 800_000_000"),
    );
    let card = "an NVIDIA GPU (device.kind = \"cuda\") with 74.51 GiB (the profile of --machine)";
    for (options, words) in [
        ("--machine h100", &[card, "238.42 GiB of host memory", "scratch of kernels"][..]),
        (
            "--machine h100 --nproc 4",
            &[card, "\"nccl\"", "450 GB/s", "4 ranks on one host of 8", "NCCL, about"],
        ),
        ("--machine h200 --nproc 8", &["131.32 GiB", "8 ranks on one host of 8"]),
        ("--machine h100 --nproc 16 --set batch.global=16", &["16 ranks on 2 hosts of 8 devices", "50 GB/s"]),
        (
            "--machine h100 --nproc 2 --set device.communication=host",
            &["through host memory", "stage what it sends"],
        ),
        ("--machine h100 --set device.memory_mb=20000", &["19.53 GiB (device.memory_mb)"]),
        (
            "--machine h100 --device-memory 20GiB",
            &["20.00 GiB (--device-memory)", "Each rank has 20.00 GiB (--device-memory)"],
        ),
        ("--machine h100 --chunks --nproc 2 --set parallel.zero=3", &[card, "450 GB/s"]),
        (
            "--machine h100 --set device.kind=simulated",
            &["a simulated device (device.kind = \"simulated\") with 74.51"],
        ),
        ("--machine h100 --placement --set memory.placement=auto", &["budget", "73.69 GiB", "238.1"]),
        ("--machine tiny.toml --nproc 4", &["4 ranks on 2 hosts of 2 devices", "50 GB/s"]),
        (
            "--machine unsaid.toml --nproc 4",
            &["all 4 ranks on one host (the profile has no devices_per_host)"],
        ),
        (
            "--machine cores.toml --nproc 2",
            &["a processor (device.kind = \"cpu\") with 762.9 MiB", "outside, about"],
        ),
        (
            "--device-memory 1GiB --set device.kind=cuda --nproc 2",
            &["\"nccl\"", "as much host memory as the plan needs"],
        ),
    ] {
        let text = run_line(&home, &format!("phalanx plan small.toml {options}")).ok().stdout;
        assert!(text.starts_with("assumed"), "{options}: {text}");
        for word in words {
            assert!(text.contains(word), "no {word:?} for {options}: {text}");
        }
    }
    for (options, words) in [
        ("--machine alone.toml --nproc 4", &["4 ranks", "join 2 devices", "[[links]]", "at most 2"][..]),
        (
            "--machine h100 --set device.kind=cpu",
            &["device.kind = \"cpu\"", "describes cards", "leave out device.kind"],
        ),
        ("--machine cores.toml --set device.kind=cuda", &["describes a processor"]),
        ("--machine here --set device.kind=cuda", &["no card here", "--machine h100"]),
    ] {
        run_line(&home, &format!("phalanx plan small.toml {options}")).refused(words);
    }
    // The same ranks take longer to exchange data where they lie on more hosts.
    let collectives = |devices: usize| {
        home.write(
            "hosts.toml",
            TINY.replace("devices_per_host = 2", &format!("devices_per_host = {devices}"))
                .replace("\ndevices = 2", &format!("\ndevices = {devices}")),
        );
        let line = "phalanx plan small.toml --nproc 4 --set parallel.zero=2 --machine hosts.toml --json";
        let plan = run_line(&home, line).ok().json();
        assert_eq!(
            plan["copies"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|copy| copy["bytes"].as_u64() > Some(4096))
                .count(),
            0,
            "{}",
            plan["copies"]
        );
        plan["step_time"]["time"]["collective_s"].as_f64().unwrap()
    };
    let seconds = [4, 2, 1].map(collectives);
    assert!(seconds[0] < seconds[1] && seconds[1] < seconds[2], "{seconds:?}");
}

/// A refusal, because no placement fits the memory of a device, names the smallest memory that does, and a budget of host memory if that
/// one needs another.
#[test]
fn the_smallest_device_that_would_do_does() {
    let home = Home::new();
    home.write("tiny.toml", TINY);
    let small_host = "device.kind=simulated --set memory.host_budget_mb=1 --nproc 4 --set model.layers=4 --set model.hidden=64";
    for (options, names_host) in [
        ("device.kind=simulated", false),
        ("device.kind=cuda", false),
        ("memory.nvme_path=/mnt/nvme", false),
        (small_host, true),
    ] {
        let line = format!("phalanx plan small.toml --set memory.placement=auto --set {options}");
        let refused = run_line(&home, &format!("{line} --device-memory 1MiB"))
            .refused(&["the smallest device that would do has "]);
        let (_, rest) = refused.stderr.split_once("would do has ").unwrap();
        let bytes = rest.split(' ').next().unwrap();
        let host =
            rest.split_once("with memory.host_budget_mb = ").map(|(_, host)| host.split(':').next().unwrap());
        assert_eq!(host.is_some(), names_host, "{options}: {rest}");
        let host = host.map_or(String::new(), |host| format!("--set memory.host_budget_mb={host}"));
        let plan = run_line(&home, &format!("{line} --device-memory {bytes} {host} --json")).ok().json();
        assert_eq!(plan["verdict"]["fits"], json!(true), "{options}: {bytes}: {}", plan["verdict"]);
    }
}

#[test]
fn only_training_refuses_more_than_the_memory() {
    let home = Home::new();
    let args = |more: &[&'static str]| [&["train", "small.toml", "--nproc", "2"], more].concat();
    home.run(&args(&LARGE)).refused(&["2 rank(s) need", "bytes", "available", "parallel.zero=3"]);
    home.run(&args(&["--set", "memory.limit_mb=1"])).refused(&["memory.limit_mb", "1048576", "a rank needs"]);
    assert!(!home.path("runs/small").exists());
}

#[test]
fn ranks_have_the_peak_of_a_run_without_a_diagnosis() {
    let home = Home::new();
    for (nproc, zero, micro) in [("1", "0", "1"), ("2", "1", "2"), ("2", "2", "1"), ("4", "3", "2")] {
        let (zero, micro) = (format!("parallel.zero={zero}"), format!("batch.micro={micro}"));
        let set = ["--set", &zero, "--set", &micro, "--set", "precision.compute=bf16"];
        let plan =
            home.run(&[&["plan", "small.toml", "--json", "--nproc", nproc], &set[..]].concat()).ok().json();
        let peaks = |of: &dyn Fn(&str) -> bool| {
            let phases = plan["phases"].as_array().unwrap().iter();
            let peak = |phase: &serde_json::Value| phase["peak_bytes"].as_u64().unwrap();
            phases.filter(|phase| of(phase["name"].as_str().unwrap())).map(peak).max().unwrap()
        };
        let run = peaks(&|name| name != "diagnose");
        assert_eq!(plan["ranks"][0]["device"]["peak_bytes"].as_u64(), Some(run));
        assert_eq!(plan["arena_bytes"][0].as_u64(), Some(peaks(&|_| true)));
    }
}

#[test]
fn the_examples_can_be_planned() {
    let home = Home::new();
    let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    for (name, data) in [
        ("quickstart.toml", &["--data", "text.txt"][..]),
        ("nanogpt_cpu.toml", &["--data", "text.txt"]),
        ("gpt2_mini.toml", &[]),
        ("gpt2_124m.toml", &["--nproc", "2", "--set", "parallel.zero=3"]),
        ("mesh_2x2x2.toml", &["--data", "text.txt"]),
        ("bert_classic.toml", &["--data", "text.txt"]),
        ("gpt3_13b_h200.toml", &[]),
        ("decoder.toml", &["--data", "text.txt"]),
    ] {
        let path = examples.join(name).display().to_string();
        let plan =
            home.run(&[&["plan", &path, "--json", "--set", "memory.limit_mb=1e6"], data].concat()).json();
        assert!(plan["parameters"].as_u64().unwrap() > 100_000, "{name}");
    }
}

#[test]
fn chunk_sizes_are_compared_with_what_they_move() {
    let home = Home::new();
    let given =
        ["plan", "small.toml", "--nproc", "2", "--set", "parallel.zero=3", "--chunks", "--machine", "h200"];
    let text = home.run(&given).ok().stdout;
    for words in [
        "Gemini's search: min_chunk_size_mb = 32",
        "one tensor each",
        "all_gather",
        "the fewest of the sizes",
    ] {
        assert!(text.contains(words), "no {words:?} in: {text}");
    }
    let plan = home.run(&[&given[..], &["--json"]].concat()).ok().json();
    let compared = plan["chunks"]["compared"]["alternatives"].as_array().unwrap();
    let tried = plan["chunks"]["tried"].as_array().unwrap();
    assert_eq!(compared.len(), tried.len());
    let chosen: Vec<_> = compared.iter().filter(|size| size["chosen"] == json!(true)).collect();
    assert_eq!(chosen.len(), 1);
    // The plan of the run has the chosen chunks.
    assert_eq!(chosen[0]["chunks"], plan["chunks"]["count"]);
    assert_eq!(chosen[0]["device_peak_bytes"].as_u64(), plan["arena_bytes"][0].as_u64());
    for size in compared {
        let moved = size["traffic"].as_array().unwrap();
        assert!(moved.iter().any(|part| part["movement"] == json!("all_gather")), "{size}");
        assert!(
            size["moving_s"].as_f64().unwrap() > 0.0 && size["gathered_peak_bytes"].as_u64().unwrap() > 0
        );
    }
    // Fewer chunks are fewer messages, which lose less time to latency.
    let of = |largest: bool| {
        let key = |size: &&serde_json::Value| size["chunks"].as_u64().unwrap();
        let one = if largest { compared.iter().max_by_key(key) } else { compared.iter().min_by_key(key) };
        one.unwrap()["moving_s"].as_f64().unwrap()
    };
    assert!(of(false) < of(true));
    let fixed = home.run(&[&given[..], &["--set", "memory.chunk=0.25"]].concat()).ok().stdout;
    assert!(fixed.contains("chosen: memory.chunk = 0.25"), "{fixed}");
    home.run(&["plan", "small.toml", "--machine", "h2000"]).refused(&["expected here (measured", "h200"]);
}

#[test]
fn placement_follows_the_budget_and_is_replayed() {
    let home = Home::new();
    let base = ["plan", "small.toml", "--nproc", "2", "--set", "parallel.zero=3", "--json"];
    let need = home.run(&base).ok().json()["arena_bytes"][0].as_u64().unwrap();
    let set = |key: &str, value: f64| format!("memory.{key}={value}");
    let budget = |share: f64| set("device_budget_mb", share * need as f64 / 1_048_576.0);
    let auto = |share: f64| {
        let given = [budget(share), set("host_budget_mb", 64.0), "memory.placement=auto".into()];
        given.into_iter().flat_map(|set| ["--set".to_string(), set]).collect::<Vec<_>>()
    };
    let run = |share: f64, more: &[&str]| {
        let given = auto(share);
        let given: Vec<&str> = base
            .iter()
            .copied()
            .chain(given.iter().map(String::as_str))
            .chain(more.iter().copied())
            .collect();
        home.run(&given)
    };
    let plan = run(0.8, &["--placement"]).ok().json();
    assert!(plan["arena_bytes"][0].as_u64().unwrap() * 10 <= need * 8);
    let chunks = plan["placement"]["chunks"].as_array().unwrap();
    assert!(chunks.iter().any(|chunk| chunk["optimizer"] == json!("host")), "{chunks:?}");
    let moved: u64 = chunks.iter().map(|chunk| chunk["moved_bytes"].as_u64().unwrap()).sum();
    assert_eq!(plan["placement"]["moved_bytes_per_step"].as_u64(), Some(moved));
    run(0.05, &[]).refused(&["needs at least", "the smallest that would do is memory.device_budget_mb = "]);
    // A run with this placement resumes with it, and into any other.
    let given = auto(0.8);
    let given: Vec<&str> = given.iter().map(String::as_str).collect();
    let train = ["train", "small.toml", "--nproc", "2", "--set", "parallel.zero=3", "--run", "placed"];
    home.run(&[&train[..], &given].concat()).ok();
    assert_eq!(home.json("placed/plan.json")["arena_bytes"], plan["arena_bytes"]);
    let steps = ["train", "--run", "placed", "--resume", "--set", "train.steps=10"];
    home.run(&steps).ok();
    assert_eq!(home.json("placed/plan.json")["arena_bytes"], plan["arena_bytes"]);
}
