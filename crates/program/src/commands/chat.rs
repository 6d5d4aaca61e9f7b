//! `phalanx chat`: answers questions, a line each, with a trained model.

use anyhow::{Context, Result};
use phalanx_train::chats;
use phalanx_train::config::DataConfig;
use phalanx_train::run_files::CONFIG_FILE;

use super::sample::{NO_TOKENIZER, generator, sampling};
use crate::environment::Environment;
use crate::run_folder::RunFolder;
use crate::sample_args::ChatArgs;
use crate::user_config::UserConfig;
use crate::{continuation, output};

/// Answers each line of standard input, until it ends.
///
/// # Errors
/// A folder without a checkpoint, a tokenizer or a chat template; a question that the template or the tokenizer refuses.
pub fn chat(args: &ChatArgs, environment: Environment) -> Result<()> {
    let how = sampling(&args.sampling)?;
    let folder = RunFolder::at(&args.run);
    let checkpoint = folder.checkpoint(args.sampling.step)?;
    let tokenizer = folder.tokenizer_of(&checkpoint)?.context(NO_TOKENIZER)?;
    let data = DataConfig { template: args.template.clone(), date: date(&folder)?, ..DataConfig::default() };
    let (encoder, tokenizer) = chats::encoder(&data, tokenizer)?;
    let stops = encoder.stops()?;
    let (model, generator, _) = generator(&folder, &checkpoint, &tokenizer, &args.sampling, environment)?;
    let system = || args.system.iter().map(|text| ("system", text.clone())).collect::<Vec<_>>();
    let mut turns = system();
    encoder.prompt(&[&turns[..], &[("user", "?".to_string())]].concat())?;
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
        continuation::stream(&generator, &tokenizer, &mut tokens, (args.tokens, &stops), how, &mut show)?;
        output::print_line("")?;
        turns.push(("assistant", answer));
    }
    Ok(())
}

/// The day that the run's chats were written for.
fn date(folder: &RunFolder) -> Result<Option<String>> {
    let Some(text) = folder.text(CONFIG_FILE)? else { return Ok(None) };
    let origin = folder.file(CONFIG_FILE).display().to_string();
    let (stored, _) = UserConfig::parse_stored(text, &origin)?;
    Ok(stored.config()?.data.date)
}
