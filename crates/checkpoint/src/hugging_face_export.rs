//! Writes a Hugging Face model folder. The same parameters give the same bytes.
//!
//! All files are complete before the first one gets its name, and `config.json`, without which no program takes the folder for
//! a model, is removed first and comes last. So a reader never sees half a model or two models mixed, and an export that fails
//! while it writes leaves what was there.

use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::path::Path;

use phalanx_plan::trace::DType;
use phalanx_system::files::AtomicFile;

use crate::hugging_face::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, INDEX, SINGLE};
use crate::narrow::{Narrow, too_large};
use crate::tensor_file::{NewEntry, elements, header};
use crate::{CheckpointError, Result};

/// Elements that are requested and written at once.
pub(crate) const WINDOW_ELEMENTS: usize = 1 << 18;

/// Fills numbers with the elements of a range of a tensor: see [`write_hugging_face`].
pub type ReadTensor<'a> = dyn FnMut(usize, Range<u64>, &mut [f32]) -> Result<()> + 'a;

/// Names of files of a model folder that other programs read, beside those that match [`is_model_file`].
const MODEL_FILES: [&str; 21] = [
    CONFIG,
    INDEX,
    ADAPTER_CONFIG,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "flax_model.msgpack",
    "generation_config.json",
    "merges.txt",
    "pytorch_model.bin.index.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "spm.model",
    "tekken.json",
    "tf_model.h5",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// The folder of the chat templates beside the first.
const TEMPLATES: &str = "additional_chat_templates";

/// Returns whether a file of this name belongs to the model of its folder: programs would read it beside another
/// model's files.
fn is_model_file(name: &str) -> bool {
    let weights = |beginning, endings: &[&str]| {
        name.starts_with(beginning) && endings.iter().any(|ending| name.ends_with(ending))
    };
    MODEL_FILES.contains(&name)
        || weights("model", &[".safetensors"])
        || weights("pytorch_model", &[".bin", ".safetensors"])
        || weights("adapter_model", &[".bin", ".safetensors"])
}

/// The names in a folder: those of the model that it holds, and others. None for a folder that is not there.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FolderNames {
    /// Files that belong to a model: configuration, weights, tokenizer, chat templates.
    pub of_model: Vec<String>,
    /// Everything else.
    pub others: Vec<String>,
}

impl FolderNames {
    /// Reads the names in `dir`, in order.
    ///
    /// # Errors
    /// [`CheckpointError::Read`].
    pub fn read(dir: &Path) -> Result<FolderNames> {
        let mut found = FolderNames::default();
        let mut names = names_in(dir)?;
        if dir.join(TEMPLATES).is_dir() {
            names.retain(|name| name != TEMPLATES);
            names.extend(
                names_in(&dir.join(TEMPLATES))?.into_iter().map(|name| format!("{TEMPLATES}/{name}")),
            );
            names.sort();
        }
        for name in names {
            let is_template = name.starts_with(TEMPLATES) && name.ends_with(".jinja");
            let is_file = dir.join(&name).symlink_metadata().is_ok_and(|found| !found.is_dir());
            let of_model = is_file && (is_model_file(&name) || is_template);
            if of_model { found.of_model.push(name) } else { found.others.push(name) }
        }
        Ok(found)
    }
}

/// The names in a folder in order, without those of files that are being written.
fn names_in(dir: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(dir) {
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(CheckpointError::reading(dir))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(CheckpointError::reading(dir))?.file_name().to_string_lossy().into_owned();
        if !phalanx_system::files::is_temporary(&name) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Writes `model.safetensors` (in the order of `tensors`: name and shape) and `files` (name and content, among them
/// `config.json`) to `dir`, which is created, and removes `outdated`, names in `dir`. `read(tensor, range, out)` must fill
/// `out` with those elements of the flattened tensor; it is called in order, with at most 262,144 elements at a time. They are
/// stored as `dtype`, F32, BF16 or F16, rounded to nearest even. The caller sets the matching type in the configuration.
///
/// # Errors
/// [`CheckpointError::Write`], [`CheckpointError::TooLarge`] for a number that the type does not have, or what `read` returned:
/// then files that were there before remain.
/// [`CheckpointError::HalfExported`]: the folder has no `config.json`, and old and new files beside each other.
///
/// # Panics
/// When a shape has 2^64 elements or more, for another type, or without `config.json`.
pub fn write_hugging_face(
    dir: &Path,
    files: &[(impl AsRef<str>, String)],
    outdated: &[String],
    tensors: &[(String, Vec<usize>)],
    dtype: DType,
    read: &mut ReadTensor<'_>,
) -> Result<()> {
    write_folder(dir, [SINGLE, CONFIG], (files, outdated), (tensors, dtype), read)
}

/// As [`write_hugging_face`] for the adapter of a model, in f32: `adapter_model.safetensors`, and `adapter_config.json` among `files`,
/// which is removed first and comes last.
///
/// # Errors
/// As [`write_hugging_face`].
///
/// # Panics
/// As [`write_hugging_face`], and without `adapter_config.json`.
pub fn write_adapter(
    dir: &Path,
    files: &[(impl AsRef<str>, String)],
    outdated: &[String],
    tensors: &[(String, Vec<usize>)],
    read: &mut ReadTensor<'_>,
) -> Result<()> {
    write_folder(dir, [ADAPTER_WEIGHTS, ADAPTER_CONFIG], (files, outdated), (tensors, DType::F32), read)
}

/// Writes a folder with a file of weights and one, `first`, without which no program takes it for what it is.
fn write_folder(
    dir: &Path,
    [weights, first]: [&str; 2],
    (files, outdated): (&[(impl AsRef<str>, String)], &[String]),
    (tensors, dtype): (&[(String, Vec<usize>)], DType),
    read: &mut ReadTensor<'_>,
) -> Result<()> {
    let mut new = vec![write_model(&dir.join(weights), tensors, dtype, read)?];
    let (config, others): (Vec<_>, Vec<_>) = files.iter().partition(|(name, _)| name.as_ref() == first);
    assert_eq!(config.len(), 1, "the folder has one {first}");
    for (name, content) in others.into_iter().chain(config) {
        let path = dir.join(name.as_ref());
        let mut file = AtomicFile::create(&path).map_err(CheckpointError::writing(&path))?;
        file.write_all(content.as_bytes()).map_err(CheckpointError::writing(&path))?;
        new.push(file);
    }
    replace(dir, first, outdated, new)
        .map_err(|cause| CheckpointError::HalfExported { dir: dir.to_path_buf(), cause })
}

/// Removes `outdated` and gives the new files their names: between the two, the folder has no file `first`.
fn replace(dir: &Path, first: &str, outdated: &[String], new: Vec<AtomicFile>) -> std::io::Result<()> {
    for name in std::iter::once(first).chain(outdated.iter().map(String::as_str)) {
        match std::fs::remove_file(dir.join(name)) {
            Err(cause) if cause.kind() == ErrorKind::NotFound => {}
            other => other?,
        }
        if name == first {
            phalanx_system::files::sync_folder(dir)?;
        }
    }
    new.into_iter().try_for_each(AtomicFile::commit)?;
    // Where files are left in it, it stays.
    let _ = std::fs::remove_dir(dir.join(TEMPLATES));
    Ok(())
}

/// Writes the model's file, which is not visible yet.
fn write_model(
    path: &Path,
    tensors: &[(String, Vec<usize>)],
    dtype: DType,
    read: &mut ReadTensor<'_>,
) -> Result<AtomicFile> {
    let width = dtype.bytes() as u64;
    let entries: Vec<NewEntry> = tensors
        .iter()
        .map(|(name, shape)| NewEntry {
            key: name.clone(),
            dtype,
            shape: shape.clone(),
            bytes: width * elements(shape).expect("a tensor has fewer than 2^64 elements"),
        })
        .collect();
    let mut file = AtomicFile::create(path).map_err(CheckpointError::writing(path))?;
    let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(CheckpointError::writing(path));
    write(&header(&entries, &[("format", "pt")]))?;
    let mut narrow = Narrow::default();
    let mut window = vec![0f32; WINDOW_ELEMENTS];
    for (index, entry) in entries.iter().enumerate() {
        let count = entry.bytes / width;
        let mut done = 0;
        while done < count {
            let next = count.min(done + WINDOW_ELEMENTS as u64);
            let values = &mut window[..(next - done) as usize];
            read(index, done..next, values)?;
            write(
                narrow
                    .bytes(dtype, values)
                    .map_err(|at| too_large(&entry.key, done, at, values, dtype.name()))?,
            )?;
            done = next;
        }
    }
    Ok(file)
}
