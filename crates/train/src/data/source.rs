//! Sources of training samples.

use phalanx_data::DataError;

use crate::data::dataset::{DataDigests, Dataset};
use crate::engine::batch::SampleNumbers;

/// A source of training samples: a token file ([`Dataset`]), or the caller's own.
///
/// Every rank asks for the samples of its own part of each batch, so all ranks must answer alike.
pub trait DataSource: Send + Sync {
    /// Writes the sample at `position` of the run (the number of samples before it): tokens and targets, `[seq]` each (one target, for a
    /// model whose targets are those of samples), or nothing of what the model does not read.
    /// A target is the token that follows; `phalanx_tensor::IGNORED` leaves one out of the loss, which is the mean over
    /// those that remain in the global batch. A step without any is not applied.
    ///
    /// # Errors
    /// [`DataError::Source`] when there is no such sample.
    fn sample(&self, position: u64, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError>;

    /// Writes what the model reads as `input` beside tokens and targets, of the sample at `position`. Where documents do not see each
    /// other (`data.documents = "apart"`), `positions` is one: of each token, how many of its document are before it in the sample.
    ///
    /// # Errors
    /// As [`DataSource::sample`], and an input that the source does not have.
    fn input(&self, _position: u64, input: &str, _to: SampleNumbers) -> Result<(), DataError> {
        Err(DataError::Source { reason: format!("the model reads {input}, which the source does not have") })
    }

    /// Returns whether samples or windows may leave targets out. If so, the ranks count targets in every step; a source that
    /// never leaves any out may return false.
    fn leaves_out_targets(&self) -> bool {
        true
    }

    /// Number of windows of an evaluation, 0 for no evaluation. Each counts once, however many fit a batch.
    fn evaluated(&self) -> usize {
        0
    }

    /// Writes evaluation window `index`: tokens and targets, `[seq]` each.
    ///
    /// # Errors
    /// As [`DataSource::sample`].
    fn window(&self, index: usize, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        self.sample(index as u64, tokens, targets)
    }

    /// Writes what the model reads as `input` beside tokens and targets, of evaluation window `index`.
    ///
    /// # Errors
    /// As [`DataSource::input`].
    fn window_input(&self, index: usize, input: &str, to: SampleNumbers) -> Result<(), DataError> {
        self.input(index as u64, input, to)
    }

    /// Number of answers of pairs in all parts of the data, whose log-probabilities a reference gives before the first step; 0 for other
    /// samples.
    fn answers(&self) -> usize {
        0
    }

    /// Writes answer `index`: tokens and targets, `[seq]` each.
    ///
    /// # Errors
    /// As [`DataSource::sample`].
    fn answer(&self, _index: usize, _tokens: &mut [u32], _targets: &mut [u32]) -> Result<(), DataError> {
        Err(DataError::Source { reason: "the source has no pairs of answers".to_string() })
    }

    /// Takes the log-probabilities of all answers under the reference, which samples have as `references` from then on, with 1 for a chosen
    /// answer or 0 behind each.
    fn keep_references(&self, _references: Vec<f32>) {}

    /// Refuses data that was changed since the run started, before a checkpoint is written.
    ///
    /// # Errors
    /// Data with other checksums than `digests`.
    fn check_unchanged(&self, _digests: &DataDigests) -> Result<(), DataError> {
        Ok(())
    }
}

/// A function that writes samples and cannot fail, without evaluation.
impl<F: Fn(u64, &mut [u32], &mut [u32]) + Send + Sync> DataSource for F {
    fn sample(&self, position: u64, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        self(position, tokens, targets);
        Ok(())
    }
}

impl DataSource for Dataset {
    fn sample(&self, position: u64, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        Dataset::sample(self, position, tokens, targets)
    }

    fn input(&self, position: u64, input: &str, to: SampleNumbers) -> Result<(), DataError> {
        Dataset::input(self, position, input, to)
    }

    fn leaves_out_targets(&self) -> bool {
        self.has_documents()
    }

    fn evaluated(&self) -> usize {
        Dataset::evaluated(self)
    }

    fn window_input(&self, index: usize, input: &str, to: SampleNumbers) -> Result<(), DataError> {
        Dataset::window_input(self, index, input, to)
    }

    fn window(&self, index: usize, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        Dataset::window(self, index, tokens, targets)
    }

    fn answers(&self) -> usize {
        Dataset::answers(self)
    }

    fn answer(&self, index: usize, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        Dataset::answer(self, index, tokens, targets)
    }

    fn keep_references(&self, references: Vec<f32>) {
        Dataset::keep_references(self, references);
    }

    fn check_unchanged(&self, digests: &DataDigests) -> Result<(), DataError> {
        Dataset::check_unchanged(self, digests)
    }
}
