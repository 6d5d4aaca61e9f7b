//! `phalanx sample`: continues a text and shows it as it is generated.

use anyhow::{Context, Result, bail};
use phalanx_models::Objective;
use phalanx_train::sample::{Generator, Sampling};
use serde_json::json;

use crate::args::SampleArgs;
use crate::environment::Environment;
use crate::run_folder::{RunFolder, model_of};
use crate::{continuation, machine, output};

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

/// Continues the prompt.
///
/// # Errors
/// A folder without a checkpoint or tokenizer, a prompt that the tokenizer cannot encode.
pub fn sample(args: &SampleArgs, environment: Environment) -> Result<()> {
    if args.top_p == 0.0 {
        bail!("--top-p 0: expected more than 0 and at most 1 (1 for all tokens)");
    }
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.step)?;
    let tokenizer = folder
        .tokenizer_of(&checkpoint)?
        .context("this run has no tokenizer: its tokens came from a file that does not hold one")?;
    let [begin, _] = tokenizer.framing();
    let mut tokens = begin.to_vec();
    tokens.extend(tokenizer.encode(&args.prompt).context("--prompt")?);
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
    let device = environment.unplanned_device(machine::cores())?;
    let generator = Generator::load(&*model, &checkpoint, &tokenizer, device)?;
    continuation::check_prompt(&tokens, model.vocab(), &tokenizer)?;
    let how = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        shift: args.shift,
        seed: args.seed,
    };
    let given = tokens.len();
    let hint = model.longest().and_then(|longest| slow_beyond(longest, given + args.tokens, args.shift));
    hint.iter().for_each(|hint| output::note(hint));
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
