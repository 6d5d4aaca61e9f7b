//! Manifests whose checksum is valid and whose content is impossible.
//!
//! A manifest's first line is the blake3 of all that follows it, so anybody can make one. Such a manifest may describe
//! another run that is possible; it must not crash, hang or exhaust the program.

use std::fs;

use serde_json::{Value, json};

use crate::hostile::Random;
use crate::reliability::groups::hostile::{Attempt, change_somewhere, number};
use crate::reliability::groups::pipes::prepared;
use crate::reliability::world::Case;

pub(super) fn make(case: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    case.take(&prepared(case.world)?, "r")?;
    let path = case.path("r/checkpoints/step-4/manifest.json");
    let text = fs::read_to_string(&path).map_err(|error| error.to_string())?;
    let mut json: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    if let Some(map) = json.as_object_mut() {
        map.remove("blake3");
    }
    let input = change(&mut json, random);
    fs::write(path, sealed(&json)).map_err(|error| error.to_string())?;
    let words: &[&str] = match random.below(4) {
        0 => &["train", "--run", "r", "--resume", "--quiet", "--set", "train.steps=6"],
        1 => &["sample", "r", "--prompt", "rank", "--tokens", "4"],
        2 => &["inspect", "r", "--verify"],
        _ => &["export", "r", "--out", "hf"],
    };
    Ok(Attempt::new(format!("manifest.json: {input}"), words.iter().copied()))
}

/// A manifest's bytes with its checksum.
fn sealed(json: &Value) -> String {
    let pretty = format!("{json:#}");
    let rest = pretty.strip_prefix("{\n").unwrap_or(&pretty);
    let rest = format!("{rest}\n");
    format!("{{\n  \"blake3\": \"{}\",\n{rest}", blake3::hash(rest.as_bytes()).to_hex())
}

fn change(json: &mut Value, random: &mut Random) -> String {
    let count = |random: &mut Random| serde_json::from_str(&number(random)).unwrap_or(json!(0));
    let tensors = json["tensors"].as_array().map_or(0, Vec::len);
    let at = random.below(tensors);
    let tensor = &mut json["tensors"][at];
    match random.below(8) {
        0 => {
            tensor["shape"] = Value::Array((0..random.below(5)).map(|_| count(random)).collect());
            format!("tensor {at} of shape {}", tensor["shape"])
        }
        1 => {
            tensor["dtype"] = json!(random.pick(&["f64", "F64", "i64", "bf16", "f16", "", "u8"]));
            format!("tensor {at} of type {}", tensor["dtype"])
        }
        2 => {
            let key = *random.pick(&["offset", "range"]);
            tensor["pieces"][0][key] =
                if key == "range" { json!([count(random), count(random)]) } else { count(random) };
            format!("{key} of tensor {at} = {}", tensor["pieces"][0][key])
        }
        3 => {
            tensor["pieces"][0]["file"] =
                json!(random.pick(&["../../x", "/dev/zero", "", ".", "manifest.json"]));
            format!("tensor {at} in the file {}", tensor["pieces"][0]["file"])
        }
        4 => {
            let key = *random.pick(&["step", "ranks", "version"]);
            json[key] = count(random);
            format!("{key} = {}", json[key])
        }
        5 => {
            let model = &mut json["state"]["model"];
            change_somewhere(model, random)
        }
        6 => {
            let state = &mut json["state"];
            change_somewhere(state, random)
        }
        _ => change_somewhere(json, random),
    }
}
