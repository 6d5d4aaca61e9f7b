//! Which tokens are sample number `k`: a pure function of seed, order and position.
//!
//! A position counts the samples of a whole run, over all ranks, so the state of a sampler is one
//! number (the samples consumed), and who reads which position is the caller's affair. A sample is
//! `seq` inputs and the same `seq` tokens shifted by one as targets, so it covers `seq + 1` tokens and
//! shares the last with its neighbour.
//!
//! Sequential order is for comparisons: position `p` is window `p % samples`. Shuffled order visits
//! each window once an epoch, in a keyed permutation, and shifts all windows of an epoch by a keyed
//! offset below `seq`, so that the places where the text is cut differ from epoch to epoch.

use serde::{Deserialize, Serialize};

use crate::permutation::{Permutation, mix};
use crate::{DataError, Result, Tokens};

/// The order of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampleOrder {
    /// In the order of the text; at its end, begins again.
    Sequential,
    /// Each window once an epoch, in an order that differs from epoch to epoch.
    Shuffled,
}

/// The samples of the training part.
#[derive(Clone, Debug)]
pub struct Sampler {
    tokens: Tokens,
    seq: usize,
    order: SampleOrder,
    seed: u64,
    /// Samples of an epoch.
    samples: u64,
    /// Offsets of an epoch are `0..offsets`.
    offsets: u64,
}

impl Sampler {
    /// Samples of `seq` tokens from `tokens`. `seed` matters in shuffled order only.
    ///
    /// # Errors
    /// [`DataError::TooShort`] with fewer than `seq + 1` tokens.
    pub fn new(tokens: Tokens, seq: usize, order: SampleOrder, seed: u64) -> Result<Sampler> {
        windows(&tokens, seq)?;
        let samples = Sampler::samples_of(tokens.len(), seq, order);
        let offsets = match order {
            SampleOrder::Sequential => 1,
            SampleOrder::Shuffled => seq.min(tokens.len() - samples * seq),
        };
        Ok(Sampler { tokens, seq, order, seed, samples: samples as u64, offsets: offsets as u64 })
    }

    /// All tokens of the samples.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// The samples of an epoch of `count` tokens, more than `seq`.
    fn samples_of(count: usize, seq: usize, order: SampleOrder) -> usize {
        match order {
            SampleOrder::Sequential => (count - 1) / seq,
            // As many windows as fit with every offset below seq; a text that is too short for that has one window and
            // fewer offsets.
            SampleOrder::Shuffled => ((count - seq) / seq).max(1),
        }
    }

    /// The number of samples after which the order begins anew.
    pub fn samples_per_epoch(&self) -> u64 {
        self.samples
    }

    /// Inputs, and targets, of a sample.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// The epoch, from 0, to which `position` belongs.
    pub fn epoch(&self, position: u64) -> u64 {
        position / self.samples
    }

    /// Writes the sample at `position`: inputs `[seq]`, and as targets `[seq]` the token after each.
    ///
    /// # Errors
    /// Those of [`Tokens::read`].
    pub fn fill(&self, position: u64, inputs: &mut [u32], targets: &mut [u32]) -> Result<()> {
        fill_window(&self.tokens, self.start(position), self.seq, inputs, targets)
    }

    /// The first token of the sample at `position`.
    fn start(&self, position: u64) -> usize {
        let (epoch, index) = (position / self.samples, position % self.samples);
        let (window, offset) = match self.order {
            SampleOrder::Sequential => (index, 0),
            SampleOrder::Shuffled => {
                let key = mix(mix(self.seed) ^ epoch);
                (Permutation::new(self.samples, key).at(index), mix(!key) % self.offsets)
            }
        };
        window as usize * self.seq + offset as usize
    }
}

/// The windows on which the validation loss is measured: always the same ones, spread evenly.
#[derive(Clone, Debug)]
pub struct EvaluationWindows {
    tokens: Tokens,
    seq: usize,
    /// Number of windows that the tokens have.
    all: usize,
    chosen: usize,
}

impl EvaluationWindows {
    /// At most `limit` windows of `seq` tokens, or all there are.
    ///
    /// # Errors
    /// [`DataError::TooShort`] with fewer than `seq + 1` tokens.
    pub fn new(tokens: Tokens, seq: usize, limit: usize) -> Result<EvaluationWindows> {
        let all = windows(&tokens, seq)?;
        Ok(EvaluationWindows { tokens, seq, all, chosen: all.min(limit) })
    }

    /// The number of windows.
    pub fn len(&self) -> usize {
        self.chosen
    }

    /// Tokens of a window.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Returns whether there is no window, because none was asked for.
    pub fn is_empty(&self) -> bool {
        self.chosen == 0
    }

    /// Writes window `index` (below [`EvaluationWindows::len`]): inputs `[seq]`, targets `[seq]`.
    ///
    /// # Errors
    /// Those of [`Tokens::read`].
    pub fn fill(&self, index: usize, inputs: &mut [u32], targets: &mut [u32]) -> Result<()> {
        assert!(index < self.chosen, "window {index} of {}", self.chosen);
        let window = (index as u128 * self.all as u128 / self.chosen as u128) as usize;
        fill_window(&self.tokens, window * self.seq, self.seq, inputs, targets)
    }
}

/// The whole windows that `tokens` have, at least one.
fn windows(tokens: &Tokens, seq: usize) -> Result<usize> {
    assert!(seq > 0, "a sequence has at least one token");
    if tokens.len() <= seq {
        let (origin, given) = (tokens.origin().to_string(), tokens.len());
        return Err(DataError::TooShort { origin, given, needed: seq + 1 });
    }
    Ok((tokens.len() - 1) / seq)
}

/// Inputs start at token `start`, targets at the next one.
fn fill_window(
    tokens: &Tokens,
    start: usize,
    seq: usize,
    inputs: &mut [u32],
    targets: &mut [u32],
) -> Result<()> {
    assert_eq!((inputs.len(), targets.len()), (seq, seq), "a sample of sequence {seq}");
    tokens.read(start, inputs)?;
    targets[..seq - 1].copy_from_slice(&inputs[1..]);
    tokens.read(start + seq, &mut targets[seq - 1..])
}
