//! `phalanx eval`: the loss of a trained model on data that it is given.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use phalanx_data::{ChatFiles, Corpus, CorpusSpec, Tokenizer, token_paths, tokenize_to_memory};
use phalanx_models::Model;
use phalanx_tensor::{DType, Device};
use phalanx_train::config::{DataConfig, DeviceConfig, DeviceKind};
use phalanx_train::measured::Sequence;
use phalanx_train::sample::Generator;
use phalanx_train::{RunConfig, RunError, chats};
use serde_json::json;

use super::sample::{NO_TOKENIZER, causal_model, compute_type, stored_config};
use crate::arguments::sample_args::EvalArgs;
use crate::folders::continuation;
use crate::folders::run_folder::RunFolder;
use crate::host::card_needs::CardNeeds;
use crate::host::environment::Environment;
use crate::host::{cards, machine, output};
use crate::jobs::rank_host::{RankDevice, RankHost};
use phalanx_drawing::report;

/// Time between lines about progress.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Ids, and which of them are predicted.
type Texts = Vec<(Vec<u32>, Vec<bool>)>;

/// Prints the mean loss over the predicted tokens of the data.
///
/// # Errors
/// A folder without a checkpoint or tokenizer, data that cannot be read or has no token to predict, a device that is not there.
pub fn eval(args: &EvalArgs, environment: Environment) -> Result<()> {
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.step)?;
    let tokenizer = folder.tokenizer_of(&checkpoint)?.context(NO_TOKENIZER)?;
    let mut config = stored_config(&folder)?.unwrap_or_default();
    let model = causal_model(&folder, &checkpoint)?;
    let compute = compute_type(args.dtype.as_deref(), &folder)?;
    let seq = args.seq.unwrap_or(config.model.seq);
    let longest = model.longest().unwrap_or(seq).min(seq);
    let has_chats = config.data.chat.is_some() || config.data.pairs.is_some();
    let (mut texts, what) = match has_chats || args.template.is_some() {
        true => (chats(args, &config.data, tokenizer.clone())?, "chat"),
        false => (windows(args, &config.data, &tokenizer, seq)?, "window"),
    };
    for (ids, _) in &mut texts {
        continuation::check_prompt(ids, model.vocab(), &tokenizer)?;
        // The last token of a window is predicted and predicts none.
        ids.truncate(if what == "window" { longest + 1 } else { longest });
    }
    let sequences = Sequence::pack(&texts, longest);
    let targets: usize = sequences.iter().map(Sequence::targets).sum();
    let first = sequences.first().filter(|_| targets > 0);
    let first = first.with_context(|| format!("--data has no token to predict within {longest} tokens"))?;
    let device = device(args, &mut config, (&*model, compute.into(), first), environment)?;
    let generator = Generator::load(&*model, &checkpoint, &tokenizer, device, compute.into())?;
    let mut sum = 0.0;
    let (mut done, mut line_due) = (0, Instant::now() + LINE_EVERY);
    for sequence in &sequences {
        if Instant::now() >= line_due {
            line_due = Instant::now() + LINE_EVERY;
            let so_far =
                if done > 0 { format!(", loss {:.4} so far", sum / done as f64) } else { String::new() };
            output::note(&format!("{done} of {targets} targets{so_far}"));
        }
        sum += f64::from(generator.sum_of_losses(sequence).map_err(RunError::from)?);
        done += sequence.targets();
    }
    let loss = sum / targets as f64;
    let step = checkpoint.step();
    if args.json {
        let bits = loss / std::f64::consts::LN_2;
        return output::print_json(&json!({
            "step": step, "device": config.device.kind.name(), "dtype": compute.name(), "seq": longest, "texts": texts.len(),
            "targets": targets, "loss": loss, "perplexity": loss.exp(), "bits_per_token": bits,
        }));
    }
    Ok(output::print_line(&format!(
        "step {step}: loss {loss:.4}, perplexity {:.3}, the mean over {targets} targets in {}",
        loss.exp(),
        report::plural(texts.len(), what)
    ))?)
}

/// The device of the run, or that of `--device`, with the memory for a model of this type and sequences like `first`. `config.device` then says which.
///
/// # Errors
/// No such device, or too little memory.
fn device(
    args: &EvalArgs,
    config: &mut RunConfig,
    (model, compute, first): (&dyn Model, DType, &Sequence),
    environment: Environment,
) -> Result<Device> {
    if let Some(kind) = &args.device {
        let kind = match kind.as_str() {
            "cpu" => DeviceKind::Cpu,
            "cuda" => DeviceKind::Cuda,
            "simulated" => DeviceKind::Simulated,
            _ => DeviceKind::Auto,
        };
        config.device = DeviceConfig { kind, ..DeviceConfig::default() };
    }
    // One rank, of which the processor does not ask for other products than a card has.
    (config.parallel, config.precision) = Default::default();
    let line = cards::decide(config, true, 1).context("on the run's device (--device cpu: the processor)")?;
    line.iter().for_each(|line| output::note(line));
    let scratch_bytes = CardNeeds::scratch(model, [1, first.length()], 1);
    let needs = CardNeeds { scratch_bytes, ..CardNeeds::NONE };
    let factory = environment.device_factory(&config.device, needs, output::note);
    let threads = machine::cores();
    let plans = Generator::plans(model, compute, first, (threads, factory.is_host_addressable()))?;
    let RankDevice { device, .. } =
        RankHost::Alone.make_planned_device(threads, plans.each_ref(), &*factory)?;
    Ok(device)
}

/// Chats, of which those tokens are predicted that the run trains.
fn chats(args: &EvalArgs, of_run: &DataConfig, tokenizer: Tokenizer) -> Result<Texts> {
    // The tokenizer has the template of the run.
    let data = DataConfig { template: args.template.clone(), ..of_run.clone() };
    let (encoder, _) = chats::encoder(&data, tokenizer)?;
    let files = ChatFiles::read(&token_paths(&args.data)?, None)?;
    let examples = encoder.examples(&files, usize::MAX)?;
    Ok(examples.into_iter().map(|example| (example.ids, example.trained)).collect())
}

/// Windows of text, each with the token behind it.
fn windows(args: &EvalArgs, data: &DataConfig, tokenizer: &Tokenizer, seq: usize) -> Result<Texts> {
    let spec = CorpusSpec {
        paths: args.data.clone(),
        extensions: data.extensions.clone(),
        plain: data.plain.clone(),
        text_key: Some(data.text_key.clone()),
        max_skipped: data.max_skipped,
    };
    let corpus = Corpus::open(&spec)?;
    let tokenizer = tokenizer.clone().for_corpus(&corpus);
    let tokens = tokenize_to_memory(&corpus, &tokenizer, machine::cores(), &mut |_| {})?;
    let mut texts = Vec::new();
    for start in (0..tokens.len().saturating_sub(1)).step_by(seq) {
        let mut ids = vec![0; (seq + 1).min(tokens.len() - start)];
        tokens.read(start, &mut ids)?;
        let predicted = vec![true; ids.len()];
        texts.push((ids, predicted));
    }
    Ok(texts)
}
