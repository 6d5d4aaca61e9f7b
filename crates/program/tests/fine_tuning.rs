//! docs/fine-tuning.md, as it is written: its configurations and its ten commands, on a tiny model; on a published one where
//! `PHALANX_SMOLLM2` names its folder (tools/smollm2_folder.py). And the recipes of `examples`: each is planned, and its memory is what it says.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::rig::{Ended, Home, ended, number};

/// The folder that the page starts from.
const BASE: &str = "SmolLM2-135M-Instruct";

/// Number of the page's commands.
const COMMANDS: usize = 10;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The blocks of a language in the page.
fn blocks(language: &str) -> Vec<String> {
    let page = std::fs::read_to_string(root().join("docs/fine-tuning.md")).unwrap();
    let parts = page.split("```").skip(1).step_by(2);
    parts.filter_map(|part| Some(part.strip_prefix(language)?.trim_start().to_string())).collect()
}

/// Writes the configurations of the page, and data for its commands.
fn prepare(home: &Home) {
    for config in blocks("toml") {
        let name = config.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap();
        home.write(name, &config);
    }
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let chat = |number: usize| {
        let question = format!("What is {number} + {number}?");
        let answer = format!("{number} + {number} = {}.", 2 * number);
        json!({"messages": [turn("user", &question), turn("assistant", &answer)]}).to_string()
    };
    home.write("chats.jsonl", (0..24).map(chat).collect::<Vec<_>>().join("\n"));
    home.write("test.jsonl", (24..28).map(chat).collect::<Vec<_>>().join("\n"));
    let pair = |number: usize| {
        let prompt = [turn("user", &format!("What is {number} + 1?"))];
        let [chosen, rejected] =
            [format!("{}.", number + 1), "I do not know.".to_string()].map(|text| [turn("assistant", &text)]);
        json!({"prompt": prompt, "chosen": chosen, "rejected": rejected}).to_string()
    };
    home.write("pairs.jsonl", (0..20).map(pair).collect::<Vec<_>>().join("\n"));
}

/// Runs the commands of the page in their order.
fn walk(home: &Home) -> Vec<Ended> {
    let program = Path::new(env!("CARGO_BIN_EXE_phalanx"));
    let paths = [program.parent().unwrap().display().to_string(), std::env::var("PATH").unwrap()].join(":");
    let [block] = &blocks("sh")[..] else { panic!("one block of commands") };
    let commands: Vec<&str> = block.lines().map(|line| line.split(" # ").next().unwrap_or(line)).collect();
    assert_eq!(commands.len(), COMMANDS);
    let mut walked = Vec::new();
    for command in commands {
        let mut shell = phalanx_testing::process::command("sh");
        shell.args(["-c", command]).current_dir(home.path("")).env("PATH", &paths);
        shell.env("CUDA_VISIBLE_DEVICES", "");
        let ended = ended(shell);
        assert_eq!(ended.code, Some(0), "{command}\nstdout: {}\nstderr: {}", ended.stdout, ended.stderr);
        walked.push(ended);
    }
    walked
}

/// What the commands have printed and left.
fn check(home: &Home, walked: &[Ended]) {
    assert!(walked[1].stdout.contains("[[What") || walked[1].stdout.contains("[["), "{}", walked[1].stdout);
    let said = |at: usize| walked[at].stdout.clone() + &walked[at].stderr;
    for (at, part) in [
        (2, "data.chat: 24 chats (24 of messages)"),
        (3, "tokens are trained ("),
        (4, "perplexity"),
        (8, "answers by the reference"),
        (8, "margin"),
    ] {
        assert!(said(at).contains(part), "{part}: {}", said(at));
    }
    for name in [
        "adapter/adapter_config.json",
        "adapter/README.md",
        "merged/model.safetensors",
        "merged/chat_template.jinja",
        "merged/generation_config.json",
        "merged/README.md",
        "preferred.gguf",
    ] {
        assert!(home.path(name).exists(), "{name}");
    }
    let card = String::from_utf8(home.read("merged/README.md")).unwrap();
    for part in
        ["library_name: transformers", "| started from | SmolLM2-135M-Instruct |", "chat: chats.jsonl"]
    {
        assert!(card.contains(part), "{part}: {card}");
    }
    assert_eq!(
        number(&home.json("merged/config.json"), "hidden_size"),
        number(&home.json(&format!("{BASE}/config.json")), "hidden_size")
    );
}

#[test]
fn the_ten_commands_of_the_page_work_on_a_tiny_model() {
    let home = Home::new();
    prepare(&home);
    let tiny = "[model]\narch = \"llama\"\nlayers = 1\nhidden = 32\nheads = 2\nseq = 1024\n[data]\nchat = \"chats.jsonl\"\n\
                tokenizer = \"byte\"\ntemplate = \"chatml\"\nvalidation = 0\n[batch]\nglobal = 1\n[train]\nsteps = 1\nthreads = 1\n";
    home.write("tiny.toml", tiny);
    home.run(&["train", "tiny.toml", "--run", "tiny", "--quiet"]).ok();
    home.run(&["export", "tiny", "--out", BASE]).ok();
    check(&home, &walk(&home));
}

/// Takes minutes, and is for the nightly lane.
#[test]
#[allow(clippy::print_stderr, reason = "a test that checks nothing says so")]
fn the_ten_commands_of_the_page_work_on_a_published_model() {
    let Some(folder) = std::env::var_os("PHALANX_SMOLLM2") else {
        eprintln!(
            "skipped: PHALANX_SMOLLM2 names no folder of SmolLM2-135M-Instruct (tools/smollm2_folder.py makes it)"
        );
        return;
    };
    let home = Home::new();
    prepare(&home);
    std::os::unix::fs::symlink(folder, home.path(BASE)).unwrap();
    let walked = walk(&home);
    check(&home, &walked);
    // It knows some arithmetic, and answers in a few words.
    let perplexity = walked[4].stdout.split("perplexity ").nth(1).and_then(|rest| rest.split(',').next());
    let perplexity: f64 = perplexity.unwrap().trim().parse().unwrap();
    assert!(perplexity < 20.0, "{}", walked[4].stdout);
}

/// A tokenizer of single bytes with so many ids.
fn tokenizer(vocab: usize) -> Value {
    let is_shown = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    // GPT-2's letters of bytes.
    let letters = (0..256u32).filter(is_shown).chain(256..324).filter_map(char::from_u32);
    let ids = letters.map(String::from).chain((256..vocab).map(|id| format!("[{id}]"))).zip(0..);
    let ids: serde_json::Map<String, Value> =
        ids.map(|(token, id): (String, u32)| (token, id.into())).collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "pre_tokenizer": bytes, "decoder": bytes,
        "model": {"type": "BPE", "vocab": ids, "merges": []},
    })
}

#[test]
fn recipes_are_planned_and_need_the_memory_that_they_say() {
    let home = Home::new();
    prepare(&home);
    std::fs::copy(home.path("chats.jsonl"), home.path("alpaca.json")).unwrap();
    let mut wrong = Vec::new();
    for (name, vocab, parameters) in [
        ("smollm2_135m_full", 49152, 134_515_008u64),
        ("qwen3_0.6b_full", 151936, 596_049_920),
        ("llama3.2_1b_lora", 128256, 1_235_814_400),
        ("smollm2_1.7b_lora", 49152, 1_711_376_384),
        ("qwen2.5_7b_qlora", 152064, 7_615_616_512),
        ("llama3_8b_qlora", 128256, 8_030_261_248),
        ("smollm2_1.7b_dpo", 49152, 1_711_376_384),
        ("mistral_7b_dpo", 32768, 7_248_023_552),
    ] {
        let path = root().join("examples").join(format!("{name}.toml"));
        let recipe = std::fs::read_to_string(&path).unwrap();
        let said = |what: &str| {
            let line = recipe.lines().find_map(|line| line.strip_prefix(&format!("# {what}: ")));
            line.unwrap_or_else(|| panic!("{name} says no {what}")).to_string()
        };
        // The shape of the published model in place of its folder; tokens do not matter for memory.
        let (shape, path) = (said("shape"), path.display().to_string());
        let (arch, size) = shape.split_once(' ').unwrap();
        let mut given = vec!["plan".to_string(), path, "--json".into(), "--unset=model.init".into()];
        given.extend([format!("--set=model.arch={arch}"), format!("--set=model.size={size}")]);
        home.write("tokenizer.json", tokenizer(vocab).to_string());
        given.extend(
            ["--set=data.tokenizer=tokenizer.json", "--set=memory.limit_mb=1e6", "--set=train.threads=2"]
                .map(String::from),
        );
        if !recipe.contains("template =") {
            given.push("--set=data.template=chatml".into());
        }
        let plan = home.run(&given.iter().map(String::as_str).collect::<Vec<_>>()).ok().json();
        let bytes =
            plan["arena_bytes"].as_array().unwrap().iter().filter_map(|bytes| bytes.as_u64()).max().unwrap();
        let memory = format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
        if memory != said("memory of a rank") {
            wrong.push(format!("{name}: {memory}"));
        }
        let planned = plan["parameters"].as_u64().unwrap();
        // With adapters, a few percent more.
        assert!((parameters..parameters + parameters / 20).contains(&planned), "{name}: {planned}");
    }
    assert!(wrong.is_empty(), "these recipes need other memory than they say:\n{}", wrong.join("\n"));
}
