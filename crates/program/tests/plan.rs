//! `phalanx plan` shows a configuration and refuses what does not fit.

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

#[test]
fn more_than_the_memory_is_refused_with_the_bytes() {
    let home = Home::new();
    let large = ["--set", "model.hidden=16384", "--set", "model.heads=16", "--set", "model.layers=200"];
    let args = |more: &[&'static str]| [&["plan", "small.toml", "--nproc", "2"], more].concat();
    home.run(&args(&large)).refused(&["2 rank(s) need", "bytes", "available", "parallel.zero=3"]);
    home.run(&args(&["--set", "memory.limit_mb=1"])).refused(&["memory.limit_mb", "1048576", "a rank needs"]);
    let mut train = args(&large);
    train[0] = "train";
    home.run(&train).refused(&["available"]);
    assert!(!home.path("runs/small").exists());
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
    ] {
        let path = examples.join(name).display().to_string();
        let plan =
            home.run(&[&["plan", &path, "--json", "--set", "memory.limit_mb=1e6"], data].concat()).json();
        assert!(plan["parameters"].as_u64().unwrap() > 100_000, "{name}");
    }
}
