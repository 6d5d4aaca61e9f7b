//! Runs on token files: what is read is what was given, and anything else is refused by name.

use std::fs;

use crate::rig::Home;
use serde_json::json;

/// The text of the rig, of which every byte is a token.
fn text(home: &Home) -> Vec<u8> {
    home.read("text.txt")
}

/// Bare ids of `width` bytes.
fn ids(bytes: &[u8], width: usize) -> Vec<u8> {
    bytes.iter().flat_map(|byte| u64::from(*byte).to_le_bytes().into_iter().take(width)).collect()
}

/// A configuration on `tokens`, with more keys of `[data]`.
fn config(home: &Home, name: &str, data: &str) {
    let small = String::from_utf8(home.read("small.toml")).unwrap();
    let small = small.replace("text = [\"text.txt\"]\n", data).replace("seq = 16", "seq = 16\nvocab = 256");
    let own = data.contains("validation_tokens");
    home.write(name, if own { small.replace("validation = 0.1\n", "") } else { small });
}

/// Every way to give the same tokens trains the same run: the losses of the text itself, bit for bit.
#[test]
fn the_same_tokens_by_every_way_give_the_same_run() {
    let home = Home::new();
    let text = text(&home);
    home.run(&["train", "small.toml", "--run", "text", "--quiet"]).ok();
    let (train, val) = text.split_at((text.len() as f64 * 0.9 + 1e-6) as usize);
    let (one, two) = train.split_at(1001);
    for (name, bytes, width) in [
        ("whole.bin", &text[..], 2),
        ("wide.bin", &text, 4),
        ("widest.dat", &text, 8),
        ("fw_train_1.bin", one, 2),
        ("fw_train_2.bin", two, 2),
        ("fw_val_0.bin", val, 2),
    ] {
        home.write(name, ids(bytes, width));
    }
    let expected = home.losses("text");
    for (number, data) in [
        "tokens = \"whole.bin\"\n",
        "tokens = [\"whole.bin\"]\ntoken_type = \"u16\"\n",
        "tokens = \"wide.bin\"\ntoken_type = \"u32\"\n",
        "tokens = \"widest.dat\"\ntoken_type = \"i64\"\n",
        "tokens = [\"fw_train_1.bin\", \"fw_train_2.bin\"]\nvalidation_tokens = \"fw_val_0.bin\"\n",
        "tokens = \"fw_train_*.bin\"\nvalidation_tokens = \"fw_val_*.bin\"\n",
        "tokens = [\"fw_train_*.bin\", \"fw_val_0.bin\"]\n",
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("run-{number}");
        config(&home, "tokens.toml", data);
        let ended = home.run(&["train", "tokens.toml", "--run", &run]).ok();
        assert_eq!(home.losses(&run), expected, "{data}");
        let val_loss = |run: &str| {
            home.metrics(run).into_iter().filter_map(|line| line.get("val_loss").cloned()).collect::<Vec<_>>()
        };
        assert_eq!(val_loss(&run), val_loss("text"), "{data}");
        let held_out = if data.contains("validation_tokens") { train.len() } else { text.len() };
        assert!(
            ended.stderr.contains(&format!("tokens      {held_out} tokens of type u"))
                || data.contains("i64"),
            "{}",
            ended.stderr
        );
        assert!(ended.stdout.contains(&format!("validation part {} tokens", val.len())), "{}", ended.stdout);
        assert!(ended.stderr.contains("the largest id of the token files is 117"), "{}", ended.stderr);
    }
}

#[test]
fn what_cannot_be_meant_is_refused_by_every_command() {
    let home = Home::new();
    let text = text(&home);
    home.write("a.bin", ids(&text[..4000], 2));
    home.write("b.bin", ids(&text[4000..8000], 2));
    home.write("copy.bin", ids(&text[..4000], 2));
    home.write("wide.bin", ids(&text, 4));
    home.write("zeros.bin", vec![0; 8000]);
    home.write("text.bin", &text[..8000]);
    home.run(&["tokenize", "--out", "own.bin", "text.txt"]).ok();
    for (data, words) in [
        ("tokens = \"text.bin\"\n", vec!["text.bin", "UTF-8 text", "data.text"]),
        ("tokens = \"wide.bin\"\n", vec!["wide.bin", "data.token_type = \"u32\""]),
        ("tokens = [\"a.bin\", \"zeros.bin\"]\n", vec!["zeros.bin", "one id only", "data.unusual_tokens"]),
        ("tokens = \"a.bin\"\nvalidation_tokens = \"zeros.bin\"\n", vec!["zeros.bin", "one id only"]),
        ("tokens = \"missing/*.bin\"\n", vec!["missing/*.bin", "no token file matches"]),
        ("tokens = [\"a.bin\", \"own.bin\"]\n", vec!["a.bin", "own.bin", "do not go together"]),
        (
            "tokens = \"own.bin\"\nvalidation_tokens = \"b.bin\"\n",
            vec!["own.bin", "b.bin", "do not go together"],
        ),
        ("tokens = \"own.bin\"\ntoken_type = \"u32\"\n", vec!["own.bin", "data.token_type", "u16"]),
        ("tokens = [\"a.bin\", \"*.bin\"]\n", vec!["a.bin", "are one file"]),
        ("tokens = [\"a.bin\", \"b.bin\"]\nvalidation_tokens = \"b.bin\"\n", vec!["b.bin", "are one file"]),
        ("tokens = []\n", vec!["data.tokens = []", "names no file"]),
        ("tokens = [\"a.bin\", \"\"]\n", vec!["data.tokens", "without a name"]),
        (
            "tokens = \"a.bin\"\ntext = [\"text.txt\"]\n",
            vec!["data.tokens = a.bin", "needs data.text left out"],
        ),
        (
            "text = [\"text.txt\"]\nvalidation_tokens = \"b.bin\"\n",
            vec!["data.validation_tokens", "is for data.tokens"],
        ),
        (
            "text = [\"text.txt\"]\ntoken_type = \"u32\"\n",
            vec!["data.token_type = \"u32\"", "is for data.tokens"],
        ),
        ("tokens = 3\n", vec!["data.tokens = 3", "a path in quotes, or a list"]),
        (
            "tokens = \"a.bin\"\ntoken_type = \"f32\"\n",
            vec!["data.token_type", "\"auto\", \"u8\", \"u16\", \"u32\", \"i64\""],
        ),
    ] {
        config(&home, "tokens.toml", data);
        for command in ["plan", "train"] {
            home.run(&[command, "tokens.toml"]).refused(&words);
        }
        assert!(!home.path("runs/tokens").exists(), "{data}");
    }
    config(&home, "both.toml", "tokens = \"a.bin\"\nvalidation_tokens = \"b.bin\"\n");
    let both = ["--set", "data.validation=0.1"];
    home.run(&[&["plan", "both.toml"][..], &both].concat())
        .refused(&["data.validation = 0.1", "give one of the two"]);
    // The content is compared where all of it is read.
    config(&home, "tokens.toml", "tokens = [\"a.bin\", \"b.bin\"]\nvalidation_tokens = \"copy.bin\"\n");
    home.run(&["train", "tokens.toml"]).refused(&[
        "a.bin",
        "copy.bin",
        "have the same content",
        "evaluation",
    ]);
    // What is unusual is accepted by its key, and said.
    for (data, note) in [
        (
            "tokens = \"zeros.bin\"\nunusual_tokens = true\n",
            "zeros.bin: it holds one id only, 0; read as u16",
        ),
        ("tokens = [\"a.bin\", \"copy.bin\"]\n", "have the same content: their tokens count twice"),
    ] {
        config(&home, "tokens.toml", data);
        let ended = home.run(&["train", "tokens.toml", "--run", &format!("r{}", data.len()), "--quiet"]).ok();
        assert!(ended.stderr.contains(note), "{}", ended.stderr);
    }
    // `plan` says what it reads also for programs.
    let planned = home.run(&["plan", "tokens.toml", "--json"]).ok();
    let read = "tokens      8000 tokens of type u16 in 16000 bytes";
    assert!(planned.stderr.contains(read), "{}", planned.stderr);
    assert!(planned.json()["data"]["notes"].to_string().contains(read), "{}", planned.stdout);
    let shown = home.run(&["inspect", "wide.bin"]).refused(&["data.token_type = \"u32\""]);
    assert!(shown.stdout.contains("3000") || shown.stdout.contains("tokens of type u16"), "{}", shown.stdout);
    let wide = home.run(&["inspect", "wide.bin", "--token-type", "u32", "--verify", "--json"]).ok().json();
    let first: Vec<serde_json::Value> = text.iter().take(64).map(|byte| json!(byte)).collect();
    assert_eq!((&wide["tokens"], &wide["largest"]), (&json!(text.len()), &json!(117)));
    assert_eq!(wide["first"], json!(first));
}

/// A resumed run reads the files with which it was started, and names the one that has changed.
#[test]
fn a_resumed_run_reads_the_same_files() {
    let home = Home::new();
    let text = text(&home);
    for (name, part) in
        [("s_1.bin", &text[..3000]), ("s_2.bin", &text[3000..6000]), ("val.bin", &text[6000..])]
    {
        home.write(name, ids(part, 2));
    }
    config(&home, "tokens.toml", "tokens = \"s_*.bin\"\nvalidation_tokens = \"val.bin\"\n");
    home.run(&["train", "tokens.toml", "--run", "whole", "--quiet"]).ok();
    home.run(&["train", "tokens.toml", "--run", "r", "--quiet", "--set", "train.steps=4"]).ok();
    // A file that came later does not count, nor does the order of names in the folder.
    home.write("s_0.bin", ids(&text[..3000], 2));
    let resume = ["train", "tokens.toml", "--run", "r", "--resume", "--quiet", "--set", "train.steps=8"];
    let saved = home.snapshot("r");
    for name in ["s_2.bin", "val.bin"] {
        let whole = home.read(name);
        let mut changed = whole.clone();
        changed[1000] ^= 1;
        home.write(name, &changed);
        home.run(&resume).refused(&[
            name,
            "does not hold the tokens",
            "--set data.tokens=",
            "nothing was changed",
        ]);
        fs::remove_file(home.path(name)).unwrap();
        home.run(&resume).refused(&[name, "no such file"]);
        home.write(name, &whole);
    }
    assert_eq!(home.snapshot("r"), saved);
    home.run(&resume).ok();
    assert_eq!(home.losses("r"), home.losses("whole"));
    // Several ranks read the same.
    home.run(&[
        "train",
        "tokens.toml",
        "--run",
        "two",
        "--quiet",
        "--nproc",
        "2",
        "--set",
        "data.tokens=[\"s_1.bin\", \"s_2.bin\"]",
    ])
    .ok();
    assert_eq!(home.losses("two").len(), 8);
}

/// A part that is too short names values that work: `plan` and `train` accept each of them.
#[test]
fn a_part_that_is_too_short_names_what_works() {
    let home = Home::new();
    let text = text(&home);
    home.write("short.bin", ids(&text[..120], 2));
    home.write("short.txt", &text[..120]);
    for data in ["tokens = \"short.bin\"\n", "text = [\"short.txt\"]\n"] {
        config(&home, "tokens.toml", data);
        for command in ["plan", "train"] {
            let words = [
                "the validation part of",
                "data.validation = 0.1 of 120 tokens",
                "has 12 tokens",
                "needs 17",
            ];
            let works =
                ["data.validation = 0.1334 or more", "model.seq = 11 or less", "data.validation = 0 (no"];
            home.run(&[command, "tokens.toml"]).refused(&[&words[..], &works].concat());
            for works in
                ["data.validation=0.1334", "model.seq=11", "data.validation=0", "data.validation=0.8583"]
            {
                let mut args = vec![command, "tokens.toml", "--set", works];
                args.extend((command == "train").then_some(["--run", "r", "--quiet"]).into_iter().flatten());
                home.run(&args).ok();
                let _ = fs::remove_dir_all(home.path("r"));
            }
            for fails in ["data.validation=0.1333", "model.seq=12", "data.validation=0.8667"] {
                home.run(&[command, "tokens.toml", "--set", fails]).refused(&["what works:"]);
            }
            let all = ["--set", "data.validation=0.9"];
            home.run(&[&[command, "tokens.toml"][..], &all].concat())
                .refused(&["the training part of", "0.8583 or less"]);
        }
    }
}
