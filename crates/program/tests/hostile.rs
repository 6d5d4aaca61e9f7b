//! Hostile files in the place of every input of the program: each is an error within seconds that names file and
//! key, and nothing is made or changed.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::rig::Home;
use phalanx_testing::hostile::make_fifo;
use serde_json::{Value, json};

/// Maximum time of a refusal on a busy machine.
const SOON: Duration = Duration::from_secs(10);

fn golden(family: &str, name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden").join(family).join(name)
}

/// A copy of a golden folder, `hf`, with its configuration changed.
fn with_model(home: &Home, family: &str, changes: &[(&str, Value)]) {
    std::fs::create_dir_all(home.path("hf")).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(golden(family, "config.json")).unwrap()).unwrap();
    for (key, value) in changes {
        config[*key] = value.clone();
    }
    home.write("hf/config.json", config.to_string());
    home.write("hf/model.safetensors", std::fs::read(golden(family, "model.safetensors")).unwrap());
}

/// `import` and a run that starts from the folder refuse with all words; the latter names its key.
fn refused(home: &Home, words: &[&str]) {
    let start = Instant::now();
    home.run(&["import", "hf", "--run", "runs/imported"]).refused(words);
    let with_key = [words, &["model.init = \"hf\""]].concat();
    let sets = ["--set", "model.init=hf", "--run", "runs/started"];
    let small = ["train", "small.toml", "--set", "data.text=[]", "--set", "data.tokens=small.bin"];
    home.run(&[&small[..], &sets].concat()).refused(&with_key);
    assert!(start.elapsed() < 2 * SOON, "{:?}", start.elapsed());
    assert!(!home.path("runs/imported/checkpoints/step-0").exists());
}

/// A home with a token file of few ids, which any of the golden models can read.
fn home() -> Home {
    let home = Home::new();
    home.write("small.bin", (0..4000u16).flat_map(|at| (at % 60).to_le_bytes()).collect::<Vec<_>>());
    let config = String::from_utf8(home.read("small.toml")).unwrap();
    let without_shape = config.replace("layers = 2\nhidden = 32\nheads = 4\n", "");
    home.write("small.toml", without_shape.replace("text = [\"text.txt\"]", "tokens = \"small.bin\""));
    home
}

#[test]
fn a_sound_folder_is_imported_and_trained() {
    let home = home();
    for (family, run) in [("gpt2", "a"), ("bert", "b")] {
        with_model(&home, family, &[]);
        home.run(&["import", "hf", "--run", &format!("runs/{run}")]).ok();
    }
    with_model(&home, "gpt2", &[]);
    home.run(&["train", "small.toml", "--set", "model.init=hf", "--set", "train.steps=2"]).ok();
}

#[test]
fn layers_that_are_not_those_of_the_weights_are_refused_before_anything_is_built() {
    let home = home();
    for layers in [1u64, 3, 1_000_000, 1_000_000_000] {
        for (family, key) in [("gpt2", "n_layer"), ("bert", "num_hidden_layers")] {
            with_model(&home, family, &[(key, json!(layers))]);
            refused(&home, &["hf", key, &layers.to_string()]);
        }
    }
}

#[test]
fn configurations_that_contradict_the_weights_are_refused() {
    let home = home();
    let cases: [(&str, &str, Value, &[&str]); 5] = [
        ("gpt2", "vocab_size", json!(68), &["wte.weight", "[67, 32]", "[68, 32]"]),
        ("gpt2", "n_positions", json!(17), &["wpe.weight", "[16, 32]"]),
        ("gpt2", "n_embd", json!(1u64 << 18), &["shape", "262144"]),
        ("gpt2", "n_embd", json!(1u64 << 40), &["n_embd is 1099511627776", "262144"]),
        ("bert", "intermediate_size", json!(65), &["intermediate.dense", "[65, 32]"]),
    ];
    for (family, key, value, words) in cases {
        with_model(&home, family, &[(key, value)]);
        refused(&home, words);
    }
}

/// The golden weights with a changed header, and `more` additional bytes of data.
fn with_header(home: &Home, change: impl FnOnce(&mut Value, usize), more: &[u8]) {
    let file = std::fs::read(golden("gpt2", "model.safetensors")).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    change(&mut header, file.len() - 8 - length);
    let json = header.to_string();
    let bytes = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &file[8 + length..], more].concat();
    home.write("hf/model.safetensors", bytes);
}

#[test]
fn weights_that_would_be_lost_or_are_no_numbers_are_refused_by_name() {
    let home = home();
    with_model(&home, "gpt2", &[]);
    let extra = |name: &'static str| {
        move |header: &mut Value, end: usize| {
            header[name] = json!({ "dtype": "F32", "shape": [1], "data_offsets": [end, end + 4] });
        }
    };
    with_header(&home, extra("transformer.h.1.crossattention.c_attn.bias"), &[0; 4]);
    refused(&home, &["transformer.h.1.crossattention.c_attn.bias", "would be lost"]);
    let twice = |header: &mut Value, end: usize| {
        header["lm_head.weight"] =
            json!({ "dtype": "F32", "shape": [67, 32], "data_offsets": [end, end + 67 * 32 * 4] });
    };
    with_header(&home, twice, &[0; 67 * 32 * 4]);
    refused(&home, &["transformer.wte.weight", "lm_head.weight", "element"]);
    let integers = |header: &mut Value, _: usize| header["transformer.ln_f.bias"]["dtype"] = json!("I32");
    with_header(&home, integers, &[]);
    refused(&home, &["transformer.ln_f.bias is I32", "F32"]);

    let file = std::fs::read(golden("gpt2", "model.safetensors")).unwrap();
    let at = file.len() - 4;
    for value in [f32::NAN, f32::INFINITY] {
        home.write("hf/model.safetensors", [&file[..at], &value.to_le_bytes()].concat());
        refused(&home, &["element 2143 of transformer.wte.weight", "must be finite"]);
    }
}

#[test]
fn inputs_that_are_no_regular_files_are_refused_at_once() {
    let home = home();
    with_model(&home, "gpt2", &[]);
    home.run(&["train", "small.toml", "--set", "model.init=hf", "--set", "train.steps=2"]).ok();
    make_fifo(&home.path("fifo"));
    symlink("/dev/zero", home.path("zero")).unwrap();
    for (file, what) in [("fifo", "a FIFO"), ("zero", "a device")] {
        let schedule = format!("parallel.schedule={file}");
        let tokenizer = format!("./{file}");
        let cases: [(&[&str], &str); 6] = [
            (&["plan", file], what),
            (&["train", file], what),
            (&["plan", "small.toml", "--set", &schedule], what),
            (&["plan", "--schedule", file], what),
            (&["tokenize", "text.txt", "--tokenizer", &tokenizer, "--out", "out.bin"], what),
            (&["tokenize", file, "--tokenizer", "byte", "--out", "out.bin"], "neither a file nor a folder"),
        ];
        for (args, what) in cases {
            let start = Instant::now();
            home.run(args).refused(&[what, file]);
            assert!(start.elapsed() < SOON, "{args:?}: {:?}", start.elapsed());
        }
        for name in ["config.json", "model.safetensors"] {
            let sound = home.read(&format!("hf/{name}"));
            let path = home.path(&format!("hf/{name}"));
            std::fs::remove_file(&path).unwrap();
            symlink(home.path(file), &path).unwrap();
            refused(&home, &[name, what]);
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, sound).unwrap();
        }
        // What a run left: metrics and manifest.
        for name in ["metrics.jsonl", "checkpoints/step-2/manifest.json"] {
            let path = home.path(&format!("runs/small/{name}"));
            let sound = std::fs::read(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            symlink(home.path(file), &path).unwrap();
            let ended = home.run(&["inspect", "runs/small", "--verify"]);
            ended.refused(&[name.rsplit('/').next().unwrap(), what]);
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, sound).unwrap();
        }
    }
}

/// A manifest with a correct checksum.
fn write_manifest(home: &Home, manifest: &Value) {
    let text = serde_json::to_string_pretty(manifest).unwrap();
    let rest = text.strip_prefix("{\n").unwrap();
    let checksum = blake3::hash(rest.as_bytes()).to_hex();
    home.write(
        "runs/small/checkpoints/step-2/manifest.json",
        format!("{{\n  \"blake3\": \"{checksum}\",\n{rest}\n"),
    );
}

#[test]
fn a_manifest_with_a_right_checksum_and_an_impossible_state_is_refused_by_file_and_field() {
    let home = home();
    with_model(&home, "gpt2", &[]);
    home.run(&["train", "small.toml", "--set", "model.init=hf", "--set", "train.steps=2"]).ok();
    let path = "runs/small/checkpoints/step-2/manifest.json";
    let mut original: Value = serde_json::from_slice(&home.read(path)).unwrap();
    original.as_object_mut().unwrap().remove("blake3");
    let updates = |applied: Value, skipped: Value, loss_scale: Value| json!({ "applied": applied, "skipped": skipped, "loss_scale": loss_scale });
    let scale = |scale: f64, iteration: i64| json!({ "kind": "dynamic", "scale": scale, "iteration": iteration, "last_overflow": -1, "hysteresis": 1 });
    let off = json!({ "kind": "off" });
    let cases: [(&str, Value, &str); 12] = [
        ("step", json!(-1), "state.step"),
        ("step", json!(3), "state.step"),
        ("step", json!("2"), "state.step"),
        ("samples", json!(1.5), "state.samples"),
        ("samples", Value::Null, "state.samples"),
        ("samples", json!(u64::MAX), "state.samples"),
        ("updates", json!("NaN"), "state.updates"),
        ("updates", updates(json!(u64::MAX), json!(3), off.clone()), "state.updates"),
        ("updates", updates(json!(1.0), json!(1), off.clone()), "state.updates"),
        ("updates", updates(json!(2), json!(0), scale(-1.0, 2)), "state.updates.loss_scale"),
        ("updates", updates(json!(2), json!(0), scale(1.0, i64::MAX)), "state.updates.loss_scale"),
        ("model", json!({ "model_type": "gpt2" }), "n_embd"),
    ];
    let resume =
        ["train", "--run", "runs/small", "--resume", "--set", "train.steps=3", "--set", "model.init=hf"];
    for (key, value, field) in cases {
        let mut changed = original.clone();
        changed["state"][key] = value.clone();
        write_manifest(&home, &changed);
        let ended = home.run(&resume[..6]);
        assert!(!ended.stderr.contains("panicked"), "{key} = {value}: {}", ended.stderr);
        ended.refused(&["step-2", field]);
    }
    // Types and layers that are not the model's.
    home.write("runs/small/tokenizer.json", "{\"kind\":\"byte\"}");
    let mut changed = original.clone();
    changed["state"]["model"]["n_layer"] = json!(1_000_000_000);
    write_manifest(&home, &changed);
    for args in [
        &["sample", "runs/small", "--prompt", "a"][..],
        &["export", "runs/small", "--out", "out"],
        &resume[..6],
    ] {
        let start = Instant::now();
        home.run(args).refused(&["step-2", "n_layer is 1000000000"]);
        assert!(start.elapsed() < SOON, "{args:?}: {:?}", start.elapsed());
    }
    let mut changed = original;
    for tensor in changed["tensors"].as_array_mut().unwrap() {
        tensor["dtype"] = json!("u32");
    }
    write_manifest(&home, &changed);
    for args in [
        &["sample", "runs/small", "--prompt", "a"][..],
        &["export", "runs/small", "--out", "out"],
        &resume[..6],
    ] {
        home.run(args).refused(&["step-2", "u32", "f32"]);
    }
}
