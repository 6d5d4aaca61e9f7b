//! The GGUF file of a checkpoint: model and tokenizer as llama.cpp has them.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use phalanx_checkpoint::{
    Checkpoint, CheckpointError, GGUF_MAGIC, GgufTensor, GgufType, GgufValue, write_gguf,
};
use phalanx_data::{GgufVocabulary, Tokenizer};
use phalanx_layers::ParameterSpec;
use phalanx_models::Model;
use phalanx_models::gguf::{GgufFrom, GgufModel, GgufNumber, GgufSource, RowOrder};
use phalanx_train::weights::Weights;
use serde_json::json;

use crate::arguments::args::{ExportArgs, ExportType};
use crate::folders::ownership::{begins_with, check_output};
use crate::folders::run_folder::RunFolder;
use crate::host::output;
use phalanx_drawing::report;

/// Writes the file.
///
/// # Errors
/// A run without that checkpoint, a damaged one; a model or tokenizer that llama.cpp does not compute; a file that is there or cannot be written.
pub fn export(
    args: &ExportArgs,
    (folder, checkpoint): (&RunFolder, &Checkpoint),
    (model, weights): (&dyn Model, &Weights),
) -> Result<()> {
    check_file(args)?;
    let refuse = |reason| {
        anyhow!("{}: llama.cpp cannot compute it as it is: {reason}; nothing was written", args.run.display())
    };
    let described = model.to_gguf().map_err(refuse)?;
    let tokenizer = folder.tokenizer_of(checkpoint)?;
    let vocabulary =
        tokenizer.as_ref().map(|tokenizer| tokenizer.gguf(model.vocab())).transpose().map_err(refuse)?;
    let stored = match args.dtype {
        ExportType::F32 => GgufType::F32,
        ExportType::Bf16 => GgufType::Bf16,
        ExportType::F16 => GgufType::F16,
        ExportType::Q8_0 => GgufType::Q8_0,
    };
    let notes = vocabulary.as_ref().map_or(&[][..], |vocabulary| &vocabulary.notes[..]);
    let notes = [&described.notes[..], notes].concat();
    let keys = keys(&described, vocabulary, stored);
    let tensors: Vec<GgufTensor> = described.tensors.iter().map(|source| tensor(source, stored)).collect();
    let network = model.whole();
    let mut reader = Reader { weights, specs: network.members().collect(), turned: None };
    let bytes = write_gguf(&args.out, &keys, &tensors, &mut |index, range, out| {
        reader.read(index, &described.tensors[index], range.start as usize, out)
    })?;
    report(args, checkpoint.step(), described.arch, tokenizer.as_ref(), (network.elements(), bytes), &notes)
}

/// Refuses a file that another program has written, and without `--force` any.
fn check_file(args: &ExportArgs) -> Result<()> {
    let is_gguf = |path: &Path| begins_with(path, GGUF_MAGIC);
    if !args.force && args.out.is_file() && is_gguf(&args.out) {
        bail!(
            "--out {} is there: choose another name, or replace it with --force; nothing was changed",
            args.out.display()
        );
    }
    check_output(&args.out, "--out", is_gguf)
}

fn report(
    args: &ExportArgs,
    step: u64,
    arch: &str,
    tokenizer: Option<&Tokenizer>,
    (parameters, bytes): (usize, u64),
    notes: &[String],
) -> Result<()> {
    let (out, dtype) = (args.out.display(), args.dtype.name());
    if args.json {
        return output::print_json(&json!({
            "out": args.out, "step": step, "parameters": parameters, "dtype": dtype, "bytes": bytes, "arch": arch,
            "tokenizer": tokenizer.is_some(), "notes": notes,
        }));
    }
    let vocabulary = tokenizer.map_or_else(|| "no tokenizer".to_string(), Tokenizer::describe);
    output::print_line(&format!(
        "{out}: step {step} of {}: architecture {arch} ({dtype}, {}), {vocabulary}",
        args.run.display(),
        report::bytes(bytes)
    ))?;
    notes.iter().try_for_each(|note| output::print_line(&format!("note  {note}")))?;
    Ok(())
}

/// The tensor in the file.
fn tensor(source: &GgufSource, stored: GgufType) -> GgufTensor {
    let width = *source.shape.last().expect("a tensor has an extent");
    let stored = if source.is_always_f32() { GgufType::F32 } else { stored.for_rows_of(width) };
    GgufTensor { name: source.name.clone(), shape: source.shape.clone(), stored }
}

fn keys(model: &GgufModel, vocabulary: Option<GgufVocabulary>, stored: GgufType) -> Vec<(String, GgufValue)> {
    let number = |number| GgufValue::U32(u32::try_from(number).unwrap_or(u32::MAX));
    let text = |text: &str| GgufValue::Text(text.to_string());
    let mut keys = vec![
        ("general.architecture".to_string(), text(model.arch)),
        ("general.file_type".to_string(), GgufValue::U32(stored.file_type())),
        ("general.quantization_version".to_string(), GgufValue::U32(2)),
    ];
    keys.extend(model.keys.iter().map(|(key, value)| {
        let value = match value {
            GgufNumber::Count(count) => number(*count),
            GgufNumber::Real(real) => GgufValue::F32(*real as f32),
            GgufNumber::Word(word) => text(word),
        };
        (format!("{}.{key}", model.arch), value)
    }));
    if let Some(name) = vocabulary.as_ref().and_then(|vocabulary| vocabulary.name) {
        keys.push(("general.name".to_string(), text(name)));
    }
    let mut set = |key: &str, value| keys.push((format!("tokenizer.{key}"), value));
    let Some(vocabulary) = vocabulary else {
        set("ggml.model", text("none"));
        return keys;
    };
    set("ggml.model", text(vocabulary.model));
    set("ggml.pre", text(vocabulary.pre));
    set("ggml.tokens", GgufValue::Texts(vocabulary.tokens));
    set("ggml.token_type", GgufValue::I32s(vocabulary.kinds));
    match vocabulary.scores.is_empty() {
        true => set("ggml.merges", GgufValue::Texts(vocabulary.merges)),
        false => set("ggml.scores", GgufValue::F32s(vocabulary.scores)),
    }
    vocabulary.ids.iter().for_each(|(key, id)| set(&format!("ggml.{key}"), GgufValue::U32(*id)));
    vocabulary.flags.iter().for_each(|(key, given)| set(&format!("ggml.{key}"), GgufValue::Bool(*given)));
    if let Some(template) = vocabulary.chat_template {
        set("chat_template", GgufValue::Text(template));
    }
    keys
}

/// Elements that are read at once of a tensor whose rows change places.
const WINDOW_ELEMENTS: usize = 1 << 18;

/// Reads tensors in the order of the file. One whose rows change places is held whole while it is written.
struct Reader<'a> {
    weights: &'a Weights<'a>,
    specs: Vec<&'a ParameterSpec>,
    /// The tensor that is held, and its index.
    turned: Option<(usize, Vec<f32>)>,
}

impl Reader<'_> {
    /// Fills `out` with the elements of tensor `index` from `start` on.
    fn read(
        &mut self,
        index: usize,
        source: &GgufSource,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let here = start..start + out.len();
        match &source.from {
            GgufFrom::Numbers(numbers) => out.copy_from_slice(&numbers[here]),
            GgufFrom::Parameters { names, order: RowOrder::Kept, plus_one } => {
                self.stored(names, start, out)?;
                if *plus_one {
                    out.iter_mut().for_each(|number| *number += 1.0);
                }
            }
            GgufFrom::Parameters { names, order, .. } => {
                if self.turned.as_ref().is_none_or(|(held, _)| *held != index) {
                    self.turned = None;
                    self.turned = Some((index, self.turn(names, *order, &source.shape)?));
                }
                let (_, numbers) = self.turned.as_ref().expect("it was read");
                out.copy_from_slice(&numbers[here]);
            }
        }
        Ok(())
    }

    /// Fills `out` with the elements from `start` on of these parameters, one behind another.
    fn stored(&self, names: &[String], mut start: usize, mut out: &mut [f32]) -> Result<(), CheckpointError> {
        for name in names {
            let spec = self.specs.iter().find(|spec| spec.name == *name).expect("a parameter of the model");
            let elements = spec.elements();
            let (here, rest) = out.split_at_mut(out.len().min(elements.saturating_sub(start)));
            if !here.is_empty() {
                let range = start as u64..(start + here.len()) as u64;
                self.weights.read(spec, range, here)?;
            }
            (start, out) = (start.saturating_sub(elements), rest);
        }
        Ok(())
    }

    /// Whole parameters in the order of the file, where they have the extents `shape`; a vector has rows of one element.
    fn turn(&self, names: &[String], order: RowOrder, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let elements: usize = shape.iter().product();
        let width = elements / shape[0];
        // Extents of the parameter itself.
        let stored_width = if order == RowOrder::Transposed { shape[0] } else { width };
        let mut turned = vec![0.0; elements];
        let mut window = vec![0.0; (WINDOW_ELEMENTS / stored_width).max(1) * stored_width];
        for start in (0..elements).step_by(window.len()) {
            let length = window.len().min(elements - start);
            let window = &mut window[..length];
            self.stored(names, start, window)?;
            for (row, numbers) in (start / stored_width..).zip(window.chunks_exact(stored_width)) {
                if order == RowOrder::Transposed {
                    numbers.iter().enumerate().for_each(|(at, number)| turned[at * width + row] = *number);
                } else {
                    turned[order.place(row) * width..][..width].copy_from_slice(numbers);
                }
            }
        }
        Ok(turned)
    }
}
