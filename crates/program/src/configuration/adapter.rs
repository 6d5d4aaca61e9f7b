//! The folder of an adapter from which a run starts: its `adapter_config.json` gives the keys of `[lora]` that the user left out.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};
use phalanx_checkpoint::{AdapterConfig, HuggingFaceDir};
use phalanx_layers::Checkpointing;
use phalanx_layers::lora::is_beside_base;
use phalanx_models::Model;
use phalanx_parallel::TensorParallel;
use phalanx_train::RunConfig;
use phalanx_train::config::Targets;
use phalanx_train::state::adapter_name;

use crate::configuration::user_config::UserConfig;

/// Reads the folder of `lora.adapter`, if there is one, of an adapter of `model`; the number of rows of tokens, if it has the last of them.
///
/// # Errors
/// A folder that cannot be read, a given key that contradicts it, or tensors that are not those of the adapter it describes.
pub fn import(config: &mut RunConfig, given: &UserConfig, model: &dyn Model) -> Result<Option<usize>> {
    let Some(dir) = config.lora.adapter.clone() else { return Ok(None) };
    let shown = || format!("lora.adapter = {dir:?}");
    let (folder, found) = AdapterConfig::read(Path::new(&dir)).with_context(shown)?;
    let AdapterConfig { rank, alpha, dropout, rslora, dora, targets, tokens } = found;
    let own = &mut config.lora;
    let targets = Targets::Several(targets);
    for (key, is_other, theirs) in [
        ("lora.rank", own.rank != Some(rank), format!("r = {rank}")),
        ("lora.alpha", own.alpha != Some(alpha), format!("lora_alpha = {alpha}")),
        ("lora.rslora", own.rslora != rslora, format!("use_rslora = {rslora}")),
        ("lora.dora", own.dora != dora, format!("use_dora = {dora}")),
        ("lora.targets", own.targets != targets, "its target_modules".to_string()),
    ] {
        if given.has(key) && is_other {
            bail!(
                "{key} is given, but {} has {theirs}: leave {key} out, or start without the adapter",
                shown()
            );
        }
    }
    (own.rank, own.alpha, own.rslora, own.targets) = (Some(rank), Some(alpha), rslora, targets);
    own.dora = dora;
    own.new_rows = tokens.as_ref().map(|tokens| tokens.len());
    let rows = tokens.map(|tokens| tokens.end);
    if !given.has("lora.dropout") {
        own.dropout = dropout;
    }
    let grown = rows.and_then(|rows| model.with_vocab(rows.max(model.vocab())));
    check_tensors(config, &folder, grown.as_deref().unwrap_or(model)).with_context(shown)?;
    Ok(rows)
}

/// Compares the names of the tensors with those of the adapters.
fn check_tensors(config: &RunConfig, folder: &HuggingFaceDir, model: &dyn Model) -> Result<()> {
    let lora = config.lora.adapters().expect("it has a rank");
    let network = model.network(&TensorParallel::solo().adapting(lora), Checkpointing::None)?;
    let of_adapters = network.members().filter(|spec| is_beside_base(&spec.name));
    let expected: BTreeSet<String> = of_adapters.map(|spec| adapter_name(&spec.name)).collect();
    let found: BTreeSet<String> = folder.names().map(str::to_string).collect();
    if let Some(name) = expected.difference(&found).next() {
        bail!("it has no {name}, which an adapter of these target_modules has in this model");
    }
    if let Some(name) = found.difference(&expected).next() {
        bail!("it has {name}, which is no tensor of an adapter of these target_modules in this model");
    }
    Ok(())
}
