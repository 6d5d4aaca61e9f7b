//! Checks that the training part and the validation part have at least one sequence each, and finds values that give them one.
//!
//! Every value that an error names was tried: it gives both parts at least one sequence, and the configuration is valid with it.

use phalanx_data::{DataError, RowKind, Tokens};

use crate::config::RunConfig;

/// Largest `data.validation`.
const MAX_FRACTION: f64 = 0.9;

/// Digits of a proposed fraction.
const DIGITS: i32 = 4;

/// Refuses parts of which one has fewer tokens than a sequence of `config.model.seq` needs. `tokens` is the number that
/// `origin` has; `evaluated` the number in files of their own for evaluation, if there are any.
///
/// # Errors
/// [`DataError::PartTooShort`], with the largest `model.seq` and the fractions that work.
pub fn check(
    config: &RunConfig,
    origin: &str,
    tokens: usize,
    evaluated: Option<usize>,
) -> Result<(), DataError> {
    let (seq, needed) = (config.model.seq, config.model.seq + 1);
    let fraction = config.data.validation;
    let (train, held_out) = parts(config, tokens, evaluated);
    let is_training = train < needed;
    if !is_training && held_out.is_none_or(|held_out| held_out >= needed) {
        return Ok(());
    }
    let short = if is_training { train } else { held_out.unwrap_or(0) };
    let part = match (evaluated, held_out, is_training) {
        (Some(_), _, false) => "the validation data (data.validation_tokens)".to_string(),
        (Some(_), ..) | (_, None, _) => format!("the training data ({origin})"),
        (None, Some(held), true) => {
            format!(
                "the training part of {origin} (data.validation = {fraction} holds out {held} of {tokens} tokens)"
            )
        }
        (None, Some(_), false) => {
            format!("the validation part of {origin} (data.validation = {fraction} of {tokens} tokens)")
        }
    };
    let what = format!(
        "{part} has {short} tokens, and a sequence needs {needed}: model.seq = {seq} and the token after it"
    );
    let mut works = Vec::new();
    if evaluated.is_none() && held_out.is_some() {
        works.extend(fractions(tokens, needed, is_training));
        works.extend((tokens >= needed).then(|| "data.validation = 0 (no evaluation)".to_string()));
    }
    let shortest = held_out.map_or(train, |held_out| held_out.min(train));
    works.extend(largest_seq(config, shortest).map(|seq| format!("model.seq = {seq} or less")));
    let data = if config.data.tokens.is_some() { "tokens" } else { "text" };
    let advice = match works.is_empty() {
        true => format!("give more {data}"),
        false => format!("what works: {}; or more {data}", works.join(", or ")),
    };
    Err(DataError::PartTooShort { what, advice })
}

/// Tokens of the training part and of the validation part, if there is one.
pub fn parts(config: &RunConfig, tokens: usize, evaluated: Option<usize>) -> (usize, Option<usize>) {
    let train = match config.data.pairs {
        Some(_) => tokens - RowKind::Pairs.held_out(tokens, config.data.validation),
        None => Tokens::training_part(tokens, config.data.validation),
    };
    match evaluated {
        Some(evaluated) => (tokens, Some(evaluated)),
        None => (train, (config.data.validation > 0.0).then_some(tokens - train)),
    }
}

/// The fractions that give both parts `needed` tokens: the largest, or the smallest, with the other one beside it.
fn fractions(tokens: usize, needed: usize, from_above: bool) -> Option<String> {
    // The training part is rounded down, and the validation part up.
    let smallest = rounded(tokens, needed, (needed - 1) as f64 / tokens as f64, 1.0)?;
    let largest = rounded(tokens, needed, (1.0 - needed as f64 / tokens as f64).min(MAX_FRACTION), -1.0)?;
    Some(match from_above {
        _ if smallest >= largest => format!("data.validation = {smallest}"),
        true => format!("data.validation = {largest} or less (at least {smallest})"),
        false => format!("data.validation = {smallest} or more (at most {largest})"),
    })
}

/// The fraction of few digits next to `exact`, above it or below it, that gives both parts `needed` tokens.
fn rounded(tokens: usize, needed: usize, exact: f64, direction: f64) -> Option<f64> {
    let first = (DIGITS - exact.log10().ceil() as i32).clamp(1, 15);
    let candidates = (first..=(first + 8).min(17)).flat_map(|digits| {
        let unit = 10f64.powi(digits);
        let from = if direction > 0.0 { (exact * unit).ceil() } else { (exact * unit).floor() };
        (-1..2)
            .map(move |step| format!("{:.*}", digits as usize, (from + direction * f64::from(step)) / unit))
    });
    candidates.filter_map(|text| text.parse().ok()).find(|fraction: &f64| {
        let train = Tokens::training_part(tokens, *fraction);
        *fraction > 0.0 && *fraction <= MAX_FRACTION && train >= needed && tokens - train >= needed
    })
}

/// The largest sequence with which the configuration is valid and for which `tokens` suffice.
fn largest_seq(config: &RunConfig, tokens: usize) -> Option<usize> {
    /// Number of lengths tried: some settings need a multiple of the tensor ranks.
    const TRIED: usize = 1024;
    let mut config = config.clone();
    (1..tokens).rev().take(TRIED).find(|seq| {
        config.model.seq = *seq;
        config.check().is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(seq: usize, validation: f64) -> RunConfig {
        let mut config = RunConfig::default();
        (config.model.seq, config.data.validation) = (seq, validation);
        config
    }

    /// The number behind `key = ` in `text`.
    fn proposed(text: &str, key: &str) -> Option<f64> {
        let (_, behind) = text.split_once(&format!("{key} = "))?;
        behind.split([' ', ',', ';', ')']).next()?.parse().ok()
    }

    /// The smallest fraction and the largest sequence are what a search of all finds, up to the digits that are shown.
    #[test]
    fn what_is_proposed_works_and_nothing_nearer_does() {
        for tokens in (1..140).chain([1000, 1024, 99_999, 1_115_394, 300_000_007]) {
            for (seq, fraction) in
                [(1, 0.1), (7, 0.1), (16, 0.05), (16, 0.9), (64, 0.5), (1024, 0.0005), (33, 0.0)]
            {
                let ok =
                    |seq: usize, fraction: f64| check(&config(seq, fraction), "t.bin", tokens, None).is_ok();
                let Err(error) = check(&config(seq, fraction), "t.bin", tokens, None) else { continue };
                let DataError::PartTooShort { advice, what } = &error else { panic!("{error}") };
                assert!(what.contains("t.bin") && what.contains(&format!("model.seq = {seq}")), "{what}");
                let range = advice.replace("data.validation = 0 (no", "");
                match proposed(&range, "data.validation") {
                    Some(proposal) => {
                        assert!(ok(seq, proposal), "{tokens} tokens: {error}");
                        let is_smallest = range.contains("or more") && !ok(seq, proposal * 0.998);
                        let is_largest = range.contains("or less (at") && !ok(seq, proposal + 0.002);
                        let one = !range.contains("(at ");
                        assert!(
                            is_smallest || is_largest || proposal == MAX_FRACTION || one,
                            "{tokens}: {error}"
                        );
                    }
                    None => assert!(fraction == 0.0 || tokens < 2 * (seq + 1), "{tokens} tokens: {error}"),
                }
                match proposed(advice, "model.seq") {
                    Some(largest) => {
                        let largest = largest as usize;
                        assert!(
                            ok(largest, fraction) && !ok(largest + 1, fraction),
                            "{tokens} tokens: {error}"
                        );
                    }
                    None => assert!(!ok(1, fraction), "{tokens} tokens: {error}"),
                }
                assert_eq!(advice.contains("= 0 (no evaluation)"), fraction > 0.0 && ok(seq, 0.0), "{error}");
            }
        }
    }

    #[test]
    fn files_for_evaluation_are_measured_by_themselves() {
        let config = config(16, 0.0);
        check(&config, "t.bin", 17, Some(17)).unwrap();
        for (train, evaluated, words) in [
            (100, 16, ["(data.validation_tokens) has 16 tokens", "model.seq = 15 or less"]),
            (12, 100, ["the training data (t.bin) has 12 tokens", "model.seq = 11 or less"]),
            (100, 1, ["has 1 tokens", "; give more"]),
        ] {
            let error = check(&config, "t.bin", train, Some(evaluated)).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
            assert!(!error.contains("data.validation ="), "{error}");
        }
    }

    /// A sequence that is sharded over the ranks of tensor parallelism must be divisible by them.
    #[test]
    fn a_proposed_sequence_is_valid_with_the_other_keys() {
        let mut config = config(16, 0.0);
        (config.parallel.tensor, config.parallel.sequence_parallel, config.batch.global) = (4, true, 1);
        let error = check(&config, "t.bin", 16, None).unwrap_err().to_string();
        assert!(error.contains("model.seq = 12 or less"), "{error}");
    }
}
