//! `phalanx chat`: answers questions, a line each, with a trained model.

use anyhow::{Context, Result};
use phalanx_train::chats;
use phalanx_train::config::DataConfig;

use super::sample::{NO_TOKENIZER, generator, sampling, stored_config};
use crate::arguments::sample_args::ChatArgs;
use crate::folders::continuation;
use crate::folders::run_folder::RunFolder;
use crate::host::environment::Environment;
use crate::host::output;

/// Answers each line of standard input, until it ends.
///
/// # Errors
/// A folder without a checkpoint, a tokenizer or a chat template; a question that the template or the tokenizer refuses.
pub fn chat(args: &ChatArgs, environment: Environment) -> Result<()> {
    let how = sampling(&args.sampling)?;
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.sampling.step)?;
    let tokenizer = folder.tokenizer_of(&checkpoint)?.context(NO_TOKENIZER)?;
    let data = DataConfig {
        template: args.template.clone(),
        date: stored_config(&folder)?.and_then(|config| config.data.date),
        ..DataConfig::default()
    };
    let (encoder, tokenizer) = chats::encoder(&data, tokenizer)?;
    let stops = encoder.stops()?;
    let (model, generator, _) =
        generator(&folder, &checkpoint, &tokenizer, args.sampling.dtype.as_deref(), environment)?;
    let system = || args.system.iter().map(|text| ("system", text.clone())).collect::<Vec<_>>();
    let mut turns = system();
    encoder.prompt(&[&turns[..], &[("user", "?".to_string())]].concat())?;
    // What was said before stays in its cache, as far as the template writes it again.
    let mut growing = generator.growing(args.tokens, how.shift);
    for line in std::io::stdin().lines() {
        let line = line.context("standard input")?;
        if line.trim().is_empty() {
            turns = system();
            continue;
        }
        turns.push(("user", line));
        let mut tokens = encoder.prompt(&turns)?;
        continuation::check_prompt(&tokens, model.vocab(), &tokenizer)?;
        let mut answer = String::new();
        let mut show = |piece: &str| {
            answer.push_str(piece);
            Ok(output::print(piece)?)
        };
        continuation::stream(&mut growing, &tokenizer, &mut tokens, (args.tokens, &stops), how, &mut show)?;
        output::print_line("")?;
        turns.push(("assistant", answer));
    }
    Ok(())
}
