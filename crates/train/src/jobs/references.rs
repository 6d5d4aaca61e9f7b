//! The log-probabilities of answers under the reference: the model before its first step, with all that it starts from. A base with
//! fresh adapters is that base.
//!
//! A run computes them once, as evaluations, and writes them beside the tokens; a resumed run reads them there. Cost: a forward pass over
//! all answers, and 4 bytes each.

use std::path::Path;

use phalanx_collectives::CollectiveError;
use phalanx_data::DataError;
use phalanx_tensor::IGNORED;

use crate::data::source::DataSource;
use crate::engine::batch::Batch;
use crate::engine::error::RunError;
use crate::engine::spec::Spec;

/// Name of the file in a run folder.
pub const REFERENCES_FILE: &str = "references.bin";

/// The first bytes of the file; behind them a checksum of what follows and of that of the tokens, then a number of each answer.
const MARK: &[u8; 8] = b"PHXREF01";

/// Bytes of a checksum.
const SUM: usize = 32;

/// The log-probability of each answer of `source` under the model that `score` evaluates, in the order of the source. `score` receives
/// the answers of data-parallel rank `data` and returns those of all ranks; `told` hears how many are done.
///
/// # Errors
/// Those of the source and of `score`.
pub fn compute(
    spec: &Spec,
    data: usize,
    source: &dyn DataSource,
    score: &mut dyn FnMut(&Batch) -> Result<Vec<f32>, CollectiveError>,
    told: &mut dyn FnMut(usize),
) -> Result<Vec<f32>, RunError> {
    let (part, count) = (&spec.batch, source.answers());
    let rows = part.evaluation_rows();
    let mut answers = Batch::of(part, rows);
    let mut references = Vec::with_capacity(count);
    while references.len() < count {
        let first = references.len() + data * rows;
        for row in 0..rows {
            let here = row * part.seq..(row + 1) * part.seq;
            let (tokens, targets) = (&mut answers.tokens[here.clone()], &mut answers.targets[here]);
            if first + row < count {
                source.answer(first + row, tokens, targets)?;
            } else {
                tokens.fill(0);
                targets.fill(IGNORED);
            }
        }
        references.extend(score(&answers)?);
        told(references.len().min(count));
    }
    references.truncate(count);
    Ok(references)
}

fn checksum(numbers: &[u8], tokens: &str) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(numbers).update(tokens.as_bytes());
    hasher.finalize()
}

/// Writes the references of answers into a run folder; `tokens` is the checksum of the tokens.
///
/// # Errors
/// [`RunError::Write`].
pub fn write(run: &Path, references: &[f32], tokens: &str) -> Result<(), RunError> {
    let numbers: Vec<u8> = references.iter().flat_map(|number| number.to_le_bytes()).collect();
    let bytes = [&MARK[..], checksum(&numbers, tokens).as_bytes(), &numbers].concat();
    let path = run.join(REFERENCES_FILE);
    phalanx_system::files::write(&path, bytes).map_err(|cause| RunError::Write { path, cause })
}

/// Reads the references of `count` answers from a run folder.
///
/// # Errors
/// A file that is missing or damaged, or of other tokens.
pub fn read(run: &Path, count: usize, tokens: &str) -> Result<Vec<f32>, RunError> {
    let path = run.join(REFERENCES_FILE);
    let refuse = |reason: String| {
        let reason = format!(
            "{}: {reason}; it has the answers' log-probabilities by the model before the first step, which this run no longer has: put it \
             back, or start a new run",
            path.display()
        );
        RunError::Data(DataError::Source { reason })
    };
    let length = MARK.len() + SUM + 4 * count;
    let bytes = phalanx_system::files::read_bounded(&path, length as u64 + 1);
    let bytes = bytes.map_err(|error| refuse(error.to_string()))?;
    let (head, numbers) = bytes.split_at(bytes.len().min(MARK.len() + SUM));
    let is_whole = bytes.len() == length
        && head[..MARK.len()] == MARK[..]
        && head[MARK.len()..] == checksum(numbers, tokens).as_bytes()[..];
    if !is_whole {
        return Err(refuse(format!("it is damaged, or not of the {count} answers of this run")));
    }
    Ok(numbers.as_chunks().0.iter().map(|number| f32::from_le_bytes(*number)).collect())
}
