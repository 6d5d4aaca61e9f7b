//! Inputs that Phalanx did not write: configurations, Hugging Face folders, token files, schedules, tokenizers,
//! manifests with a valid checksum, and special files in their place.
//!
//! A command refuses with an error or succeeds, within the bounds of time and memory. Where an input cannot be right (a
//! wrong type, weights that are not finite, a FIFO), it must refuse, and name the key or the file.

mod configurations;
mod hugging_face;
mod manifests;
mod schedules;
mod special_files;
mod token_files;
mod tokenizers;

use serde_json::Value;

use crate::hostile::Random;
use crate::reliability::command::Ended;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// One kind of input: makes it in the case's folder.
type Input = (&'static str, fn(&Case<'_>, &mut Random) -> Result<Attempt, String>);

// Configurations twice: there are more keys than kinds of files.
const KINDS: [Input; 8] = [
    ("configurations", configurations::make),
    ("configurations", configurations::make),
    ("Hugging Face folders", hugging_face::make),
    ("token files", token_files::make),
    ("schedules", schedules::make),
    ("tokenizers", tokenizers::make),
    ("manifests with a valid checksum", manifests::make),
    ("special files", special_files::make),
];

/// A command on an input that was made for it.
struct Attempt {
    /// Description of the input.
    input: String,
    words: Vec<String>,
    /// `Some` where the command must refuse, with what its message must name.
    refused: Option<String>,
}

impl Attempt {
    fn new<S: Into<String>>(input: impl Into<String>, words: impl IntoIterator<Item = S>) -> Attempt {
        Attempt { input: input.into(), words: words.into_iter().map(Into::into).collect(), refused: None }
    }

    fn refused(mut self, name: &str) -> Attempt {
        self.refused = Some(name.to_string());
        self
    }
}

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let (kind, make) = KINDS[number % KINDS.len()];
    let tried = world.case().and_then(|case| {
        let attempt = make(&case, random)?;
        let ended = case.phalanx(attempt.words.iter().cloned()).run()?;
        Ok((attempt.input.clone(), judge(&attempt, &ended)))
    });
    let (detail, result) = tried.unwrap_or_else(|error| ("preparation".to_string(), Err(error)));
    Trial::new(kind, detail, result)
}

fn judge(attempt: &Attempt, ended: &Ended) -> Result<(), String> {
    match &attempt.refused {
        Some(name) => ended.refusal(&[name]),
        None => ended.orderly(),
    }
}

/// A number that few programs expect, as JSON and TOML write it.
fn number(random: &mut Random) -> String {
    const EDGES: [&str; 18] = [
        "0",
        "1",
        "-1",
        "3",
        "255",
        "65535",
        "65536",
        "1000000",
        "2147483647",
        "4294967295",
        "4294967296",
        "9007199254740993",
        "9223372036854775807",
        "-9223372036854775808",
        "1e300",
        "-1e300",
        "1e-320",
        "0.5",
    ];
    match random.below(4) {
        0 => {
            random
                .next_u64()
                .to_string()
                .chars()
                .take(1 + random.below(18))
                .collect::<String>()
                .trim_start_matches('0')
                .to_string()
                + "7"
        }
        _ => (*random.pick(&EDGES)).to_string(),
    }
}

/// Changes one value somewhere in `json`; says which and to what.
fn change_somewhere(json: &mut Value, random: &mut Random) -> String {
    let stays = random.chance(0.05);
    match json {
        Value::Object(map) if !map.is_empty() && !stays => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = random.pick(&keys).clone();
            if random.chance(0.03) {
                map.remove(&key);
                return format!("{key} is gone");
            }
            format!("{key}.{}", change_somewhere(&mut map[&key], random))
        }
        Value::Array(list) if !list.is_empty() && !stays => {
            let index = random.below(list.len());
            if random.chance(0.05) {
                list.remove(index);
                return format!("{index} is gone");
            }
            format!("{index}.{}", change_somewhere(&mut list[index], random))
        }
        leaf => {
            *leaf = value(random);
            let shown: String = leaf.to_string().chars().take(60).collect();
            format!(" = {shown}")
        }
    }
}

/// A JSON value of any kind.
fn value(random: &mut Random) -> Value {
    match random.below(12) {
        0 => Value::Null,
        1 => Value::String("x".repeat(1 << random.below(16))),
        2 => Value::String("../../x\u{0}\u{202e}".to_string()),
        3 => Value::Array(vec![Value::Bool(true); random.below(5)]),
        4 => Value::Object(serde_json::Map::new()),
        5 => Value::Bool(random.chance(0.5)),
        _ => serde_json::from_str(&number(random)).unwrap_or(Value::Null),
    }
}

/// Arrays within arrays, deeper than a recursive reader can go.
fn nested(depth: usize) -> String {
    "[".repeat(depth) + &"]".repeat(depth)
}

/// Flips up to four bytes.
fn flip(bytes: &mut [u8], random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len());
        if let Some(byte) = bytes.get_mut(at) {
            *byte = random.next_u64() as u8;
        }
    }
}
