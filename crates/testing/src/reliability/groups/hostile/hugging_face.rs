//! Hugging Face folders: counts that the weights do not have, headers whose lengths, offsets, types and shapes lie.

use std::fs;

use serde_json::{Value, json};

use crate::hostile::Random;
use crate::reliability::groups::hostile::{Attempt, change_somewhere, flip, nested, number};
use crate::reliability::groups::pipes::prepared;
use crate::reliability::world::Case;

/// Keys of `config.json` that count something.
const COUNTS: [&str; 6] = ["n_layer", "n_head", "n_embd", "n_positions", "n_ctx", "vocab_size"];

pub(super) fn make(case: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    case.take(&prepared(case.world)?, "hf")?;
    let (input, refused) = if random.chance(0.5) { config(case, random)? } else { weights(case, random)? };
    let words: &[&str] = match random.below(if refused.is_some() { 2 } else { 4 }) {
        0 => &["import", "hf", "--run", "i"],
        1 => &["train", "small.toml", "--set", "model.init=hf", "--set", "train.steps=3", "--quiet"],
        2 => &["inspect", "hf"],
        _ => &["plan", "small.toml", "--set", "model.init=hf"],
    };
    let mut attempt = Attempt::new(input, words.iter().copied());
    // A shape in the configuration may be refused before the folder is read.
    if let Some(name) = refused {
        attempt = attempt.refused(if words[0] == "import" { name } else { "error" });
    }
    Ok(attempt)
}

/// Description of what was written, and the name that a refusal must contain.
type Written = (String, Option<&'static str>);

fn config(case: &Case<'_>, random: &mut Random) -> Result<Written, String> {
    let path = case.path("hf/config.json");
    let text = fs::read_to_string(&path).map_err(|error| error.to_string())?;
    let mut json: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let (input, text, refused) = match random.below(8) {
        0 => {
            json["n_layer"] = json!(1);
            ("config.json with a layer less than the weights".to_string(), json.to_string(), Some("layer"))
        }
        1..4 => {
            let key = *random.pick(&COUNTS);
            json[key] = serde_json::from_str(&number(random)).unwrap_or(json!(0));
            (format!("config.json: {key} = {}", json[key]), json.to_string(), None)
        }
        4 => (format!("config.json: {}", change_somewhere(&mut json, random)), json.to_string(), None),
        5 => {
            let mut bytes = text.into_bytes();
            flip(&mut bytes, random);
            let text = String::from_utf8_lossy(&bytes).into_owned();
            ("config.json with flipped bytes".to_string(), text, None)
        }
        6 => {
            let depth = 10usize.pow(1 + random.below(6) as u32);
            (format!("config.json of {depth} nested arrays"), nested(depth), Some("config.json"))
        }
        _ => {
            let padding = " ".repeat(1 << (10 + random.below(15)));
            (format!("config.json with {} blanks", padding.len()), json.to_string() + &padding, None)
        }
    };
    fs::write(path, text).map_err(|error| error.to_string())?;
    Ok((input, refused))
}

fn weights(case: &Case<'_>, random: &mut Random) -> Result<Written, String> {
    let path = case.path("hf/model.safetensors");
    let mut bytes = fs::read(&path).map_err(|error| error.to_string())?;
    let length = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length)) as usize;
    let (input, refused) = match random.below(8) {
        0 => {
            let lie = *random.pick(&[
                0,
                1,
                7,
                99_000_000,
                100_000_001,
                u64::MAX,
                u64::MAX - 7,
                1 << 63,
                length as u64 + 1,
            ]);
            bytes[..8].copy_from_slice(&lie.to_le_bytes());
            (format!("a header length of {lie}"), Some("model.safetensors"))
        }
        1 => {
            let tensors = 8 + length;
            let at = tensors + 4 * random.below((bytes.len() - tensors) / 4);
            let not_finite = *random.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
            bytes[at..at + 4].copy_from_slice(&not_finite.to_le_bytes());
            (format!("a weight that is {not_finite}"), Some("finite"))
        }
        2 => {
            bytes.truncate(random.below(bytes.len()));
            (format!("weights cut to {} bytes", bytes.len()), Some("model.safetensors"))
        }
        3 => {
            // Blanks are JSON: a header of nearly the largest size that the format allows.
            let blanks = *random.pick(&[1_000usize, 1_000_000, 20_000_000]);
            let header = [&bytes[8..8 + length], &vec![b' '; blanks][..]].concat();
            bytes = [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[8 + length..]].concat();
            (format!("a header with {blanks} blanks"), None)
        }
        4 => {
            flip(&mut bytes[..8 + length], random);
            ("a header with flipped bytes".to_string(), None)
        }
        _ => {
            let mut header: Value =
                serde_json::from_slice(&bytes[8..8 + length]).map_err(|error| error.to_string())?;
            let input = lie(&mut header, random);
            let header = header.to_string();
            bytes =
                [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]].concat();
            (input, None)
        }
    };
    fs::write(path, bytes).map_err(|error| error.to_string())?;
    Ok((input, refused))
}

/// Changes what a header says of one tensor.
fn lie(header: &mut Value, random: &mut Random) -> String {
    let names: Vec<String> = header.as_object().map(|map| map.keys().cloned().collect()).unwrap_or_default();
    let name = random.pick(&names).clone();
    let entry = &mut header[&name];
    let count = |random: &mut Random| serde_json::from_str(&number(random)).unwrap_or(json!(0));
    match random.below(5) {
        0 => entry["data_offsets"] = json!([count(random), count(random)]),
        1 => entry["shape"] = Value::Array((0..random.below(6)).map(|_| count(random)).collect()),
        2 => entry["dtype"] = json!(random.pick(&["F64", "F8_E4M3", "I64", "BOOL", "", "f32"])),
        3 => {
            let again = entry.clone();
            header[format!("{name}.again")] = again;
        }
        _ => return format!("a header: {}", change_somewhere(header, random)),
    }
    let shown: String = header[&name].to_string().chars().take(120).collect();
    format!("a header: {name} {shown}")
}
