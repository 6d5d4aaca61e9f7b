//! `phalanx export`: a checkpoint as a Hugging Face folder, a GGUF file, or the folder of its adapter, streamed tensor by tensor.

mod adapter;
mod card;
mod gguf;

use anyhow::{Result, bail};
use phalanx_checkpoint::{Checkpoint, FolderNames, write_hugging_face};
use phalanx_data::HuggingFaceFiles;
use phalanx_models::limits::MAX_POSITIONS;
use phalanx_models::{Model, Objective, stored_tensors};
use phalanx_plan::trace::DType;
use phalanx_train::config::LoraInit;
use phalanx_train::dataset::DataDigests;
use phalanx_train::weights::{Weights, adapters_of};
use serde_json::json;

use crate::arguments::args::{ExportArgs, ExportFormat, ExportType};
use crate::folders::ownership::refuse_in_run;
use crate::folders::run_folder::{RunFolder, model_of};
use crate::host::output;
use card::CardOf;
use phalanx_drawing::report;

/// The weights.
const MODEL_FILE: &str = "model.safetensors";

/// Settings for the generation of text, which a model may have without a tokenizer.
const GENERATION_CONFIG: &str = "generation_config.json";

/// Names of files that a message lists.
const LISTED: usize = 4;

/// Writes the folder or the file.
///
/// # Errors
/// A run without that checkpoint, a damaged one, a folder that holds files or cannot be written; numbers that are too large for the type.
pub fn export(args: &ExportArgs) -> Result<()> {
    refuse_in_run(&args.out, "--out")?;
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.step)?;
    let model = model_of(&checkpoint)?;
    let adapters = adapters_of(&checkpoint)?;
    let has_adapters = adapters.rank.is_some();
    if args.merge && !has_adapters {
        bail!("--merge: {} has no adapters to merge into its weights: leave it out", args.run.display());
    }
    let alone = has_adapters && !args.merge && adapters.init != LoraInit::Pissa;
    let read = if alone { Weights::of_adapters } else { Weights::of };
    let weights = read(&checkpoint, &*model)?;
    match args.format {
        ExportFormat::Hf if has_adapters && !args.merge => {
            adapter::export(args, (&folder, &checkpoint), (&*model, &weights))
        }
        ExportFormat::Gguf if has_adapters && !args.merge => {
            bail!(
                "--format gguf: give --merge, which adds the adapters of {} to its weights",
                args.run.display()
            )
        }
        ExportFormat::Hf => export_folder(args, (&folder, &checkpoint), (&*model, &weights)),
        ExportFormat::Gguf => gguf::export(args, (&folder, &checkpoint), (&*model, &weights)),
    }
}

fn export_folder(
    args: &ExportArgs,
    (folder, checkpoint): (&RunFolder, &Checkpoint),
    (model, weights): (&dyn Model, &Weights),
) -> Result<()> {
    let (dtype, word) = match args.dtype {
        ExportType::F32 => (DType::F32, "float32"),
        ExportType::Bf16 => (DType::BF16, "bfloat16"),
        ExportType::F16 => (DType::F16, "float16"),
        ExportType::Q8_0 => {
            bail!("--dtype q8_0 is for --format gguf: a Hugging Face folder has f32, bf16 or f16")
        }
    };
    let found = FolderNames::read(&args.out)?;
    refuse_files(args, &found)?;
    let mask =
        checkpoint.state()["config"]["data"]["mask_token"].as_u64().and_then(|id| u32::try_from(id).ok());
    let mask = mask.filter(|_| model.objective() == Objective::Masked);
    let tokenizer = folder.tokenizer_of(checkpoint)?.map(|tokenizer| tokenizer.hugging_face_files(mask));
    let network = model.whole();
    for spec in network.members() {
        weights.read(spec, 0..0, &mut [])?;
    }
    let (names, specs): (Vec<_>, Vec<_>) = stored_tensors(model, &network).unzip();
    let tensors: Vec<_> = names.into_iter().zip(specs.iter().map(|spec| spec.shape.clone())).collect();
    let has_tokenizer = tokenizer.is_some();
    let mut files = files(model, tokenizer, DataDigests::of(checkpoint).generation_config, word);
    files.extend(card::card(CardOf::Model, checkpoint, &args.out, &found));
    let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
    let is_new = |name: &str| name == MODEL_FILE || names.contains(&name);
    let replaced = Replaced::of(found, is_new);
    write_hugging_face(&args.out, &files, &replaced.removed, &tensors, dtype, &mut |index, range, out| {
        specs[index].of_members(range).try_for_each(|(spec, own, first)| {
            let out = &mut out[first..][..(own.end - own.start) as usize];
            weights.read(spec, own, out)
        })
    })?;
    if args.json {
        return output::print_json(&json!({
            "out": args.out, "step": checkpoint.step(), "parameters": network.elements(), "dtype": dtype.name(),
            "tokenizer": has_tokenizer, "files": names, "replaced": replaced.replaced, "removed": replaced.removed,
            "left": replaced.left,
        }));
    }
    output::print_line(&format!(
        "{}: step {} of {}: {MODEL_FILE} ({}, {}), {}",
        args.out.display(),
        checkpoint.step(),
        args.run.display(),
        dtype.name(),
        report::bytes((dtype.bytes() * network.elements()) as u64),
        names.join(", ")
    ))?;
    replaced.print()
}

/// Treatment of the files that were in the folder.
struct Replaced {
    replaced: Vec<String>,
    removed: Vec<String>,
    left: Vec<String>,
}

impl Replaced {
    /// Files of a model are replaced by new ones of the same name, or removed; others are left.
    fn of(found: FolderNames, is_new: impl Fn(&str) -> bool) -> Replaced {
        let (replaced, removed) = found.of_model.into_iter().partition(|name| is_new(name));
        Replaced { replaced, removed, left: found.others }
    }

    fn print(&self) -> Result<()> {
        let Replaced { replaced, removed, left } = self;
        for (what, names) in [("replaced", replaced), ("removed", removed), ("left as they are", left)] {
            if !names.is_empty() {
                output::print_line(&format!("{what}: {}", names.join(", ")))?;
            }
        }
        Ok(())
    }
}

/// Refuses a folder that holds files: programs would read those that are left beside the new ones.
fn refuse_files(args: &ExportArgs, found: &FolderNames) -> Result<()> {
    let names: Vec<&str> = found.of_model.iter().chain(&found.others).map(String::as_str).collect();
    if args.force || names.is_empty() {
        return Ok(());
    }
    let more = match names.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    bail!(
        "--out {} holds files ({}{more}): choose another folder, or replace the model that it holds with --force, which leaves \
         other files as they are; nothing was changed",
        args.out.display(),
        names[..names.len().min(LISTED)].join(", ")
    )
}

/// The files beside the weights: the model's configuration, and the tokenizer's files, as they were read where there were any.
/// Ids of special tokens are null where there are none: without the key, transformers would take those of the first
/// published model of the architecture, which may not be in this vocabulary.
/// `generation_config` is the file of that name that the run keeps; `dtype` the type of the weights, for which version 4 of transformers
/// has another key than version 5.
fn files(
    model: &dyn Model,
    tokenizer: Option<HuggingFaceFiles>,
    generation_config: Option<String>,
    dtype: &str,
) -> Vec<(String, String)> {
    let mut config = model.to_config();
    ["torch_dtype", "dtype"].into_iter().for_each(|key| config[key] = json!(dtype));
    let ids = tokenizer.as_ref().map_or_else(HuggingFaceFiles::no_model_ids, HuggingFaceFiles::model_ids);
    ids.into_iter().for_each(|(key, id)| config[key] = id);
    let of_model = ("config.json".to_string(), format!("{config:#}\n"));
    let continues = model.objective() == Objective::Causal;
    let of_tokenizer =
        tokenizer.map(|tokenizer| tokenizer.complete(model.longest().unwrap_or(MAX_POSITIONS), continues));
    let mut others = of_tokenizer.unwrap_or_default();
    others.extend(generation_config.map(|content| (GENERATION_CONFIG.to_string(), content)));
    [of_model].into_iter().chain(others).collect()
}
