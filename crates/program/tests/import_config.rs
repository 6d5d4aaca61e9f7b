//! Configurations of nanoGPT, torchtitan, axolotl and LLaMA-Factory, translated.

use serde_json::Value;

use crate::rig::Home;

/// The rows of a translation.
fn rows(home: &Home, file: &str, more: &[&str]) -> Vec<Value> {
    let args = [&["import-config", file, "--json"], more].concat();
    home.run(&args).ok().json()["rows"].as_array().unwrap().clone()
}

/// Our value of a key.
#[track_caller]
fn ours(rows: &[Value], key: &str) -> Value {
    let row = rows.iter().rfind(|row| row["key"] == key).unwrap_or_else(|| panic!("no {key} in {rows:#?}"));
    row["ours"].clone()
}

#[test]
fn nanogpts_assignments_are_read_and_never_executed() {
    let home = Home::new();
    let text = "import os\nos_name = 'x'\n";
    home.write("bad.py", text);
    home.run(&["import-config", "bad.py"]).refused(&["bad.py:2: os_name is no key of nanoGPT"]);
    home.write("run.py", "batch_size = 4\nopen('written', 'w').write('x')\n");
    home.run(&["import-config", "run.py"]).refused(&["run.py:2", "an assignment"]);
    assert!(!home.path("written").exists());
    home.write("lr.py", "learning_rate = compute()\n");
    home.run(&["import-config", "lr.py"]).refused(&["lr.py:1: learning_rate = compute(): expected a number"]);
    home.write(
        "small.py",
        "import time\nout_dir = 'out'\neval_interval = 50\neval_iters = 2\nalways_save_checkpoint = False\nwandb_log = False\n\
         wandb_run_name = 'ft-' + str(time.time())\ngradient_accumulation_steps = 2 * 2\nbatch_size = 4\nblock_size = 16\nn_layer = 2\nn_head = 4\n\
         n_embd = 32\ndropout = 0.2\nlearning_rate = 1e-3\nmax_iters = 3\nlr_decay_iters = 5000\nmin_lr = 1e-4\nbeta2 = 0.99\nwarmup_iters = 1\n\
         weight_decay = 1e-1\ndtype = 'float32'\n",
    );
    let rows = rows(&home, "small.py", &["--nproc", "2"]);
    for (key, value) in [
        ("batch.global", Value::from(16)),
        ("batch.micro", 4.into()),
        ("train.eval_samples", 8.into()),
        ("train.keep_best", true.into()),
        ("schedule.kind", "cosine".into()),
        ("schedule.warmup", 1.into()),
        ("model.hidden", 32.into()),
        ("optimizer.beta2", 0.99.into()),
        ("precision.compute", "f32".into()),
    ] {
        assert_eq!(ours(&rows, key), value, "{key}");
    }
    let toml = home.run(&["import-config", "small.py"]).ok().stdout;
    home.write("mine.toml", toml);
    home.run(&["train", "mine.toml", "--data", "text.txt", "--set", "train.threads=1"]).ok();
    home.run(&["import-config", "small.py", "--nproc", "3"])
        .refused(&["gradient_accumulation_steps = 4", "multiple of the 3"]);
}

#[test]
fn torchtitans_toml_is_translated() {
    let home = Home::new();
    let text = "[model]\nname = \"llama3\"\nhf_assets_path = \"./assets\"\n[optimizer]\nname = \"AdamW\"\nlr = 3e-4\neps = 1e-8\n[lr_scheduler]\n\
                warmup_steps = 200\n[training]\nlocal_batch_size = 1\nseq_len = 8192\nmax_norm = 1.0\nsteps = 1000\n[parallelism]\n\
                data_parallel_replicate_degree = 1\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\ncontext_parallel_degree = 1\n\
                [checkpoint]\nenable = false\ninterval = 500\n[activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"op\"\n[compile]\nenable = false\n";
    home.write("titan.toml", text);
    let rows = rows(&home, "titan.toml", &["--nproc", "4"]);
    for (key, value) in [
        ("model.arch", Value::from("llama")),
        ("model.seq", 8192.into()),
        ("batch.global", 2.into()),
        ("parallel.tensor", 2.into()),
        ("parallel.zero", 3.into()),
        ("precision.compute", "bf16".into()),
        ("memory.checkpointing", "selective".into()),
        ("train.save_every", 500.into()),
    ] {
        assert_eq!(ours(&rows, key), value, "{key}");
    }
    home.write("flavor.toml", text.replace("name = \"llama3\"", "name = \"llama3\"\nflavor = \"8B\""));
    home.run(&["import-config", "flavor.toml"])
        .refused(&["flavor.toml:3: model.flavor = \"8B\" is refused", "--partial"]);
    let partial = home.run(&["import-config", "flavor.toml", "--partial"]).ok().stdout;
    assert!(partial.starts_with("# left out: model.flavor = \"8B\""), "{partial}");
    home.write("wrong.toml", "[training]\nsteps = 1\nstep = 2\n");
    home.run(&["import-config", "wrong.toml"])
        .refused(&["wrong.toml:3: training.step is no key", "did you mean training.steps?"]);
    home.write("broken.toml", "[training\n");
    home.run(&["import-config", "broken.toml"]).refused(&["broken.toml:1"]);
}

/// Schedules and optimizers by their names elsewhere.
#[test]
fn rates_and_rules_of_other_programs_are_translated() {
    let home = Home::new();
    let titan = "[model]\nname = \"llama3\"\n[training]\nsteps = 1000\n[lr_scheduler]\nwarmup_steps = 200\ndecay_ratio = 0.1\n[metrics]\nenable_tensorboard = true\n";
    let trainer = |more: &str| LLAMA_FACTORY.replace("lr_scheduler_type: cosine\n", more);
    let restarts = "lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs:\n  num_cycles: 3\n";
    let wsd = "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs:\n  num_decay_steps: 10\n  decay_type: linear\n  min_lr_ratio: 0.1\n";
    let power = "lr_scheduler_type: polynomial\nlr_scheduler_kwargs:\n  power: 2\noptim: adafactor\nadam_beta2: 0.98\n";
    let root = "lr_scheduler_type: inverse_sqrt\noptim: lion_32bit\n";
    let json = "{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"Lion\", \"params\": {\"lr\": 1e-4}}}";
    let texts =
        [titan.to_string(), trainer(restarts), trainer(wsd), trainer(power), trainer(root), json.to_string()];
    let expected: [&[(&str, Value)]; 6] = [
        &[
            ("metrics.sinks", vec!["tensorboard"].into()),
            ("schedule.kind", "wsd".into()),
            ("schedule.last_steps", 100.into()),
            ("schedule.last_shape", "linear".into()),
        ],
        &[("schedule.kind", "cosine_with_restarts".into()), ("schedule.cycles", 3.into())],
        &[
            ("schedule.kind", "wsd".into()),
            ("schedule.last_steps", 10.into()),
            ("schedule.last_shape", "linear".into()),
            ("schedule.min_lr", (0.1 * 1e-5).into()),
        ],
        &[
            ("schedule.kind", "polynomial".into()),
            ("schedule.power", 2.0.into()),
            ("schedule.min_lr", 1e-7.into()),
            ("optimizer.kind", "adafactor".into()),
        ],
        &[
            ("schedule.kind", "inverse_sqrt".into()),
            ("optimizer.kind", "lion".into()),
            ("optimizer.beta2", 0.999.into()),
        ],
        &[("optimizer.kind", "lion".into()), ("optimizer.beta2", 0.99.into())],
    ];
    for ((text, expected), name) in
        texts.iter().zip(expected).zip(["a.toml", "b.yaml", "c.yaml", "d.yaml", "e.yaml", "f.json"])
    {
        home.write(name, text);
        let rows = rows(&home, name, &[]);
        for (key, value) in expected {
            assert_eq!(ours(&rows, key), *value, "{name}: {key}");
        }
    }
}

/// A training of all parameters.
const AXOLOTL: &str = "base_model: models/llama\nval_set_size: 0.05\noutput_dir: ./out\nsequence_len: 512\nsample_packing: false\nwandb_project:\n\
                   gradient_accumulation_steps: 8\nmicro_batch_size: 1\nmax_steps: 100\noptimizer: adamw_torch_fused\nlr_scheduler: cosine\n\
                   learning_rate: 2e-5\nbf16: auto\ntf32: false\ngradient_checkpointing: true\nwarmup_ratio: 0.1\nweight_decay: 0.0\n\
                   special_tokens:\n  pad_token: <|end_of_text|>\n";

/// The same for LLaMA-Factory.
const LLAMA_FACTORY: &str = "model_name_or_path: models/llama\nstage: pt\ndo_train: true\nfinetuning_type: full\ncutoff_len: 256\nper_device_train_batch_size: 2\n\
                   gradient_accumulation_steps: 4\nlearning_rate: 1.0e-5\nmax_steps: 50\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\n\
                   output_dir: saves\nsave_steps: 500\nlogging_steps: 10\nplot_loss: true\n";

#[test]
fn yaml_of_axolotl_and_llama_factory_is_translated() {
    let home = Home::new();
    let axolotl = AXOLOTL;
    home.write("full.yaml", axolotl);
    let all = rows(&home, "full.yaml", &["--nproc", "2"]);
    for (key, value) in [
        ("model.init", Value::from("models/llama")),
        ("batch.global", 16.into()),
        ("data.validation", 0.05.into()),
        ("schedule.warmup_share", 0.1.into()),
        ("schedule.warmup_shape", "from-zero".into()),
        ("memory.checkpointing", "block".into()),
        ("optimizer.lr", 2e-5.into()),
        ("optimizer.beta2", 0.999.into()),
    ] {
        assert_eq!(ours(&all, key), value, "{key}");
    }
    home.write(
        "lora.yml",
        format!("{axolotl}adapter: lora\nlora_r: 8\ndatasets:\n  - path: x\n    type: alpaca\n"),
    );
    home.run(&["import-config", "lora.yml"]).refused(&[
        "lora.yml:20: adapter = \"lora\" is refused: it needs lora_alpha",
        "it needs lora_target_linear",
        "datasets.path = \"x\"",
    ]);
    let factory = LLAMA_FACTORY;
    home.write("pt.yaml", factory);
    let all = rows(&home, "pt.yaml", &[]);
    for (key, value) in [
        ("batch.global", Value::from(8)),
        ("model.seq", 256.into()),
        ("train.save_every", 500.into()),
        ("schedule.warmup_share", 0.1.into()),
    ] {
        assert_eq!(ours(&all, key), value, "{key}");
    }
    let chats = "datasets:\n  - path: a.jsonl\n    type: chat_template\n  - path: b.json\n    type: alpaca\nchat_template: chatml\ntrain_on_inputs: false\n";
    let packs = axolotl.replace("sample_packing: false", "sample_packing: true");
    home.write("chats.yaml", format!("{packs}{chats}"));
    let all = rows(&home, "chats.yaml", &["--nproc", "2"]);
    assert_eq!(ours(&all, "data.chat"), Value::from(vec!["a.jsonl", "b.json"]));
    for (key, value) in
        [("data.template", "chatml"), ("data.pack", "documents"), ("data.train_on", "answers")]
    {
        assert_eq!(ours(&all, key), value, "{key}");
    }
    home.write("sft.yaml", factory.replace("stage: pt", "stage: sft\ndataset: own\ntemplate: qwen"));
    let refused = [
        "sft.yaml:3: dataset = \"own\" is refused",
        "data.chat",
        "sft.yaml:4: template = \"qwen\" is refused",
    ];
    home.run(&["import-config", "sft.yaml"]).refused(&refused);
    home.write("sft.yaml", factory.replace("stage: pt", "stage: sft\ntemplate: llama3\nmask_history: true"));
    let all = rows(&home, "sft.yaml", &[]);
    for (key, value) in [("data.template", "llama3"), ("data.pack", "off"), ("data.train_on", "last-answer")]
    {
        assert_eq!(ours(&all, key), value, "{key}");
    }
    assert_eq!(ours(&all, "data.validation"), 0.0);
    home.write("rm.yaml", factory.replace("stage: pt", "stage: rm"));
    home.run(&["import-config", "rm.yaml"]).refused(&["rm.yaml:2: stage = \"rm\" is refused"]);
    home.write("typo.yaml", factory.replace("save_steps", "save_stepz"));
    home.run(&["import-config", "typo.yaml"])
        .refused(&["typo.yaml:14: save_stepz is no key of LLaMA-Factory", "did you mean save_steps?"]);
    home.run(&["import-config", "text.txt"]).refused(&["give --from"]);
    home.run(&["import-config", "none.json"]).refused(&["cannot read", "none.json"]);
}

#[test]
fn data_sets_of_llama_factory_are_found_by_their_names() {
    let (home, factory) = (Home::new(), LLAMA_FACTORY);
    let sets = serde_json::json!({
        "own": {"file_name": "own.json"},
        "turns": {"file_name": "turns.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages", "tools": "tools"}},
        "hub": {"hf_hub_url": "someone/something"},
        "other": {"file_name": "other.json", "columns": {"prompt": "question"}},
        "pairs": {"file_name": "pairs.json", "ranking": true},
    });
    home.write("dataset_info.json", sets.to_string());
    let with = |names: &str| {
        factory.replace("stage: pt", &format!("stage: sft\ndataset: {names}\ntemplate: llama3"))
    };
    home.write("sets.yaml", with("own, turns"));
    assert_eq!(
        ours(&rows(&home, "sets.yaml", &[]), "data.chat"),
        Value::from(vec!["own.json", "turns.jsonl"])
    );
    for (names, part) in [
        ("own,none", "there is no \"none\""),
        ("hub", "download the set first"),
        ("other", "the column prompt \"question\", and records here have instruction"),
        ("pairs", "stage dpo or kto"),
    ] {
        home.write("sets.yaml", with(names));
        home.run(&["import-config", "sets.yaml"]).refused(&["dataset_info.json", part]);
    }
    home.write("sets.yaml", with("own").replace("stage: sft", "stage: dpo"));
    home.run(&["import-config", "sets.yaml"]).refused(&["dataset_info.json", "stage sft"]);
}

/// Writes a configuration and compares keys that it becomes.
fn check_keys(home: &Home, name: &str, text: &str, expected: &[(&str, Value)]) {
    home.write(name, text);
    let all = rows(home, name, &[]);
    for (key, value) in expected {
        assert_eq!(ours(&all, key), *value, "{name}: {key}");
    }
}

#[test]
fn preferences_and_tokens_of_axolotl_are_translated() {
    let home = Home::new();
    let pairs = "datasets:\n  - path: pairs.jsonl\n    type: chat_template.default\n";
    let check =
        |name: &str, text: String, expected: &[(&str, Value)]| check_keys(&home, name, &text, expected);
    let axolotl = format!("{AXOLOTL}{pairs}");
    let files = Value::from(vec!["pairs.jsonl"]);
    // Sequences are counted, two a pair.
    let of_dpo =
        [("preference.kind", "dpo".into()), ("preference.beta", 0.2.into()), ("data.pairs", files.clone())];
    check("dpo.yml", format!("{axolotl}rl: dpo\nrl_beta: 0.2\n"), &of_dpo);
    let plain = rows(&home, "dpo.yml", &[]);
    home.write("full.yml", AXOLOTL);
    let sequences = |all: &[Value]| ours(all, "batch.global").as_u64().unwrap();
    assert_eq!(sequences(&plain), 2 * sequences(&rows(&home, "full.yml", &[])));
    check(
        "norm.yml",
        format!("{axolotl}rl: dpo\ndpo_norm_loss: true\n"),
        &[("preference.kind", "dpo-norm".into())],
    );
    let of_orpo = [("preference.kind", "orpo".into()), ("preference.beta", 0.3.into())];
    check("orpo.yml", format!("{axolotl}rl: orpo\norpo_alpha: 0.3\n"), &of_orpo);
    let of_simpo = [("preference.kind", "simpo".into()), ("preference.gamma", 1.5.into())];
    check("simpo.yml", format!("{axolotl}rl: simpo\nsimpo_gamma: 1.5\ncpo_alpha: 0.0\n"), &of_simpo);
    let adapted = format!("{AXOLOTL}adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n");
    let added = "tokens:\n  - <tool>\n  - </tool>\nlora_modules_to_save:\n  - embed_tokens\n  - lm_head\n";
    let tokens = [("model.add_tokens", Value::from(vec!["<tool>", "</tool>"]))];
    check("tokens.yml", format!("{adapted}{added}"), &tokens);
    for (name, text, parts) in [
        ("grpo.yml", format!("{AXOLOTL}rl: grpo\n"), ["rl = \"grpo\" is refused", "during the run"]),
        ("cpo.yml", format!("{axolotl}rl: simpo\n"), ["rl = \"simpo\" is refused", "cpo_alpha: 0.0"]),
        (
            "smooth.yml",
            format!("{axolotl}rl: dpo\ndpo_label_smoothing: 0.1\n"),
            ["dpo_label_smoothing", "robust"],
        ),
        (
            "type.yml",
            format!("{}rl: dpo\n", axolotl.replace("chat_template.default", "chatml.intel")),
            ["datasets.type", "chat_template.default"],
        ),
    ] {
        home.write(name, text);
        home.run(&["import-config", name]).refused(&parts);
    }
}

#[test]
fn stages_of_llama_factory_with_pairs_are_translated() {
    let home = Home::new();
    let check =
        |name: &str, text: String, expected: &[(&str, Value)]| check_keys(&home, name, &text, expected);
    let sets = serde_json::json!({
        "pairs": {"file_name": "pairs.json", "ranking": true, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
        "labels": {"file_name": "labels.json", "columns": {"prompt": "instruction", "response": "output", "kto_tag": "kto_tag"}},
    });
    home.write("dataset_info.json", sets.to_string());
    let staged = |stage: &str, set: &str, more: &str| {
        let stage = format!("stage: {stage}\ndataset: {set}\ntemplate: llama3\n{more}");
        LLAMA_FACTORY.replace("stage: pt\n", &stage)
    };
    let of_ipo = [
        ("preference.kind", "ipo".into()),
        ("preference.beta", 0.05.into()),
        ("data.pairs", Value::from(vec!["pairs.json"])),
        ("batch.global", 16.into()),
        ("model.add_tokens", Value::from(vec!["<tool>", "</tool>"])),
    ];
    let more =
        "pref_loss: ipo\npref_beta: 0.05\npref_ftx: 0.0\nadd_tokens: <tool>, </tool>\nresize_vocab: true\n";
    check("ipo.yaml", staged("dpo", "pairs", more), &of_ipo);
    let of_kto = [("preference.kind", "kto".into()), ("data.pairs", Value::from(vec!["labels.json"]))];
    check("kto.yaml", staged("kto", "labels", ""), &of_kto);
    for (more, part) in
        [("pref_loss: hinge\n", "sigmoid, ipo, orpo and simpo"), ("pref_ftx: 1.0\n", "no other term")]
    {
        home.write("other.yaml", staged("dpo", "pairs", more));
        home.run(&["import-config", "other.yaml"]).refused(&[part]);
    }
}

#[test]
fn adapters_of_axolotl_and_llama_factory_are_translated() {
    let home = Home::new();
    let lora = format!("{AXOLOTL}adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_dropout: 0.05\n");
    home.write("lora.yml", format!("{lora}lora_target_linear: true\npeft_use_rslora: true\n"));
    let all = rows(&home, "lora.yml", &[]);
    for (key, value) in [
        ("lora.rank", Value::from(8)),
        ("lora.alpha", 16.0.into()),
        ("lora.dropout", 0.05.into()),
        ("lora.targets", "all-linear".into()),
        ("lora.rslora", true.into()),
    ] {
        assert_eq!(ours(&all, key), value, "{key}");
    }
    home.write("some.yml", format!("{lora}lora_target_modules:\n  - q_proj\n  - v_proj\n"));
    let some = rows(&home, "some.yml", &[]);
    assert_eq!(ours(&some, "lora.targets"), serde_json::json!(["q_proj", "v_proj"]));
    home.write("qlora.yml", lora.replace("adapter: lora", "adapter: qlora"));
    home.run(&["import-config", "qlora.yml"]).refused(&["adapter = \"qlora\"", "load_in_4bit: true"]);
    let of_qlora = format!(
        "{}lora_target_linear: true\nload_in_4bit: true\nload_in_8bit: false\npeft_use_dora: true\n",
        lora.replace("adapter: lora", "adapter: qlora")
    );
    home.write("qlora.yml", &of_qlora);
    let all = rows(&home, "qlora.yml", &[]);
    assert_eq!((ours(&all, "lora.base"), ours(&all, "lora.dora")), ("nf4".into(), true.into()));
    home.write("int8.yml", format!("{lora}lora_target_linear: true\nload_in_8bit: true\n"));
    assert_eq!(ours(&rows(&home, "int8.yml", &[]), "lora.base"), "q8_0");
    home.write("quantised.yml", format!("{AXOLOTL}load_in_4bit: true\n"));
    home.run(&["import-config", "quantised.yml"]).refused(&["load_in_4bit = true", "below adapters"]);
    home.write("full.yml", format!("{AXOLOTL}lora_r: 8\n"));
    assert!(rows(&home, "full.yml", &[]).iter().all(|row| row["key"] != "lora.rank"));
    let lora = LLAMA_FACTORY.replace("full\n", "lora\nlora_target: q_proj, v_proj\n");
    let of_4_bits = "quantization_bit: 4\nquantization_type: nf4\npissa_init: true\npissa_iter: 16\n";
    home.write("qlora.yaml", format!("{lora}{of_4_bits}"));
    let all = rows(&home, "qlora.yaml", &[]);
    assert_eq!((ours(&all, "lora.base"), ours(&all, "lora.init")), ("nf4".into(), "pissa".into()));
    home.write("fp4.yaml", format!("{lora}quantization_bit: 4\nquantization_type: fp4\n"));
    home.run(&["import-config", "fp4.yaml"]).refused(&["quantization_type = \"fp4\"", "NF4"]);
    home.write("lora.yaml", lora);
    let all = rows(&home, "lora.yaml", &[]);
    for (key, value) in [
        ("lora.rank", Value::from(8)),
        ("lora.alpha", 16.0.into()),
        ("lora.targets", serde_json::json!(["q_proj", "v_proj"])),
    ] {
        assert_eq!(ours(&all, key), value, "{key}");
    }
}
