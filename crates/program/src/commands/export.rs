//! `phalanx export`: a checkpoint as a Hugging Face folder, streamed tensor by tensor.

use std::path::Path;

use anyhow::{Context, Result};
use phalanx_checkpoint::write_hugging_face;
use phalanx_data::{HuggingFaceFiles, TOKENIZER_FILE};
use phalanx_models::{Model, Objective};
use phalanx_trace::DType;
use phalanx_train::state::PARAMETERS;
use serde_json::{Map, Value, json};

use crate::args::ExportArgs;
use crate::run_folder::{RunFolder, model_of};
use crate::run_folder_lock::refuse_run_folder;
use crate::{output, report, shape};

/// Keys of `config.json` and `generation_config.json` that hold the ids of special tokens, and the tokens' roles.
const SPECIAL_IDS: [(&str, &str); 3] =
    [("bos_token_id", "bos_token"), ("eos_token_id", "eos_token"), ("pad_token_id", "pad_token")];

/// Writes the folder.
///
/// # Errors
/// A run without that checkpoint, a damaged one, a folder that cannot be written.
pub fn export(args: &ExportArgs) -> Result<()> {
    refuse_run_folder(&args.out, "--out")?;
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.step)?;
    let model = model_of(&checkpoint)?;
    let mask =
        checkpoint.state()["config"]["data"]["mask_token"].as_u64().and_then(|id| u32::try_from(id).ok());
    let mask = mask.filter(|_| model.objective() == Objective::Masked);
    let tokenizer = folder.tokenizer_of(&checkpoint)?.map(|tokenizer| tokenizer.hugging_face_files(mask));
    let network = shape::whole(&*model);
    for spec in &network.parameters {
        checkpoint.expect(PARAMETERS, &spec.name, &spec.shape, DType::F32)?;
    }
    let parts = |spec| model.stored_as(spec).into_iter().map(move |stored| (spec, stored));
    let stored: Vec<_> = network.parameters.iter().flat_map(parts).collect();
    let tensors: Vec<_> = stored.iter().map(|(_, part)| (part.name.clone(), part.shape.clone())).collect();
    let mut bytes = Vec::new();
    let config = config(&*model, tokenizer.as_ref());
    write_hugging_face(&args.out, &config, &tensors, DType::F32, &mut |index, range, out| {
        bytes.resize(4 * out.len(), 0);
        let (spec, part) = &stored[index];
        let range = part.first + range.start..part.first + range.end;
        checkpoint.read(PARAMETERS, &spec.name, range, &mut bytes)?;
        for (number, four) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *number = f32::from_le_bytes(*four);
        }
        Ok(())
    })?;
    let mut names = vec!["config.json"];
    if let Some(tokenizer) = &tokenizer {
        names.extend(write_tokenizer(&args.out, tokenizer, &*model)?);
    }
    if args.json {
        return output::print_json(&json!({
            "out": args.out, "step": checkpoint.step(), "parameters": network.elements(),
            "tokenizer": tokenizer.is_some(), "files": names,
        }));
    }
    output::print_line(&format!(
        "{}: step {} of {}: model.safetensors ({}), {}",
        args.out.display(),
        checkpoint.step(),
        args.run.display(),
        report::bytes(4 * network.elements() as u64),
        names.join(", ")
    ))?;
    Ok(())
}

/// `config.json`: that of the model, with the ids of special tokens. Without them, transformers would take those of the
/// first published model of the architecture, which may not be in this vocabulary.
fn config(model: &dyn Model, tokenizer: Option<&HuggingFaceFiles>) -> Value {
    let mut config = model.to_config();
    if let Some(tokenizer) = tokenizer {
        for (key, role) in SPECIAL_IDS {
            config[key] = json!(tokenizer.id(role));
        }
    }
    config
}

/// Writes the tokenizer's files, and for a model that continues text how it does; returns their names.
fn write_tokenizer(out: &Path, tokenizer: &HuggingFaceFiles, model: &dyn Model) -> Result<Vec<&'static str>> {
    let mut files = vec![
        (TOKENIZER_FILE, tokenizer.tokenizer.clone()),
        ("tokenizer_config.json", format!("{:#}\n", tokenizer.config(model.shape().positions))),
    ];
    if model.objective() == Objective::Causal {
        let ids: Map<String, Value> =
            SPECIAL_IDS.iter().map(|(key, role)| (key.to_string(), json!(tokenizer.id(role)))).collect();
        files.push(("generation_config.json", format!("{:#}\n", Value::Object(ids))));
    }
    for (name, content) in &files {
        let path = out.join(name);
        phalanx_files::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(files.into_iter().map(|(name, _)| name).collect())
}
