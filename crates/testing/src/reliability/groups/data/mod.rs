//! Generated corpora: formats, encodings, names, copies, links and broken lines, in folders or named one by one.
//!
//! The rule: a run trains on what was meant, or refuses by name; never silent. The case itself computes which bytes are
//! to become tokens, in which order, and everything that must be named; it reads the tokens that were made, byte by byte.

mod items;

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use crate::hostile::Random;
use crate::reliability::command::Ended;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};
use items::{Item, KINDS, Outcome, Shape};

/// Commands that read the corpus.
const COMMANDS: [&[&str]; 5] = [
    &["tokenize", "--out", "t.bin"],
    &["tokenize", "--json", "--out", "t.bin"],
    &["train", "small.toml", "--run", "r"],
    &["train", "small.toml", "--run", "r", "--quiet"],
    &["train", "small.toml", "--run", "r", "--json"],
];

/// The id between two documents of bytes.
const BETWEEN: u8 = 0xff;

/// A corpus and what must come of it.
struct Corpus {
    items: Vec<Item>,
    /// True if the files are named one by one, in this order, and not by their folder.
    is_named: bool,
    max_skipped: Option<f64>,
}

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let corpus = make(random, number);
    let command = *random.pick(&COMMANDS);
    let first = corpus.items.first().map_or("", |item| item.kind);
    let listed: Vec<String> =
        corpus.items.iter().map(|item| format!("{} ({})", item.name, item.kind)).collect();
    let how = if corpus.is_named { "named" } else { "in a folder" };
    let detail =
        format!("{} of {how}: {}, max_skipped {:?}", command[0], listed.join(", "), corpus.max_skipped);
    let result = world.case().and_then(|case| attempt(&case, &corpus, command));
    Trial::new(format!("a corpus with {first}"), detail, result)
}

/// A corpus whose first item is of each kind in turn, with others beside it.
fn make(random: &mut Random, number: usize) -> Corpus {
    let mut kinds = vec![KINDS[number % KINDS.len()]];
    for _ in 0..random.below(5) {
        kinds.push(*random.pick(&KINDS));
    }
    // A group of what is said shows its first three names.
    let mut known = HashSet::new();
    kinds.retain(|(kind, _)| known.insert(*kind));
    let items: Vec<Item> = kinds.iter().enumerate().map(|(n, (kind, make))| make(kind, n, random)).collect();
    let is_named = random.chance(0.4) && !items.iter().any(Item::is_for_folders);
    let max_skipped = random.chance(0.5).then(|| *random.pick(&[1.0, 1.0, 0.9, 0.0]));
    Corpus { items, is_named, max_skipped }
}

fn attempt(case: &Case<'_>, corpus: &Corpus, command: &[&str]) -> Result<(), String> {
    let folder = case.path("corpus");
    fs::create_dir(&folder).map_err(|error| error.to_string())?;
    for item in &corpus.items {
        item.write(&folder)?;
    }
    let mut words: Vec<String> = command.iter().map(|word| word.to_string()).collect();
    if command[0] == "tokenize" {
        words.extend(corpus.max_skipped.map(|max| format!("--max-skipped={max}")));
    } else {
        words.extend(["--set", "data.tokenizer=byte", "--set", "train.steps=1"].map(String::from));
        words.extend(
            corpus.max_skipped.iter().flat_map(|max| ["--set".into(), format!("data.max_skipped={max}")]),
        );
        words.push("--data".to_string());
    }
    match corpus.is_named {
        true => words.extend(corpus.items.iter().map(|item| format!("corpus/{}", item.name))),
        false => words.push("corpus".to_string()),
    }
    let ended = case.phalanx(words).run()?;
    let tokens = case.path(if command[0] == "tokenize" { "t.bin" } else { "r/tokens.bin" });
    judge(corpus, &ended, &tokens)
}

/// Checks that the command has read what it had to, or has refused it.
fn judge(corpus: &Corpus, ended: &Ended, tokens: &Path) -> Result<(), String> {
    if let Some(refused) = corpus.items.iter().find(|item| corpus.is_named && item.is_refused_by_name) {
        return ended.refusal(&[&refused.name]);
    }
    let mut items: Vec<&Item> = corpus.items.iter().collect();
    if !corpus.is_named {
        items.sort_by_key(|item| {
            Path::new(&item.name).components().map(|part| part.as_os_str().to_owned()).collect::<Vec<_>>()
        });
    }
    let mut documents: Vec<&[u8]> = Vec::new();
    let (mut skipped_bytes, mut lines, mut skipped_lines) = (0, 0, 0);
    let mut said = Vec::new();
    for item in items {
        said.extend(item.said.iter().map(String::as_str));
        match &item.outcome {
            Outcome::Read { texts, lines: all, skipped } => {
                documents.extend(texts.iter().map(|text| text.as_bytes()));
                (lines, skipped_lines) = (lines + all, skipped_lines + skipped);
            }
            Outcome::Skipped => skipped_bytes += item.size(),
            Outcome::LeftOut => {}
        }
    }
    let text_bytes: usize = documents.iter().map(|text| text.len()).sum();
    let (expected, documents) = (documents.join(&BETWEEN), documents.len());
    let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
    let (of_lines, of_bytes) = (corpus.max_skipped.unwrap_or(0.01), corpus.max_skipped.unwrap_or(0.5));
    let too_many = share(skipped_lines, lines) > of_lines;
    let too_much = share(skipped_bytes, skipped_bytes + text_bytes) > of_bytes;
    if documents == 0 || too_many || too_much {
        ended.refusal(&said)?;
        return match tokens.exists() {
            true => ended.wrong("refused, and left tokens"),
            false => Ok(()),
        };
    }
    ended.success()?;
    if let Some(missing) = said.iter().find(|name| !ended.stderr.contains(*name)) {
        return ended.wrong(&format!("did not say {missing:?}"));
    }
    let read = fs::read(tokens).map_err(|error| format!("tokens: {error}"))?;
    match tokens_of(&read) {
        Some((bytes, counted)) if bytes == expected && counted == documents as u64 => Ok(()),
        Some((bytes, counted)) => {
            let differs = bytes.iter().zip(&expected).position(|(a, b)| a != b);
            ended.wrong(&format!(
                "made {} bytes of {counted} documents, expected {} of {documents}; the first other is {differs:?}",
                bytes.len(),
                expected.len()
            ))
        }
        None => ended.wrong("wrote tokens that cannot be read"),
    }
}

/// The ids of a token file of bytes, what is between documents among them, and the documents that its header counts.
fn tokens_of(file: &[u8]) -> Option<(Vec<u8>, u64)> {
    let long = |at: usize| Some(u64::from_le_bytes(file.get(at..at + 8)?.try_into().ok()?));
    let (tokens, documents) = (long(24)? as usize, long(32)?);
    let ids = file.get(64..64 + 2 * tokens)?.chunks_exact(2).map(|id| u16::from_le_bytes([id[0], id[1]]));
    Some((ids.map(|id| u8::try_from(id).ok()).collect::<Option<_>>()?, documents))
}

impl Item {
    fn write(&self, folder: &Path) -> Result<(), String> {
        let wrong = |error: std::io::Error| format!("{}: {error}", self.name);
        let path = folder.join(&self.name);
        if let Some(above) = path.parent() {
            fs::create_dir_all(above).map_err(wrong)?;
        }
        match &self.shape {
            Shape::File(content) => fs::write(&path, content).map_err(wrong),
            Shape::Link(target) => std::os::unix::fs::symlink(target, &path).map_err(wrong),
            Shape::Files(files) => {
                fs::create_dir_all(&path).map_err(wrong)?;
                files
                    .iter()
                    .try_for_each(|(name, content)| fs::write(path.join(name), content).map_err(wrong))
            }
        }
    }
}
