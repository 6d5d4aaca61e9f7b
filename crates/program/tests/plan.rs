//! `phalanx plan` shows a configuration, says whether it fits and what would make it fit.

mod rig;

use rig::Home;
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

#[test]
fn what_would_make_a_plan_fit_was_planned() {
    let home = Home::new();
    let plan = |more: &[&str]| {
        home.run(&[&["plan", "small.toml", "--nproc", "2", "--json"], more].concat()).ok().json()
    };
    let needed = |plan: &serde_json::Value| plan["verdict"]["needed_bytes"].as_u64().unwrap();
    let model = ["--set", "model.hidden=512", "--set", "model.heads=8"];
    let own = needed(&plan(&[&model[..], &["--device-memory", "1TiB"]].concat()));
    let limit = (own - 1).to_string();
    let told = plan(&[&model[..], &["--device-memory", &limit]].concat());
    assert_eq!(told["verdict"]["fits"], json!(false));
    let proposals = told["verdict"]["proposals"].as_array().unwrap();
    assert!(proposals.len() > 1, "{proposals:?}");
    for proposal in proposals {
        let set = proposal["set"].as_array().unwrap().iter().flat_map(|set| ["--set", set.as_str().unwrap()]);
        let changed = plan(&[&model[..], &["--device-memory", &limit], &set.collect::<Vec<_>>()].concat());
        assert_eq!(needed(&changed), proposal["needed_bytes"].as_u64().unwrap(), "{proposal}");
        assert_eq!(changed["verdict"]["fits"], proposal["fits"], "{proposal}");
    }
    let sets = |told: &serde_json::Value| told["verdict"]["proposals"].to_string();
    assert!(sets(&told).contains("memory.optimizer=host"), "{told}");
    // Twelve heads are divided among 2 or 4 ranks, not among 8.
    let heads = ["--set", "model.hidden=96", "--set", "model.heads=12", "--device-memory", "1"];
    let sets = sets(&plan(&heads));
    assert!(sets.contains("parallel.tensor=4") && !sets.contains("parallel.tensor=8"), "{sets}");
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
    let of = |most: bool| {
        let key = |size: &&serde_json::Value| size["chunks"].as_u64().unwrap();
        let one = if most { compared.iter().max_by_key(key) } else { compared.iter().min_by_key(key) };
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
