//! DeepSpeed's configurations: 40 of public projects, and what is wrong with others.

use serde_json::{Map, Value, json};

use crate::rig::{Ended, Home};

/// The key sets, written anew: a line for each, after names for sets of keys that many have. `z` is `zero_optimization`.
const CONFIGS: &str = include_str!("deepspeed_configs.txt");

/// The page with the table of what becomes of them.
const PAGE: &str = include_str!("../../../docs/coming-from.md");

/// A small GPT-2 that gives no key that DeepSpeed has.
const SMALL: &str = "[model]\nlayers = 2\nhidden = 32\nheads = 4\nseq = 16\n[data]\ntext = [\"text.txt\"]\n\
                     [train]\nsteps = 2\nthreads = 1\neval_samples = 8\n";

/// Their names and JSON.
fn configs() -> Vec<(String, Value)> {
    let lines = || CONFIGS.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let sets: Vec<(&str, &str)> =
        lines().filter_map(|line| line.split_once(" = ")).filter(|(name, _)| name.starts_with('@')).collect();
    let keys = |text: &'static str| {
        let words = text.split(' ').flat_map(|word| match sets.iter().find(|(name, _)| *name == word) {
            Some((_, set)) => set.split(' ').collect::<Vec<_>>(),
            None => vec![word],
        });
        let mut config = json!({});
        for (path, value) in words.filter_map(|word| word.split_once('=')) {
            let mut at = &mut config;
            for name in path.split('.') {
                let name = if name == "z" { "zero_optimization" } else { name };
                at = at.as_object_mut().unwrap().entry(name).or_insert_with(|| Value::Object(Map::new()));
            }
            *at = serde_json::from_str(value).unwrap_or_else(|error| panic!("{path} = {value}: {error}"));
        }
        config
    };
    let named = lines().filter(|line| !line.starts_with('@')).map(|line| line.split_once(": ").unwrap());
    named.map(|(name, text)| (name.to_string(), keys(text))).collect()
}

/// A folder with a configuration of theirs.
fn home(theirs: &str) -> Home {
    let home = Home::new();
    home.write("gpt2.toml", SMALL);
    home.write("ds.json", theirs);
    home
}

/// The names of a translation of which this has become, each with the reason.
fn rows(translation: &Value, outcome: &str) -> Vec<(String, String)> {
    let text = |row: &Value, of: &str| row[of].as_str().unwrap().to_string();
    let rows = translation["rows"].as_array().unwrap().iter().filter(|row| row["outcome"] == outcome);
    rows.map(|row| (text(row, "theirs"), text(row, "why"))).collect()
}

/// Refused keys, as the page says them: names without their table, and each reason once.
fn reasons(refused: &[(String, String)]) -> String {
    let mut said: Vec<(Vec<&str>, &str)> = Vec::new();
    for (name, why) in refused {
        let leaf =
            ["optimizer.params.", "zero_optimization."].iter().find_map(|table| name.strip_prefix(table));
        let leaf = leaf.unwrap_or(name);
        let name = if leaf.starts_with("zenflow") { "zenflow" } else { leaf };
        match said.iter_mut().find(|(_, known)| *known == why.as_str()) {
            Some((names, _)) if names.contains(&name) => {}
            Some((names, _)) => names.push(name),
            None => said.push((vec![name], why)),
        }
    }
    said.iter().map(|(names, why)| format!("{}: {why}", names.join(", "))).collect::<Vec<_>>().join("; ")
}

#[test]
fn forty_configurations_of_public_projects_are_planned_and_trained() {
    let configs = configs();
    assert_eq!(configs.len(), 40);
    let mut table = Vec::new();
    for (name, theirs) in &configs {
        let home = home(&theirs.to_string());
        let ranks = theirs["tensor_parallel"]["autotp_size"].as_u64().unwrap_or(1).to_string();
        let imported = home.run(&["import-config", "ds.json", "--json", "--partial"]).ok().json();
        let count = |outcome: &str| rows(&imported, outcome).len();
        let refused = rows(&imported, "refused");
        let train = ["train", "gpt2.toml", "--deepspeed", "ds.json", "--nproc", &ranks, "--run", "run"];
        let ended = home.run(&train);
        let fate = if refused.is_empty() {
            ended.ok();
            let losses = home.losses("run");
            assert_eq!(losses.len(), 2, "{name}");
            "trained".to_string()
        } else {
            let names: Vec<&str> = refused.iter().map(|(name, _)| name.as_str()).collect();
            ended.refused(&names);
            assert!(!home.path("run").exists(), "{name}");
            format!("refused: {}", reasons(&refused))
        };
        let [same, differs, default, unneeded] = ["same", "differs", "default", "not needed"].map(count);
        table.push(format!("| {name} | {same} | {differs} | {default} | {unneeded} | {fate} |"));
    }
    let missing: Vec<&String> = table.iter().filter(|line| !PAGE.contains(line.as_str())).collect();
    assert!(missing.is_empty(), "docs/coming-from.md must have this table:\n{}", table.join("\n"));
}

/// Runs `train` with both files, of which `more` follows the small model.
fn with(theirs: &str, more: &str, args: &[&str]) -> (Home, Ended) {
    let home = home(theirs);
    home.write("gpt2.toml", format!("{SMALL}{more}"));
    let ended = home.run(&[&["train", "gpt2.toml", "--deepspeed", "ds.json", "--run", "run"], args].concat());
    (home, ended)
}

/// Configurations that are wrong, and words of their errors.
const WRONG: &[(&str, &[&str])] = &[
    ("hello", &["ds.json:1: expected a colon"]),
    ("", &["no keys"]),
    (
        "{\"train_batch_size\": 8,\n\"train_batch_size\": 8}",
        &["ds.json:2: train_batch_size is given twice, first in line 1"],
    ),
    ("{\"train_batch_size\": \"8\"}", &["train_batch_size = \"8\": expected a whole number"]),
    ("{\"train_batch_size\": 8, \"bf16\": {\"enabled\": 1}}", &["bf16.enabled = 1: expected true or false"]),
    ("{\"train_batch_size\": 8, \"bf16\": true}", &["bf16 is no key of DeepSpeed", "did you mean"]),
    (
        "{\"train_batch_size\": 8, \"wall_clock_breakdown\": \"no\"}",
        &["wall_clock_breakdown", "true or false"],
    ),
    (
        "{\"train_batch_size\": 8,\n\n\"gradient_cliping\": 1}",
        &["ds.json:3: gradient_cliping is no key", "did you mean gradient_clipping?"],
    ),
    (
        "{\"train_batch_size\": 8, \"zero_optimization\": {\"stag\": 1}}",
        &["did you mean zero_optimization.stage?"],
    ),
    (
        "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 4}}",
        &["zero_optimization.stage = 4", "0, 1, 2 or 3"],
    ),
    (
        "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"tpu\"}}}",
        &["offload_param.device = \"tpu\"", "\"none\", \"cpu\", \"nvme\""],
    ),
    (
        "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"nvme\"}}}",
        &["offload_param.nvme_path"],
    ),
    (
        "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 3, \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"/no/such/disk\"}}}",
        &["/no/such/disk"],
    ),
    (
        "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 2, \"offload_param\": {\"device\": \"cpu\"}}}",
        &["needs zero_optimization.stage of 3"],
    ),
    (
        "{\"train_batch_size\": 8, \"fp16\": {\"enabled\": true}, \"bf16\": {\"enabled\": true}}",
        &["fp16.enabled and bf16.enabled"],
    ),
    ("{\"gradient_accumulation_steps\": 2}", &["gradient_accumulation_steps alone"]),
    (
        "{\"train_batch_size\": 32,\n\"train_micro_batch_size_per_gpu\": 4,\n\"gradient_accumulation_steps\": 2}",
        &["train_batch_size = 32 is not", "4 x 2 x 1 = 8 (line 1, 2, 3)", "with 4 data-parallel ranks it is"],
    ),
    (
        "{\"train_batch_size\": 10, \"train_micro_batch_size_per_gpu\": 4}",
        &["train_batch_size = 10 is not", "4 x 2 x 1 = 8"],
    ),
    (
        "{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"Lamb\"}}",
        &["optimizer.type = \"Lamb\" is refused", "AdamW, SGD and Lion"],
    ),
    (
        "{\"train_batch_size\": 8, \"scheduler\": {\"type\": \"OneCycle\"}}",
        &["scheduler.type = \"OneCycle\" is refused"],
    ),
    ("{\"train_batch_size\": 8, \"scheduler\": {\"type\": \"WarmupDecayLR\"}}", &["needs total_num_steps"]),
    (
        "{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"Adam\", \"params\": {\"weight_decay\": 0.1, \"adam_w_mode\": false}}}",
        &["adam_w_mode = false is refused"],
    ),
];

#[test]
fn what_is_wrong_names_its_line_and_writes_nothing() {
    for (theirs, words) in WRONG {
        let (home, ended) = with(theirs, "", &[]);
        ended.refused(words);
        assert!(!home.path("run").exists(), "{theirs}");
    }
}

#[test]
fn values_that_differ_in_both_files_are_refused_unless_set_decides() {
    let theirs = "{\"train_batch_size\": 8,\n\"gradient_clipping\": 0.5}";
    let more = "[optimizer]\nclip = 2.0\n[batch]\nglobal = 8\n";
    let (_, ended) = with(theirs, more, &[]);
    ended.refused(&[
        "gpt2.toml:13: optimizer.clip = 2.0, but ds.json:2: gradient_clipping = 0.5 is optimizer.clip = 0.5",
        "--set optimizer.clip=VALUE",
    ]);
    let (home, ended) = with(theirs, more, &["--set", "optimizer.clip=0.25", "--nproc", "2"]);
    assert!(ended.ok().stderr.contains("--set wins"));
    let config = String::from_utf8(home.read("run/config.toml")).unwrap();
    for line in ["clip = 0.25", "global = 8", "micro = 4"] {
        assert!(config.contains(line), "no {line} in {config}");
    }
    // The run folder has all that a resume needs.
    let more = ["train.steps=3", "schedule.min_lr=1e-5"].map(|set| ["--set", set]).concat();
    home.run(&[&["train", "--run", "run", "--resume"], &more[..]].concat()).ok();
    home.run(&["train", "--run", "run", "--resume", "--deepspeed", "ds.json"]).refused(&["give CONFIG"]);
}

#[test]
fn launchers_of_several_hosts_read_both_files() {
    let home =
        home("{\"train_batch_size\": 8, \"gradient_clipping\": 0.5, \"zero_optimization\": {\"stage\": 2}}");
    home.write("gpt2.toml", format!("{SMALL}[optimizer]\nlr = 0.5\n"));
    let more = ["gpt2.toml", "--deepspeed", "ds.json", "--unset", "optimizer.lr"];
    home.run(&[&["train", "--nproc", "2", "--run", "one"], &more[..]].concat()).ok();
    let played = [&["launch", "--hosts", "2", "--nproc", "1", "--run", "played"], &more[..]].concat();
    let told = home.run(&played).ok().stderr;
    assert_eq!(told.matches("gradient_clipping = 0.5").count(), 1, "host 0 alone translates: {told}");
    assert_eq!(home.losses("one"), home.losses("played"));
    home.write("ds.json", "{\"train_batch_size\": 8, \"stage\": 4}");
    home.run(&played).refused(&["ds.json:1: stage is no key"]);
}

#[test]
fn auto_is_what_is_given_here_or_trainers_default() {
    let theirs = "{\"train_batch_size\": \"auto\", \"train_micro_batch_size_per_gpu\": \"auto\", \"optimizer\": {\"type\": \"AdamW\", \
                  \"params\": {\"lr\": \"auto\", \"betas\": \"auto\"}}, \"gradient_clipping\": \"auto\", \"bf16\": {\"enabled\": \"auto\"}}";
    let home = home(theirs);
    home.write("gpt2.toml", format!("{SMALL}[optimizer]\nlr = 0.5\n[precision]\ncompute = \"bf16\"\n"));
    let plan =
        home.run(&["plan", "gpt2.toml", "--deepspeed", "ds.json", "--json", "--nproc", "2"]).ok().json();
    let rows = plan["deepspeed"]["translation"]["rows"].as_array().unwrap();
    let of = |key: &str| rows.iter().find(|row| row["key"] == key).unwrap_or_else(|| panic!("no {key}"));
    assert_eq!(of("optimizer.lr")["ours"], 0.5);
    assert_eq!(of("optimizer.lr")["why"], "auto: optimizer.lr as given");
    assert_eq!(of("optimizer.beta2")["ours"], 0.999);
    assert_eq!(of("optimizer.beta2")["why"], "auto: Trainer's default");
    assert_eq!(of("precision.compute")["ours"], "bf16");
    assert_eq!(of("batch.global")["ours"], 16, "8 of Trainer x 2 ranks");
}

#[test]
fn the_plan_stands_beside_deepspeeds_estimate() {
    let theirs =
        "{\"train_batch_size\": 8, \"bf16\": {\"enabled\": true}, \"zero_optimization\": {\"stage\": 2}}";
    let home = home(theirs);
    let args = ["plan", "gpt2.toml", "--deepspeed", "ds.json", "--nproc", "2"];
    let plan = home.run(&[&args[..], &["--json"]].concat()).ok().json();
    let (estimate, parameters) = (&plan["deepspeed"]["estimate"], plan["parameters"].as_f64().unwrap());
    assert_eq!(estimate["device"]["theirs_bytes"].as_f64().unwrap(), 2.0 * parameters + 9.0 * parameters);
    assert_eq!(estimate["host"]["theirs_bytes"].as_f64().unwrap(), 12.0 * parameters);
    // Parameters in bf16, and 2 + 12 bytes of gradients and states in two shards, of an element with the padding.
    let elements = plan["chunks"]["bytes"].as_u64().unwrap() / 2;
    assert_eq!(estimate["device"]["bytes"], 9 * elements);
    let text = home.run(&args).ok().stdout;
    for words in ["2P + 18P/N", "f32 copy of the gradients", "padding of chunks", "not in theirs"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
}

#[test]
fn an_imported_configuration_is_one_of_ours() {
    let theirs = "{\n// sixteen\n\"train_batch_size\": 16, \"train_micro_batch_size_per_gpu\": 4, gradient_accumulation_steps: 2,\n\
                  \"optimizer\": {\"type\": \"Adam\", \"params\": {\"lr\": 3e-4, \"weight_decay\": 0.1}},\n\"scheduler\": {\"type\": \
                  \"WarmupDecayLR\", \"params\": {\"warmup_num_steps\": 10, \"total_num_steps\": 100, \"warmup_type\": \"linear\"}},}";
    let home = home(theirs);
    let ended = home.run(&["import-config", "ds.json"]).ok();
    assert!(ended.stderr.contains("their Adam is AdamW"), "{}", ended.stderr);
    let config: toml_of::Table = toml_of::parse(&ended.stdout);
    for (key, value) in [
        ("parallel.ranks", "2"),
        ("batch.global", "16"),
        ("batch.micro", "4"),
        ("schedule.decay_steps", "100"),
        ("schedule.kind", "linear"),
    ] {
        assert_eq!(config.get(key).map(String::as_str), Some(value), "{key} in {}", ended.stdout);
    }
    home.write("mine.toml", ended.stdout.replace("[schedule]", "[model]\nlayers = 1\nhidden = 32\nheads = 4\nseq = 16\n[data]\ntext = [\"text.txt\"]\n[schedule]"));
    home.run(&["plan", "mine.toml"]).ok();
}

/// TOML of one level, as text.
mod toml_of {
    use std::collections::BTreeMap;

    pub type Table = BTreeMap<String, String>;

    pub fn parse(text: &str) -> Table {
        let (mut table, mut all) = ("", Table::new());
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                table = name;
            } else if let Some((key, value)) = line.split_once(" = ") {
                all.insert(format!("{table}.{key}"), value.trim_matches('"').to_string());
            }
        }
        all
    }
}
