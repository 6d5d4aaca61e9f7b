//! `phalanx sample`: continues a text and shows it as it is generated.

use anyhow::{Context, Result, bail};
use phalanx_models::Objective;
use phalanx_train::sample::{Generator, Sampling};
use serde_json::json;

use crate::args::SampleArgs;
use crate::environment::Environment;
use crate::run_folder::{RunFolder, model_of};
use crate::{continuation, machine, output};

/// Continues the prompt.
///
/// # Errors
/// A folder without a checkpoint or tokenizer, a prompt that the tokenizer cannot encode.
pub fn sample(args: &SampleArgs, environment: Environment) -> Result<()> {
    if !(args.temperature >= 0.0 && args.temperature.is_finite()) {
        bail!("--temperature {}: expected 0 or more", args.temperature);
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        bail!("--top-p {}: expected more than 0 and at most 1 (1 for all tokens)", args.top_p);
    }
    if args.shift == 0 {
        bail!("--shift 0: expected 1 or more");
    }
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.step)?;
    let tokenizer = folder
        .tokenizer_of(&checkpoint)?
        .context("this run has no tokenizer: its tokens came from a file that does not hold one")?;
    let mut tokens = tokenizer.encode(&args.prompt).context("--prompt")?;
    if tokens.is_empty() {
        match tokenizer.separator() {
            Some(separator) => tokens.push(separator),
            None => bail!(
                "--prompt is empty, and this tokenizer has no token that begins a text: give a character"
            ),
        }
    }
    let model = model_of(&checkpoint)?;
    if model.objective() == Objective::Masked {
        bail!(
            "{} holds a masked model (BERT), which fills gaps and does not continue text: sample from a GPT-2, or \
             export this one",
            args.run.display()
        );
    }
    let generator = Generator::load(&*model, &checkpoint, environment.unplanned_device(machine::cores())?)?;
    let how = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        shift: args.shift,
        seed: args.seed,
    };
    let given = tokens.len();
    let mut text = args.prompt.clone();
    let mut show = |piece: &str| {
        if args.json {
            text.push_str(piece);
            Ok(())
        } else {
            Ok(output::print(piece)?)
        }
    };
    if !args.json {
        show(&args.prompt)?;
    }
    continuation::stream(&generator, &tokenizer, &mut tokens, args.tokens, how, &mut show)?;
    if args.json {
        let made = &tokens[given..];
        return output::print_json(
            &json!({ "step": checkpoint.step(), "prompt": args.prompt, "text": text, "tokens": made }),
        );
    }
    Ok(output::print_line("")?)
}
