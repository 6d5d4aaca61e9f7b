//! Hugging Face folders in and out, against a folder that transformers wrote and the safetensors crate.

use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use phalanx_checkpoint::{CheckpointError, FolderNames, HuggingFaceDir, Result, write_hugging_face};
use phalanx_plan::trace::DType;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::tempdir;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/gpt2")
}

/// Writes what `model` holds to `out`, in its own order.
fn copy(model: &HuggingFaceDir, out: &Path) -> Result<()> {
    copy_as(DType::F32, model, out)
}

fn copy_as(dtype: DType, model: &HuggingFaceDir, out: &Path) -> Result<()> {
    let tensors: Vec<(String, Vec<usize>)> =
        model.names().map(|name| (name.to_string(), model.shape(name).unwrap().to_vec())).collect();
    let config = [("config.json", format!("{:#}\n", model.config()))];
    write_hugging_face(out, &config, &[], &tensors, dtype, &mut |index, range, values| {
        model.read_f32(&tensors[index].0, range, values)
    })
}

#[test]
fn the_golden_folder_is_read() {
    let model = HuggingFaceDir::open(&golden()).unwrap();
    assert_eq!(model.config()["n_embd"], 32);
    let file = fs::read(golden().join("model.safetensors")).unwrap();
    let oracle = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(model.names().count(), oracle.len());
    for (name, view) in oracle.tensors() {
        assert_eq!(model.shape(&name).unwrap(), view.shape());
        let expected: Vec<f32> =
            view.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let mut values = vec![0.0; expected.len()];
        model.read_f32(&name, 0..expected.len() as u64, &mut values).unwrap();
        assert_eq!(values, expected, "{name}");
        let (from, to) = (expected.len() / 3, expected.len() / 2);
        model.read_f32(&name, from as u64..to as u64, &mut values[..to - from]).unwrap();
        assert_eq!(values[..to - from], expected[from..to], "{name}");
    }
}

/// Reading a file of transformers and writing it in the same order gives the same bytes.
#[test]
fn a_round_trip_is_byte_identical() {
    let folders = [tempdir().unwrap(), tempdir().unwrap()];
    copy(&HuggingFaceDir::open(&golden()).unwrap(), folders[0].path()).unwrap();
    copy(&HuggingFaceDir::open(folders[0].path()).unwrap(), folders[1].path()).unwrap();
    let read = |folder: &Path, name: &str| fs::read(folder.join(name)).unwrap();
    let model = read(&golden(), "model.safetensors");
    for folder in &folders {
        assert!(read(folder.path(), "model.safetensors") == model);
        assert_eq!(read(folder.path(), "config.json"), read(folders[0].path(), "config.json"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
    let config: Value = serde_json::from_slice(&read(folders[1].path(), "config.json")).unwrap();
    let expected: Value = serde_json::from_slice(&read(&golden(), "config.json")).unwrap();
    assert_eq!(config, expected);
}

/// Halves equal what the safetensors crate reads, and are rounded only once: writing what was read gives the same
/// bytes.
#[test]
fn half_precision_is_rounded_once() {
    let model = HuggingFaceDir::open(&golden()).unwrap();
    for (dtype, theirs) in [(DType::BF16, Dtype::BF16), (DType::F16, Dtype::F16)] {
        let folders = [tempdir().unwrap(), tempdir().unwrap()];
        copy_as(dtype, &model, folders[0].path()).unwrap();
        let halves = HuggingFaceDir::open(folders[0].path()).unwrap();
        copy_as(dtype, &halves, folders[1].path()).unwrap();
        let [file, again] = folders.each_ref().map(|f| fs::read(f.path().join("model.safetensors")).unwrap());
        assert!(file == again);
        for (name, view) in SafeTensors::deserialize(&file).unwrap().tensors() {
            assert_eq!((view.dtype(), view.shape()), (theirs, model.shape(&name).unwrap()));
            let elements = view.shape().iter().product();
            let (mut exact, mut read) = (vec![0.0; elements], vec![0.0; elements]);
            model.read_f32(&name, 0..elements as u64, &mut exact).unwrap();
            halves.read_f32(&name, 0..elements as u64, &mut read).unwrap();
            assert_eq!(view.data().len(), 2 * elements);
            for (at, (&bits, exact)) in view.data().as_chunks::<2>().0.iter().zip(exact).enumerate() {
                let (rounded, value) = match dtype {
                    DType::BF16 => (bf16::from_f32(exact).to_le_bytes(), bf16::from_le_bytes(bits).to_f32()),
                    _ => (f16::from_f32(exact).to_le_bytes(), f16::from_le_bytes(bits).to_f32()),
                };
                assert_eq!((bits, read[at]), (rounded, value), "{name} {at}");
            }
        }
    }
}

#[test]
fn a_number_that_the_type_does_not_have_is_refused() {
    let folder = tempdir().unwrap();
    let config = [("config.json", "{}\n".to_string())];
    for (dtype, largest, too_large) in [(DType::F16, 65519.9, -65520.0), (DType::BF16, 3.38e38, 3.4e38)] {
        let written = |value: f32| {
            write_hugging_face(
                folder.path(),
                &config,
                &[],
                &[("w".into(), vec![4])],
                dtype,
                &mut |_, _, out| {
                    out.copy_from_slice(&[0.0, f32::INFINITY, value, 1.0]);
                    Ok(())
                },
            )
        };
        written(largest).unwrap();
        let error = written(too_large).unwrap_err().to_string();
        assert!(error.contains("element 2 of w") && error.contains(dtype.name()), "{error}");
    }
}

#[test]
fn an_export_that_fails_leaves_the_older() {
    let folder = tempdir().unwrap();
    copy(&HuggingFaceDir::open(&golden()).unwrap(), folder.path()).unwrap();
    let before = fs::read(folder.path().join("model.safetensors")).unwrap();
    let missing = || CheckpointError::NotACheckpoint { path: PathBuf::new(), reason: "gone".into() };
    let config = [("config.json", "{}\n".to_string())];
    let failed = write_hugging_face(
        folder.path(),
        &config,
        &["config.json".to_string()],
        &[("w".into(), vec![4])],
        DType::F32,
        &mut |_, _, _| Err(missing()),
    );
    assert!(failed.unwrap_err().to_string().contains("gone"));
    assert!(fs::read(folder.path().join("model.safetensors")).unwrap() == before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);

    let file = folder.path().join("config.json/model");
    let error = write_hugging_face(&file, &config, &[], &[], DType::F32, &mut |_, _, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("config.json/model"), "{error}");

    // Something that cannot be removed, found when the old model is no longer one.
    fs::create_dir(folder.path().join("vocab.txt")).unwrap();
    let outdated = ["vocab.txt".to_string()];
    let failed =
        write_hugging_face(folder.path(), &config, &outdated, &[], DType::F32, &mut |_, _, _| Ok(()));
    let error = failed.unwrap_err().to_string();
    assert!(error.contains("it has no config.json now") && error.contains("--force"), "{error}");
    assert!(HuggingFaceDir::open(folder.path()).unwrap_err().to_string().contains("no config.json"));
}

#[test]
fn the_files_of_a_model_are_told_from_others() {
    let folder = tempdir().unwrap();
    let of_model = [
        "adapter_model.safetensors",
        "additional_chat_templates/tool_use.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "tokenizer.model",
        "vocab.txt",
    ];
    let others =
        [".git", "README.md", "additional_chat_templates/notes.md", "notes.bin", "train.txt", "vocab.json"];
    fs::create_dir_all(folder.path().join("additional_chat_templates")).unwrap();
    fs::create_dir(folder.path().join("vocab.json")).unwrap();
    for name in of_model.iter().chain(&others).filter(|name| **name != "vocab.json") {
        fs::write(folder.path().join(name), name).unwrap();
    }
    let found = FolderNames::read(folder.path()).unwrap();
    assert_eq!(
        (found.of_model, found.others),
        (of_model.map(String::from).into(), others.map(String::from).into())
    );
    assert_eq!(FolderNames::read(&folder.path().join("none")).unwrap(), FolderNames::default());
}

/// Names of two shards.
const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";

#[test]
fn half_precision_and_shards() {
    let folder = tempdir().unwrap();
    let dir = folder.path();
    fs::write(dir.join("config.json"), "{}").unwrap();
    // More than one window of conversion.
    let long: Vec<u8> = (0..150_000u32).flat_map(|i| ((i % 0x7f00) as u16).to_le_bytes()).collect();
    let short: Vec<u8> = [0x3c00u16, 0xc000, 0x0001, 0x7bff].iter().flat_map(|v| v.to_le_bytes()).collect();
    let bf16 = TensorView::new(Dtype::BF16, vec![150_000], &long).unwrap();
    let f16 = TensorView::new(Dtype::F16, vec![2, 2], &short).unwrap();
    let mask = TensorView::new(Dtype::U8, vec![8], &short).unwrap();
    let first = [("b", bf16)];
    let second = [("h", f16), ("mask", mask)];
    safetensors::serialize_to_file(first, None, &dir.join(FIRST)).unwrap();
    safetensors::serialize_to_file(second, None, &dir.join(SECOND)).unwrap();
    let map = json!({ "b": FIRST, "h": SECOND, "mask": SECOND });
    let index = dir.join("model.safetensors.index.json");
    fs::write(&index, json!({ "metadata": {}, "weight_map": map }).to_string()).unwrap();

    let model = HuggingFaceDir::open(dir).unwrap();
    let mut names: Vec<&str> = model.names().collect();
    names.sort_unstable();
    assert_eq!(names, ["b", "h", "mask"]);
    let mut values = [0.0; 4];
    model.read_f32("h", 0..4, &mut values).unwrap();
    assert_eq!(values, [1.0, -2.0, 2f32.powi(-24), 65504.0]);
    let mut values = vec![0.0; 149_990];
    model.read_f32("b", 10..150_000, &mut values).unwrap();
    for (at, value) in values.iter().enumerate() {
        assert_eq!(value.to_bits() >> 16, (at as u32 + 10) % 0x7f00);
    }
    let error = model.read_f32("mask", 0..1, &mut [0.0]).unwrap_err().to_string();
    assert!(error.contains("mask is U8"), "{error}");
    let error = model.read_f32("hh", 0..1, &mut [0.0]).unwrap_err().to_string();
    assert!(error.ends_with("nearest that it has is h"), "{error}");
    let error = model.read_f32("h", 3..5, &mut [0.0; 2]).unwrap_err().to_string();
    assert!(error.contains("[2, 2]"), "{error}");

    for (map, word) in [
        (json!({ "b": SECOND, "h": SECOND, "mask": SECOND }), "says that b is in"),
        (json!({ "b": FIRST, "h": FIRST, "mask": SECOND }), "also has it"),
        (json!({ "b": FIRST, "h": SECOND }), "does not list mask"),
        (json!({ "b": "model-00003-of-00003.safetensors" }), "download it too"),
        (json!({ "b": "../model.safetensors" }), "not the name of a file"),
        (json!([]), "not the expected JSON"),
    ] {
        fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
        let error = HuggingFaceDir::open(dir).unwrap_err().to_string();
        assert!(error.contains(word), "{word:?} in {error}");
    }
}

#[test]
fn folders_that_are_no_models() {
    let folder = tempdir().unwrap();
    let dir = folder.path();
    let message = || HuggingFaceDir::open(dir).unwrap_err().to_string();
    assert!(HuggingFaceDir::open(&dir.join("none")).unwrap_err().to_string().contains("no such folder"));
    assert!(message().contains("no config.json"));
    fs::write(dir.join("config.json"), "{ \"n_embd\": ").unwrap();
    assert!(message().contains("config.json"));
    fs::write(dir.join("config.json"), "[]").unwrap();
    assert!(message().contains("not a JSON object"));
    fs::write(dir.join("config.json"), "{}").unwrap();
    assert!(message().contains("neither model.safetensors"));
    for (name, words) in [
        ("consolidated.00.pth", &["weights are in consolidated.00.pth", "other programs read"][..]),
        (
            "model.fp16.safetensors",
            &["in consolidated.00.pth, model.fp16.safetensors: a single file must be called"],
        ),
        ("pytorch_model-00001-of-00002.bin", &["a pickle", "save_pretrained", "AutoModelForMaskedLM"]),
        ("adapter_config.json", &["an adapter", "merge_and_unload"]),
    ] {
        fs::write(dir.join(name), "x").unwrap();
        assert!(words.iter().all(|word| message().contains(word)), "{name}: {}", message());
    }
}

/// Files of other names for the same tensors: what wraps a model in training has its name in those of the tensors.
#[test]
fn wrappers_are_stripped_from_the_names_of_tensors_and_said() {
    let folder = tempdir().unwrap();
    let dir = folder.path();
    fs::write(dir.join("config.json"), "{}").unwrap();
    let one = 1f32.to_le_bytes();
    let write = |names: &[&str]| {
        let tensor = || TensorView::new(Dtype::F32, vec![1], &one).unwrap();
        let tensors = names.iter().map(|name| (name.to_string(), tensor()));
        safetensors::serialize_to_file(tensors, None, &dir.join("model.safetensors")).unwrap();
        HuggingFaceDir::open(dir)
    };
    for (given, name, said) in [
        ("module.wte.weight", "wte.weight", "module. stripped from the names of 1 of 2 tensors"),
        ("_orig_mod.module.h.0.attn.bias", "h.0.attn.bias", "_orig_mod. and module. stripped"),
        ("transformer._orig_mod.h.1.w", "transformer.h.1.w", "_orig_mod. stripped"),
        ("h.0._checkpoint_wrapped_module.w", "h.0.w", "_checkpoint_wrapped_module. stripped"),
    ] {
        let model = write(&[given, "plain"]).unwrap();
        let mut value = [0.0];
        model.read_f32(name, 0..1, &mut value).unwrap();
        assert_eq!((value[0], model.contains(given), model.contains("plain")), (1.0, false, true));
        assert!(matches!(model.notes(), [note] if note.contains(said)), "{:?}", model.notes());
    }
    assert!(write(&["modules.w"]).unwrap().notes().is_empty(), "only whole parts of a name");
    let twice = write(&["module.w", "w"]).unwrap_err().to_string();
    assert!(twice.contains("it has w twice, with and without module."), "{twice}");
    write(&["w"]).unwrap();
    fs::write(dir.join("pytorch_model.bin"), "older").unwrap();
    let model = HuggingFaceDir::open(dir).unwrap();
    assert!(matches!(model.notes(), [note] if note.contains("pytorch_model.bin in")), "{:?}", model.notes());
}

/// A file that is there and is not the file that is meant is not called missing.
#[test]
fn git_lfs_pointers_and_links_to_nothing_are_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n";
    let index = json!({ "weight_map": { "w": FIRST } }).to_string();
    for name in ["config.json", "model.safetensors", FIRST, "model.safetensors.index.json"] {
        let folder = tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(folder.path().join("config.json"), "{}").unwrap();
        if name == FIRST {
            fs::write(folder.path().join("model.safetensors.index.json"), &index).unwrap();
        }
        fs::write(&path, pointer).unwrap();
        let message = || HuggingFaceDir::open(folder.path()).unwrap_err().to_string();
        for word in [name, "a git-lfs pointer to a file of 548105171 bytes", "git lfs pull"] {
            assert!(message().contains(word), "{word:?} in {}", message());
        }
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("../../blobs/4d7a", &path).unwrap();
        for word in [name, "a link to ../../blobs/4d7a, which does not exist"] {
            assert!(message().contains(word), "{word:?} in {}", message());
        }
    }
}

#[test]
fn damaged_headers() {
    let golden = fs::read(golden().join("model.safetensors")).unwrap();
    let header = |json: &str, data: usize| {
        [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &vec![0; data]].concat()
    };
    let cases: [(Vec<u8>, &str); 11] = [
        (vec![], "too few"),
        (golden[..golden.len() - 7].to_vec(), "were expected"),
        ([&golden[..], b"tail"].concat(), "were expected"),
        (golden[..100].to_vec(), "header claims"),
        (u64::MAX.to_le_bytes().to_vec(), "header claims"),
        (header("[1, 2]", 0), "not the JSON object"),
        (header(r#"{"w":{"dtype":"F32","shape":[2]}}"#, 8), "the entry of w is invalid"),
        (header(r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4), "does not fit"),
        (header(r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#, 12), "does not begin"),
        (header(r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, 8), "impossible"),
        (
            header(r#"{"w":{"dtype":"X9","shape":[9223372036854775807,4],"data_offsets":[0,8]}}"#, 8),
            "impossible shape",
        ),
    ];
    for (bytes, word) in cases {
        let folder = tempdir().unwrap();
        fs::write(folder.path().join("config.json"), "{}").unwrap();
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        let error = HuggingFaceDir::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("model.safetensors"), "{word:?} in {error}");
    }
}
