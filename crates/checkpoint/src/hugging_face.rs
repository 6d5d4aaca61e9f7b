//! A Hugging Face model folder: `config.json` and safetensors, in one file or several.
//!
//! Only headers are read on opening. Numbers come as f32 whatever the file holds (F32, F16 or BF16),
//! converted through a small window, so an import needs no copy of the file in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16, slice::HalfFloatSliceExt};
use phalanx_plan::Stripe;
use serde::Deserialize;
use serde_json::Value;

use crate::limits::{CONFIG_BYTES, INDEX_BYTES};
use crate::nearest::nearest;
use crate::overlap::{Limits, Overlaps, ReadSpans};
use crate::stored_tensor::part;
use crate::tensor_file::{self, Entry, elements};
use crate::{CheckpointError, Result};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
pub(crate) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// Modules that PyTorch wraps around a model or its parts. The names of tensors that were saved through one contain it.
const WRAPPERS: [&str; 4] = ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// Bytes that are hashed at once.
const HASHED_BYTES: usize = 1 << 20;

/// Elements that are converted at once.
const CONVERT_ELEMENTS: usize = 1 << 16;

/// Stripes with runs shorter than `alone` are read window by window.
const STRIPE_LIMITS: Limits = Limits { window: 1 << 18, alone: 1 << 14, gap: 1 << 14 };

/// A model folder, open for reading.
#[derive(Debug)]
pub struct HuggingFaceDir {
    dir: PathBuf,
    config: Value,
    tensors: Vec<(PathBuf, Entry)>,
    /// Name to position in `tensors`.
    positions: BTreeMap<String, usize>,
    notes: Vec<String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl HuggingFaceDir {
    /// Opens `dir`: reads its configuration and the headers of its safetensors files, and checks them.
    ///
    /// # Errors
    /// [`CheckpointError::HuggingFace`] when files are missing or are no JSON,
    /// [`CheckpointError::TensorFile`] and [`CheckpointError::WrongSize`] for damaged ones,
    /// [`CheckpointError::Read`].
    pub fn open(dir: &Path) -> Result<HuggingFaceDir> {
        if !dir.is_dir() {
            return Err(bad(dir, "there is no such folder"));
        }
        let config_path = dir.join(CONFIG);
        let Some(config) = json::<Value>(&config_path, CONFIG_BYTES)? else {
            if phalanx_system::files::is_named(&dir.join(ADAPTER_CONFIG)) {
                return Err(bad(dir, OF_AN_ADAPTER));
            }
            return Err(bad(dir, "it has no config.json; give the folder of a Hugging Face model"));
        };
        if !config.is_object() {
            return Err(bad(&config_path, "it is not a JSON object"));
        }
        let (path, index) = (dir.join(SINGLE), dir.join(INDEX));
        let (single, is_sharded) =
            (phalanx_system::files::is_named(&path), phalanx_system::files::is_named(&index));
        if single && is_sharded {
            let reason = format!("it has both {SINGLE} and {INDEX}: remove the one that is out of date");
            return Err(bad(dir, &reason));
        }
        let mut tensors = if single {
            tensor_file::entries(&path)?.into_iter().map(|entry| (path.clone(), entry)).collect()
        } else {
            sharded(dir)?
        };
        let mut notes: Vec<String> = unread_weights(dir).into_iter().collect();
        notes.extend(unwrap_names(dir, &mut tensors)?);
        let positions = tensors.iter().enumerate().map(|(at, (_, entry))| (entry.name.clone(), at)).collect();
        Ok(HuggingFaceDir { dir: dir.to_path_buf(), config, tensors, positions, notes })
    }

    /// Opens the folder of an adapter as PEFT writes it: its configuration is `adapter_config.json`, and its tensors lie in
    /// `adapter_model.safetensors`.
    ///
    /// # Errors
    /// As [`HuggingFaceDir::open`].
    pub fn open_adapter(dir: &Path) -> Result<HuggingFaceDir> {
        let Some(config) = json::<Value>(&dir.join(ADAPTER_CONFIG), CONFIG_BYTES)? else {
            return Err(bad(
                dir,
                "it has no adapter_config.json; give a folder in which PEFT has saved an adapter",
            ));
        };
        let path = dir.join(ADAPTER_WEIGHTS);
        if !phalanx_system::files::is_named(&path) {
            return Err(bad(
                dir,
                &format!("it has no {ADAPTER_WEIGHTS}; other formats of adapters are not read"),
            ));
        }
        let entries = tensor_file::entries(&path)?.into_iter();
        let tensors: Vec<_> = entries.map(|entry| (path.clone(), entry)).collect();
        let positions = tensors.iter().enumerate().map(|(at, (_, entry))| (entry.name.clone(), at)).collect();
        Ok(HuggingFaceDir { dir: dir.to_path_buf(), config, tensors, positions, notes: Vec::new() })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// For people: files with weights that are not read, and what was stripped from the names of tensors.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Contents of `config.json`.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// All tensors, in the order in which they lie in the files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(_, entry)| entry.name.as_str())
    }

    /// Returns whether there is such a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.positions.contains_key(name)
    }

    /// Shape of a tensor.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownTensor`], which names the nearest known.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.find(name)?.1.shape)
    }

    /// Refuses a tensor whose elements are not floating-point numbers that can be read.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownTensor`]; [`CheckpointError::HuggingFace`] for a type that is no F32, F16 or
    /// BF16.
    pub fn check_type(&self, name: &str) -> Result<()> {
        let (path, entry) = self.find(name)?;
        if ["F32", "F16", "BF16"].contains(&&*entry.dtype) { Ok(()) } else { Err(wrong_type(path, entry)) }
    }

    /// Fills `out` with the elements `range` of the flattened tensor, converted to f32.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownTensor`], [`CheckpointError::OutsideTensor`], [`CheckpointError::Read`];
    /// [`CheckpointError::HuggingFace`] for a type that is no F32, F16 or BF16.
    ///
    /// # Panics
    /// When `out` is not as long as the range.
    pub fn read_f32(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let whole = whole(&self.find(name)?.1);
        self.read_stripe_f32(name, &Stripe::whole(whole), range, out)
    }

    /// Fills `out` with the elements `local` of the part `stripe` of the flattened tensor, converted to
    /// f32. Short runs are read a window at a time, which costs at most 1 MiB of memory.
    ///
    /// # Errors
    /// As [`HuggingFaceDir::read_f32`]; [`CheckpointError::OutsideTensor`] also for a stripe that does not
    /// fit the tensor.
    ///
    /// # Panics
    /// When `out` is not as long as the range.
    pub fn read_stripe_f32(
        &self,
        name: &str,
        stripe: &Stripe,
        local: Range<u64>,
        out: &mut [f32],
    ) -> Result<()> {
        let (path, entry) = self.find(name)?;
        let whole = whole(entry);
        let count = stripe.local_elements(whole);
        if local.start > local.end || count.is_none_or(|count| local.end > count) {
            return Err(CheckpointError::OutsideTensor {
                tensor: part(name, (!stripe.is_whole()).then_some(*stripe)),
                shape: entry.shape.clone(),
                range: local,
                path: self.dir.clone(),
            });
        }
        assert_eq!(out.len() as u64, local.end - local.start, "{name}: the buffer does not fit {local:?}");
        let file = phalanx_system::files::open_regular(path).map_err(CheckpointError::reading(path))?;
        let overlaps = Overlaps::new((Stripe::whole(whole), 0..whole), (*stripe, local.clone()));
        let mut window = Vec::new();
        for span in ReadSpans::new(overlaps, STRIPE_LIMITS) {
            if let Some(target) = &span.single {
                let [start, end] = [target.start, target.end].map(|at| (at - local.start) as usize);
                read_span(&file, path, entry, span.source.start, &mut out[start..end])?;
            } else {
                window.resize((span.source.end - span.source.start) as usize, 0.0);
                read_span(&file, path, entry, span.source.start, &mut window)?;
                span.scatter(&window, 1, out, local.start);
            }
        }
        Ok(())
    }

    /// Fills `out` with weights that a model starts from: as [`HuggingFaceDir::read_stripe_f32`], and every
    /// number is finite.
    ///
    /// # Errors
    /// As [`HuggingFaceDir::read_stripe_f32`], and [`CheckpointError::NotFinite`].
    ///
    /// # Panics
    /// When `out` is not as long as the range.
    pub fn read_weights(
        &self,
        name: &str,
        stripe: &Stripe,
        local: Range<u64>,
        out: &mut [f32],
    ) -> Result<()> {
        self.read_stripe_f32(name, stripe, local.clone(), out)?;
        let Some(at) = out.iter().position(|number| !number.is_finite()) else { return Ok(()) };
        Err(CheckpointError::NotFinite {
            path: self.find(name)?.0.clone(),
            tensor: name.to_string(),
            element: stripe.global(local.start + at as u64),
            value: out[at],
        })
    }

    /// Compares `values`, read as [`HuggingFaceDir::read_weights`] does from the tensor `name`, with the same
    /// elements of its copy.
    ///
    /// # Errors
    /// As [`HuggingFaceDir::read_weights`]; [`CheckpointError::CopyDiffers`].
    pub fn check_copy(
        &self,
        name: &str,
        copy: &str,
        stripe: &Stripe,
        local: Range<u64>,
        values: &[f32],
    ) -> Result<()> {
        let mut copied = vec![0.0; values.len()];
        self.read_weights(copy, stripe, local.clone(), &mut copied)?;
        let Some(at) = values.iter().zip(&copied).position(|(value, copied)| value != copied) else {
            return Ok(());
        };
        Err(CheckpointError::CopyDiffers {
            path: self.find(copy)?.0.clone(),
            tensor: name.to_string(),
            copy: copy.to_string(),
            element: stripe.global(local.start + at as u64),
            values: [values[at], copied[at]],
        })
    }

    /// Checksum (blake3) of the names, types, shapes and bytes of all tensors, in the order of their names: whichever files hold them.
    ///
    /// # Errors
    /// [`CheckpointError::Read`].
    pub fn digest(&self) -> Result<String> {
        let mut digest = blake3::Hasher::new();
        let mut window = vec![0; HASHED_BYTES];
        for at in self.positions.values() {
            let (path, Entry { name, dtype, shape, bytes, .. }) = &self.tensors[*at];
            digest.update(format!("{name} {dtype} {shape:?}\n").as_bytes());
            let file = phalanx_system::files::open_regular(path).map_err(CheckpointError::reading(path))?;
            for start in bytes.clone().step_by(HASHED_BYTES) {
                let window = &mut window[..(bytes.end - start).min(HASHED_BYTES as u64) as usize];
                file.read_exact_at(window, start).map_err(CheckpointError::reading(path))?;
                digest.update(window);
            }
        }
        Ok(digest.finalize().to_hex().to_string())
    }

    fn find(&self, name: &str) -> Result<&(PathBuf, Entry)> {
        self.positions.get(name).map(|&at| &self.tensors[at]).ok_or_else(|| CheckpointError::UnknownTensor {
            wanted: name.to_string(),
            path: self.dir.clone(),
            nearest: nearest(name, self.names()).map(str::to_string),
        })
    }
}

/// Elements of a tensor.
fn whole(entry: &Entry) -> u64 {
    elements(&entry.shape).expect("checked against the file when it was opened")
}

/// Consecutive elements from `start` on, converted to f32.
fn read_span(file: &File, path: &Path, entry: &Entry, start: u64, out: &mut [f32]) -> Result<()> {
    let at = |bytes: u64| entry.bytes.start + start * bytes;
    let read = match &*entry.dtype {
        "F32" => file.read_exact_at(bytemuck::cast_slice_mut(out), at(4)),
        "F16" => read_halves::<f16>(file, at(2), out),
        "BF16" => read_halves::<bf16>(file, at(2), out),
        _ => return Err(wrong_type(path, entry)),
    };
    read.map_err(CheckpointError::reading(path))
}

fn wrong_type(path: &Path, entry: &Entry) -> CheckpointError {
    let Entry { name, dtype, .. } = entry;
    bad(path, &format!("{name} is {dtype}, and only F32, F16 and BF16 can be read"))
}

/// Two-byte elements from byte `at` on.
fn read_halves<H: bytemuck::Pod>(file: &File, mut at: u64, out: &mut [f32]) -> io::Result<()>
where
    [H]: HalfFloatSliceExt,
{
    let mut halves = vec![H::zeroed(); out.len().min(CONVERT_ELEMENTS)];
    for part in out.chunks_mut(CONVERT_ELEMENTS) {
        let halves = &mut halves[..part.len()];
        file.read_exact_at(bytemuck::cast_slice_mut(halves), at)?;
        halves.convert_to_f32_slice(part);
        at += 2 * part.len() as u64;
    }
    Ok(())
}

/// The tensors that the index lists, from all of its files.
fn sharded(dir: &Path) -> Result<Vec<(PathBuf, Entry)>> {
    let index_path = dir.join(INDEX);
    let Some(Index { weight_map }) = json(&index_path, INDEX_BYTES)? else {
        return Err(bad(dir, &no_safetensors(dir)));
    };
    let mut files: Vec<&String> = weight_map.values().collect();
    files.sort();
    files.dedup();
    let mut tensors = Vec::with_capacity(weight_map.len());
    for file in files {
        if Path::new(file).file_name() != Some(file.as_ref()) {
            return Err(bad(&index_path, &format!("{file:?} is not the name of a file in this folder")));
        }
        let path = dir.join(file);
        if !phalanx_system::files::is_named(&path) {
            let reason = format!("it needs {file}, which is not in the folder: download it too");
            return Err(bad(&index_path, &reason));
        }
        for entry in tensor_file::entries(&path)? {
            let Entry { name, .. } = &entry;
            match weight_map.get(name) {
                Some(listed) if listed == file => tensors.push((path.clone(), entry)),
                Some(listed) => {
                    let reason = format!("it says that {name} is in {listed}, but {file} also has it");
                    return Err(bad(&index_path, &reason));
                }
                None => {
                    return Err(bad(&index_path, &format!("it does not list {name}, which is in {file}")));
                }
            }
        }
    }
    let found: BTreeSet<&str> = tensors.iter().map(|(_, entry)| entry.name.as_str()).collect();
    if let Some((name, file)) = weight_map.iter().find(|(name, _)| !found.contains(name.as_str())) {
        return Err(bad(&index_path, &format!("it says that {name} is in {file}, but it is not")));
    }
    Ok(tensors)
}

/// Strips [`WRAPPERS`] from the names of tensors; says which, if there are any.
fn unwrap_names(dir: &Path, tensors: &mut [(PathBuf, Entry)]) -> Result<Option<String>> {
    let (mut stripped, mut count) = (BTreeSet::new(), 0);
    for (_, entry) in tensors.iter_mut() {
        let (wrappers, parts): (Vec<&str>, Vec<&str>) =
            entry.name.split('.').partition(|part| WRAPPERS.contains(part));
        if wrappers.is_empty() {
            continue;
        }
        stripped.extend(wrappers.iter().map(|wrapper| format!("{wrapper}.")));
        count += 1;
        entry.name = parts.join(".");
    }
    if count == 0 {
        return Ok(None);
    }
    let stripped = Vec::from_iter(stripped).join(" and ");
    let mut names = BTreeSet::new();
    if let Some((_, twice)) = tensors.iter().find(|(_, entry)| !names.insert(&entry.name)) {
        let reason = format!("it has {} twice, with and without {stripped}: remove one of them", twice.name);
        return Err(bad(dir, &reason));
    }
    Ok(Some(format!(
        "{stripped} stripped from the names of {count} of {} tensors (PyTorch adds this when it wraps a model)",
        tensors.len()
    )))
}

/// Returns whether a file of this name holds weights in a format that is not read here.
fn holds_other_weights(name: &str) -> bool {
    [".bin", ".bin.index.json", ".h5", ".msgpack", ".gguf", ".pt", ".pth", ".ckpt", ".onnx", ".safetensors"]
        .iter()
        .any(|ending| name.ends_with(ending))
        && name != "training_args.bin"
}

/// Files of `dir` with weights that are not read, in order.
fn other_weights(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name != SINGLE && holds_other_weights(name)).collect();
    names.sort();
    names
}

/// A note about pickles beside the weights that are read, as older programs left them.
fn unread_weights(dir: &Path) -> Option<String> {
    let pickles: Vec<String> =
        other_weights(dir).into_iter().filter(|name| !name.ends_with(".safetensors")).collect();
    let first = pickles.first()?;
    let more = if pickles.len() > 1 { format!(" and {} more", pickles.len() - 1) } else { String::new() };
    Some(format!(
        "{first}{more} in {} not read: the weights are those of the safetensors files",
        dir.display()
    ))
}

/// Why the folder of an adapter is no model's, and what to do.
const OF_AN_ADAPTER: &str = "it is an adapter (adapter_config.json), not a model: name it in lora.adapter, beside the model in model.init; or \
    merge it into its model with peft: AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(OUT)";

/// Why a folder without [`SINGLE`] and [`INDEX`] cannot be read, and what to do.
fn no_safetensors(dir: &Path) -> String {
    let others = other_weights(dir);
    let has = |test: &dyn Fn(&str) -> bool| others.iter().any(|name| test(name));
    if phalanx_system::files::is_named(&dir.join(ADAPTER_CONFIG)) {
        return OF_AN_ADAPTER.to_string();
    }
    if has(&|name| name.contains(".bin")) {
        return "its weights are a pickle (pytorch_model.bin), which may run code when read; convert them with \
                transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT, \
                safe_serialization=True); for BERT, AutoModelForMaskedLM"
            .to_string();
    }
    let found = match others.is_empty() {
        true => "give the folder of a Hugging Face model".to_string(),
        false if has(&|name| name.ends_with(".safetensors")) => format!(
            "its weights are in {}: a single file must be called {SINGLE}, and several need {INDEX}, which is to be \
             downloaded, too",
            others.join(", ")
        ),
        false => format!(
            "its weights are in {}, which only other programs read: load the folder there, and save it as safetensors",
            others.join(", ")
        ),
    };
    format!("it has neither {SINGLE} nor {INDEX}; {found}")
}

/// A JSON file of at most `max_bytes`; `None` when it is not there.
fn json<T: for<'a> Deserialize<'a>>(path: &Path, max_bytes: u64) -> Result<Option<T>> {
    let bytes = match phalanx_system::files::read_bounded(path, max_bytes) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(CheckpointError::reading(path))?,
    };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|cause| bad(path, &format!("it is not the expected JSON: {cause}")))
}

fn bad(path: &Path, reason: &str) -> CheckpointError {
    CheckpointError::HuggingFace { path: path.to_path_buf(), reason: reason.to_string() }
}
