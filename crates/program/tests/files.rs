//! Models and tokens in and out: import, export, inspect, tokenize, sample.

mod rig;

use rig::Home;
use serde_json::json;

#[test]
fn export_and_import_keep_every_bit() {
    let home = Home::new();
    let sets = ["--set", "parallel.zero=3", "--set", "model.attention_dropout=0.1"];
    home.run(&[&["train", "small.toml", "--run", "r", "--nproc", "2", "--quiet"], &sets[..]].concat()).ok();
    home.run(&["export", "r", "--out", "a"]).ok();
    let config = home.json("a/config.json");
    assert_eq!((&config["attn_pdrop"], &config["resid_pdrop"]), (&json!(0.1), &json!(0.0)));
    home.run(&["export", "r", "--out", "b"]).ok();
    assert_eq!(home.read("a/model.safetensors"), home.read("b/model.safetensors"));
    home.run(&["import", "a"]).ok();
    home.run(&["export", "runs/a", "--out", "c"]).ok();
    assert_eq!(home.read("a/model.safetensors"), home.read("c/model.safetensors"));
    assert_eq!(home.json("a/config.json"), home.json("c/config.json"));
    home.run(&["export", "r", "--step", "4", "--out", "d"]).ok();
    assert_ne!(home.read("a/model.safetensors"), home.read("d/model.safetensors"));
    home.run(&["export", "r", "--step", "5", "--out", "e"]).refused(&["step-5"]);
}

#[test]
fn an_imported_model_trains_on() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    home.run(&["export", "r", "--out", "hf"]).ok();
    home.run(&["import", "hf", "--run", "i"]).ok();
    home.run(&["train", "small.toml", "--run", "i", "--resume", "--quiet"]).ok();
    // The same weights through `model.init`, in a configuration without model sizes.
    home.write(
        "init.toml",
        "[model]\ninit = \"hf\"\n[data]\ntext = [\"text.txt\"]\n[schedule]\nkind = \"constant\"\n\
        [optimizer]\nlr = 1e-2\n[train]\nsteps = 8\neval_samples = 8\nthreads = 1\n",
    );
    home.run(&["train", "init.toml", "--nproc", "2", "--quiet"]).ok();
    let (resumed, started) = (home.losses("i"), home.losses("runs/init"));
    let loss = |losses: &[(u64, String, String)]| losses[0].1.parse::<f64>().unwrap();
    assert!((loss(&resumed) - loss(&started)).abs() < 1e-5, "{resumed:?} {started:?}");
    home.run(&["plan", "init.toml", "--set", "model.layers=3"]).refused(&["model.layers = 3", "n_layer = 2"]);
    home.run(&["plan", "init.toml", "--set", "model.seq=99"])
        .refused(&["model.seq = 99", "n_positions = 16"]);
}

#[test]
fn another_architecture_is_not_imported() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    home.run(&["export", "r", "--out", "hf"]).ok();
    let mut config = home.json("hf/config.json");
    config["model_type"] = json!("llama");
    home.write("hf/config.json", config.to_string());
    home.run(&["import", "hf", "--run", "i"]).refused(&["llama", "gpt2", "hf"]);
    config["model_type"] = json!("gpt2");
    config["n_embd"] = json!(64);
    home.write("hf/config.json", config.to_string());
    home.run(&["import", "hf", "--run", "i"]).refused(&["shape", "[256, 32]", "[256, 64]"]);
    home.run(&["import", "nowhere", "--run", "i"]).refused(&["nowhere", "no such folder"]);
    assert!(!home.path("i").exists());
}

#[test]
fn inspect_knows_what_it_looks_at() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    home.run(&["export", "r", "--out", "hf"]).ok();
    for (path, kind) in
        [("r/checkpoints/step-8", "checkpoint"), ("hf", "hugging_face"), ("r/tokens.bin", "tokens")]
    {
        for verify in [false, true] {
            let args = ["inspect", path, "--json", "--verify"];
            let json = home.run(&args[..3 + usize::from(verify)]).ok().json();
            assert_eq!(json["kind"], json!(kind));
        }
        home.run(&["inspect", path, "--verify"]).ok();
    }
    let run = home.run(&["inspect", "r", "--json", "--verify"]).ok().json();
    assert_eq!(run["kind"], json!("run"));
    let checkpoint = &run["checkpoint"];
    assert_eq!(
        (&checkpoint["step"], &checkpoint["states"]["parameters"]["tensors"]),
        (&json!(8), &json!(28))
    );
    assert_eq!(checkpoint["verified"].as_array().unwrap().len(), 3 * 28);
    home.run(&["inspect", "nothing"]).refused(&["nothing"]);
    home.run(&["inspect", "."]).refused(&["neither a run folder"]);
}

#[test]
fn damage_names_the_tensor() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    let file = "r/checkpoints/step-8/rank-00000.safetensors";
    let whole = home.read(file);
    let mut flipped = whole.clone();
    let at = flipped.len() - 1000;
    flipped[at] ^= 1;
    home.write(file, &flipped);
    home.run(&["inspect", "r", "--verify"]).refused(&["is damaged", "exp_avg_sq/"]);
    let resume = ["train", "--run", "r", "--resume", "--set", "train.steps=12"];
    for nproc in ["1", "2"] {
        home.run(&[&resume[..], &["--nproc", nproc]].concat()).refused(&[
            "is damaged",
            "exp_avg_sq/",
            "step-8",
        ]);
    }
    // A file that is too short is detected at once: the run continues from the previous checkpoint.
    home.write(file, &whole[..whole.len() - 1]);
    let ended = home.run(&resume).ok();
    assert!(
        ended.stderr.contains("skipping") && ended.stderr.contains("resuming from step 4"),
        "{}",
        ended.stderr
    );
}

#[test]
fn token_files_are_made_and_trained_on() {
    let home = Home::new();
    for tokenizer in ["byte", "char"] {
        let (out, run) = (format!("{tokenizer}.bin"), format!("run-{tokenizer}"));
        let made = home
            .run(&["tokenize", "--tokenizer", tokenizer, "--out", &out, "text.txt", "--json"])
            .ok()
            .json();
        assert_eq!(rig::value(&made, "tokens"), rig::value(&made, "text_bytes"));
        let tokens = format!("data.tokens={out}");
        let text = String::from_utf8(home.read("small.toml")).unwrap().replace("text = [\"text.txt\"]\n", "");
        home.write("tokens.toml", text);
        home.run(&["train", "tokens.toml", "--set", &tokens, "--run", &run, "--quiet"]).ok();
        home.run(&["sample", &run, "--prompt", "rank", "--tokens", "5"]).ok();
    }
}

#[test]
fn samples_depend_on_the_seed_alone() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    let sample = |more: &[&str]| {
        let base = ["sample", "r", "--prompt", "rank ", "--tokens", "20"];
        home.run(&[&base[..], more].concat()).ok().stdout
    };
    assert_eq!(sample(&["--seed", "3"]), sample(&["--seed", "3"]));
    assert_eq!(sample(&["--temperature", "0"]), sample(&["--temperature", "0", "--seed", "9"]));
    assert!(sample(&[]).starts_with("rank "));
    let json: serde_json::Value = serde_json::from_str(&sample(&["--json"])).unwrap();
    assert_eq!(json["tokens"].as_array().unwrap().len(), 20);
    home.run(&["sample", "nowhere", "--prompt", "x"]).refused(&["nowhere", "no checkpoint"]);
    home.run(&["sample", "r", "--prompt", ""]).refused(&["--prompt is empty"]);
}
