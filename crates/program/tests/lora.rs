//! `[lora]` from end to end: what is planned, trained, resumed, exported as PEFT has it and merged, started from, and refused.

use serde_json::json;

use crate::rig::Home;

/// A folder of a model, and a run of adapters beside it.
fn tuned(more: &[&str]) -> Home {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "base", "--quiet", "--set", "train.steps=2"]).ok();
    home.run(&["export", "base", "--out", "hf"]).ok();
    train(&home, &[&["--run", "r", "--set", "lora.rank=2", "--set", "lora.alpha=4"], more].concat()).ok();
    home
}

fn train(home: &Home, more: &[&str]) -> crate::rig::Ended {
    home.run(&[&["train", "small.toml", "--quiet", "--set", "model.init=hf"], more].concat())
}

/// The loss of the first step of a run that starts from a folder.
fn first_loss(home: &Home, run: &str, more: &[&str]) -> f64 {
    home.run(&[&["train", "small.toml", "--quiet", "--run", run, "--set", "train.steps=1"], more].concat())
        .ok();
    home.losses(run)[0].1.parse().unwrap()
}

#[test]
fn a_run_is_resumed_and_exported_as_an_adapter_and_merged() {
    let home = tuned(&["--set", "train.steps=3", "--nproc", "2"]);
    let rest = ["--resume", "--set", "train.steps=6", "--set", "parallel.zero=3", "--quiet"];
    home.run(&[&["train", "--run", "r"], &rest[..]].concat()).ok();
    train(
        &home,
        &[
            "--run",
            "whole",
            "--set",
            "lora.rank=2",
            "--set",
            "lora.alpha=4",
            "--set",
            "train.steps=6",
            "--nproc",
            "2",
        ],
    )
    .ok();
    assert_eq!(home.losses("r"), home.losses("whole"));
    // Its checkpoints have the adapters alone, and name the base.
    let shown = home.run(&["inspect", "r/checkpoints/step-6", "--json"]).ok().json();
    let names: Vec<&str> =
        shown["tensors"].as_array().unwrap().iter().map(|tensor| tensor["name"].as_str().unwrap()).collect();
    assert!(names.iter().all(|name| name.contains(".lora_")), "{names:?}");
    home.run(&["train", "--run", "r", "--resume", "--set", "lora.rank=3"])
        .refused(&["lora.rank = 3", "the run has 2"]);

    let written = home.run(&["export", "r", "--out", "adapter", "--json"]).ok().json();
    let files = json!(["adapter_config.json", "README.md"]);
    assert_eq!((&written["adapter"], &written["files"]), (&json!(true), &files));
    let config = home.json("adapter/adapter_config.json");
    for (key, value) in [
        ("peft_type", json!("LORA")),
        ("r", json!(2)),
        ("lora_alpha", json!(4.0)),
        ("target_modules", json!(["c_attn", "c_fc", "c_proj"])),
        ("fan_in_fan_out", json!(true)),
        ("use_rslora", json!(false)),
        ("base_model_name_or_path", json!(home.path("hf").display().to_string())),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    home.run(&["export", "r", "--out", "merged", "--merge"]).ok();
    assert_eq!(home.json("merged/config.json"), home.json("hf/config.json"));

    // The adapter beside its base computes what the merged model does, and another thing than the base.
    let adapter = ["--set", "model.init=hf", "--set", "lora.adapter=adapter"];
    let adapted = first_loss(&home, "a", &adapter);
    let merged = first_loss(&home, "m", &["--set", "model.init=merged"]);
    let base = first_loss(&home, "b", &["--set", "model.init=hf"]);
    assert!((adapted - merged).abs() < 1e-5 && (adapted - base).abs() > 1e-3, "{adapted} {merged} {base}");
    // Saved without a step, it is the same file.
    let zero = ["--set", "optimizer.lr=0", "--set", "schedule.min_lr=0"];
    first_loss(&home, "same", &[&adapter[..], &zero].concat());
    home.run(&["export", "same", "--out", "again"]).ok();
    assert_eq!(home.read("again/adapter_model.safetensors"), home.read("adapter/adapter_model.safetensors"));

    // Greedy texts of the run and of the merged model.
    home.run(&["import", "merged", "--run", "i"]).ok();
    let text = |run: &str| {
        home.run(&["sample", run, "--prompt", "chunk ", "--tokens", "24", "--temperature", "0", "--json"])
            .ok()
            .json()["text"]
            .clone()
    };
    assert_eq!(text("r"), text("i"));
    home.run(&["export", "r", "--out", "r.gguf", "--format", "gguf", "--merge"]).ok();
    home.run(&["export", "i", "--out", "i.gguf", "--format", "gguf"]).ok();
    assert!(home.read("r.gguf") == home.read("i.gguf"));
}

/// Magnitudes are part of the adapter; one that starts as a part of the base is written for the whole base, of twice the rank. Both begin as
/// the base, go on after a resume, and compute beside it what the merged model does.
#[test]
fn magnitudes_and_principal_parts_are_exported_as_peft_has_them() {
    for (key, rank, alpha) in [("lora.dora=true", 2, 4.0), ("lora.init=pissa", 4, 8.0)] {
        let home = tuned(&["--set", "train.steps=3", "--nproc", "2", "--set", key]);
        home.run(&[
            "train",
            "--run",
            "r",
            "--resume",
            "--set",
            "train.steps=6",
            "--set",
            "parallel.zero=3",
            "--quiet",
        ])
        .ok();
        let lora = ["--set", "lora.rank=2", "--set", "lora.alpha=4", "--set", key];
        train(&home, &[&["--run", "whole", "--nproc", "2", "--set", "train.steps=6"], &lora[..]].concat())
            .ok();
        assert_eq!(home.losses("r"), home.losses("whole"), "{key}");
        let begun = first_loss(&home, "begun", &[&["--set", "model.init=hf"], &lora[..]].concat());
        let base = first_loss(&home, "b", &["--set", "model.init=hf"]);
        assert!((begun - base).abs() < 1e-5, "{key}: {begun} and {base}");

        home.run(&["export", "r", "--out", "adapter"]).ok();
        home.run(&["export", "r", "--out", "merged", "--merge"]).ok();
        let config = home.json("adapter/adapter_config.json");
        assert_eq!((&config["r"], &config["lora_alpha"]), (&json!(rank), &json!(alpha)), "{key}");
        assert_eq!(config["use_dora"], json!(key.contains("dora")), "{key}");
        let adapted = first_loss(&home, "a", &["--set", "model.init=hf", "--set", "lora.adapter=adapter"]);
        let merged = first_loss(&home, "m", &["--set", "model.init=merged"]);
        assert!(
            (adapted - merged).abs() < 1e-5 && (adapted - base).abs() > 1e-3,
            "{key}: {adapted} {merged} {base}"
        );
    }
}

/// A token that the folder's tokenizer lacks gets an id and a row, which is trained beside the base, resumed, exported with the adapter and
/// merged; with all weights, too.
#[test]
fn new_tokens_are_trained_and_exported() {
    let home = Home::new();
    let sets = ["--set", "data.tokenizer=char", "--set", "train.steps=2"];
    home.run(&[&["train", "small.toml", "--run", "base", "--quiet"], &sets[..]].concat()).ok();
    home.run(&["export", "base", "--out", "hf"]).ok();
    let rows = home.json("hf/config.json")["vocab_size"].as_u64().unwrap();
    let text = String::from_utf8(home.read("text.txt")).unwrap().replace('\n', "<tool>\n");
    home.write("tool.txt", text);
    let token = ["--set", "model.add_tokens=[\"<tool>\"]", "--data", "tool.txt"];
    let lora = [&token[..], &["--set", "lora.rank=2", "--set", "lora.alpha=4"]].concat();
    train(&home, &[&["--run", "r", "--nproc", "2", "--set", "train.steps=3"], &lora[..]].concat()).ok();
    home.run(&[
        "train",
        "--run",
        "r",
        "--resume",
        "--set",
        "train.steps=6",
        "--set",
        "parallel.zero=3",
        "--quiet",
    ])
    .ok();
    train(&home, &[&["--run", "whole", "--nproc", "2", "--set", "train.steps=6"], &lora[..]].concat()).ok();
    assert_eq!(home.losses("r"), home.losses("whole"));
    let shown = home.run(&["inspect", "r/checkpoints/step-6", "--json"]).ok().json();
    let tensors = shown["tensors"].as_array().unwrap();
    let is_row = |tensor: &&serde_json::Value| tensor["name"] == "transformer.wte.added.weight";
    assert_eq!(tensors.iter().find(is_row).unwrap()["shape"], json!([1, 32]));
    assert!(tensors.iter().all(|tensor| tensor["name"] != "transformer.wte.weight"));

    home.run(&["export", "r", "--out", "adapter"]).ok();
    let config = home.json("adapter/adapter_config.json");
    assert_eq!(config["trainable_token_indices"], json!({ "wte": [rows] }));
    assert_eq!(home.json("adapter/tokenizer_config.json")["additional_special_tokens"], json!(["<tool>"]));
    home.run(&["export", "r", "--out", "merged", "--merge"]).ok();
    assert_eq!(home.json("merged/config.json")["vocab_size"], json!(rows + 1));
    let adapter = ["--set", "model.init=hf", "--set", "lora.adapter=adapter"];
    let adapted = first_loss(&home, "a", &[&adapter[..], &token].concat());
    let merged = first_loss(&home, "m", &["--set", "model.init=merged", "--data", "tool.txt"]);
    let begun = first_loss(&home, "b", &[&["--set", "model.init=hf"], &token[..]].concat());
    assert!((adapted - merged).abs() < 1e-5 && (adapted - begun).abs() > 1e-3, "{adapted} {merged} {begun}");
    let sampled = ["sample", "r", "--prompt", "rank<tool>", "--tokens", "8", "--temperature", "0", "--json"];
    home.run(&["import", "merged", "--run", "i"]).ok();
    let of_merged = [&["sample", "i"], &sampled[2..]].concat();
    assert_eq!(home.run(&sampled).ok().json()["text"], home.run(&of_merged).ok().json()["text"]);

    let refused = |sets: &[&str], words: &[&str]| {
        home.run(&[&["plan", "small.toml"], sets].concat()).refused(words);
    };
    refused(&["--set", "model.add_tokens=[\"<tool>\"]"], &["model.add_tokens", "model.init"]);
    refused(
        &["--set", "model.init=hf", "--set", "model.add_tokens=[\"r\"]"],
        &["model.add_tokens", "in the vocabulary already"],
    );
    let rows_of_all = format!("lora.new_rows={rows}");
    refused(
        &["--set", "model.init=hf", "--set", "lora.rank=2", "--set", &rows_of_all],
        &["lora.new_rows", "stay frozen"],
    );
}

#[test]
fn a_run_needs_the_base_that_it_began_with() {
    let home = tuned(&["--set", "train.steps=1"]);
    home.run(&["train", "small.toml", "--run", "other", "--quiet", "--set", "train.steps=3"]).ok();
    home.run(&["export", "other", "--out", "else"]).ok();
    let sample = ["sample", "r", "--prompt", "chunk ", "--tokens", "2"];
    let resume = ["train", "--run", "r", "--resume", "--set", "train.steps=2", "--quiet"];
    let text = home.run(&sample).ok().stdout;
    std::fs::rename(home.path("hf"), home.path("kept")).unwrap();
    home.run(&resume).refused(&["model.init", "there is no such folder"]);
    home.run(&sample).refused(&["model.init", "there is no such folder"]);
    // The adapter alone needs no base.
    home.run(&["export", "r", "--out", "adapter"]).ok();
    home.copy("else", "hf");
    for args in [&resume[..], &sample[..], &["export", "r", "--out", "m", "--merge"]] {
        home.run(args).refused(&["model.init", "not the base of the adapters of", "step-1"]);
    }
    home.run(&[&resume[..], &["--set", "model.init=kept"]].concat()).ok();
    home.copy("kept", "hf");
    assert_eq!(home.run(&[&sample[..], &["--step", "1"]].concat()).ok().stdout, text);
    // Without a folder the base is that of the seed.
    home.run(&[
        "train",
        "small.toml",
        "--run",
        "s",
        "--quiet",
        "--set",
        "lora.rank=2",
        "--set",
        "train.steps=1",
    ])
    .ok();
    let more = ["train", "--run", "s", "--resume", "--set", "train.steps=2", "--quiet"];
    home.run(&[&more[..], &["--set", "train.seed=7"]].concat()).refused(&["train.seed = 7", "seed 1"]);
    home.run(&more).ok();
}

#[test]
fn a_quantised_base_is_trained_beside_resumed_sampled_and_merged() {
    let home = Home::new();
    // Weights of whole blocks.
    let wide = ["--quiet", "--set", "model.hidden=64"];
    home.run(&[&["train", "small.toml", "--run", "base", "--set", "train.steps=2"], &wide[..]].concat()).ok();
    home.run(&["export", "base", "--out", "hf"]).ok();
    let adapters =
        ["--set", "model.hidden=64", "--set", "lora.rank=2", "--set", "lora.base=nf4", "--nproc", "2"];
    let tuned = |run: &str, steps: &str| {
        train(&home, &[&["--run", run, "--set", steps], &adapters[..]].concat()).ok();
    };
    tuned("r", "train.steps=3");
    let rest = ["--resume", "--quiet", "--set", "train.steps=6"];
    home.run(&[&["train", "--run", "r", "--set", "parallel.zero=3"], &rest[..]].concat()).ok();
    tuned("whole", "train.steps=6");
    assert_eq!(home.losses("r"), home.losses("whole"));
    home.run(&[&["train", "--run", "r", "--set", "lora.base=q8_0"], &rest[..]].concat())
        .refused(&["lora.base = \"q8_0\"", "the run has \"nf4\""]);

    home.run(&["export", "r", "--out", "merged", "--merge"]).ok();
    home.run(&["import", "merged", "--run", "i"]).ok();
    let text = |run: &str| {
        home.run(&["sample", run, "--prompt", "chunk ", "--tokens", "24", "--temperature", "0"]).ok().stdout
    };
    assert_eq!(text("r"), text("i"));
    home.run(&["plan", "small.toml", "--set", "lora.base=nf4"]).refused(&["lora.base", "lora.rank"]);
    let plan =
        home.run(&[&["plan", "small.toml", "--set", "model.init=hf"], &adapters[..]].concat()).ok().stdout;
    assert!(plan.contains("beside 8 linear weights in nf4\n"), "{plan}");
}

#[test]
fn a_published_size_is_planned_without_a_configuration() {
    let home = Home::new();
    let plan = |more: &[&str]| home.run(&[&["plan", "--size", "llama3.2-1b", "--json"], more].concat());
    let of = |more: &[&str]| plan(more).ok().json();
    let fits = |plan: &serde_json::Value| plan["verdict"]["fits"].as_bool().unwrap();
    let quantised =
        ["--lora", "16", "--base", "nf4", "--gpus", "1x8GiB", "--set", "memory.checkpointing=selective"];
    let small = of(&quantised);
    assert!(fits(&small), "{}", small["verdict"]);
    assert!(!fits(&of(&["--gpus", "1x8GiB"])));
    assert_eq!(of(&["--gpus", "2x80GiB"])["layout"]["ranks"], json!(2));
    plan(&["--set", "model.seq=512"]).ok();
    assert_eq!(plan(&["--base", "nf4"]).code, Some(2));
    assert_eq!(plan(&["small.toml"]).code, Some(2));
    home.run(&["plan", "--size", "llama4"]).refused(&["--size llama4", "no published size"]);
    plan(&["--lora", "16", "--base", "nf5"]).refused(&["lora.base", "nf4"]);
}

#[test]
fn a_plan_has_adapters_and_counts_them_apart() {
    let home = Home::new();
    let plan = |more: &[&str]| home.run(&[&["plan", "small.toml", "--json"], more].concat()).ok().json();
    let (all, adapters) = (plan(&[]), plan(&["--set", "lora.rank=2", "--set", "lora.targets=c_attn"]));
    let count = |plan: &serde_json::Value, key: &str| plan[key].as_u64().unwrap();
    let trained = count(&adapters, "trained_parameters");
    assert_eq!(count(&adapters, "parameters"), count(&all, "parameters") + trained);
    assert!(adapters["arena_bytes"][0].as_u64().unwrap() < all["arena_bytes"][0].as_u64().unwrap());
}

#[test]
fn what_is_no_such_adapter_is_refused() {
    let home = tuned(&["--set", "train.steps=1", "--set", "lora.targets=[\"c_attn\"]"]);
    home.run(&["export", "base", "--out", "m", "--merge"]).refused(&["--merge", "no adapters"]);
    home.run(&["export", "r", "--out", "m", "--dtype", "bf16"]).refused(&["--dtype bf16", "--merge"]);
    home.run(&["export", "r", "--out", "m.gguf", "--format", "gguf"]).refused(&["--format gguf", "--merge"]);
    home.run(&["export", "r", "--out", "adapter"]).ok();
    home.run(&["export", "r", "--out", "adapter"]).refused(&["holds files", "--force"]);
    home.run(&["train", "small.toml", "--set", "model.init=adapter"]).refused(&[
        "model.init",
        "adapter_config.json",
        "lora.adapter",
    ]);
    let from = |more: &[&str]| {
        let sets = ["plan", "small.toml", "--set", "model.init=hf", "--set", "lora.adapter=adapter"];
        home.run(&[&sets[..], more].concat())
    };
    from(&[]).ok();
    from(&["--set", "lora.rank=3"]).refused(&["lora.rank is given", "r = 2"]);
    home.run(&["plan", "small.toml", "--set", "lora.adapter=adapter"])
        .refused(&["lora.adapter", "model.init"]);
    let config = String::from_utf8(home.read("adapter/adapter_config.json")).unwrap();
    let changed = |from_text: &str, to: &str, words: &[&str]| {
        assert!(config.contains(from_text), "{config}");
        home.write("adapter/adapter_config.json", config.replace(from_text, to));
        from(&[]).refused(words);
    };
    changed("\"bias\": \"none\"", "\"bias\": \"all\"", &["bias is \"all\"", "no such thing"]);
    changed("\"use_dora\": false", "\"use_dora\": true", &["it has no ", "c_attn.lora_magnitude_vector"]);
    changed("\"use_rslora\": false", "\"rank_pattern\": {\"h\": 2}", &["rank_pattern is"]);
    changed("\"LORA\"", "\"IA3\"", &["peft_type is \"IA3\""]);
    changed("\"c_attn\"", "\"c_fc\"", &["it has no ", "c_fc.lora_A.weight"]);
    changed("\"r\": 2", "\"r\": 0", &["r is 0", "a rank"]);
    home.write("adapter/adapter_config.json", config.replace("\"r\": 2", "\"r\": 4"));
    home.run(&[
        "train",
        "small.toml",
        "--set",
        "model.init=hf",
        "--set",
        "lora.adapter=adapter",
        "--set",
        "train.steps=1",
    ])
    .refused(&["lora_A.weight", "[2, "]);
}
