//! Models and tokens in and out: import, export, inspect, tokenize, sample.

use crate::rig;
use crate::rig::Home;
use serde_json::{Value, json};

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

/// Edits the header of a safetensors file, which may get longer or shorter.
fn edit_header(home: &Home, file: &str, edit: impl Fn(String) -> String) {
    let bytes = home.read(file);
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = edit(String::from_utf8(bytes[8..8 + length].to_vec()).unwrap());
    home.write(
        file,
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]].concat(),
    );
}

/// Files of other programs for the same weights are imported with the same numbers, and guesses are reported.
#[test]
#[allow(clippy::too_many_lines, reason = "a list of cases")]
fn variants_of_transformers_files_are_imported_and_said() {
    let home = Home::new();
    for arch in ["gpt2", "bert", "phi3"] {
        let arch_key = format!("model.arch={arch}");
        let sets = ["--set", &arch_key, "--set", "train.steps=1"];
        home.run(&[&["train", "small.toml", "--run", arch, "--quiet"], &sets[..]].concat()).ok();
        home.run(&["export", arch, "--out", &format!("{arch}-hf")]).ok();
    }
    type Edit = fn(String) -> String;
    let fused = String::from_utf8_lossy(&home.read("phi3-hf/model.safetensors")[8..])
        .contains("0.self_attn.qkv_proj.weight");
    assert!(fused, "query, key and value are one tensor");
    let cases: [(&str, Edit, &str); 6] = [
        ("phi3", |header| header, ""),
        ("gpt2", |header| header.replace("\"transformer.", "\""), ""),
        (
            "gpt2",
            |header| header.replace("\"transformer.", "\"module.transformer."),
            "module. stripped from the names",
        ),
        (
            "gpt2",
            |header| header.replace("\"transformer.", "\"_orig_mod.module.transformer."),
            "_orig_mod. and module.",
        ),
        ("bert", |header| header.replace("\"bert.", "\""), ""),
        ("bert", |header| header.replace("\"bert.", "\"module.bert."), "module. stripped"),
    ];
    for (number, (arch, edit, said)) in cases.into_iter().enumerate() {
        let [source, run, out] = ["s", "i", "o"].map(|name| format!("{name}{number}"));
        home.copy(&format!("{arch}-hf"), &source);
        edit_header(&home, &format!("{source}/model.safetensors"), edit);
        let ended = home.run(&["import", &source, "--run", &run]).ok();
        assert!(
            ended.stdout.contains(said) && (said.is_empty() != ended.stdout.contains("stripped")),
            "{}",
            ended.stdout
        );
        home.run(&["export", &run, "--out", &out]).ok();
        let file = |folder: &str| home.read(&format!("{folder}/model.safetensors"));
        assert!(file(&out) == file(&format!("{arch}-hf")), "case {number}");
    }
    // The dropout of a folder is not that of the run.
    let dropped = ["--set", "model.init=dropped", "--set", "model.residual_dropout=0.1"];
    home.copy("gpt2-hf", "dropped");
    let config = String::from_utf8(home.read("dropped/config.json")).unwrap();
    let config = config.replace("pdrop\": 0.0", "pdrop\": 0.1");
    home.write("dropped/config.json", &config);
    let said = home.run(&["import", "dropped", "--run", "di"]).ok().stdout;
    assert!(
        said.contains("attn_pdrop = 0.1 (here 0.0), embd_pdrop") && said.contains("resid_pdrop"),
        "{said}"
    );
    let said =
        home.run(&[&["train", "small.toml", "--run", "d", "--set", "train.steps=1"], &dropped[..]].concat());
    let said = said.ok().stderr;
    assert!(said.contains("embd_pdrop = 0.1 (here 0.0)") && !said.contains("resid_pdrop"), "{said}");
    // BertModel alone has no head; the head is made anew, the same each time, and the rest is kept.
    home.copy("bert-hf", "bare");
    let tensors = |folder: &str| {
        let described = home.run(&["inspect", folder, "--verify", "--json"]).ok().json();
        rig::list(&described, "tensors").to_vec()
    };
    let whole = tensors("bert-hf");
    let heads = whole.iter().filter(|tensor| tensor["name"].as_str().unwrap().starts_with("cls.")).count();
    assert_eq!(heads, 5);
    let file = home.read("bare/model.safetensors");
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&file[8..8 + length]).unwrap();
    let end = header
        .iter()
        .filter(|(name, _)| name.starts_with("bert."))
        .map(|(_, at)| at["data_offsets"][1].as_u64());
    let end = end.max().flatten().unwrap() as usize;
    header.retain(|name, _| !name.starts_with("cls."));
    let text = json!(header).to_string();
    let kept = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &file[8 + length..8 + length + end]]
        .concat();
    home.write("bare/model.safetensors", kept);
    let ended = home.run(&["import", "bare", "--run", "new"]).ok();
    assert!(
        ended.stdout.contains("no cls.predictions.*") && ended.stdout.contains("initial values"),
        "{}",
        ended.stdout
    );
    home.run(&["export", "new", "--out", "new-hf"]).ok();
    for (before, after) in rig::pairs(&whole, &tensors("new-hf")) {
        let name = before["name"].as_str().unwrap();
        assert_eq!(before == after, !name.starts_with("cls."), "{name}");
    }
    home.run(&["train", "--run", "new", "--resume", "--data", "text.txt", "--set", "train.steps=1"]).ok();
}

/// A model with the erf form of GELU is trained with it, and exported with the word that it had.
#[test]
fn the_activation_of_a_folder_is_computed_and_kept() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet", "--set", "train.steps=1"]).ok();
    let mut losses = Vec::new();
    for word in ["gelu_new", "gelu", "gelu_pytorch_tanh", "gelu_fast"] {
        let [source, run, out] = ["s", "i", "o"].map(|name| format!("{name}-{word}"));
        home.run(&["export", "r", "--out", &source]).ok();
        let mut config = home.json(&format!("{source}/config.json"));
        config["activation_function"] = json!(word);
        home.write(&format!("{source}/config.json"), config.to_string());
        home.run(&["import", &source, "--run", &run]).ok();
        home.run(&[
            "train",
            "--run",
            &run,
            "--resume",
            "--quiet",
            "--data",
            "text.txt",
            "--set",
            "train.steps=2",
        ])
        .ok();
        home.run(&["export", &run, "--out", &out]).ok();
        assert_eq!(home.json(&format!("{out}/config.json"))["activation_function"], json!(word));
        losses.push(home.losses(&run)[0].clone());
    }
    assert_ne!(losses[0], losses[1], "another function has another loss");
    assert!(losses[2..].iter().all(|loss| *loss == losses[0]), "one function with several names: {losses:?}");
}

/// Old files that programs would read beside the new ones are removed, and nothing else; without `--force`, nothing is.
#[test]
fn export_replaces_a_model_only_by_force() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet", "--set", "train.steps=1"]).ok();
    home.run(&["export", "r", "--out", "fresh"]).ok();
    std::fs::create_dir_all(home.path("old/additional_chat_templates")).unwrap();
    std::fs::create_dir_all(home.path("old/.git")).unwrap();
    let outdated = [
        "added_tokens.json",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "special_tokens_map.json",
        "vocab.json",
    ];
    let others = [".git/HEAD", "README.md", "notes.bin"];
    for name in outdated.iter().chain(&others).chain(&["config.json", "generation_config.json"]) {
        home.write(&format!("old/{name}"), name);
    }
    let before = home.snapshot("old");
    home.run(&["export", "r", "--out", "old"]).refused(&[
        "--out old holds files",
        "--force",
        "nothing was changed",
    ]);
    assert!(home.snapshot("old") == before);
    let ended = home.run(&["export", "r", "--out", "old", "--force"]).ok();
    let removed = format!("removed: {}", outdated.join(", "));
    for words in [
        &removed,
        "replaced: config.json, generation_config.json",
        "left as they are: .git, README.md, notes.bin",
    ] {
        assert!(ended.stdout.contains(words), "{words:?} in {}", ended.stdout);
    }
    let mut expected = home.snapshot("fresh");
    for name in others {
        expected.insert(home.path(&format!("fresh/{name}")), name.as_bytes().to_vec());
    }
    let names = |files: std::collections::BTreeMap<std::path::PathBuf, Vec<u8>>, folder: &str| {
        let inside = |path: std::path::PathBuf| path.strip_prefix(home.path(folder)).unwrap().to_path_buf();
        files.into_iter().map(|(path, content)| (inside(path), content)).collect::<Vec<_>>()
    };
    assert!(names(home.snapshot("old"), "old") == names(expected, "fresh"));
    // Again: what is there is what would be written.
    let json = home.run(&["export", "r", "--out", "old", "--force", "--json"]).ok().json();
    assert_eq!(
        (json["removed"].clone(), json["left"].clone()),
        (json!([]), json!([".git", "README.md", "notes.bin"]))
    );
    // A failure while files are replaced leaves no folder that looks like a model.
    std::fs::create_dir(home.path("old/tokenizer_config.json.d")).unwrap();
    home.run(&["import", "old", "--run", "i"]).ok();
    // Without a tokenizer, no id of a special token is left to transformers' defaults.
    let text = String::from_utf8(home.read("small.toml")).unwrap().replace("text = [\"text.txt\"]\n", "");
    home.write("tokens.toml", text);
    let ids: Vec<u8> = (0..3000u32).flat_map(|i| ((i * i % 61) as u16).to_le_bytes()).collect();
    home.write("plain.bin", ids);
    let sets = ["--set", "data.tokens=plain.bin", "--set", "model.vocab=64", "--set", "train.steps=1"];
    home.run(&[&["train", "tokens.toml", "--run", "t", "--quiet"], &sets[..]].concat()).ok();
    home.run(&["export", "t", "--out", "ids"]).ok();
    let config = home.json("ids/config.json");
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        assert_eq!(config.get(key), Some(&json!(null)), "{key}");
    }
    assert!(!home.path("ids/tokenizer.json").exists());
}

/// Rows that no id has are never drawn: padding, and what a text did not train.
#[test]
fn rows_beyond_the_tokenizers_ids_are_never_sampled() {
    let home = Home::new();
    let sets = ["--set", "data.tokenizer=char", "--set", "model.vocab=64", "--set", "train.steps=1"];
    let ended = home.run(&[&["train", "small.toml", "--run", "r"], &sets[..]].concat()).ok();
    assert!(!ended.stdout.contains('\u{fffd}'), "the sample at the end: {}", ended.stdout);
    home.run(&["export", "r", "--out", "hf"]).ok();
    let ids = home.json("hf/tokenizer.json")["model"]["vocab"].as_object().unwrap().len() as u64;
    assert!(ids < 40, "{ids}");
    let said = home.run(&["import", "hf", "--run", "i"]).ok().stdout;
    assert!(said.contains("of the model's 64 rows are no id of the tokenizer"), "{said}");
    for run in ["r", "i"] {
        for extra in [
            &["--temperature", "9"][..],
            &["--temperature", "9", "--top-k", "60"],
            &["--top-p", "0.999", "--shift", "4"],
            &["--temperature", "0"],
        ] {
            let base = ["sample", run, "--prompt", "rank", "--tokens", "60", "--json"];
            let json = home.run(&[&base[..], extra].concat()).ok().json();
            let drawn = rig::list(&json, "tokens");
            assert!(drawn.iter().all(|id| id.as_u64().unwrap() < ids), "{extra:?}: {drawn:?}");
        }
    }
}

/// A text that does not use the ids without a row is trained on; one that does, and a prompt, are refused by name.
#[test]
fn a_tokenizer_with_more_ids_than_rows_is_said_and_its_spare_ids_are_refused() {
    let home = Home::new();
    let sets = ["--set", "data.tokenizer=char", "--set", "train.steps=1"];
    home.run(&[&["train", "small.toml", "--run", "r", "--quiet"], &sets[..]].concat()).ok();
    home.run(&["export", "r", "--out", "hf"]).ok();
    let mut tokenizer = home.json("hf/tokenizer.json");
    let rows = home.json("hf/config.json")["vocab_size"].clone();
    tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({
        "id": rows, "content": "<tool>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    }));
    home.write("hf/tokenizer.json", tokenizer.to_string());
    let words = format!("more ids than the model has rows ({rows})");
    let said = home.run(&["import", "hf", "--run", "i"]).ok().stdout;
    assert!(said.contains(&words), "{said}");
    home.run(&["sample", "i", "--prompt", "rank", "--tokens", "4"]).ok();
    home.run(&["sample", "i", "--prompt", "rank <tool>"])
        .refused(&["\"<tool>\"", &format!("whose id is {rows}")]);
    let resume = ["train", "--run", "i", "--resume", "--set", "train.steps=1", "--data"];
    home.write("tool.txt", [&home.read("text.txt")[..], b"<tool>"].concat());
    home.run(&[&resume[..], &["tool.txt"]].concat()).refused(&[
        &format!("is id {rows}"),
        "\"<tool>\"",
        "nothing was changed",
    ]);
    let ended = home.run(&[&resume[..], &["text.txt"]].concat()).ok();
    assert!(ended.stderr.contains(&words), "{}", ended.stderr);
}

#[test]
fn another_architecture_is_not_imported() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    home.run(&["export", "r", "--out", "hf"]).ok();
    let mut config = home.json("hf/config.json");
    config["model_type"] = json!("t5");
    home.write("hf/config.json", config.to_string());
    home.run(&["import", "hf", "--run", "i"]).refused(&["t5", "gpt2", "hf"]);
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

/// The tokenizer that an export writes is the run's own, and what is imported again has the same ids.
#[test]
fn an_export_has_the_tokenizer_of_its_run() {
    let home = Home::new();
    for (tokenizer, end) in [("byte", json!(null)), ("char", json!(null)), ("gpt2", json!(50256))] {
        let set = format!("data.tokenizer={tokenizer}");
        home.run(&[
            "train",
            "small.toml",
            "--run",
            tokenizer,
            "--quiet",
            "--set",
            &set,
            "--set",
            "train.steps=1",
        ])
        .ok();
        let out = format!("{tokenizer}-hf");
        let ended = home.run(&["export", tokenizer, "--out", &out]).ok();
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            assert!(ended.stdout.contains(name) && home.path(&format!("{out}/{name}")).exists(), "{name}");
        }
        assert_eq!(home.json(&format!("{out}/tokenizer_config.json"))["model_max_length"], json!(16));
        for file in ["config.json", "generation_config.json"] {
            let file = home.json(&format!("{out}/{file}"));
            assert_eq!((&file["eos_token_id"], &file["bos_token_id"]), (&end, &end), "{tokenizer}");
        }
        let ids = |tokenizer: &str| {
            let of = home.path(tokenizer).join("tokenizer.json");
            home.run(&[
                "tokenize",
                "--force",
                "--tokenizer",
                of.to_str().unwrap(),
                "--out",
                "t.bin",
                "text.txt",
            ])
            .ok();
            let file = home.read("t.bin");
            let tokens = u64::from_le_bytes(file[24..32].try_into().unwrap()) as usize;
            file[64..64 + 2 * tokens].to_vec()
        };
        assert_eq!(ids(tokenizer), ids(&out), "{tokenizer}");
    }
    // A model that was imported with the exported tokenizer is exported with the same one.
    home.run(&["import", "char-hf", "--run", "again"]).ok();
    home.run(&["export", "again", "--out", "again-hf"]).ok();
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        assert_eq!(home.read(&format!("char-hf/{name}")), home.read(&format!("again-hf/{name}")), "{name}");
    }
}

/// A masked model has one more row than its tokenizer; its token is named in the export.
#[test]
fn the_mask_token_of_a_bert_is_exported_and_the_frozen_row_is_mentioned() {
    let home = Home::new();
    home.run(&[
        "train",
        "small.toml",
        "--run",
        "b",
        "--quiet",
        "--set",
        "model.arch=bert",
        "--set",
        "train.steps=1",
    ])
    .ok();
    home.run(&["export", "b", "--out", "hf"]).ok();
    assert_eq!(home.json("hf/tokenizer_config.json")["mask_token"], json!("[MASK]"));
    let tokenizer = home.json("hf/tokenizer.json");
    assert_eq!(
        (&tokenizer["added_tokens"][0]["id"], home.json("hf/config.json")["vocab_size"].as_u64()),
        (&json!(256), Some(257))
    );
    assert!(!home.path("hf/generation_config.json").exists());
    let mut config = home.json("hf/config.json");
    for (id, words) in [(json!(0), "row 0 (pad_token_id)"), (json!(7), "row 7 (pad_token_id)")] {
        config["pad_token_id"] = id;
        home.write("hf/config.json", config.to_string());
        let ended = home.run(&["import", "hf", "--run", words]).ok();
        assert!(ended.stdout.contains(words), "{}", ended.stdout);
    }
    config["pad_token_id"] = json!(null);
    home.write("hf/config.json", config.to_string());
    assert!(!home.run(&["import", "hf", "--run", "none"]).ok().stdout.contains("pad_token_id"));
    let help = home.run(&["import", "--help"]).ok().stdout;
    assert!(help.contains("GPT-2") && help.contains("BERT"), "{help}");
}

/// 200 documents of 7 bytes and the end of each: in a window of 16 tokens, two have no target.
#[test]
fn documents_apart_are_trained_without_the_first_token_of_each() {
    let home = Home::new();
    home.write("a.jsonl", "{\"text\": \"sharded\"}\n".repeat(200));
    let run = |args: &[&str], sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        home.run(&[args, &sets[..]].concat())
    };
    let train = ["train", "small.toml", "--data", "a.jsonl", "--run", "r"];
    let apart = "data.documents=apart";
    run(&train, &[apart, "train.steps=2"]).ok();
    let config = String::from_utf8(home.read("r/config.toml")).unwrap();
    assert!(config.contains("documents = \"apart\"\nend_token = 255"), "{config}");
    let steps = || home.metrics("r").into_iter().filter(|line| line["loss"].is_number()).collect::<Vec<_>>();
    let each = steps()[0]["tokens"].as_u64().unwrap();
    for step in &steps() {
        // 14 of 16 tokens have a target, in the mean.
        assert_eq!(step["targets"].as_u64().unwrap() * 16, each * 14, "{step}");
    }
    let more = ["train", "--resume", "--run", "r"];
    let ended = run(&more, &["train.steps=3", "data.documents=joined", "data.end_token=255"]);
    ended.refused(&["data.end_token = 255", "data.documents"]);
    let ended = run(&more, &["train.steps=3", "data.end_token=100"]).ok();
    let lines = [
        "data.end_token is 100 and was 255: tokens see other ones than before",
        "data.end_token = 100 ends documents, and the tokenizer puts 255 between them",
    ];
    let said = format!("{}\n{}", ended.stdout, ended.stderr);
    assert!(lines.iter().all(|line| said.contains(line)), "{said}");
    let ended = run(&more, &["train.steps=4", "data.documents=joined"]).ok();
    let said = format!("{}\n{}", ended.stdout, ended.stderr);
    assert!(said.contains("data.documents is \"joined\" and was \"apart\": tokens see other ones"), "{said}");
    assert!(steps().last().unwrap()["targets"].is_null());
    let train = ["train", "small.toml", "--data", "a.jsonl", "--run", "refused"];
    for (args, sets, words) in [
        (&train[..], &["data.end_token=3"][..], &["data.end_token = 3", "data.documents"][..]),
        (&train[..], &[apart, "data.end_token=9999"], &["data.end_token = 9999", "256 rows"]),
        (&["plan", "small.toml"], &[apart], &["data.documents = \"apart\"", "data.end_token"]),
        (&["plan", "small.toml"], &[apart, "model.arch=bert"], &["data.documents = \"apart\"", "next token"]),
        (
            &["plan", "small.toml"],
            &[apart, "data.end_token=10", "parallel.updates=asynchronous"],
            &["data.documents = \"apart\"", "parallel.updates"],
        ),
        (&["bench", "step", "small.toml"], &[apart], &["data.documents = \"apart\"", "random tokens"]),
    ] {
        run(args, sets).refused(words);
    }
    assert!(!home.path("refused").exists());
}

#[test]
fn json_lines_are_documents_and_skipped_lines_are_reported() {
    let home = Home::new();
    let text = "chunk rank shard gather ".repeat(60);
    home.write("a.jsonl", format!("{{\"text\": {text:?}}}\noops\n{{\"id\": 1}}\n{{\"text\": {text:?}}}\n"));
    let words = "data: skipped 2 of 4 lines: 1 x not valid JSON: a.jsonl line 2; 1 x without the key \"text\": a.jsonl line 3";
    let train = |run: &str, extra: &[&str]| {
        let args = ["train", "small.toml", "--data", "a.jsonl", "--set", "train.steps=1", "--run", run];
        home.run(&[&args[..], extra].concat())
    };
    train("r", &[]).refused(&["2 of 4 lines (50 %)", "at most 1 %", "data.max_skipped = 0.5", words]);
    train("r", &["--set", "data.max_skipped=1.5"]).refused(&["data.max_skipped"]);
    let allowed = ["--set", "data.max_skipped=0.5"];
    let line = "data: 1 file, 2.8 KiB, 2 documents, 2881 tokens; 161 windows of 16 to train on, 0.05 epochs in 1 step; \
        validation part 289 tokens, 18 windows, 8 an evaluation\n";
    let between = "tokenizer: byte, 256 ids; between documents: \"<|endoftext|>\" (id 255)";
    let ended = train("r", &allowed).ok();
    assert!(
        ended.stderr.contains(words) && ended.stdout.starts_with(line),
        "{}\n{}",
        ended.stdout,
        ended.stderr
    );
    assert_eq!(
        train("q", &[&allowed[..], &["--quiet"]].concat()).ok().stderr,
        format!("{words}\n{between}\n")
    );
    let ended = train("j", &[&allowed[..], &["--json"]].concat()).ok();
    let last: Value = serde_json::from_str(ended.stdout.lines().last().unwrap()).unwrap();
    assert_eq!(ended.stderr, format!("{words}\n{between}\n"));
    assert_eq!((&last["data"]["tokens"], &last["data"]["windows"]), (&json!(2881), &json!(161)));
    assert_eq!(last["data"]["findings"]["skipped_lines"][1]["first"], json!(["a.jsonl line 3"]));
    // A run that is resumed knows its tokens.
    let more = ["train", "--resume", "--run", "r", "--set", "train.steps=2"];
    let ended = home.run(&more).ok();
    assert!(ended.stdout.contains("data: 1 file, 5.7 KiB, 2 documents, 2881 tokens;"), "{}", ended.stdout);
    let plan = ["plan", "small.toml", "--set", "data.text=[\"a.jsonl\"]", "--set", "data.max_skipped=1"];
    let ended = home.run(&plan).ok();
    assert!(
        ended.stderr.contains(words) && ended.stdout.contains("2 documents, about 2880 tokens;"),
        "{}",
        ended.stdout
    );
    train("n", &["--set", "data.text_key=body"]).refused(&[
        "a.jsonl holds no text",
        "\"body\"",
        "data.text_key",
    ]);
    let tokenize = |extra: &[&str]| home.run(&[&["tokenize", "--out", "a.bin", "a.jsonl"], extra].concat());
    tokenize(&[]).refused(&["2 of 4 lines", "--max-skipped 0.5"]);
    let ended = tokenize(&["--max-skipped", "0.5"]).ok();
    assert!(ended.stderr.contains(words) && ended.stdout.contains("2 documents"), "{}", ended.stdout);
    let figures = tokenize(&["--force", "--json", "--max-skipped", "1"]).ok().json();
    assert_eq!((&figures["documents"], &figures["skipped_lines"]), (&json!(2), &json!(2)));
    // Each byte, and what separates the documents.
    assert_eq!(figures["tokens"], json!(2 * text.len() + 1));
}

#[test]
fn sampling_is_the_same_with_each_shift_until_the_context_is_full_and_checks_its_numbers() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    let sample = |extra: &[&str]| {
        home.run(&[&["sample", "r", "--prompt", "ra", "--json", "--seed", "3"], extra].concat())
    };
    let tokens = |extra: &[&str]| sample(extra).ok().json()["tokens"].clone();
    // The context has 16 tokens: 15 tokens fit behind two of the prompt, and the last is never read.
    assert_eq!(tokens(&["--tokens", "15"]), tokens(&["--tokens", "15", "--shift", "8"]));
    assert_eq!(tokens(&["--tokens", "40", "--shift", "8"]).as_array().unwrap().len(), 40);
    // Of the most likely token alone, whatever the temperature.
    assert_eq!(tokens(&["--top-p", "0.000001"]), tokens(&["--temperature", "0"]));
    sample(&["--top-p", "0"]).refused(&["--top-p 0: expected more than 0"]);
}
