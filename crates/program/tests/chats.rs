//! Chats: they are learned, packed or not, resumed with the same bits, shown, exported with their template, and refused by file and line.

use serde_json::{Value, json};

use crate::rig::{Home, pairs};

const CONFIG: &str = r#"
[model]
arch = "llama"
layers = 1
hidden = 32
heads = 2
seq = 192

[data]
chat = "chats.jsonl"
tokenizer = "byte"
template = "chatml"

[batch]
global = 4

[optimizer]
lr = 1e-2

[schedule]
kind = "constant"

[train]
steps = 6
eval_every = 3
save_every = 3
threads = 1
"#;

fn home() -> Home {
    let home = Home::new();
    home.write("chats.toml", CONFIG);
    let turn = |role: &str, content: String| json!({"role": role, "content": content});
    let chats = (0..60).map(|number| {
        let mut messages =
            vec![turn("user", format!("{number}?")), turn("assistant", format!("{}!", number % 3))];
        if number % 4 == 0 {
            messages.extend([turn("user", "<|endoftext|>?".into()), turn("assistant", "yes".into())]);
        }
        json!({"messages": messages, "id": number}).to_string()
    });
    home.write("chats.jsonl", chats.collect::<Vec<_>>().join("\n"));
    home
}

#[test]
fn chats_are_learned_resumed_and_exported_with_their_template() {
    let home = home();
    let ended = home.run(&["train", "chats.toml", "--run", "one"]).ok();
    let said = ended.stdout + &ended.stderr;
    for part in [
        "data.chat: 60 chats (60 of messages) of 65 to ",
        "0 are longer than model.seq = 192",
        "of 192 tokens, ",
        "tokens are trained (",
        "of the records is not read: \"id\"",
        "chat template: \"chatml\"; it marks what is generated",
        "<|im_start|>, <|im_end|> are no tokens of the tokenizer (byte, 256 ids), and become text",
        "the mean over",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let config = String::from_utf8(home.read("one/config.toml")).unwrap();
    assert!(config.contains("date = \"20") && config.contains("\"data.date\""), "{config}");
    // Resumed, and on two ranks whose states are sharded: the same bits, the same to rounding.
    home.run(&["train", "chats.toml", "--run", "half", "--set=train.steps=3", "--quiet"]).ok();
    home.run(&["train", "--run", "half", "--resume", "--set=train.steps=6", "--quiet"]).ok();
    assert_eq!(home.losses("half"), home.losses("one"));
    home.run(&["train", "chats.toml", "--run", "two", "--nproc=2", "--set=parallel.zero=3", "--quiet"]).ok();
    let losses = |run: &str| -> Vec<f64> {
        home.metrics(run).iter().filter_map(|line| line["loss"].as_f64()).collect()
    };
    for (two, one) in pairs(&losses("two"), &losses("one")) {
        assert!((two - one).abs() < 1e-3, "{two} and {one}");
    }
    // The rows were cut for a length.
    home.run(&["train", "--run", "half", "--resume", "--set=model.seq=128"]).refused(&["model.seq = 192"]);

    home.run(&["export", "one", "--out", "hf"]).ok();
    let template = String::from_utf8(home.read("hf/chat_template.jinja")).unwrap();
    assert!(template.contains("{% generation %}"), "{template}");
    home.write("own.jinja", "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}");
    let own = ["train", "chats.toml", "--run", "own", "--set=data.template=own.jinja", "--set=data.pack=off"];
    let ended = home.run(&[&own[..], &["--set=train.steps=1"]].concat()).ok();
    let said = ended.stdout + &ended.stderr;
    assert!(said.contains("60 rows of 192 tokens"), "{said}");
    assert!(said.contains("answers are found by marks around their content"), "{said}");
}

/// A model that has learned its chats by heart answers as they do, and each answer ends where it ends in them.
#[test]
fn a_trained_model_answers_by_the_template() {
    let home = home();
    let turn = |question: &str, answer: &str| json!({"prompt": [{"role": "user", "content": question}], "completion": [{"role": "assistant", "content": answer}]});
    let chats = [turn("a?", "first"), turn("b?", "the other")].map(|chat| chat.to_string());
    home.write("two.jsonl", chats.join("\n"));
    let train = [
        "train",
        "chats.toml",
        "--run",
        "chat",
        "--set=data.chat=two.jsonl",
        "--set=data.validation=0",
        "--quiet",
    ];
    home.run(
        &[&train[..], &["--set=train.steps=150", "--set=train.eval_every=0", "--set=train.save_every=0"]]
            .concat(),
    )
    .ok();
    let mut command = home.command(&["chat", "chat", "--temperature=0", "--tokens=40"]);
    std::fs::write(home.path("questions"), "a?\n\nb?\n").unwrap();
    command.stdin(std::fs::File::open(home.path("questions")).unwrap());
    let ended = crate::rig::ended(command).ok();
    assert_eq!(ended.stdout, "first\nthe other\n");
    home.run(&[
        "train",
        "chats.toml",
        "--run",
        "plain",
        "--unset=data.chat",
        "--unset=data.template",
        "--set=data.text=two.jsonl",
        "--set=data.plain=jsonl",
        "--set=train.steps=1",
        "--set=model.seq=32",
        "--set=data.validation=0",
        "--quiet",
    ])
    .ok();
    // The loss of the data is what the run evaluates, but for its type and order of sums.
    let of_file = |run: &str, data: &str| home.run(&["eval", run, "--data", data, "--json"]).ok().json();
    let same = ["--set=data.validation_chat=two.jsonl", "--set=train.eval_every=1", "--set=train.steps=1"];
    home.run(&[&train[..3], &["same", "--set=data.chat=two.jsonl", "--quiet"], &same[..]].concat()).ok();
    let (found, evaluated) = (of_file("same", "two.jsonl"), &home.metrics("same"));
    let evaluated = evaluated.iter().rev().find_map(|line| line["val_loss"].as_f64()).unwrap();
    assert!((found["loss"].as_f64().unwrap() - evaluated).abs() < 1e-4, "{found} and {evaluated}");
    assert_eq!((&found["targets"], &found["texts"]), (&json!(34), &json!(2)));
    assert!(of_file("chat", "two.jsonl")["perplexity"].as_f64().unwrap() < 1.5);
    let text = of_file("plain", "two.jsonl");
    assert!(text["targets"].as_u64().unwrap() > 100 && text["loss"].as_f64().unwrap() > 1.0, "{text}");
    home.run(&["eval", "chat", "--data", "none.jsonl"]).refused(&["none.jsonl"]);
    home.run(&["chat", "plain"]).refused(&["no chat template", "data.template"]);
}

#[test]
fn what_is_trained_is_shown() {
    let home = home();
    let show = ["tokenize", "chats.jsonl", "--set=data.template=chatml", "--show=1"];
    let shown = home.run(&show).ok().stdout;
    let expected = "--- chat 1: messages, 143 tokens, 25 trained\n<|im_start|>user\n0?<|im_end|>\n<|im_start|>assistant\n\
        [[0!<|im_end|>]]\n<|im_start|>user\n<|endoftext|>?<|im_end|>\n<|im_start|>assistant\n[[yes<|im_end|>]]\n\n";
    assert_eq!(shown, expected);
    let made: Value =
        serde_json::from_str(&home.run(&[&show[..], &["--json"]].concat()).ok().stdout).unwrap();
    let chat = &made["chats"][0];
    let trained =
        chat["trained"].as_array().unwrap().iter().filter(|trained| **trained == json!(true)).count();
    assert_eq!((chat["ids"].as_array().unwrap().len(), trained), (143, 25));
    home.run(&["tokenize", "chats.jsonl", "--show=1"])
        .refused(&["chats.jsonl, line 1", "has no chat template"]);
    for misused in [&["tokenize", "chats.jsonl", "--show=1", "--out=t.bin"][..], &["tokenize", "chats.jsonl"]]
    {
        let ended = home.run(misused);
        assert!(ended.code == Some(2) && ended.stderr.contains("--out"), "{}", ended.stderr);
    }
}

#[test]
fn wrong_chats_and_keys_are_refused_and_nothing_is_written() {
    let home = home();
    home.write(
        "bad.jsonl",
        "{\"instruction\": \"a\", \"output\": \"b\"}\n{\"instruction\": \"a\", \"output\": \"\"}\n",
    );
    home.write("text.txt", "text");
    home.write(
        "loops.jinja",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    );
    home.write("broken.jinja", "{% for %}");
    for (set, parts) in [
        ("data.chat=bad.jsonl", &["bad.jsonl, line 2: message 2 (assistant) is empty"][..]),
        ("data.chat=none.jsonl", &["data.chat", "none.jsonl"]),
        ("data.format=sharegpt", &["chats.jsonl, line 1", "conversations"]),
        ("data.template=loops.jinja", &["10000000 instructions"]),
        ("data.template=broken.jinja", &["broken.jinja", "line 1"]),
        ("data.template=mine", &["data.template = ", "chatml"]),
        ("data.date=tomorrow", &["data.date", "2026-11-28"]),
        ("data.text=text.txt", &["data.chat", "data.text"]),
        ("data.documents=apart", &["data.documents", "never see each other"]),
        ("model.arch=bert", &["data.chat", "predict the next token"]),
        ("parallel.updates=asynchronous", &["data.chat", "parallel.updates"]),
        ("data.max_skipped=0.5", &["data.max_skipped", "is for text"]),
        ("model.seq=16", &["no chat has an answer within its first 16 tokens"]),
        ("data.tokenizer=char", &["char"]),
    ] {
        home.run(&["train", "chats.toml", "--run", "bad", &format!("--set={set}")]).refused(parts);
        assert!(!home.path("bad").exists(), "{set}");
    }
    let unset = ["train", "chats.toml", "--run", "bad", "--unset=data.template"];
    home.run(&unset).refused(&["chats.jsonl, line 1", "has no chat template"]);
    let both = ["--set=data.validation_chat=chats.jsonl", "--set=data.validation=0.1"];
    home.run(&[&["train", "chats.toml", "--run", "bad"], &both[..]].concat())
        .refused(&["data.validation_chat"]);
    let alone = ["--unset=data.chat", "--set=data.text=text.txt", "--set=data.train_on=all"];
    home.run(&[&["train", "chats.toml", "--run", "bad"], &alone[..]].concat())
        .refused(&["data.t", "is for data.chat"]);
    home.run(&["bench", "step", "chats.toml"]).refused(&["data.chat", "random tokens"]);
}
