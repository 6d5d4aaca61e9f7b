//! Files that somebody else made: a manifest whose checksum is right and whose content is impossible, headers
//! and indexes of any size and form, FIFOs. Each is an error that names file and field, in bounded memory.

use std::fs;
use std::path::Path;

use crate::fixture::{LAYOUTS, save};
use phalanx_checkpoint::{Checkpoint, CheckpointError, HuggingFaceDir, newest};
use phalanx_plan::Stripe;
use phalanx_plan::trace::DType;
use phalanx_testing::hostile::{make_fifo, mutate, mutate_json, overwrite, peak_bytes, survive};
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

/// Maximum memory for reading any of the small files here.
const MAX_BYTES: usize = 4 << 20;

fn golden() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/gpt2")
}

/// The manifest of a checkpoint, without its checksum.
fn manifest(dir: &Path) -> Value {
    let mut manifest: Value = serde_json::from_slice(&fs::read(dir.join("manifest.json")).unwrap()).unwrap();
    manifest.as_object_mut().unwrap().remove("blake3");
    manifest
}

/// Text of a manifest with a correct checksum.
fn sealed(manifest: &Value) -> String {
    let text = serde_json::to_string_pretty(manifest).unwrap();
    let Some(rest) = text.strip_prefix("{\n") else { return text };
    format!("{{\n  \"blake3\": \"{}\",\n{rest}\n", blake3::hash(rest.as_bytes()).to_hex())
}

/// A checkpoint to change.
fn checkpoint() -> (TempDir, std::path::PathBuf, Value) {
    let folder = tempdir().unwrap();
    let dir = save(folder.path(), 4, LAYOUTS[1]);
    let original = manifest(&dir);
    (folder, dir, original)
}

#[test]
fn a_manifest_with_a_right_checksum_and_impossible_content() {
    let (_folder, dir, original) = checkpoint();
    let tensor = |field: &str, value: Value| (format!("/tensors/0/{field}"), value);
    let piece = |field: &str, value: Value| (format!("/tensors/0/pieces/0/{field}"), value);
    let cases: [((String, Value), &str); 26] = [
        (("/step".into(), json!(-1)), "invalid value"),
        (("/step".into(), json!(1e30)), "invalid type"),
        (("/step".into(), json!(5)), "its step is 5"),
        (("/ranks".into(), json!(0)), "2 files for 0 ranks"),
        (("/ranks".into(), json!(3)), "2 files for 3 ranks"),
        (("/files".into(), json!({ "../a": 1, "b": 1 })), "not the name of a file"),
        (("/files".into(), json!({ "..": 1, "b": 1 })), "not the name of a file"),
        (("/files".into(), json!({ "": 1, "b": 1 })), "not the name of a file"),
        (("/files".into(), json!({ "a": u64::MAX, "b": 1 })), "more than 2^64"),
        (("/files".into(), json!({ "a": 1, "b": 1 })), "counts/wte.weight lie outside rank-0"),
        (tensor("dtype", json!("i8")), "unknown variant"),
        (tensor("dtype", json!("f64")), "lie outside"),
        (tensor("shape", json!([])), "counts/wte.weight"),
        (tensor("shape", json!([0])), "counts/wte.weight"),
        (tensor("shape", json!([u64::MAX, 2])), "impossible shape"),
        (tensor("shape", json!(vec![1; 100])), "more than 8 sizes"),
        (tensor("shape", json!([-3])), "invalid value"),
        (tensor("state", json!("x".repeat(5000))), "a name has 5000 bytes"),
        (tensor("pieces", json!([])), "saved by no rank"),
        (piece("range", json!([3, 0])), "elements 3 to 0 of counts/wte.weight"),
        (piece("range", json!([0, u64::MAX])), "of counts/wte.weight"),
        (piece("offset", json!(u64::MAX)), "lie outside"),
        (piece("file", json!("../rank-00000.safetensors")), "lie outside"),
        (piece("stripe", json!({ "run": 0, "ranks": 2, "rank": 0 })), "does not fit its shape"),
        (piece("stripe", json!({ "run": 1, "ranks": 0, "rank": 0 })), "does not fit its shape"),
        (piece("stripe", json!({ "run": 1, "ranks": u64::MAX, "rank": 0 })), "of counts/wte.weight"),
    ];
    for ((pointer, value), word) in cases {
        let mut changed = original.clone();
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        changed.pointer_mut(parent).unwrap()[field] = value.clone();
        fs::write(dir.join("manifest.json"), sealed(&changed)).unwrap();
        let error = Checkpoint::open(&dir).unwrap_err().to_string();
        assert!(error.contains("manifest.json") && error.contains(word), "{pointer} = {value}: {error}");
    }
}

#[test]
fn tensors_and_pieces_that_are_listed_twice_are_refused() {
    let (_folder, dir, mut manifest) = checkpoint();
    let original = manifest.clone();
    manifest["tensors"][0] = manifest["tensors"][1].clone();
    fs::write(dir.join("manifest.json"), sealed(&manifest)).unwrap();
    let error = Checkpoint::open(&dir).unwrap_err().to_string();
    assert!(error.contains("out of order"), "{error}");
    manifest = original;
    let offset = manifest["tensors"][1]["pieces"][0]["offset"].clone();
    assert_eq!(manifest["tensors"][1]["pieces"][0]["file"], manifest["tensors"][3]["pieces"][0]["file"]);
    manifest["tensors"][3]["pieces"][0]["offset"] = offset;
    fs::write(dir.join("manifest.json"), sealed(&manifest)).unwrap();
    let error = Checkpoint::open(&dir).unwrap_err().to_string();
    assert!(error.contains("belongs to a piece of"), "{error}");
}

/// A reader checks the type as well as the shape.
#[test]
fn a_tensor_of_another_type_is_an_error_that_names_both() {
    let (_folder, dir, _) = checkpoint();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    checkpoint.expect("parameters", "wte.weight", &[37, 16], DType::F32).unwrap();
    let error = checkpoint.expect("exp_avg", "wte.weight", &[37, 16], DType::F32).unwrap_err().to_string();
    for word in ["exp_avg/wte.weight", "step-4", "f64", "f32", "[37, 16]"] {
        assert!(error.contains(word), "{word:?} in {error}");
    }
}

#[test]
fn manifests_of_any_content_are_read_or_refused() {
    let (_folder, dir, original) = checkpoint();
    let path = dir.join("manifest.json");
    let mut open = |bytes: &[u8]| {
        overwrite(&path, bytes);
        let Ok(checkpoint) = Checkpoint::open(&dir) else { return false };
        if checkpoint.check_files().is_ok() {
            let _ = checkpoint.verify_all(&mut |_| ());
            for tensor in checkpoint.tensors() {
                let mut out = vec![0; (tensor.elements() * tensor.dtype.bytes() as u64) as usize];
                let _ = checkpoint.read(&tensor.state, &tensor.name, 0..tensor.elements(), &mut out);
            }
        }
        true
    };
    let changed = |random: &mut phalanx_testing::hostile::Random| {
        let mut manifest = original.clone();
        mutate_json(random, &mut manifest);
        sealed(&manifest).into_bytes()
    };
    let accepted = survive("manifest", 2000, MAX_BYTES, changed, &mut open);
    assert!((1..1000).contains(&accepted), "{accepted} of 2000 accepted");
    let text = sealed(&original);
    let accepted = survive("bytes", 500, MAX_BYTES, |random| mutate(random, text.as_bytes()), &mut open);
    assert!(accepted < 50, "{accepted} of 500 accepted, whose checksum is wrong");
}

/// A folder with the golden's configuration, and a file to change.
fn model() -> (TempDir, Vec<u8>) {
    let folder = tempdir().unwrap();
    fs::copy(golden().join("config.json"), folder.path().join("config.json")).unwrap();
    (folder, fs::read(golden().join("model.safetensors")).unwrap())
}

#[test]
fn safetensors_headers_of_any_content_are_read_or_refused() {
    let (folder, original) = model();
    let length = u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&original[8..8 + length]).unwrap();
    let path = folder.path().join("model.safetensors");
    let mut open = |bytes: &[u8]| {
        overwrite(&path, bytes);
        let Ok(model) = HuggingFaceDir::open(folder.path()) else { return false };
        for name in model.names() {
            let elements = model.shape(name).unwrap().iter().product::<usize>() as u64;
            let mut out = vec![0.0; elements.min(64) as usize];
            let stripe = Stripe::whole(elements);
            let _ = model.read_weights(name, &stripe, 0..out.len() as u64, &mut out);
        }
        true
    };
    let data = &original[8 + length..];
    let file = |json: Vec<u8>| [&(json.len() as u64).to_le_bytes()[..], &json, data].concat();
    let structured = |random: &mut phalanx_testing::hostile::Random| {
        let mut header = header.clone();
        mutate_json(random, &mut header);
        file(serde_json::to_vec(&header).unwrap())
    };
    let json = &original[8..8 + length];
    survive("header fields", 1000, MAX_BYTES, structured, &mut open);
    survive("header text", 1000, MAX_BYTES, |random| file(mutate(random, json)), &mut open);
    let whole = |random: &mut phalanx_testing::hostile::Random| {
        let mut bytes = mutate(random, &original[..8 + length]);
        bytes.extend(data);
        bytes
    };
    let accepted = survive("length and header", 500, MAX_BYTES, whole, &mut open);
    assert!(accepted < 250, "{accepted} of 500 accepted");
}

#[test]
fn configurations_and_indexes_of_any_content_are_read_or_refused() {
    let (folder, _) = model();
    let original = fs::read(golden().join("config.json")).unwrap();
    let path = folder.path().join("config.json");
    let index = folder.path().join("model.safetensors.index.json");
    fs::write(&index, json!({ "weight_map": {} }).to_string()).unwrap();
    let open = |path: &Path, bytes: &[u8]| {
        overwrite(path, bytes);
        HuggingFaceDir::open(folder.path()).is_ok()
    };
    survive("config", 1000, MAX_BYTES, |random| mutate(random, &original), |bytes| open(&path, bytes));
    fs::write(&path, &original).unwrap();
    fs::copy(golden().join("model.safetensors"), folder.path().join("a.safetensors")).unwrap();
    let names: Vec<String> =
        HuggingFaceDir::open(&golden()).unwrap().names().map(|name| name.to_string()).collect();
    let map: serde_json::Map<_, _> = names.into_iter().map(|name| (name, json!("a.safetensors"))).collect();
    let map = json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    assert!(open(&index, map.to_string().as_bytes()));
    let changed = |random: &mut phalanx_testing::hostile::Random| {
        let mut map = map.clone();
        mutate_json(random, &mut map);
        map.to_string().into_bytes()
    };
    survive("index", 1000, MAX_BYTES, changed, |bytes| open(&index, bytes));
}

/// A header of the maximum size takes a small multiple of its size in memory; a larger one is not read.
#[test]
fn the_memory_for_a_header_is_a_small_multiple_of_it() {
    let (folder, _) = model();
    let path = folder.path().join("model.safetensors");
    let many = |count: usize| {
        let entry = |at: usize| {
            format!("\"{at}\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[{at},{}]}}", at + 1)
        };
        let json = format!("{{{}}}", (0..count).map(entry).collect::<Vec<_>>().join(","));
        [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &vec![0; count]].concat()
    };
    let file = many(40_000);
    fs::write(&path, &file).unwrap();
    let (opened, peak) = peak_bytes(|| HuggingFaceDir::open(folder.path()).map(|_| ()));
    opened.unwrap();
    assert!(peak < 8 * file.len(), "{peak} bytes for a file of {}", file.len());
    // One field with very many values, for which no list is allocated.
    for json in [
        format!(
            "{{\"w\":{{\"dtype\":\"U8\",\"shape\":[{}1],\"data_offsets\":[0,1]}}}}",
            "1,".repeat(1 << 20)
        ),
        format!(
            "{{\"w\":{{\"x\":[{}1],\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}}}",
            "[],".repeat(1 << 20)
        ),
        format!("{{\"__metadata__\":{{\"a\":[{}1]}}}}", "[],".repeat(1 << 20)),
    ] {
        fs::write(&path, [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[0]].concat()).unwrap();
        let (_, peak) = peak_bytes(|| HuggingFaceDir::open(folder.path()).map(|_| ()));
        assert!(peak < 2 * json.len(), "{peak} bytes for a header of {}", json.len());
    }
    // A sparse file whose header is longer than the format allows.
    let length = 100_000_001u64;
    fs::write(&path, length.to_le_bytes()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(8 + length).unwrap();
    let (opened, peak) = peak_bytes(|| HuggingFaceDir::open(folder.path()).map(|_| ()));
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("100000001 bytes; at most 100000000"), "{error}");
    assert!(peak < MAX_BYTES, "{peak} bytes");
}

/// Files of many thousand tensors have headers of tens of megabytes.
#[test]
fn a_long_header_is_read() {
    let (folder, _) = model();
    let long = "x".repeat(900);
    let entry = |at: usize| {
        format!("\"{at}{long}\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[{at},{}]}}", at + 1)
    };
    let count = 20_000;
    let json = format!("{{{}}}", (0..count).map(entry).collect::<Vec<_>>().join(","));
    assert!(json.len() > 18_000_000);
    let file = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &vec![0; count]].concat();
    fs::write(folder.path().join("model.safetensors"), file).unwrap();
    assert_eq!(HuggingFaceDir::open(folder.path()).unwrap().names().count(), count);
}

/// Makes a file that must not be read.
type Make<'a> = &'a dyn Fn(&Path);

#[test]
fn only_regular_files_of_expected_size_are_read() {
    let large = |path: &Path| fs::File::create(path).unwrap().set_len(1 << 40).unwrap();
    let zero = |path: &Path| std::os::unix::fs::symlink("/dev/zero", path).unwrap();
    let kinds: [(Make, &str); 3] =
        [(&make_fifo, "a FIFO"), (&zero, "a device"), (&large, "1099511627776 bytes; at most")];
    for (make, word) in kinds {
        for name in ["config.json", "model.safetensors", "model.safetensors.index.json"] {
            let (folder, weights) = model();
            let path = folder.path().join(name);
            if name == "config.json" {
                fs::remove_file(&path).unwrap();
                fs::write(folder.path().join("model.safetensors"), weights).unwrap();
            }
            make(&path);
            let error = HuggingFaceDir::open(folder.path()).unwrap_err().to_string();
            let word = if name == "model.safetensors" && word.contains("at most") { "header" } else { word };
            // An empty header is not JSON; the file's size is what its tensors need.
            assert!(error.contains(name) && error.contains(word), "{name}, {word}: {error}");
        }
        let (folder, dir, _) = checkpoint();
        let path = dir.join("manifest.json");
        fs::remove_file(&path).unwrap();
        make(&path);
        let error = Checkpoint::open(&dir).unwrap_err().to_string();
        assert!(error.contains("manifest.json") && error.contains(word), "{error}");
        assert!(newest(folder.path()).unwrap().checkpoint.is_none());
    }
    // A rank's file that was replaced: found when it is read.
    let (_folder, dir, _) = checkpoint();
    let file = dir.join("rank-00000.safetensors");
    fs::remove_file(&file).unwrap();
    make_fifo(&file);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let error = checkpoint.read("parameters", "wte.weight", 0..4, &mut [0; 16]).unwrap_err().to_string();
    assert!(error.contains("a FIFO"), "{error}");
}

#[test]
fn weights_that_are_not_finite_are_named() {
    let (folder, mut weights) = model();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, &weights).unwrap();
    let model = HuggingFaceDir::open(folder.path()).unwrap();
    let last = model.names().last().unwrap().to_string();
    let shape = model.shape(&last).unwrap().to_vec();
    let elements = shape.iter().product::<usize>() as u64;
    let at = weights.len() - 4;
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        weights[at..].copy_from_slice(&value.to_le_bytes());
        fs::write(&path, &weights).unwrap();
        let model = HuggingFaceDir::open(folder.path()).unwrap();
        let mut out = vec![0.0; elements as usize];
        model.read_f32(&last, 0..elements, &mut out).unwrap();
        let second_half = Stripe { run: elements / 2, ranks: 2, rank: 1 };
        let read =
            model.read_weights(&last, &second_half, 0..elements / 2, &mut out[..elements as usize / 2]);
        let error = read.unwrap_err();
        assert!(matches!(&error, CheckpointError::NotFinite { element, .. } if *element == elements - 1));
        assert!(error.to_string().contains(&format!("of {last} in")), "{error}");
    }
}
