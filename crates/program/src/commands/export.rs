//! `phalanx export`: a checkpoint as a Hugging Face folder, streamed tensor by tensor.

use anyhow::{Context, Result};
use phalanx_checkpoint::write_hugging_face;
use phalanx_data::{TOKENIZER_FILE, Tokenizer};
use phalanx_trace::DType;
use phalanx_train::state::PARAMETERS;
use serde_json::json;

use crate::args::ExportArgs;
use crate::run_folder::{RunFolder, model_of};
use crate::run_folder_lock::refuse_run_folder;
use crate::{output, report, shape};

/// Writes the folder.
///
/// # Errors
/// A run without that checkpoint, a damaged one, a folder that cannot be written.
pub fn export(args: &ExportArgs) -> Result<()> {
    refuse_run_folder(&args.out, "--out")?;
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.step)?;
    // Only a tokenizer that Hugging Face libraries can read.
    let tokenizer = folder.tokenizer_of(&checkpoint)?.filter(Tokenizer::is_hugging_face);
    let model = model_of(&checkpoint)?;
    let network = shape::whole(&*model);
    for spec in &network.parameters {
        checkpoint.expect(PARAMETERS, &spec.name, &spec.shape, DType::F32)?;
    }
    let parts = |spec| model.stored_as(spec).into_iter().map(move |stored| (spec, stored));
    let stored: Vec<_> = network.parameters.iter().flat_map(parts).collect();
    let tensors: Vec<_> = stored.iter().map(|(_, part)| (part.name.clone(), part.shape.clone())).collect();
    let mut bytes = Vec::new();
    write_hugging_face(&args.out, &model.to_config(), &tensors, DType::F32, &mut |index, range, out| {
        bytes.resize(4 * out.len(), 0);
        let (spec, part) = &stored[index];
        let range = part.first + range.start..part.first + range.end;
        checkpoint.read(PARAMETERS, &spec.name, range, &mut bytes)?;
        for (number, four) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *number = f32::from_le_bytes(*four);
        }
        Ok(())
    })?;
    if let Some(tokenizer) = &tokenizer {
        let path = args.out.join(TOKENIZER_FILE);
        phalanx_files::write(&path, tokenizer.to_json())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let has_tokenizer = tokenizer.is_some();
    if args.json {
        return output::print_json(&json!({
            "out": args.out, "step": checkpoint.step(), "parameters": network.elements(), "tokenizer": has_tokenizer,
        }));
    }
    output::print_line(&format!(
        "{}: step {} of {}: model.safetensors ({}), config.json{}",
        args.out.display(),
        checkpoint.step(),
        args.run.display(),
        report::bytes(4 * network.elements() as u64),
        if has_tokenizer { ", tokenizer.json" } else { "" }
    ))?;
    Ok(())
}
