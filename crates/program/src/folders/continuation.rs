//! Streams generated text: tokens are shown as soon as they form whole characters.

use anyhow::{Result, bail};
use phalanx_data::Tokenizer;
use phalanx_train::sample::{Growing, Sampling};

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

/// Why sampling ends before its last token.
enum Ended {
    /// The model has ended its text.
    Whole,
    /// The text could not be shown.
    Failed(anyhow::Error),
}

/// Appends at most `count` tokens to `tokens` and passes their text to `show`, piece by piece. The tokens end before the first of `stops`, the
/// ids of each in their order, which is not shown.
///
/// # Errors
/// The first error of `show`, which ends the sampling.
pub fn stream(
    growing: &mut Growing,
    tokenizer: &Tokenizer,
    tokens: &mut Vec<u32>,
    (count, stops): (usize, &[Vec<u32>]),
    how: Sampling,
    show: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    let mut held: Vec<u32> = Vec::new();
    let ended = growing.extend(tokens, count, how, |token| -> Result<(), Ended> {
        held.push(token);
        if let Some(stop) = stops.iter().find(|stop| held.ends_with(stop)) {
            held.truncate(held.len() - stop.len());
            return Err(Ended::Whole);
        }
        // What may be the beginning of a stop.
        let begun = |stop: &Vec<u32>| (1..stop.len()).rev().find(|length| held.ends_with(&stop[..*length]));
        let kept = stops.iter().filter_map(begun).max().unwrap_or(0);
        let text = tokenizer.decode(&held[..held.len() - kept]);
        // An incomplete character is decoded as the replacement character.
        if !text.ends_with('\u{fffd}') || held.len() - kept >= HELD {
            show(&text).map_err(Ended::Failed)?;
            held.drain(..held.len() - kept);
        }
        Ok(())
    });
    if let Err(Ended::Failed(error)) = ended {
        return Err(error);
    }
    if held.is_empty() { Ok(()) } else { show(&tokenizer.decode(&held)) }
}
