//! Configurations: unusual values for every key, unknown keys, text that is not TOML.

use crate::hostile::Random;
use crate::reliability::groups::hostile::{Attempt, flip, nested, number};
use crate::reliability::world::Case;

/// Keys whose value is a count, and which make a run larger.
const COUNTS: [&str; 17] = [
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.seq",
    "model.positions",
    "model.vocab",
    "batch.global",
    "batch.micro",
    "parallel.ranks",
    "parallel.pipeline",
    "parallel.data",
    "parallel.tensor",
    "parallel.chunks",
    "parallel.micro_batches",
    "train.threads",
    "train.steps",
    "train.eval_samples",
];

/// Keys whose value is a number and which leave the size of a run as it is.
const NUMBERS: [&str; 32] = [
    "parallel.zero",
    "parallel.max_staleness",
    "run.stall_timeout_s",
    "memory.search_range_mb",
    "memory.min_chunk_size_mb",
    "memory.hidden_dim",
    "memory.limit_mb",
    "memory.prefetch",
    "memory.checkpointing",
    "memory.chunk",
    "precision.loss_scale",
    "precision.initial_scale_power",
    "precision.loss_scale_window",
    "precision.hysteresis",
    "precision.min_loss_scale",
    "loss.label_smoothing",
    "loss.z_loss",
    "optimizer.lr",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.clip",
    "schedule.warmup",
    "schedule.min_lr",
    "train.eval_every",
    "train.save_every",
    "train.keep",
    "train.seed",
    "data.validation",
    "data.mask_token",
    "model.dropout",
];

/// Keys whose value is a word.
const WORDS: [&str; 15] = [
    "model.arch",
    "model.init",
    "data.tokenizer",
    "data.order",
    "data.tokens",
    "data.text",
    "parallel.schedule",
    "parallel.cut",
    "parallel.updates",
    "precision.compute",
    "precision.accumulate",
    "precision.communicate",
    "precision.products",
    "optimizer.kind",
    "schedule.kind",
];

pub(super) fn make(case: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    match random.below(10) {
        0..5 => numbers(case, random),
        5 => words(case, random),
        6 => wrong_type(random),
        _ => text(case, random),
    }
}

/// One to three numbers that few expect.
fn numbers(case: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    let training = random.chance(0.3);
    let mut sets = Vec::new();
    for _ in 0..1 + random.below(3) {
        // A large run that fits is right, and takes its time: only its plan is asked for.
        let key = match !training && random.chance(0.6) {
            true => *random.pick(&COUNTS),
            false => *random.pick(&NUMBERS),
        };
        let value = match random.below(12) {
            0 => "nan".to_string(),
            1 => "inf".to_string(),
            _ => number(random),
        };
        sets.push(format!("{key}={value}"));
    }
    if random.chance(0.15) {
        sets.push("model.arch=bert".to_string());
    }
    let input = sets.join(" ");
    if random.chance(0.3) {
        return as_file(case, &sets, training, input);
    }
    let mut words = vec![if training { "train" } else { "plan" }.to_string(), "small.toml".to_string()];
    words.extend(sets.into_iter().flat_map(|set| ["--set".to_string(), set]));
    if training {
        words.extend(["--set", "train.steps=3", "--quiet"].map(String::from));
    }
    Ok(Attempt::new(input, words))
}

/// The same keys in a file instead of on the command line.
fn as_file(case: &Case<'_>, sets: &[String], training: bool, input: String) -> Result<Attempt, String> {
    let mut text = std::fs::read_to_string(case.path("small.toml")).map_err(|error| error.to_string())?;
    for set in sets {
        let (key, value) = set.split_once('=').unwrap_or((set, ""));
        let (table, key) = key.split_once('.').unwrap_or(("train", key));
        let value = if value.parse::<f64>().is_ok() { value.to_string() } else { format!("{value:?}") };
        let mut lines = Vec::new();
        let (mut current, mut written) = (String::new(), false);
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('[') {
                current = name.trim_end_matches(']').to_string();
            }
            let is_it = current == table && line.split(['=', ' ']).next() == Some(key);
            if !is_it {
                lines.push(line.to_string());
            }
            if line == format!("[{table}]") {
                lines.push(format!("{key} = {value}"));
                written = true;
            }
        }
        if !written {
            lines.push(format!("[{table}]\n{key} = {value}"));
        }
        text = lines.join("\n") + "\n";
    }
    case.write("hostile.toml", &text)?;
    let words: &[&str] = match training {
        true => &["train", "hostile.toml", "--quiet", "--set", "train.steps=3"],
        false => &["plan", "hostile.toml", "--json"],
    };
    Ok(Attempt::new(format!("a file with {input}"), words.iter().copied()))
}

fn words(_: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    let key = *random.pick(&WORDS);
    let value = match random.below(6) {
        0 => String::new(),
        1 => "x".repeat(1 << random.below(17)),
        2 => "\u{1b}[2J\u{202e}".to_string(),
        3 => "/".to_string(),
        4 => "../../../../etc/passwd".to_string(),
        _ => "none such".to_string(),
    };
    let shown: String = value.chars().take(40).collect();
    let set = format!("{key}={value}");
    Ok(Attempt::new(format!("{key}={shown}"), ["plan", "small.toml", "--set", &set]))
}

/// A value that is not of its key's type must be refused by the key's name.
fn wrong_type(random: &mut Random) -> Result<Attempt, String> {
    // A word is the right type for these, too.
    let takes_words = ["memory.checkpointing", "memory.chunk"];
    let numbers: Vec<_> =
        NUMBERS.iter().chain(&COUNTS).filter(|key| !takes_words.contains(*key)).copied().collect();
    let key = *random.pick(&numbers);
    let value = *random.pick(&["\"seven\"", "true", "[1]", "[[[]]]", "1979-05-27", "{ a = 1 }"]);
    let set = format!("{key}={value}");
    let command = *random.pick(&["plan", "train"]);
    Ok(Attempt::new(set.clone(), [command, "small.toml", "--set", &set]).refused(key))
}

/// Text that is no configuration.
fn text(case: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    let small = std::fs::read(case.path("small.toml")).map_err(|error| error.to_string())?;
    let (name, bytes, refused) = match random.below(7) {
        0 => {
            let mut bytes = small;
            flip(&mut bytes, random);
            ("a configuration with flipped bytes", bytes, false)
        }
        1 => ("an unknown key", [&small[..], b"hiden = 3\n"].concat(), true),
        2 => {
            let depth = 10usize.pow(1 + random.below(5) as u32);
            ("arrays within arrays", format!("[model]\nlayers = {}\n", nested(depth)).into_bytes(), true)
        }
        3 => ("text that is no UTF-8", [&small[..], b"# \xff\xfe\n"].concat(), true),
        4 => {
            let count = 1 + random.below(4000);
            ("random bytes", random.bytes(count), true)
        }
        5 => {
            let lines = "# a line that says nothing, again and again\n".repeat(1 << (8 + random.below(12)));
            ("a long configuration", [&small[..], lines.as_bytes()].concat(), false)
        }
        _ => {
            let depth = 1 << random.below(16);
            ("tables within tables", format!("[{}b]\nx = 1\n", "a.".repeat(depth)).into_bytes(), true)
        }
    };
    case.write("hostile.toml", &bytes)?;
    let command = *random.pick(&["plan", "train"]);
    let more: &[&str] = if command == "train" { &["--quiet", "--set", "train.steps=3"] } else { &[] };
    let words = [&[command, "hostile.toml"], more].concat();
    let attempt = Attempt::new(format!("{name} ({} bytes)", bytes.len()), words);
    Ok(if refused { attempt.refused("hostile.toml") } else { attempt })
}
