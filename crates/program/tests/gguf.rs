//! `export --format gguf`: the numbers of the folder's tensors under llama.cpp's names and in its order, the tokenizer, and what is refused.
//! That llama.cpp and transformers read such files was seen by hand.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::rig::Home;

/// Contents of a file.
struct Gguf {
    keys: BTreeMap<String, Value>,
    /// Extents, type and numbers; those of blocks are left in the file.
    tensors: BTreeMap<String, (Vec<usize>, u32, Vec<f32>)>,
}

/// Reads the bytes of a file from its beginning on.
struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn take(&mut self, count: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken.to_vec()
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn text(&mut self) -> String {
        let length = self.u64() as usize;
        String::from_utf8(self.take(length)).unwrap()
    }

    fn value(&mut self, kind: u32) -> Value {
        match kind {
            4 | 5 => json!(self.u32()),
            6 => json!(f32::from_bits(self.u32())),
            7 => json!(self.take(1) == [1]),
            8 => json!(self.text()),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).map(|_| self.value(kind)).collect()
            }
            other => panic!("a value of type {other}"),
        }
    }
}

fn read(file: &[u8]) -> Gguf {
    let mut at = Cursor(file);
    assert_eq!((at.take(4), at.u32()), (b"GGUF".to_vec(), 3));
    let (tensors, keys) = (at.u64(), at.u64());
    let key = |at: &mut Cursor| {
        let (key, kind) = (at.text(), at.u32());
        (key, at.value(kind))
    };
    let keys = (0..keys).map(|_| key(&mut at)).collect();
    let infos: Vec<_> = (0..tensors)
        .map(|_| {
            let (name, dimensions) = (at.text(), at.u32());
            let mut shape: Vec<usize> = (0..dimensions).map(|_| at.u64() as usize).collect();
            shape.reverse();
            (name, shape, at.u32(), at.u64() as usize)
        })
        .collect();
    let start = (file.len() - at.0.len()).next_multiple_of(32);
    let numbers = |(name, shape, kind, offset): (String, Vec<usize>, u32, usize)| {
        assert_eq!(offset % 32, 0);
        let (bytes, count) = (&file[start + offset..], shape.iter().product::<usize>());
        let halves = |bytes: &[u8]| {
            bytes.chunks(2).take(count).map(|half| u16::from_le_bytes([half[0], half[1]])).collect::<Vec<_>>()
        };
        let numbers = match kind {
            0 => {
                bytes.chunks(4).take(count).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
            }
            30 => halves(bytes).into_iter().map(|half| f32::from_bits(u32::from(half) << 16)).collect(),
            _ => Vec::new(),
        };
        (name, (shape, kind, numbers))
    };
    Gguf { keys, tensors: infos.into_iter().map(numbers).collect() }
}

/// The tensors of a folder that was exported as f32.
fn safetensors(home: &Home, folder: &str) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let file = home.read(&format!("{folder}/model.safetensors"));
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    let tensor = |(name, entry): (String, Value)| {
        let [start, end] = [0, 1].map(|i| 8 + length + entry["data_offsets"][i].as_u64().unwrap() as usize);
        let numbers =
            file[start..end].chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
        (name, (serde_json::from_value(entry["shape"].clone()).unwrap(), numbers))
    };
    tensors.map(tensor).collect()
}

/// Within each head of so many rows, halves become neighbours: [2, n / 2] is read as [n / 2, 2].
fn neighbours(numbers: &[f32], width: usize, rows: usize) -> Vec<f32> {
    let order =
        (0..numbers.len() / width).map(|row| row / rows * rows + (row % rows) / 2 + row % 2 * rows / 2);
    order.flat_map(|row| numbers[row * width..(row + 1) * width].to_vec()).collect()
}

fn train(home: &Home, run: &str, sets: &[&str]) {
    let mut args = vec!["train", "small.toml", "--run", run, "--quiet", "--set", "train.steps=1"];
    sets.iter().for_each(|set| args.extend(["--set", set]));
    home.run(&args).ok();
}

#[test]
#[allow(clippy::too_many_lines, reason = "a list of names")]
fn tensors_have_the_names_and_the_order_of_llama_cpp() {
    let home = Home::new();
    for (arch, more, permuted) in [
        (
            "llama",
            vec![
                "model.attention_bias=true",
                "model.rope_scaling={rope_type=\"llama3\",factor=8.0,low_freq_factor=1.0,high_freq_factor=4.0,original_max_position_embeddings=16}",
            ],
            true,
        ),
        ("mistral", vec![], true),
        ("qwen2", vec!["model.tied=true"], false),
        ("qwen3", vec!["model.head_dim=16"], false),
        ("smollm3", vec![], true),
        ("olmo2", vec!["model.tied=true"], false),
        ("ministral", vec![], true),
        (
            "phi3",
            vec![
                "model.partial_rotary_factor=0.5",
                "model.positions=64",
                "model.rope_scaling={rope_type=\"longrope\",short_factor=[1.0,1.5],long_factor=[2.0,3.5],original_max_position_embeddings=16}",
            ],
            false,
        ),
        (
            "gemma3_text",
            vec![
                "model.head_dim=16",
                "model.query_pre_attn_scalar=16",
                "model.window=8",
                "model.window_pattern=3",
                "model.local_rope_theta=5000.0",
            ],
            false,
        ),
    ] {
        let arch_key = format!("model.arch={arch}");
        train(&home, arch, &[&[arch_key.as_str(), "model.kv_heads=2", "model.layers=1"][..], &more].concat());
        home.run(&["export", arch, "--out", &format!("{arch}-hf")]).ok();
        let out = format!("{arch}.gguf");
        home.run(&["export", arch, "--out", &out, "--format", "gguf"]).ok();
        let (mut found, folder) = (read(&home.read(&out)), safetensors(&home, &format!("{arch}-hf")));
        let name = match arch {
            "mistral" | "ministral" => "llama",
            "gemma3_text" => "gemma3",
            other => other,
        };
        assert_eq!(found.keys["general.architecture"], name);
        assert_eq!(found.keys[&format!("{name}.attention.head_count_kv")], 2);
        let head_dim = found.keys[&format!("{name}.attention.key_length")].as_u64().unwrap() as usize;
        let (after, gemma) = (["olmo2", "gemma3_text"].contains(&arch), arch == "gemma3_text");
        for (hf, ours) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("model.norm.weight", "output_norm.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.0.self_attn.qkv_proj.weight", "blk.0.attn_qkv.weight"),
            ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
            ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight"),
            ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
            ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight"),
            ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
            ("model.layers.0.self_attn.k_proj.bias", "blk.0.attn_k.bias"),
            ("model.layers.0.self_attn.v_proj.bias", "blk.0.attn_v.bias"),
            ("model.layers.0.self_attn.o_proj.bias", "blk.0.attn_output.bias"),
            ("model.layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
            ("model.layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
            ("model.layers.0.mlp.gate_up_proj.weight", "blk.0.ffn_up.weight"),
            ("model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"),
            ("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"),
            ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
            ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
            (
                "model.layers.0.post_attention_layernorm.weight",
                if after { "blk.0.post_attention_norm.weight" } else { "blk.0.ffn_norm.weight" },
            ),
            ("model.layers.0.pre_feedforward_layernorm.weight", "blk.0.ffn_norm.weight"),
            ("model.layers.0.post_feedforward_layernorm.weight", "blk.0.post_ffw_norm.weight"),
        ] {
            // A tied head is left out, but for OLMo 2's.
            let hf = if hf == "lm_head.weight" && arch == "olmo2" { "model.embed_tokens.weight" } else { hf };
            let Some((shape, numbers)) = folder.get(hf) else { continue };
            let turned = permuted && (ours.contains("attn_q.") || ours.contains("attn_k."));
            let expected = if turned {
                neighbours(numbers, shape.get(1).copied().unwrap_or(1), head_dim)
            } else if gemma && ours.ends_with("norm.weight") {
                // Gemma multiplies by 1 + weight.
                numbers.iter().map(|number| number + 1.0).collect()
            } else {
                numbers.clone()
            };
            assert_eq!(found.tensors.remove(ours), Some((shape.clone(), 0, expected)), "{arch}: {ours}");
        }
        let rest: Vec<String> = found.tensors.keys().cloned().collect();
        let expected: &[&str] = match arch {
            "llama" => &["rope_freqs.weight"],
            "phi3" => &["rope_factors_long.weight", "rope_factors_short.weight"],
            _ => &[],
        };
        assert_eq!(rest, expected, "{arch}");
    }
    let divisors = &read(&home.read("llama.gguf")).tensors["rope_freqs.weight"].2;
    // Heads of 8 in four pairs: 16 positions hold 2.5 turns of the first, which is between, and less than one of the others.
    assert!(divisors[0] > 1.0 && divisors[0] < 8.0 && divisors[1..] == [8.0; 3], "{divisors:?}");
    let phi3 = read(&home.read("phi3.gguf"));
    let factors = |name: &str| phi3.tensors[&format!("rope_factors_{name}.weight")].2.clone();
    assert_eq!([factors("long"), factors("short")], [[2.0, 3.5], [1.0, 1.5]]);
    let number = |file: &Gguf, key: &str| file.keys[key].as_f64().unwrap();
    // Four times the positions of training: ln 4 / ln 16 is a half.
    let factor = number(&phi3, "phi3.rope.scaling.attn_factor");
    assert!((factor - 1.5f64.sqrt()).abs() < 1e-7, "{factor}");
    for (key, expected) in [
        ("rope.scaling.original_context_length", 16.0),
        ("rope.dimension_count", 4.0),
        ("attention.sliding_window", 0.0),
    ] {
        assert_eq!(number(&phi3, &format!("phi3.{key}")), expected, "{key}");
    }
    let gemma3 = read(&home.read("gemma3_text.gguf"));
    for (key, expected) in [
        ("attention.sliding_window", 8.0),
        ("attention.sliding_window_pattern", 3.0),
        ("rope.freq_base_swa", 5e3),
        ("rope.freq_base", 1e6),
    ] {
        assert_eq!(number(&gemma3, &format!("gemma3.{key}")), expected, "{key}");
    }
}

#[test]
fn types_round_and_the_tokenizer_has_a_token_for_each_row() {
    let home = Home::new();
    train(&home, "r", &["model.hidden=64", "model.layers=1", "data.tokenizer=gpt2", "model.vocab=50304"]);
    home.run(&["export", "r", "--out", "f32-hf"]).ok();
    for (dtype, word, kind) in [("bf16", "bfloat16", 30), ("f16", "float16", 1), ("q8_0", "", 8)] {
        let out = format!("{dtype}.gguf");
        let json = home
            .run(&["export", "r", "--out", &out, "--format", "gguf", "--dtype", dtype, "--json"])
            .ok()
            .json();
        assert_eq!(
            (&json["arch"], json["bytes"].as_u64().unwrap() as usize),
            (&json!("gpt2"), home.read(&out).len())
        );
        let found = read(&home.read(&out));
        let kinds = |name: &str| found.tensors[name].1;
        assert_eq!(["token_embd.weight", "blk.0.attn_qkv.weight"].map(kinds), [kind; 2], "{dtype}");
        for name in ["position_embd.weight", "blk.0.attn_norm.weight", "blk.0.attn_qkv.bias"] {
            assert_eq!(kinds(name), 0, "{dtype}: {name}");
        }
        if !word.is_empty() {
            home.run(&["export", "r", "--out", dtype, "--dtype", dtype]).ok();
            let config = home.json(&format!("{dtype}/config.json"));
            assert_eq!([&config["torch_dtype"], &config["dtype"]], [word; 2]);
            home.run(&["import", dtype, "--run", &format!("{dtype}-run")]).ok();
            home.run(&[
                "export",
                &format!("{dtype}-run"),
                "--out",
                &format!("{dtype}-again"),
                "--dtype",
                dtype,
            ])
            .ok();
            let file = |folder: &str| home.read(&format!("{folder}/model.safetensors"));
            assert!(file(dtype) == file(&format!("{dtype}-again")) && file(dtype) != file("f32-hf"));
        }
        let tokens = found.keys["tokenizer.ggml.tokens"].as_array().unwrap();
        assert_eq!(
            (tokens.len(), &tokens[50_256], &tokens[50_303]),
            (50_304, &json!("<|endoftext|>"), &json!("[PAD50303]"))
        );
    }
    // Weights of GPT-2 are [in, out] in the folder.
    let (folder, found) = (safetensors(&home, "f32-hf"), read(&home.read("bf16.gguf")));
    let (shape, numbers) = &folder["transformer.h.0.mlp.c_fc.weight"];
    let (turned, _, rounded) = &found.tensors["blk.0.ffn_up.weight"];
    assert_eq!((shape[0], shape[1]), (turned[1], turned[0]));
    for (at, number) in numbers.iter().enumerate() {
        let rounded = rounded[at % shape[1] * shape[0] + at / shape[1]];
        // Half of the last of 8 bits.
        assert!((rounded - number).abs() <= number.abs() / 256.0, "{at}: {number} became {rounded}");
    }
    home.run(&["export", "r", "--out", "bf16.gguf", "--format", "gguf"])
        .refused(&["bf16.gguf is there", "--force"]);
    home.run(&["export", "r", "--out", "bf16.gguf", "--format", "gguf", "--force"]).ok();
    home.run(&["export", "r", "--out", "text.txt", "--format", "gguf", "--force"])
        .refused(&["has not written what is there"]);
    home.run(&["export", "r", "--out", "x", "--dtype", "q8_0"])
        .refused(&["--dtype q8_0 is for --format gguf"]);
    assert!(!home.path("x").exists());
}

#[test]
fn what_llama_cpp_computes_otherwise_is_refused_by_name() {
    let home = Home::new();
    for (arch, more, expected) in [
        ("bert", vec![], "BERT"),
        ("mistral", vec!["model.window=8"], "sliding_window = 8"),
        ("qwen3", vec!["model.attention_bias=true"], "attention_bias"),
        ("llama", vec!["model.rope_scaling={rope_type=\"dynamic\",factor=2.0}"], "\"dynamic\""),
        ("llama", vec!["data.tokenizer=char"], "\"WordLevel\""),
        ("phi3", vec!["model.window=8"], "sliding_window = 8"),
        ("phi3", vec!["model.head_dim=16"], "head_dim = 16"),
        ("gemma3_text", vec!["model.head_dim=16"], "query_pre_attn_scalar = 256"),
        (
            "gemma3_text",
            vec!["model.head_dim=256", "model.rope_scaling={rope_type=\"yarn\",factor=2.0}"],
            "rope_type = \"yarn\"",
        ),
    ] {
        let (run, arch_key) =
            (format!("{arch}-{expected}").replace(['"', ' '], ""), format!("model.arch={arch}"));
        train(&home, &run, &[&[arch_key.as_str()][..], &more].concat());
        home.run(&["export", &run, "--out", "x.gguf", "--format", "gguf"])
            .refused(&[expected, "nothing was written"]);
        assert!(!home.path("x.gguf").exists());
    }
}
