//! `phalanx inspect`: what is in a checkpoint, run folder, token file, Hugging Face folder or flight record.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
use phalanx_checkpoint::{Checkpoint, HuggingFaceDir, Skipped, Statistics, StoredTensor, TensorReport};
use phalanx_data::TokenFile;
use phalanx_system::files::is_named;
use serde_json::{Value, json};

use crate::arguments::args::InspectArgs;
use crate::configuration::shape;
use crate::folders::flight;
use crate::folders::run_damage;
use crate::folders::run_folder::RunFolder;
use crate::folders::run_names::READY;
use crate::host::output::{note, print, print_json, print_line};
use crate::reports::final_report::Reached;
use phalanx_drawing::report::{Table, bytes};

/// Number of events of a rank's flight record that are shown.
const SHOWN_EVENTS: usize = 40;

/// Number of tokens of a token file that are shown.
const SHOWN_TOKENS: usize = 64;

/// Describes the contents of a path.
///
/// # Errors
/// A path that is none of these, or damaged.
pub fn inspect(args: &InspectArgs) -> Result<()> {
    let path = &args.path;
    if path.join("manifest.json").is_file() {
        return checkpoint(&Checkpoint::open(path)?, args);
    }
    if path.join("checkpoints").is_dir() || path.join("config.toml").is_file() {
        return run_folder(&RunFolder::at(path), args);
    }
    if path.join("config.json").is_file() {
        return hugging_face(path, args);
    }
    if flight::is_flight(path) {
        return flight_records(path, args);
    }
    if path.is_dir() {
        bail!(
            "{} is neither a run folder (config.toml, checkpoints), nor a checkpoint (manifest.json), nor a Hugging Face \
             folder (config.json), nor a folder of flight records (rank-N.json)",
            path.display()
        );
    }
    token_file(path, args)
}

/// Prints the last events of the ranks before a run failed.
fn flight_records(path: &Path, args: &InspectArgs) -> Result<()> {
    let flights = flight::read(path)?;
    if args.json {
        return print_json(&json!({ "kind": "flight", "path": path, "ranks": flights }));
    }
    Ok(print(&flight::describe(&flights, SHOWN_EVENTS))?)
}

/// Reads everything if `--verify` was given.
fn verified(checkpoint: &Checkpoint, args: &InspectArgs) -> Result<Option<Vec<TensorReport>>> {
    checkpoint.check_files()?;
    Ok(if args.verify { Some(checkpoint.verify_all(&mut |_| {})?) } else { None })
}

fn checkpoint(checkpoint: &Checkpoint, args: &InspectArgs) -> Result<()> {
    let reports = verified(checkpoint, args)?;
    if args.json {
        print_json(&checkpoint_json(checkpoint, reports.as_deref()))?;
    } else {
        print(&checkpoint_text(checkpoint, reports.as_deref()))?;
    }
    refuse_damage(&reports.unwrap_or_default())
}

/// For each state: its tensors and bytes.
fn states(checkpoint: &Checkpoint) -> BTreeMap<&str, (u64, u64)> {
    let mut states: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let (count, total) = states.entry(&tensor.state).or_default();
        *count += 1;
        *total += tensor.elements() * tensor.dtype.bytes() as u64;
    }
    states
}

fn checkpoint_json(checkpoint: &Checkpoint, reports: Option<&[TensorReport]>) -> Value {
    let state = |(state, (count, size))| (state, json!({ "tensors": count, "bytes": size }));
    let tensor = |t: &StoredTensor| json!({ "state": t.state, "name": t.name, "dtype": t.dtype, "shape": t.shape, "pieces": t.pieces.len() });
    json!({
        "kind": "checkpoint", "path": checkpoint.dir(), "step": checkpoint.step(), "ranks": checkpoint.ranks(),
        "states": states(checkpoint).into_iter().map(state).collect::<BTreeMap<_, _>>(),
        "model": checkpoint.state()["model"],
        "tensors": checkpoint.tensors().iter().map(tensor).collect::<Vec<_>>(),
        "verified": reports,
    })
}

fn checkpoint_text(checkpoint: &Checkpoint, reports: Option<&[TensorReport]>) -> String {
    let mut table = Table::new(&["state", "tensors", "bytes"]);
    for (state, (count, size)) in states(checkpoint) {
        table.row([state.to_string(), count.to_string(), bytes(size)]);
    }
    let (path, step, ranks) = (checkpoint.dir().display(), checkpoint.step(), checkpoint.ranks());
    let tensors = reports.map(statistics).unwrap_or_default();
    format!("{path}: checkpoint of step {step}, saved by {ranks} rank(s)\n{table}{tensors}")
}

/// A line for each tensor, with its damage.
fn statistics(reports: &[TensorReport]) -> String {
    let mut table = Table::new(&["tensor", "shape", "min", "max", "mean", "rms", "not finite"]);
    for report in reports {
        let name = format!("{}/{}", report.state, report.name);
        match &report.statistics {
            Some(s) => table.row(figures(name, &report.shape, Some(s)).chain([s.non_finite.to_string()])),
            None => table.row([name, "DAMAGED".into()]),
        }
    }
    table.to_string()
}

/// Name, shape and figures of a tensor.
fn figures(
    name: String,
    shape: &[usize],
    figures: Option<&Statistics>,
) -> impl Iterator<Item = String> + use<> {
    let figures = figures.map(|s| [s.min, s.max, s.mean, s.rms].map(|value| format!("{value:.4e}")));
    [name, format!("{shape:?}")].into_iter().chain(figures.into_iter().flatten())
}

fn refuse_damage(reports: &[TensorReport]) -> Result<()> {
    let damage: Vec<&String> = reports.iter().flat_map(|report| &report.damage).collect();
    match damage.as_slice() {
        [] => Ok(()),
        [first] => bail!("{first}"),
        [first, rest @ ..] => bail!("{first}\nand {} more damaged piece(s)", rest.len()),
    }
}

fn run_folder(folder: &RunFolder, args: &InspectArgs) -> Result<()> {
    let found = folder.newest()?;
    let reached = Reached::read(folder)?;
    let mut damaged: Vec<String> = found.skipped.iter().map(Skipped::describe).collect();
    if args.verify && is_named(&folder.file(READY)) {
        note(&format!(
            "{}: a start writes its files now, or was interrupted and the next one completes it: they are not checked",
            folder.path().display()
        ));
    } else if args.verify {
        damaged.extend(run_damage::of_files(folder, found.checkpoint.as_ref()));
    }
    let reports = match &found.checkpoint {
        Some(newest) => verified(newest, args)?,
        None => None,
    };
    if args.json {
        print_json(&json!({
            "kind": "run", "step": reached.step, "losses": reached.losses, "val_loss": reached.val_loss,
            "damaged": damaged,
            "checkpoint": found.checkpoint.as_ref().map(|newest| checkpoint_json(newest, reports.as_deref())),
        }))?;
    } else {
        print_line(&format!(
            "{}: run folder, {} steps in metrics.jsonl",
            folder.path().display(),
            reached.step
        ))?;
        if let Some((first, last)) = reached.losses {
            print_line(&format!("  loss {first:.4} -> {last:.4}"))?;
        }
        if let Some((val_loss, _)) = reached.val_loss {
            print_line(&format!("  validation loss {val_loss:.4}"))?;
        }
        damaged.iter().try_for_each(|line| print_line(&format!("  damaged: {line}")))?;
        match &found.checkpoint {
            Some(newest) => print(&checkpoint_text(newest, reports.as_deref()))?,
            None => print_line("  no checkpoint")?,
        }
    }
    refuse_damage(&reports.unwrap_or_default())?;
    match damaged.as_slice() {
        [first, ..] if args.verify => bail!("{} damaged or missing: {first}", damaged.len()),
        _ => Ok(()),
    }
}

fn hugging_face(dir: &Path, args: &InspectArgs) -> Result<()> {
    let folder = HuggingFaceDir::open(dir)?;
    let model = shape::model_in(&folder);
    let mut reports = Vec::new();
    for name in folder.names() {
        let shape = folder.shape(name)?.to_vec();
        let statistics =
            if args.verify { Some(hugging_face_statistics(&folder, name, &shape)?) } else { None };
        reports.push((name.to_string(), shape, statistics));
    }
    let elements: usize = reports.iter().map(|(_, shape, _)| shape.iter().product::<usize>()).sum();
    let kind = match &model {
        Ok(model) => {
            let name = model.architecture().map_or("a model", |arch| arch.name);
            format!("{name}, can be imported")
        }
        Err(error) => error.to_string(),
    };
    if args.json {
        let tensors: Vec<Value> = reports
            .iter()
            .map(
                |(name, shape, statistics)| json!({ "name": name, "shape": shape, "statistics": statistics }),
            )
            .collect();
        return print_json(&json!({
            "kind": "hugging_face", "model": folder.config(), "can_import": model.is_ok(), "elements": elements,
            "tensors": tensors, "notes": folder.notes(),
        }));
    }
    print_line(&format!(
        "{}: Hugging Face folder, {} tensors, {elements} elements; {kind}",
        dir.display(),
        reports.len()
    ))?;
    folder.notes().iter().try_for_each(|note| print_line(&format!("  {note}")))?;
    let mut table = Table::new(&["tensor", "shape", "min", "max", "mean", "rms"]);
    for (name, shape, statistics) in reports {
        table.row(figures(name, &shape, statistics.as_ref()));
    }
    Ok(print(&table.to_string())?)
}

/// Reads a tensor window by window.
fn hugging_face_statistics(folder: &HuggingFaceDir, name: &str, shape: &[usize]) -> Result<Statistics> {
    const WINDOW: u64 = 1 << 16;
    let elements = shape.iter().product::<usize>() as u64;
    let mut window = vec![0f32; WINDOW as usize];
    let mut s = Statistics { min: f64::INFINITY, max: f64::NEG_INFINITY, mean: 0.0, rms: 0.0, non_finite: 0 };
    let mut at = 0;
    while at < elements {
        let end = (at + WINDOW).min(elements);
        let values = &mut window[..(end - at) as usize];
        folder.read_f32(name, at..end, values)?;
        for value in values.iter().map(|value| f64::from(*value)) {
            if !value.is_finite() {
                s.non_finite += 1;
                continue;
            }
            (s.min, s.max) = (s.min.min(value), s.max.max(value));
            (s.mean, s.rms) = (s.mean + value, s.rms + value * value);
        }
        at = end;
    }
    let finite = (elements - s.non_finite) as f64;
    (s.mean, s.rms) = (s.mean / finite, (s.rms / finite).sqrt());
    Ok(s)
}

fn token_file(path: &Path, args: &InspectArgs) -> Result<()> {
    let file = TokenFile::open_as(path, args.token_type)?;
    let look = file.look()?;
    let tokenizer = file.tokenizer()?;
    let scan = args.verify.then(|| file.scan(file.vocab_size().unwrap_or(usize::MAX))).transpose()?;
    let largest = scan.as_ref().map(|scan| scan.largest);
    scan.and_then(|scan| scan.out_of_range).map_or(Ok(()), Err)?;
    let mut first = vec![0; SHOWN_TOKENS.min(file.len())];
    file.read(0, &mut first)?;
    let text = tokenizer.as_ref().map(|tokenizer| tokenizer.decode(&first));
    if args.json {
        print_json(&json!({
            "kind": "tokens", "format": format!("{:?}", file.format()), "id_type": file.id_type(), "tokens": file.len(),
            "bytes": file.bytes(), "vocab": file.vocab_size(), "tokenizer": tokenizer.map(|t| t.describe()),
            "first": first, "largest": largest, "text": text, "looks_like": look.map(|look| look.is),
        }))?;
        return Ok(file.check_look()?);
    }
    let vocabulary = file.vocab_size().map_or("not said".to_string(), |v| format!("{v} ids"));
    let tokenizer = tokenizer.map_or("not in the file".to_string(), |t| t.describe());
    let begins = text.map_or_else(|| format!("{first:?}"), |text| format!("{text:?}"));
    print_line(&format!(
        "{}: token file ({:?}), {} tokens of type {} in {} bytes\n  vocabulary {vocabulary}\n  tokenizer  {tokenizer}\n  \
         begins     {begins}",
        path.display(),
        file.format(),
        file.len(),
        file.id_type(),
        file.bytes()
    ))?;
    largest.map_or(Ok(()), |largest| print_line(&format!("  largest id {largest}")))?;
    Ok(file.check_look()?)
}
