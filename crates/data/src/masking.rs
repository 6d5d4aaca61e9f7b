//! Samples of a masked language model (Devlin et al., "BERT", arXiv 1810.04805, section 3.1): the model predicts some
//! tokens of a sequence, most of which are hidden from it.
//!
//! In each sample, the same number of tokens is chosen, 15 % of `seq`, so that a mean over samples is a mean over tokens.
//! 80 % of the chosen tokens become the mask token, 10 % a random token, and 10 % stay: a model that will later see no mask
//! tokens must not learn to look at them alone.
//!
//! The choice is a pure function of the seed and the number of the sample in the run. The layout of ranks and resuming do
//! not change it, and a text that returns in the next epoch is masked differently.

use crate::permutation::mix;
use crate::{EvaluationWindows, Permutation, Result, Sampler};

/// Target of a token that is not predicted: the largest u32, which is never a token id.
pub const NOT_PREDICTED: u32 = u32::MAX;

/// Denominator of the shares.
const OUT_OF: u64 = 10;
/// Share of the chosen tokens that become the mask token.
const MASKED: u64 = 8;
/// Share of the chosen tokens that become a random one.
const RANDOM: u64 = 1;

/// Seed of the validation part, the same in all runs, so that runs with different seeds are evaluated alike.
const EVALUATION_SEED: u64 = 0x6576_616c_7561_7465;

/// Decides which tokens are hidden and what replaces them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masking {
    seed: u64,
    mask_token: u32,
    vocab: usize,
}

impl Masking {
    /// Hides tokens of a vocabulary of `vocab` ids (at most 2^31: ids have a bit for their type), by `mask`
    /// ([`Tokenizer::mask`](crate::Tokenizer::mask)); without one, by the id after the last, for which the
    /// model has one more row.
    pub fn new(seed: u64, mask: Option<u32>, vocab: usize) -> Masking {
        assert!((1..=1 << 31).contains(&vocab), "a vocabulary of {vocab} ids");
        let mask_token = mask.unwrap_or(vocab as u32);
        Masking { seed, mask_token, vocab }
    }

    /// The id that replaces a hidden token.
    pub fn mask_token(&self) -> u32 {
        self.mask_token
    }

    /// Rows that the model's token table needs: the vocabulary, and one more if the mask token is not part of it.
    pub fn rows(&self) -> usize {
        self.vocab.max(self.mask_token as usize + 1)
    }

    /// Tokens of a sample of `seq` that are predicted: 15 %, rounded (half up), at least one.
    pub fn predicted(seq: usize) -> usize {
        ((3 * seq + 10) / 20).max(1)
    }

    /// Writes the sample at `position` of the run: inputs `[seq]`, some of them hidden, and as targets
    /// `[seq]` the token that was there; [`NOT_PREDICTED`] where none was chosen.
    ///
    /// # Errors
    /// Those of [`Sampler::fill`].
    pub fn sample(
        &self,
        sampler: &Sampler,
        position: u64,
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<()> {
        sampler.fill(position, inputs, targets)?;
        self.hide(self.seed, position, inputs, targets);
        Ok(())
    }

    /// Writes evaluation window `index` in the same form. The hidden tokens do not depend on the run's seed.
    ///
    /// # Errors
    /// Those of [`EvaluationWindows::fill`].
    pub fn window(
        &self,
        windows: &EvaluationWindows,
        index: usize,
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<()> {
        windows.fill(index, inputs, targets)?;
        self.hide(EVALUATION_SEED, index as u64, inputs, targets);
        Ok(())
    }

    /// Sample `number`: hides tokens of `inputs`, overwrites `targets`.
    fn hide(&self, seed: u64, number: u64, inputs: &mut [u32], targets: &mut [u32]) {
        let key = mix(mix(!seed) ^ number);
        let choice = Permutation::new(inputs.len() as u64, key);
        targets.fill(NOT_PREDICTED);
        for i in 0..Self::predicted(inputs.len()) as u64 {
            let place = choice.at(i) as usize;
            targets[place] = inputs[place];
            // Two random numbers for each chosen position, with a different key than the choice of positions.
            let [kind, token] = [2 * i, 2 * i + 1].map(|counter| mix(mix(!key).wrapping_add(counter)));
            match below(OUT_OF, kind) {
                share if share < MASKED => inputs[place] = self.mask_token,
                share if share < MASKED + RANDOM => inputs[place] = below(self.vocab as u64, token) as u32,
                _ => {}
            }
        }
    }
}

/// A number below `n` from 64 random bits.
fn below(n: u64, bits: u64) -> u64 {
    ((u128::from(n) * u128::from(bits)) >> 64) as u64
}
