//! The adapter of a checkpoint as PEFT has it: `adapter_config.json` and `adapter_model.safetensors`, in f32. One that started as a part of the
//! base's weights is written with that part, which it subtracts, behind it: an adapter of twice the rank for the whole base, as PEFT converts it.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use phalanx_checkpoint::{AdapterConfig, Checkpoint, FolderNames, write_adapter};
use phalanx_data::HuggingFaceFiles;
use phalanx_layers::lora::{adapted_by, is_beside_base};
use phalanx_layers::{Checkpointing, ParameterSpec, table_of_added};
use phalanx_models::Model;
use phalanx_models::limits::MAX_POSITIONS;
use phalanx_parallel::TensorParallel;
use phalanx_tensor::Layout;
use phalanx_train::config::{LoraConfig, LoraInit};
use phalanx_train::state::adapter_name;
use phalanx_train::weights::Weights;
use serde_json::json;

use super::card::{CardOf, card};
use super::{Replaced, refuse_files};
use crate::arguments::args::{ExportArgs, ExportType};
use crate::folders::run_folder::RunFolder;
use crate::host::output;
use phalanx_drawing::report;

/// Names of the files.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// Writes the folder.
///
/// # Errors
/// As those of an export of a model; a family whose files fuse layers that have an adapter each here.
pub fn export(
    args: &ExportArgs,
    (folder, checkpoint): (&RunFolder, &Checkpoint),
    (model, weights): (&dyn Model, &Weights),
) -> Result<()> {
    if args.dtype != ExportType::F32 {
        bail!(
            "--dtype {}: an adapter is written in f32; give --merge for the whole model",
            args.dtype.name()
        );
    }
    let found = FolderNames::read(&args.out)?;
    refuse_files(args, &found)?;
    let adapters = weights.adapters();
    let (rank, lora) = adapters.rank.zip(adapters.adapters()).expect("a run with adapters");
    let network = model.network(&TensorParallel::solo().adapting(lora), Checkpointing::None)?;
    let specs: Vec<&ParameterSpec> = network.members().filter(|spec| is_beside_base(&spec.name)).collect();
    let tables: Vec<String> = specs.iter().filter_map(|spec| table_of_added(&spec.name)).collect();
    let layers: BTreeSet<&str> = specs.iter().filter_map(|spec| adapted_by(&spec.name)).collect();
    let (times, alpha) = doubled_rank(adapters, rank);
    let is_doubled = times == 2;
    let config = AdapterConfig {
        rank: times * rank,
        alpha,
        dropout: adapters.dropout,
        rslora: adapters.rslora,
        dora: adapters.dora,
        targets: targets(model, &layers)?,
        tokens: adapters.new_rows.map(|new| model.vocab() - new..model.vocab()),
    };
    let tables: Vec<&str> = tables.iter().filter_map(|table| table.rsplit('.').nth(1)).collect();
    let base = checkpoint.state()["config"]["model"]["init"].as_str();
    let config = config.to_json(base, model.linear_layout() == Layout::InOut, &tables);
    let mut files = vec![(FILES[0].to_string(), format!("{config:#}\n"))];
    if adapters.new_rows.is_some() {
        files.extend(tokenizer_files(folder, checkpoint, model)?);
    }
    files.extend(card(CardOf::Adapter, checkpoint, &args.out, &found));
    let written: Vec<_> = specs.iter().map(|spec| (adapter_name(&spec.name), shape(spec, times))).collect();
    let mut doubled: Option<(usize, [Vec<f32>; 2])> = None;
    let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
    let replaced = Replaced::of(found, |name| name == FILES[1] || names.contains(&name));
    write_adapter(&args.out, &files, &replaced.removed, &written, &mut |index, range, out| {
        if !is_doubled || adapted_by(&specs[index].name).is_none() {
            return weights.read(specs[index], range, out);
        }
        // b of a layer follows its a.
        let is_b = specs[index].name.contains(".lora_B.");
        let first = index - usize::from(is_b);
        if doubled.as_ref().is_none_or(|(of, _)| *of != first) {
            doubled = Some((first, weights.beside_whole_base([specs[first], specs[first + 1]])?));
        }
        let (_, both) = doubled.as_ref().expect("it was made");
        out.copy_from_slice(&both[usize::from(is_b)][range.start as usize..range.end as usize]);
        Ok(())
    })?;
    let elements: u64 = written.iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum();
    if args.json {
        return output::print_json(&json!({
            "out": args.out, "step": checkpoint.step(), "adapter": true, "parameters": elements, "dtype": "f32",
            "files": names, "replaced": replaced.replaced, "removed": replaced.removed, "left": replaced.left,
        }));
    }
    output::print_line(&format!(
        "{}: the adapter of step {} of {}: {} (f32, {}), {}",
        args.out.display(),
        checkpoint.step(),
        args.run.display(),
        FILES[1],
        report::bytes(4 * elements),
        names.join(", ")
    ))?;
    replaced.print()
}

/// The factor of the rank, and alpha: for an adapter that started as a part of the base, that part lies behind it.
fn doubled_rank(adapters: &LoraConfig, rank: usize) -> (usize, f64) {
    let alpha = adapters.alpha.unwrap_or(rank as f64);
    match (adapters.init, adapters.rslora) {
        (LoraInit::Pissa, true) => (2, alpha * std::f64::consts::SQRT_2),
        (LoraInit::Pissa, false) => (2, alpha * 2.0),
        _ => (1, alpha),
    }
}

/// The tokenizer's files: who reads new tokens needs the one that has them.
fn tokenizer_files(
    folder: &RunFolder,
    checkpoint: &Checkpoint,
    model: &dyn Model,
) -> Result<Vec<(String, String)>> {
    let tokenizer = folder.tokenizer_of(checkpoint)?.map(|tokenizer| tokenizer.hugging_face_files(None));
    let complete = |files: HuggingFaceFiles| files.complete(model.longest().unwrap_or(MAX_POSITIONS), true);
    Ok(tokenizer.map(complete).into_iter().flatten().collect())
}

/// The shape of a parameter of adapters that have so many times their rank: a is `[rank, in]`, and b `[out, rank]`.
fn shape(spec: &ParameterSpec, times: usize) -> Vec<usize> {
    match &spec.shape[..] {
        [rank, inputs] if spec.name.contains(".lora_A.") => vec![times * rank, *inputs],
        [outputs, rank] if spec.name.contains(".lora_B.") => vec![*outputs, times * rank],
        other => other.to_vec(),
    }
}

/// The layers that have an adapter, by the ends of their names where no other layer has such an end.
fn targets(model: &dyn Model, adapted: &BTreeSet<&str>) -> Result<Vec<String>> {
    let end = |name: &str| name.rsplit('.').next().unwrap_or(name).to_string();
    let ends: BTreeSet<String> = adapted.iter().map(|name| end(name)).collect();
    let network = model.whole();
    let mut are_whole = true;
    for spec in network.members() {
        let Some(layer) = spec.name.strip_suffix(".weight") else { continue };
        are_whole &= !ends.contains(&end(layer)) || adapted.contains(layer);
        if let Some(rows) = model.source(spec).filter(|_| adapted.contains(layer)) {
            bail!(
                "{layer} has an adapter of its own, and files of this family hold it in {}, which is one layer for PEFT: give \
                 --merge; nothing was written",
                rows.name
            );
        }
    }
    Ok(match are_whole {
        true => ends.into_iter().collect(),
        false => adapted.iter().map(|name| name.to_string()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use phalanx_models::Gpt2;

    use super::*;

    #[test]
    fn layers_are_named_by_their_ends_where_these_are_theirs_alone() {
        let model = Gpt2 { layers: 2, hidden: 8, heads: 2, vocab: 16, positions: 8, ..Gpt2::default() };
        let of = |names: &[&str]| targets(&model, &names.iter().copied().collect()).unwrap();
        let [first, second] = ["transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"];
        assert_eq!(of(&[first, second]), ["c_attn"]);
        assert_eq!(of(&[second]), [second]);
        // Attention and MLP have a layer of this name each.
        assert_eq!(of(&["transformer.h.0.mlp.c_proj", "transformer.h.1.mlp.c_proj"]).len(), 2);
    }
}
