//! `phalanx sample`: continues a text and shows it as it is generated.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use phalanx_checkpoint::Checkpoint;
use phalanx_data::Tokenizer;
use phalanx_models::{Model, Objective};
use phalanx_train::RunConfig;
use phalanx_train::config::Float;
use phalanx_train::run_files::CONFIG_FILE;
use phalanx_train::sample::{Generator, Sampling};
use serde_json::{Value, json};

use crate::arguments::sample_args::{SampleArgs, SamplingArgs};
use crate::configuration::user_config::UserConfig;
use crate::folders::continuation;
use crate::folders::run_folder::{RunFolder, model_of};
use crate::host::environment::Environment;
use crate::host::{machine, output};

/// Tokens beyond the model's positions from which on [`slow_beyond`] gives its advice.
const MANY: usize = 64;

/// Advice for a text of `length` tokens that is much longer than the model's positions, where every token moves the
/// window.
fn slow_beyond(positions: usize, length: usize, shift: usize) -> Option<String> {
    let quarter = (positions / 4).max(2);
    (shift == 1 && length > positions + MANY).then(|| {
        format!(
            "note: beyond {positions} tokens, which is what the model sees at once, each token computes the whole window \
             again. --shift {quarter} drops {quarter} tokens at a time and is several times as fast; the text is another \
             one from there on"
        )
    })
}

/// Why no text can be read or made.
pub const NO_TOKENIZER: &str =
    "this run has no tokenizer: its tokens came from a file that does not hold one";

/// Largest file of prompts.
const PROMPTS_BYTES: u64 = 64 << 20;

/// The prompts, with the option that gives each.
///
/// # Errors
/// A file that cannot be read, or has no prompt.
fn prompts(args: &SampleArgs) -> Result<Vec<(String, String)>> {
    let Some(path) = &args.prompts else {
        return Ok(vec![("--prompt".to_string(), args.prompt.clone().unwrap_or_default())]);
    };
    let shown = path.display();
    let text = phalanx_system::files::read_text(path, PROMPTS_BYTES)
        .with_context(|| format!("--prompts {shown}"))?;
    let is_json = path.extension().is_some_and(|extension| extension == "jsonl");
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let prompts = lines.map(|(number, line)| {
        let of = format!("{shown}:{}", number + 1);
        if !is_json {
            return Ok((of, line.to_string()));
        }
        let value: Value = serde_json::from_str(line).with_context(|| format!("{of} is not JSON"))?;
        let prompt = value.as_str().or_else(|| value["prompt"].as_str()).map(str::to_string);
        let prompt = prompt.with_context(|| {
            format!("{of}: expected a text, as \"once\", or an object with one, as {{\"prompt\": \"once\"}}")
        })?;
        Ok((of, prompt))
    });
    let prompts: Vec<(String, String)> = prompts.collect::<Result<_>>()?;
    if prompts.is_empty() {
        bail!("--prompts {shown}: expected a prompt in each line, and there is none");
    }
    Ok(prompts)
}

/// The tokens of a prompt, with those that begin a text.
fn encode(tokenizer: &Tokenizer, (of, prompt): &(String, String)) -> Result<Vec<u32>> {
    let [begin, _] = tokenizer.framing();
    let mut tokens = begin.to_vec();
    tokens.extend(tokenizer.encode(prompt).with_context(|| of.clone())?);
    if tokens.is_empty() {
        match tokenizer.separator() {
            Some(separator) => tokens.push(separator),
            None => {
                bail!("{of} is empty, and this tokenizer has no token that begins a text: give a character")
            }
        }
    }
    Ok(tokens)
}

/// Continues each prompt, as if it were the only one.
///
/// # Errors
/// A folder without a checkpoint or tokenizer, a prompt that the tokenizer cannot encode.
pub fn sample(args: &SampleArgs, environment: Environment) -> Result<()> {
    let (how, shift) = (sampling(&args.sampling)?, args.sampling.shift);
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.sampling.step)?;
    let tokenizer = folder.tokenizer_of(&checkpoint)?.context(NO_TOKENIZER)?;
    let prompts = prompts(args)?;
    // All of them, before the first is continued.
    let encoded: Vec<Vec<u32>> =
        prompts.iter().map(|prompt| encode(&tokenizer, prompt)).collect::<Result<_>>()?;
    let (model, generator, compute) =
        generator(&folder, &checkpoint, &tokenizer, args.sampling.dtype.as_deref(), environment)?;
    encoded.iter().try_for_each(|tokens| continuation::check_prompt(tokens, model.vocab(), &tokenizer))?;
    let longest_given = encoded.iter().map(Vec::len).max().unwrap_or(0);
    let hint = model.longest().and_then(|longest| slow_beyond(longest, longest_given + args.tokens, shift));
    hint.iter().for_each(|hint| output::note(hint));
    for (number, ((_, prompt), mut tokens)) in prompts.iter().zip(encoded).enumerate() {
        let (given, mut text) = (tokens.len(), prompt.clone());
        if !args.json {
            let between = if number > 0 { "\n" } else { "" };
            output::print(&format!("{between}{prompt}"))?;
        }
        let mut show = |piece: &str| {
            if args.json {
                text.push_str(piece);
                Ok(())
            } else {
                Ok(output::print(piece)?)
            }
        };
        let mut growing = generator.growing(tokens.len() + args.tokens, shift);
        continuation::stream(&mut growing, &tokenizer, &mut tokens, (args.tokens, &[]), how, &mut show)?;
        let (step, made) = (checkpoint.step(), &tokens[given..]);
        let found =
            json!({ "step": step, "dtype": compute.name(), "prompt": prompt, "text": text, "tokens": made });
        match (args.json, &args.prompts) {
            (false, _) => output::print_line("")?,
            (true, None) => output::print_json(&found)?,
            (true, Some(_)) => output::print_line(&found.to_string())?,
        }
    }
    Ok(())
}

/// The rule by which tokens are drawn.
///
/// # Errors
/// A share of the probability that leaves no token.
pub fn sampling(args: &SamplingArgs) -> Result<Sampling> {
    let &SamplingArgs { temperature, top_k, top_p, shift, seed, .. } = args;
    if top_p == 0.0 {
        bail!("--top-p 0: expected more than 0 and at most 1 (1 for all tokens)");
    }
    Ok(Sampling { temperature, top_k, top_p, shift, seed })
}

/// The model of a checkpoint, ready to continue text on the processor, and the type that it computes in.
///
/// # Errors
/// A model that does not continue text, a damaged checkpoint.
pub fn generator(
    folder: &RunFolder,
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    dtype: Option<&str>,
    environment: Environment,
) -> Result<(Arc<dyn Model>, Generator, Float)> {
    let model = causal_model(folder, checkpoint)?;
    let device = environment.unplanned_device(machine::cores())?;
    let compute = compute_type(dtype, folder)?;
    let generator = Generator::load(&*model, checkpoint, tokenizer, device, compute.into())?;
    Ok((model, generator, compute))
}

/// The model of a checkpoint.
///
/// # Errors
/// A model that does not continue text.
pub fn causal_model(folder: &RunFolder, checkpoint: &Checkpoint) -> Result<Arc<dyn Model>> {
    let model = model_of(checkpoint)?;
    let other = match model.objective() {
        Objective::Causal => return Ok(model),
        Objective::Masked => "a masked model (BERT), which fills gaps",
        Objective::Classes => "a model with classes (BERT), which chooses one of them",
    };
    bail!(
        "{} holds {other} and does not continue text: sample from a GPT-2, or export this one",
        folder.path().display()
    )
}

/// The type to compute in: as asked, else that of the run, else f32 for a folder without a configuration.
pub fn compute_type(dtype: Option<&str>, folder: &RunFolder) -> Result<Float> {
    Ok(match dtype {
        Some("f32") => Float::F32,
        Some("bf16") => Float::Bf16,
        Some(_) => Float::F16,
        None => {
            let stored = stored_config(folder).context("the type to compute in; --dtype gives another")?;
            stored.map_or(Float::F32, |config| config.precision.compute)
        }
    })
}

/// The configuration of a run; None for a folder without one.
///
/// # Errors
/// A damaged one.
pub fn stored_config(folder: &RunFolder) -> Result<Option<RunConfig>> {
    let Some(text) = folder.text(CONFIG_FILE)? else { return Ok(None) };
    let origin = folder.file(CONFIG_FILE).display().to_string();
    UserConfig::parse_stored(text, &origin)?.0.config().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_texts_that_move_by_single_tokens_get_advice() {
        assert!(slow_beyond(256, 500, 1).unwrap().contains("--shift 64"));
        assert_eq!(slow_beyond(256, 500, 64), None);
        assert_eq!(slow_beyond(256, 256 + MANY, 1), None);
        assert_eq!(slow_beyond(1024, 500, 1), None);
    }
}
