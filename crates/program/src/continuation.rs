//! Streams generated text: tokens are shown as soon as they form whole characters.

use anyhow::{Result, bail};
use phalanx_data::Tokenizer;
use phalanx_train::sample::{Generator, Sampling};

/// Maximum number of tokens that are held back; no character spans more.
const HELD: usize = 8;

/// Refuses a prompt with an id for which the model has no row.
///
/// # Errors
/// The first such id, and how the tokenizer spells it.
pub fn check_prompt(tokens: &[u32], rows: usize, tokenizer: &Tokenizer) -> Result<()> {
    let Some(id) = tokens.iter().find(|id| **id as usize >= rows) else { return Ok(()) };
    bail!(
        "the prompt has {:?}, whose id is {id}, and the model has {rows} rows (0 to {}): the tokenizer ({}) has more ids \
         than the model; leave this out of the prompt",
        tokenizer.token(*id).unwrap_or_default(),
        rows.saturating_sub(1),
        tokenizer.describe()
    )
}

/// Appends `count` tokens to `tokens` and passes their text to `show`, piece by piece.
///
/// # Errors
/// The first error of `show`, which ends the sampling.
pub fn stream(
    generator: &Generator,
    tokenizer: &Tokenizer,
    tokens: &mut Vec<u32>,
    count: usize,
    how: Sampling,
    show: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    let mut held = Vec::new();
    generator.extend(tokens, count, how, |token| -> Result<()> {
        held.push(token);
        let text = tokenizer.decode(&held);
        // An incomplete character is decoded as the replacement character.
        if !text.ends_with('\u{fffd}') || held.len() >= HELD {
            show(&text)?;
            held.clear();
        }
        Ok(())
    })?;
    if held.is_empty() { Ok(()) } else { show(&tokenizer.decode(&held)) }
}
