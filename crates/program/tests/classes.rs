//! Labelled rows: a BERT learns classes, is evaluated by accuracy and F1, resumes, and goes to a Hugging Face folder and back.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::rig::Home;

const CONFIG: &str = r#"
[model]
arch = "bert"
layers = 1
hidden = 32
heads = 2
seq = 16

[data]
rows = "train.jsonl"
tokenizer = "tok"
validation = 0.2

[batch]
global = 16

[optimizer]
lr = 5e-3

[schedule]
kind = "constant"

[train]
steps = 40
eval_every = 20
save_every = 20
threads = 1
"#;

const WORDS: [&str; 8] = ["good", "fine", "bad", "poor", "the", "film", "was", "so"];

/// Rows whose class follows from a word, sorted by class; every third has a second text.
fn rows() -> Vec<(String, Option<String>, &'static str)> {
    let row = |number: usize| {
        let (class, word) =
            if number < 100 { ("no", WORDS[2 + number % 2]) } else { ("yes", WORDS[number % 2]) };
        let text = format!("the film {}was {word}", "so ".repeat(number % 7));
        (text, number.is_multiple_of(3).then(|| "the film".to_string()), class)
    };
    (0..200).map(row).collect()
}

fn home() -> Home {
    let home = Home::new();
    std::fs::create_dir(home.path("tok")).unwrap();
    let vocab = format!("[PAD]\n[UNK]\n[CLS]\n[SEP]\n{}\n", WORDS.join("\n"));
    home.write("tok/vocab.txt", vocab);
    home.write("classes.toml", CONFIG);
    let (mut lines, mut csv) = (String::new(), "idx,label,text,text_pair\n".to_string());
    for (number, (text, pair, label)) in rows().into_iter().enumerate() {
        let row = json!({ "text": text, "text_pair": pair, "label": label });
        writeln!(lines, "{row}").unwrap();
        writeln!(csv, "{number},{label},\"{text}\",{}", pair.unwrap_or_default()).unwrap();
    }
    home.write("train.jsonl", lines);
    home.write("train.csv", csv);
    home
}

fn last_evaluation(home: &Home, run: &str) -> Value {
    let metrics = String::from_utf8(home.read(&format!("{run}/metrics.jsonl"))).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.rev().find(|line| line["val_loss"].is_number()).unwrap()
}

#[test]
fn rows_are_learned_evaluated_resumed_and_exported() {
    let home = home();
    let ended = home.run(&["train", "classes.toml", "--run", "one"]).ok();
    for part in [
        "2 classes, as the rows have them, \"no\", \"yes\"",
        "160 rows to train on",
        "40 rows held out",
        "accuracy ",
    ] {
        assert!(
            ended.stdout.contains(part) || ended.stderr.contains(part),
            "{part}: {}{}",
            ended.stdout,
            ended.stderr
        );
    }
    let evaluated = last_evaluation(&home, "one");
    assert_eq!(
        (evaluated["accuracy"].as_f64(), evaluated["f1"].as_f64()),
        (Some(1.0), Some(1.0)),
        "{evaluated}"
    );
    assert_eq!((&evaluated["windows"], &evaluated["targets"]), (&json!(40), &json!(40)));
    // On two ranks the same to rounding; resumed, the same bits.
    home.run(&[
        "train",
        "classes.toml",
        "--run",
        "two",
        "--nproc",
        "2",
        "--set",
        "parallel.zero=3",
        "--quiet",
    ])
    .ok();
    let [one, two] = ["one", "two"].map(|run| last_evaluation(&home, run)["val_loss"].as_f64().unwrap());
    assert!((one - two).abs() < 1e-3, "{one} and {two}");
    home.run(&["train", "classes.toml", "--run", "half", "--set", "train.steps=20", "--quiet"]).ok();
    home.run(&["train", "--run", "half", "--resume", "--set", "train.steps=40", "--quiet"]).ok();
    assert_eq!(home.losses("half"), home.losses("one"));
    // The folder of an export has the labels, and starts another run with them.
    home.run(&["export", "one", "--out", "hf"]).ok();
    let config = home.json("hf/config.json");
    assert_eq!(config["architectures"], json!(["BertForSequenceClassification"]));
    assert_eq!(config["id2label"], json!({ "0": "no", "1": "yes" }));
    let tuned = String::from_utf8(home.read("classes.toml")).unwrap();
    let tuned = tuned.replace("arch = \"bert\"\nlayers = 1\nhidden = 32\nheads = 2\n", "init = \"hf\"\n");
    let tuned = tuned
        .replace("tokenizer = \"tok\"\n", "")
        .replace("lr = 5e-3", "lr = 1e-9")
        .replace("steps = 40", "steps = 1");
    home.write("tuned.toml", tuned);
    let ended = home.run(&["train", "tuned.toml", "--run", "tuned"]).ok();
    assert!(!ended.stderr.contains("gets initial values"), "{}", ended.stderr);
    assert_eq!(last_evaluation(&home, "tuned")["accuracy"], json!(1.0));
    home.run(&["sample", "one", "--prompt", "the film"]).refused(&["a model with classes (BERT)"]);
}

/// CSV gives the same run, by names and by numbers; a masked model gets a new head, which is said.
#[test]
fn csv_numbers_and_a_masked_model() {
    let home = home();
    home.run(&["train", "classes.toml", "--run", "lines", "--quiet", "--set", "train.steps=4"]).ok();
    let csv = home
        .run(&[
            "train",
            "classes.toml",
            "--run",
            "csv",
            "--set",
            "train.steps=4",
            "--set",
            "data.rows=\"train.csv\"",
        ])
        .ok();
    assert!(csv.stderr.contains("of the rows is not read: \"idx\""), "{}", csv.stderr);
    assert_eq!(home.losses("csv"), home.losses("lines"));
    let numbers = String::from_utf8(home.read("train.jsonl")).unwrap();
    home.write("numbers.jsonl", numbers.replace("\"no\"", "0").replace("\"yes\"", "1"));
    let ended = home
        .run(&[
            "train",
            "classes.toml",
            "--run",
            "numbers",
            "--set",
            "train.steps=4",
            "--set",
            "data.rows=\"numbers.jsonl\"",
        ])
        .ok();
    assert!(ended.stderr.contains("\"LABEL_0\", \"LABEL_1\""), "{}", ended.stderr);
    assert_eq!(home.losses("numbers"), home.losses("lines"));
    home.write("words.txt", "the film was so good the film was bad ".repeat(40));
    let masked = [
        "train",
        "classes.toml",
        "--unset",
        "data.rows",
        "--set",
        "data.text=[\"words.txt\"]",
        "--set",
        "train.steps=2",
    ];
    home.run(&[&masked[..], &["--run", "masked", "--quiet"]].concat()).ok();
    home.run(&["export", "masked", "--out", "masked-hf"]).ok();
    let tuned = String::from_utf8(home.read("classes.toml")).unwrap();
    let tuned =
        tuned.replace("arch = \"bert\"\nlayers = 1\nhidden = 32\nheads = 2\n", "init = \"masked-hf\"\n");
    home.write("tuned.toml", tuned.replace("tokenizer = \"tok\"\n", ""));
    let ended = home.run(&["train", "tuned.toml", "--run", "tuned"]).ok();
    assert!(ended.stderr.contains("no bert.pooler.* and no classifier.*"), "{}", ended.stderr);
    assert!(ended.stderr.contains("cls.predictions"), "{}", ended.stderr);
    assert_eq!(last_evaluation(&home, "tuned")["accuracy"], json!(1.0));
}

#[test]
fn wrong_rows_are_refused_by_file_and_line() {
    let home = home();
    let good =
        "{\"text\": \"the film\", \"label\": \"no\"}\n{\"text\": \"so\", \"label\": \"yes\"}\n".repeat(4);
    home.write("good.jsonl", &good);
    home.write("open.csv", "text,label\nthe film,no\n\"so bad,no\nfine,yes\n");
    home.write("within.csv", "text,label\nthe film,no\nso \"bad\",no\n");
    home.write("behind.csv", "text,label\n\"the film\" ,no\n");
    home.write("fields.csv", "text,label\nthe film, good,yes\n");
    home.write("columns.csv", "sentence,label\nthe film,yes\n");
    for (name, line) in [
        ("other.jsonl", "{\"text\": \"a\", \"label\": \"maybe\"}"),
        ("beyond.jsonl", "{\"text\": \"a\", \"label\": 2}"),
        ("share.jsonl", "{\"text\": \"a\", \"label\": 0.5}"),
        ("several.jsonl", "{\"text\": \"a\", \"label\": [0, 1]}"),
        ("none.jsonl", "{\"text\": \"a\"}"),
        ("nothing.jsonl", "{\"label\": \"no\"}"),
        ("broken.jsonl", "{\"text\": \"a\", \"label\": \"no\""),
        ("list.jsonl", "{\"text\": [\"a\"], \"label\": \"no\"}"),
    ] {
        home.write(name, format!("{good}{line}\n"));
    }
    home.write("rows.txt", &good);
    let labels = "--set=model.labels=[\"no\",\"yes\"]";
    for (file, words) in [
        (
            "other.jsonl",
            vec!["other.jsonl, line 9", "the label \"maybe\" is not among the classes \"no\", \"yes\""],
        ),
        ("beyond.jsonl", vec!["line 9", "the label \"2\" is not among the classes", "numbers 0 to 1"]),
        ("share.jsonl", vec!["line 9", "\"label\" is 0.5", "regression"]),
        ("several.jsonl", vec!["line 9", "\"label\" is [0,1]", "several classes of one row"]),
        ("none.jsonl", vec!["line 9", "there is no \"label\"", "\"text\""]),
        ("nothing.jsonl", vec!["line 9", "there is no \"text\""]),
        ("broken.jsonl", vec!["line 9", "not a JSON object"]),
        ("list.jsonl", vec!["line 9", "\"text\" is [\"a\"], expected a text"]),
        ("open.csv", vec!["open.csv, line 3", "a quote that opens on this line is never closed"]),
        ("within.csv", vec!["within.csv, line 3", "a quote stands within a field"]),
        ("behind.csv", vec!["behind.csv, line 2", "is followed by ' '"]),
        ("fields.csv", vec!["fields.csv, line 2", "it has 3 fields", "2 columns"]),
        ("columns.csv", vec!["columns.csv, line 2", "there is no \"text\"", "\"sentence\""]),
        ("rows.txt", vec!["rows.txt", ".jsonl", ".csv"]),
        ("gone.jsonl", vec!["gone.jsonl"]),
    ] {
        let rows = format!("--set=data.rows=\"{file}\"");
        for command in ["plan", "train"] {
            let run: &[&str] = if command == "train" { &["--run", "refused"] } else { &[] };
            home.run(&[&[command, "classes.toml", &rows, labels], run].concat()).refused(&words);
        }
        assert!(!home.path("refused").exists(), "{file}: nothing is written");
    }
}

#[test]
fn keys_that_rows_do_not_go_with_are_refused() {
    let home = home();
    let good =
        "{\"text\": \"the film\", \"label\": \"no\"}\n{\"text\": \"so\", \"label\": \"yes\"}\n".repeat(4);
    home.write("good.jsonl", &good);
    home.write("same.jsonl", "{\"text\": \"a\", \"label\": \"no\"}\n".repeat(4));
    let labels = "--set=model.labels=[\"no\",\"yes\"]";
    let refuse = |args: &[&str], words: &[&str]| {
        home.run(&[&["plan", "classes.toml"], args].concat()).refused(words);
    };
    refuse(&["--set=data.rows=\"same.jsonl\""], &["all rows have the label \"no\""]);
    refuse(&["--set=model.arch=gpt2"], &["data.rows", "model.arch = \"bert\""]);
    refuse(&["--set=data.tokenizer=byte"], &["[CLS] text [SEP]", "data.tokenizer"]);
    refuse(&["--set=data.text=[\"text.txt\"]"], &["data.rows", "data.text"]);
    refuse(&["--unset=data.rows", "--set=data.text=[\"text.txt\"]", labels], &["data.text", "data.rows"]);
    refuse(
        &["--set=data.validation_rows=\"good.jsonl\""],
        &["data.validation = 0.2", "data.validation_rows"],
    );
    refuse(&["--set=data.extensions=[\"jsonl\"]"], &["data.extensions", "leave it out"]);
    refuse(&["--set=model.labels=[\"no\"]"], &["model.labels", "2 to 4096 names"]);
    refuse(
        &["--set=parallel.tensor=2", "--set=parallel.sequence_parallel=true"],
        &["sequence_parallel", "pooler"],
    );
    let evaluated = ["--set=data.validation=0.0", "--set=data.validation_rows=\"good.jsonl\""];
    home.run(&[&["plan", "classes.toml"], &evaluated[..]].concat()).ok();
}
