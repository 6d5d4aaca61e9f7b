//! `phalanx eval`: the loss of a trained model on data that it is given.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use phalanx_data::{ChatFiles, Corpus, CorpusSpec, Tokenizer, token_paths, tokenize_to_memory};
use phalanx_train::chats;
use phalanx_train::config::DataConfig;
use serde_json::json;

use super::sample::{NO_TOKENIZER, generator, stored_config};
use crate::arguments::sample_args::EvalArgs;
use crate::folders::continuation;
use crate::folders::run_folder::RunFolder;
use crate::host::environment::Environment;
use crate::host::{machine, output};
use phalanx_drawing::report;

/// Time between lines about progress.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Ids, and which of them are predicted.
type Texts = Vec<(Vec<u32>, Vec<bool>)>;

/// Prints the mean loss over the predicted tokens of the data.
///
/// # Errors
/// A folder without a checkpoint or tokenizer, data that cannot be read or has no token to predict.
pub fn eval(args: &EvalArgs, environment: Environment) -> Result<()> {
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.step)?;
    let tokenizer = folder.tokenizer_of(&checkpoint)?.context(NO_TOKENIZER)?;
    let config = stored_config(&folder)?.unwrap_or_default();
    let seq = args.seq.unwrap_or(config.model.seq);
    let has_chats = config.data.chat.is_some() || config.data.pairs.is_some();
    let (texts, what) = match has_chats || args.template.is_some() {
        true => (chats(args, &config.data, tokenizer.clone())?, "chat"),
        false => (windows(args, &config.data, &tokenizer, seq)?, "window"),
    };
    let (model, generator, compute) =
        generator(&folder, &checkpoint, &tokenizer, args.dtype.as_deref(), environment)?;
    let longest = model.longest().unwrap_or(seq).min(seq);
    let (mut sum, mut targets) = (0.0, 0);
    let mut line_due = Instant::now() + LINE_EVERY;
    for (number, (ids, trained)) in texts.iter().enumerate() {
        if Instant::now() >= line_due {
            line_due = Instant::now() + LINE_EVERY;
            let so_far = if targets > 0 {
                format!(", loss {:.4} so far", sum / targets as f64)
            } else {
                String::new()
            };
            output::note(&format!("{number} of {}{so_far}", report::plural(texts.len(), what)));
        }
        continuation::check_prompt(ids, model.vocab(), &tokenizer)?;
        // The last token of a window is predicted and predicts none.
        let kept = ids.len().min(if what == "window" { longest + 1 } else { longest });
        let (of_text, count) = generator.losses(&ids[..kept], &trained[..kept]);
        (sum, targets) = (sum + of_text, targets + count);
    }
    if targets == 0 {
        bail!("--data has no token to predict within {longest} tokens");
    }
    let loss = sum / targets as f64;
    let step = checkpoint.step();
    if args.json {
        let bits = loss / std::f64::consts::LN_2;
        return output::print_json(&json!({
            "step": step, "dtype": compute.name(), "seq": longest, "texts": texts.len(), "targets": targets, "loss": loss,
            "perplexity": loss.exp(), "bits_per_token": bits,
        }));
    }
    Ok(output::print_line(&format!(
        "step {step}: loss {loss:.4}, perplexity {:.3}, the mean over {targets} targets in {}",
        loss.exp(),
        report::plural(texts.len(), what)
    ))?)
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
