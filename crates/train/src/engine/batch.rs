//! The samples of a step or an evaluation on one rank, in host memory.

use std::collections::BTreeMap;

use phalanx_data::DataError;
use phalanx_layers::{Input, TARGETS, TOKENS};
use phalanx_tensor::IGNORED;

use crate::engine::spec::BatchPart;

/// The inputs of this rank's samples, in host memory, one micro-batch after another.
#[derive(Default)]
pub struct Batch {
    /// `[micro_batches, micro_batch_size, seq]`
    pub tokens: Vec<u32>,
    /// Targets, of the same shape: the tokens shifted by one.
    pub targets: Vec<u32>,
    /// The other inputs of the model, by name.
    pub others: BTreeMap<&'static str, Numbers>,
}

/// The numbers of an input in host memory.
#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    /// Ids.
    Ids(Vec<u32>),
    /// Floats.
    Floats(Vec<f32>),
}

/// The numbers of an input, of one sample.
pub enum SampleNumbers<'a> {
    /// Ids.
    Ids(&'a mut [u32]),
    /// Floats.
    Floats(&'a mut [f32]),
}

impl Numbers {
    fn len(&self) -> usize {
        match self {
            Numbers::Ids(ids) => ids.len(),
            Numbers::Floats(floats) => floats.len(),
        }
    }

    /// Sample `row` of `rows`.
    pub fn sample(&mut self, row: usize, rows: usize) -> SampleNumbers<'_> {
        let each = self.len() / rows;
        let here = row * each..(row + 1) * each;
        match self {
            Numbers::Ids(ids) => SampleNumbers::Ids(&mut ids[here]),
            Numbers::Floats(floats) => SampleNumbers::Floats(&mut floats[here]),
        }
    }
}

impl SampleNumbers<'_> {
    /// Copies the floats of a sample of `input`.
    ///
    /// # Errors
    /// When there are more or fewer than the model reads (an image of another size), or the input has ids.
    pub fn write(self, input: &str, floats: &[f32]) -> Result<(), DataError> {
        let expected = match self {
            SampleNumbers::Floats(to) if to.len() == floats.len() => {
                to.copy_from_slice(floats);
                return Ok(());
            }
            SampleNumbers::Floats(to) => format!("{} numbers", to.len()),
            SampleNumbers::Ids(to) => format!("{} ids", to.len()),
        };
        let given = floats.len();
        let reason =
            format!("the model reads {expected} of `{input}` in a sample, and this one has {given} floats");
        Err(DataError::Source { reason })
    }
}

impl Batch {
    /// A batch of `rows` sequences of `seq` tokens, all zero.
    pub fn with_rows(rows: usize, seq: usize) -> Batch {
        Batch { tokens: vec![0; rows * seq], targets: vec![0; rows * seq], others: BTreeMap::new() }
    }

    /// A batch of `rows` samples of all inputs of a run's model, all zero.
    pub fn of(part: &BatchPart, rows: usize) -> Batch {
        let mut batch = Batch::default();
        for input in &part.inputs {
            let elements = input.shape.of([rows, part.seq]).elements();
            match input.name {
                TOKENS => batch.tokens = vec![0; elements],
                TARGETS => batch.targets = vec![0; elements],
                other => drop(batch.others.insert(other, zeros(input, elements))),
            }
        }
        batch
    }

    /// Number of samples of a run's batch.
    pub fn rows(&self, part: &BatchPart) -> usize {
        let Some(first) = part.inputs.first() else { return 0 };
        let elements = match first.name {
            TOKENS => self.tokens.len(),
            TARGETS => self.targets.len(),
            other => self.others.get(other).map_or(0, Numbers::len),
        };
        elements / first.shape.of([1, part.seq]).elements().max(1)
    }

    /// Number of pairs of sequences of `seq` targets that count in the loss: those with a target in the first.
    pub fn counted_pairs(&self, seq: usize) -> usize {
        let has_target = |pair: &&[u32]| pair[..seq].iter().any(|target| *target != IGNORED);
        self.targets.chunks(2 * seq).filter(has_target).count()
    }

    /// Number of targets that count in the loss.
    pub fn counted_targets(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORED).count()
    }
}

fn zeros(input: &Input, elements: usize) -> Numbers {
    match input.bound {
        Some(_) => Numbers::Ids(vec![0; elements]),
        None => Numbers::Floats(vec![0.0; elements]),
    }
}
