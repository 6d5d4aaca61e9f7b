//! `phalanx import`: a Hugging Face folder becomes a run folder with a checkpoint of step 0.
//!
//! The weights stream from one file into the other; nothing is held whole. Optimizer states are zero.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use phalanx_checkpoint::{HuggingFaceDir, TensorPiece, begin, commit, discard, write_rank};
use phalanx_data::Tokenizer;
use phalanx_layers::ParameterSpec;
use phalanx_models::{Model, Objective};
use phalanx_plan::trace::DType;
use phalanx_train::base::read_imported;
use phalanx_train::config::ModelConfig;
use phalanx_train::dataset::DataDigests;
use phalanx_train::learned::Learned;
use phalanx_train::state::PARAMETERS;
use phalanx_train::{ResolvedConfig, RunConfig};
use serde_json::json;

use crate::arguments::args::ImportArgs;
use crate::configuration::shape;
use crate::folders::resume;
use crate::folders::run_folder::RunFolder;
use crate::folders::staged::Staged;
use crate::host::{hub, output};
use crate::jobs::run_folder_lock::RunFolderLock;
use crate::jobs::setup;

/// Maximum default sequence length of a run on an imported model.
const SEQ: usize = 1024;

/// Optimizer states of a new run, which are zero at the start.
const STATES: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// Makes the run folder.
///
/// # Errors
/// A folder of an unknown architecture, tensors that are missing or of another shape, a run folder with a run.
pub fn import(args: &ImportArgs) -> Result<()> {
    let dir = hub::folder(&args.dir)?;
    let (source, model) = shape::read_hugging_face(&dir)?;
    let network = model.whole();
    let parameters: Vec<ParameterSpec> = network.members().cloned().collect();
    let learned = Learned::of_folder(&dir, &*model)?;
    let folder = run_folder(args)?;
    let lock = RunFolderLock::acquire(&folder)?;
    let path = match write_run(&dir, &folder, &source, &*model, &parameters, &learned) {
        Ok(path) => path,
        Err(error) => {
            lock.leave();
            return Err(error);
        }
    };
    let tokenizer = learned.tokenizer();
    let parameters = network.elements();
    let mut notes = shape::notes(&source, &*model, &ModelConfig::default());
    notes.extend_from_slice(learned.notes());
    notes.extend(tokenizer.and_then(|tokenizer| shape::rows_and_ids(model.vocab(), tokenizer)));
    if args.json {
        return output::print_json(&json!({
            "run": folder.path(), "checkpoint": path, "parameters": parameters,
            "tokenizer": tokenizer.map(Tokenizer::describe), "notes": notes,
        }));
    }
    let run = resume::shell_word(&folder.path().display().to_string());
    output::print_line(&format!("{run}: {parameters} parameters in {}", path.display()))?;
    notes.iter().try_for_each(|note| output::print_line(&format!("note  {note}")))?;
    if tokenizer.is_some() && model.objective() == Objective::Causal {
        output::print_line(&format!("next  phalanx sample {run} --prompt TEXT"))?;
    }
    let given = if tokenizer.is_some() { "" } else { " --set data.tokenizer=ITS-TOKENIZER" };
    output::print_line(&format!("      phalanx train --run {run} --resume --data YOUR-TEXTS{given}"))?;
    Ok(())
}

/// The run folder that was given, or else `runs/NAME` of the folder, whose name may have dots: `Qwen3-0.6B`.
fn run_folder(args: &ImportArgs) -> Result<RunFolder> {
    let resolved = || args.dir.canonicalize().ok()?.file_name().map(PathBuf::from);
    let name = args.dir.file_name().map(PathBuf::from).or_else(resolved);
    match (&args.run, name) {
        (Some(run), _) => Ok(RunFolder::at(run)),
        (None, Some(name)) => Ok(RunFolder::at(&Path::new("runs").join(name))),
        (None, None) => bail!("give the run folder: --run DIR"),
    }
}

/// Writes the configuration, the tokenizer and the checkpoint; returns the path of the checkpoint, and where the tokenizer's
/// ids are not the rows of the model, how they differ.
fn write_run(
    dir: &Path,
    folder: &RunFolder,
    source: &HuggingFaceDir,
    model: &dyn Model,
    parameters: &[ParameterSpec],
    learned: &Learned,
) -> Result<PathBuf> {
    if let Some(note) = folder.check_start()? {
        output::note(&note);
    }
    let config = ResolvedConfig::new(config(dir, model, learned))?;
    let staged = Staged::new(folder.path())?;
    let generation_config = learned.generation_config().map(str::to_string);
    let mut digests = DataDigests { generation_config, ..DataDigests::default() };
    if let Some(tokenizer) = learned.tokenizer() {
        tokenizer.save(staged.path())?;
        digests.tokenizer = Some(tokenizer.digest());
    }
    setup::write_config(folder, staged, &config, None, None, true)?;
    let state =
        json!({ "step": 0, "samples": 0, "config": config, "model": model.to_config(), "data": digests });
    let tmp = begin(&folder.checkpoints(), 0)?;
    if let Err(error) = write(source, model, parameters, &tmp) {
        // The first error is reported; the next save removes what remains.
        let _ = discard(&tmp);
        return Err(error);
    }
    Ok(commit(&tmp, state, 1)?)
}

fn config(dir: &Path, model: &dyn Model, learned: &Learned) -> RunConfig {
    let mut config = RunConfig::default();
    shape::write(&mut config.model, model);
    config.model.seq = model.longest().map_or(SEQ, |longest| SEQ.min(longest));
    config.model.init = Some(resume::absolute(&dir.display().to_string()));
    if learned.tokenizer().is_some() {
        config.data.tokenizer = resume::absolute(&dir.display().to_string());
    }
    config
}

/// Streams the parameters and zero states into the new checkpoint.
fn write(source: &HuggingFaceDir, model: &dyn Model, parameters: &[ParameterSpec], tmp: &Path) -> Result<()> {
    const WINDOW_BYTES: usize = 1 << 20;
    let states = std::iter::once(PARAMETERS).chain(STATES);
    let pieces: Vec<TensorPiece> = states
        .flat_map(|state| {
            parameters.iter().map(move |spec| TensorPiece {
                state,
                name: spec.name.clone(),
                shape: spec.shape.clone(),
                dtype: DType::F32,
                stripe: None,
                range: 0..spec.elements() as u64,
            })
        })
        .collect();
    let mut failed = None;
    let mut numbers = vec![0f32; WINDOW_BYTES / 4];
    write_rank(tmp, 0, &pieces, WINDOW_BYTES, &mut |index, range, bytes| {
        let piece = &pieces[index];
        let numbers = &mut numbers[..bytes.len() / 4];
        numbers.fill(0.0);
        if piece.state == PARAMETERS && failed.is_none() {
            let spec = &parameters[index % parameters.len()];
            failed = read_imported(source, model, spec, range, numbers).err();
        }
        for (four, number) in bytes.chunks_exact_mut(4).zip(numbers) {
            four.copy_from_slice(&number.to_le_bytes());
        }
    })?;
    Ok(failed.map_or(Ok(()), Err)?)
}
