//! Streams generated text: tokens are shown as soon as they form whole characters.

use anyhow::Result;
use phalanx_data::Tokenizer;
use phalanx_train::sample::{Generator, Sampling};

/// Maximum number of tokens that are held back; no character spans more.
const HELD: usize = 8;

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
