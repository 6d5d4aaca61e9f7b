//! The search for the chunk size with the least waste, after Colossal-AI's Gemini
//! (`search_utils.py`), with its knobs.
//!
//! From the larger of the minimum and the largest ordinary parameter, sizes are tried at equal steps;
//! each is priced by packing the parameters in order, and the first with the least waste wins.
//! Parameters beyond mean + 3 sigma do not push the size up: they will have chunks of their own.
//! Unlike Gemini, the chunk which such a giant closes early is counted as waste.
//!
//! C candidates and P parameters cost C * P additions; C is at most [`MAX_CANDIDATES`].

use serde::{Deserialize, Serialize};

use crate::chunk_error::ChunkError;
use crate::chunk_packing::{Grain, Item, chunks};

/// Maximum number of sizes that a search tries; a wider range is searched in wider steps.
pub const MAX_CANDIDATES: u64 = 2048;

/// The minimum size and the range are at most the model divided by this, so that a small model still has several chunks
/// and communication can overlap.
pub const MIN_PARTS: u64 = 8;

/// Elements in one unit of the `_mb` knobs. Despite their names, Gemini compares them with element counts; this does
/// the same, so equal values give equal chunks.
const MEBI: f64 = 1_048_576.0;

/// Gemini's knobs.
///
/// The `_mb` knobs are in 2^20 *elements*, as Gemini treats them. Both are cut to an eighth of the
/// model (outliers aside), so the sizes tried lie between an eighth and a quarter of a small model: it
/// gets four to eight chunks unless one parameter demands more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Search {
    /// Width of the range of sizes tried, in 2^20 elements.
    pub search_range_mb: f64,
    /// Step between sizes in elements, rounded up to whole blocks on every rank; without it, the
    /// smallest such step.
    pub hidden_dim: Option<u64>,
    /// Smallest size tried, in 2^20 elements.
    pub min_chunk_size_mb: f64,
}

impl Default for Search {
    fn default() -> Self {
        Search { search_range_mb: 32.0, hidden_dim: None, min_chunk_size_mb: 32.0 }
    }
}

/// A chunk size that was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// Elements of a chunk.
    pub chunk_elements: u64,
    /// Elements of all chunks that hold no parameter.
    pub waste_elements: u64,
}

/// All candidates, smallest size first, and the chosen one: the first with the least waste.
///
/// `classes`: of parameters that share no chunk, each with its parameters in order, none of them empty, at least one in all.
/// `elements`: real elements of all parameters. Every chunk has at least `min_elements`.
///
/// # Errors
/// A knob that is negative, not a number, or a step of 0.
pub(crate) fn search(
    classes: &[Vec<Item>],
    elements: u64,
    (grain, min_elements): (Grain, u64),
    knobs: &Search,
) -> Result<(Candidate, Vec<Candidate>), ChunkError> {
    let unit = grain.unit();
    let minimum = knob_elements("min_chunk_size_mb", knobs.min_chunk_size_mb)?;
    let range = knob_elements("search_range_mb", knobs.search_range_mb)?;
    if knobs.hidden_dim == Some(0) {
        return Err(ChunkError::Knob { knob: "hidden_dim", given: 0.0, expected: "at least 1" });
    }
    let padded: Vec<u64> = classes.iter().flatten().map(|item| item.padded).collect();
    let total: u64 = padded.iter().sum();
    let limit = outlier_limit(&padded);
    let ordinary = || padded.iter().copied().filter(|p| *p as f64 <= limit);
    let part = (ordinary().sum::<u64>() / MIN_PARTS).max(1);
    let largest = ordinary().max().unwrap_or(unit);

    let range = range.min(part);
    let wanted_step = knobs.hidden_dim.unwrap_or(unit).min(total).next_multiple_of(unit);
    let step = wanted_step.max((range / (MAX_CANDIDATES - 1)).next_multiple_of(unit));
    let start = minimum.min(part).max(largest).max(min_elements).next_multiple_of(unit);

    let packed = |own: &Vec<Item>, size| chunks(own, size, grain).map(|chunk| chunk.elements).sum::<u64>();
    let try_size = |chunk_elements| Candidate {
        chunk_elements,
        waste_elements: classes.iter().map(|own| packed(own, chunk_elements)).sum::<u64>() - elements,
    };
    let tried: Vec<Candidate> = (0..=range / step).map(|i| try_size(start + i * step)).collect();
    let mut best = tried[0];
    for candidate in &tried {
        if candidate.waste_elements < best.waste_elements {
            best = *candidate;
        }
    }
    Ok((best, tried))
}

/// Mean + 3 standard deviations (of the population) of the parameter sizes.
fn outlier_limit(padded: &[u64]) -> f64 {
    let count = padded.len() as f64;
    let mean = padded.iter().map(|p| *p as f64).sum::<f64>() / count;
    let variance = padded.iter().map(|p| (*p as f64 - mean).powi(2)).sum::<f64>() / count;
    mean + 3.0 * variance.sqrt()
}

/// Converts a knob from 2^20 elements to elements; saturates at `u64::MAX`.
fn knob_elements(knob: &'static str, given: f64) -> Result<u64, ChunkError> {
    if !given.is_finite() || given < 0.0 {
        return Err(ChunkError::Knob { knob, given, expected: "a number that is not negative" });
    }
    Ok((given * MEBI).round() as u64)
}
