//! The tokens of a run: a training part with an order, a held-out part with fixed windows.

use std::path::Path;
use std::sync::OnceLock;

use phalanx_checkpoint::Checkpoint;
use phalanx_data::{
    Corpus, CorpusSpec, DataError, DocumentEnds, EvaluationWindows, Masking, RowKind, RowSamples, Sampler,
    TokenFiles, Tokenizer, Tokens, tokenize_to_file,
};
use phalanx_layers::{POSITIONS, REFERENCES};
use phalanx_models::Objective;
use serde::{Deserialize, Serialize};

use crate::config::{DataConfig, Documents, RunConfig};
use crate::data::chats::Chats;
use crate::data::learned::Learned;
use crate::data::parts;
pub use crate::data::prepared::{DataRead, Prepared, TextProgress};
use crate::data::rows::{self, LabelledRows};
use crate::data::token_data::{ScannedTokens, TOKENS_FILE, TokenData};
use crate::engine::batch::SampleNumbers;

/// Why documents cannot be kept apart.
pub const NO_END: &str = "data.documents = \"apart\" needs to know where documents end, and neither the tokenizer nor the files say which \
    token that is (a single document of bytes or characters has none): give its id in data.end_token, or leave data.documents out";

/// Training samples and evaluation windows.
pub struct Dataset {
    samples: Samples,
    /// The tokens of data.tokens, or those made of text: of both parts, if there are no files for evaluation.
    tokens: Tokens,
    /// The tokens of the files for evaluation.
    evaluated_tokens: Option<Tokens>,
    /// Numbers of tokens of the training part and of the validation part; of rows, if samples are rows.
    parts: (usize, usize),
    /// Log-probabilities of answers under the reference with which they are compared.
    references: OnceLock<Vec<f32>>,
}

/// Kinds of samples.
enum Samples {
    /// Windows of text.
    Windows(Windows),
    /// Labelled rows or chats, and how many of those held out are evaluated.
    Rows(RowSamples, usize),
}

/// Windows of text, to train on and to evaluate.
struct Windows {
    train: Sampler,
    validation: Option<EvaluationWindows>,
    /// Masking of samples of a masked model; None for a causal model.
    masking: Option<Masking>,
    /// Ends of documents, if they do not see each other.
    documents: Option<DocumentEnds>,
}

/// Checksums of the data of a run, in hexadecimal, and the file about tokens that no tokenizer keeps. Checkpoints store them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataDigests {
    /// Checksums of the token files.
    pub tokens: Option<String>,
    /// [`Tokenizer::digest`] of the tokenizer.
    pub tokenizer: Option<String>,
    /// The `generation_config.json` of an imported folder without tokenizer, as it was read; an export writes it back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation_config: Option<String>,
    /// Checksum of the weights below adapters, or their seed, of a run whose checkpoints have adapters alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
}

impl DataDigests {
    /// The checksums of the data that a checkpoint was trained on.
    pub fn of(checkpoint: &Checkpoint) -> DataDigests {
        DataDigests::deserialize(&checkpoint.state()["data"]).unwrap_or_default()
    }
}

/// The text that `data` names, if it names any.
///
/// # Errors
/// Missing or unreadable text, text of which too much was skipped.
pub fn open_corpus(
    data: &DataConfig,
    watch: &mut dyn FnMut(TextProgress),
) -> Result<Option<Corpus>, DataError> {
    if data.text.is_empty() {
        return Ok(None);
    }
    let corpus = Corpus::open_watched(&spec(data), &mut |bytes| watch(TextProgress::Reading(bytes)));
    let corpus = corpus.map_err(|error| error.of_key("data.text"))?;
    watch(TextProgress::Read(corpus.findings()));
    Ok(Some(corpus))
}

fn spec(data: &DataConfig) -> CorpusSpec {
    CorpusSpec {
        paths: data.text.iter().map(Into::into).collect(),
        extensions: data.extensions.clone(),
        plain: data.plain.clone(),
        text_key: Some(data.text_key.clone()),
        max_skipped: data.max_skipped,
    }
}

/// Makes tokens from text, or opens the token file that `data` names, if its ids are those that the model has `learned`.
/// Writes tokens and tokenizer into `folder`.
///
/// # Errors
/// Missing, empty or unreadable data; another tokenizer; a folder that cannot be written.
pub fn prepare(
    config: &RunConfig,
    folder: &Path,
    threads: usize,
    learned: &Learned,
    watch: &mut dyn FnMut(TextProgress),
) -> Result<Prepared, DataError> {
    let (data, labels) = (&config.data, Vec::new());
    if data.rows.is_some() {
        return LabelledRows::read(config)?.prepare(config, folder, learned);
    }
    if data.chat.is_some() || data.pairs.is_some() {
        return Chats::encode(config, learned, threads, watch)?.prepare(folder);
    }
    if !config.model.keys.labels().is_empty() {
        let reason =
            "a model with classes learns from labelled rows: name their files in data.rows".to_string();
        return Err(DataError::Source { reason });
    }
    if data.tokens.is_some() {
        let files = TokenData::open(data, folder)?;
        let mut notes = files.check_looks(data)?;
        let (tokenizer, of_tokenizer) = learned.for_tokens(data, &files.train.files()[0])?;
        notes.extend(of_tokenizer);
        if let Some(tokenizer) = &tokenizer {
            tokenizer.save(folder)?;
        }
        let vocab = files.train.vocab_size().or(tokenizer.as_ref().map(Tokenizer::vocab_size)).unwrap_or(0);
        let read = DataRead::of_tokens(files.files())?;
        return Ok(Prepared { tokens: files.train.len() as u64, vocab, tokenizer, read, labels, notes });
    }
    let corpus = open_corpus(data, watch)?;
    let (tokenizer, mut notes) = learned.for_text(data, corpus.as_ref())?;
    let corpus = corpus.ok_or_else(|| DataError::NoText {
        given: "data.text = []".into(),
        found: "no path; name text files or folders in data.text, or a token file in data.tokens".into(),
    })?;
    let written =
        tokenize_to_file(&corpus, &tokenizer, &folder.join(TOKENS_FILE), threads, &mut |progress| {
            watch(TextProgress::Tokenising(progress));
        })?;
    tokenizer.save(folder)?;
    notes.extend(tokenizer.describe_spelled(&written.spelled));
    let (tokens, vocab) = (written.tokens, tokenizer.vocab_size());
    let read = DataRead::of_text(corpus.findings());
    Ok(Prepared { tokens, vocab, tokenizer: Some(tokenizer), read, labels, notes })
}

impl Dataset {
    /// Like [`Dataset::open`], and checks every id against `vocab`. This reads all tokens, so the launcher does it
    /// once for all ranks. Also returns what that has found, with the checksums of the token files, which must equal `expected`
    /// where those are known.
    ///
    /// # Errors
    /// The errors of [`Dataset::open`], [`DataError::NotTheTokens`], and ids for which the model has no row.
    pub fn open_checked(
        config: &RunConfig,
        folder: &Path,
        vocab: usize,
        expected: Option<&str>,
    ) -> Result<(Dataset, ScannedTokens), DataError> {
        let files = TokenData::open(&config.data, folder)?;
        if config.data.has_rows() {
            // Ids of rows have bits beside them, and lie beside classes and lengths.
            let scanned = files.scan(1 << 32, expected)?;
            let opened = Dataset::of(files, config)?;
            if let Samples::Rows(rows, _) = &opened.samples {
                let of_pairs = rows.kind().together();
                rows.check(vocab, config.model.keys.labels().len().max(of_pairs))?;
            }
            return Ok((opened, scanned));
        }
        let mut scanned = files.scan(vocab, expected)?;
        let origin = match config.data.tokens {
            Some(_) => files.train.origin(),
            None => config.data.text.join(", "),
        };
        parts::check(config, &origin, files.train.len(), files.evaluated.as_ref().map(TokenFiles::len))?;
        if config.data.tokens.is_some() {
            scanned.files = files.describe(Some(scanned.largest));
        }
        Ok((Dataset::of(files, config)?, scanned))
    }

    /// Opens the tokens of the run in folder `run`, whose ids are checked already.
    ///
    /// # Errors
    /// Data that is missing, damaged, or too short for a sequence.
    pub fn open(config: &RunConfig, run: &Path) -> Result<Dataset, DataError> {
        Dataset::of(TokenData::open(&config.data, run)?, config)
    }

    fn of(files: TokenData, config: &RunConfig) -> Result<Dataset, DataError> {
        let TokenData { train, evaluated } = files;
        if config.data.has_rows() {
            let tokens = Tokens::from(train);
            let rows = rows::open(tokens.clone(), config)?;
            let [trained, held_out] = rows.counts();
            let samples = Samples::Rows(rows, evaluated_rows(held_out, config));
            let parts = (trained, held_out);
            return Ok(Dataset {
                samples,
                tokens,
                evaluated_tokens: None,
                parts,
                references: OnceLock::new(),
            });
        }
        let limit = config.model.vocab.unwrap_or(usize::MAX);
        let [tokens, evaluated_tokens] =
            [Some(train), evaluated].map(|files| files.map(|files| Tokens::from(files).limited_to(limit)));
        let tokens = tokens.expect("there are files to train on");
        let seq = config.model.seq;
        let (train, held_out) = tokens.split(config.data.validation)?;
        let held_out = evaluated_tokens.clone().or((config.data.validation > 0.0).then_some(held_out));
        let parts = (train.len(), held_out.as_ref().map_or(0, Tokens::len));
        let windows = |tokens| EvaluationWindows::new(tokens, seq, config.train.eval_samples);
        let samples = Samples::Windows(Windows {
            train: Sampler::new(train, seq, config.data.order.into(), config.train.seed)?,
            validation: held_out.map(windows).transpose()?,
            masking: masking(config, tokens.vocab_size()),
            documents: documents(&config.data)?,
        });
        Ok(Dataset { samples, tokens, evaluated_tokens, parts, references: OnceLock::new() })
    }

    /// Reads the sample at `position` of the run (the number of samples before it): tokens and targets, `[seq]` each; of a row one
    /// target, its class.
    ///
    /// # Errors
    /// A token file that was changed since the run started, or cannot be read.
    pub fn sample(&self, position: u64, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        let windows = match &self.samples {
            Samples::Rows(rows, _) => return rows.fill(rows.trained(position), tokens, targets),
            Samples::Windows(windows) => windows,
        };
        match &windows.masking {
            None => windows.train.fill(position, tokens, targets)?,
            Some(masking) => masking.sample(&windows.train, position, tokens, targets)?,
        }
        windows.part(tokens, targets);
        Ok(())
    }

    /// Number of windows of an evaluation: `train.eval_samples`, or all that the held-out part has.
    pub fn evaluated(&self) -> usize {
        match &self.samples {
            Samples::Rows(_, evaluated) => *evaluated,
            Samples::Windows(windows) => windows.validation.as_ref().map_or(0, EvaluationWindows::len),
        }
    }

    /// Reads evaluation window `index`, as [`Dataset::sample`] reads samples.
    ///
    /// # Errors
    /// The errors of [`Dataset::sample`].
    pub fn window(&self, index: usize, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        let windows = match &self.samples {
            Samples::Rows(rows, all) => {
                return rows.fill(rows.evaluated(index, *all), tokens, targets);
            }
            Samples::Windows(windows) => windows,
        };
        let Some(validation) = &windows.validation else { return Ok(()) };
        match &windows.masking {
            None => validation.fill(index, tokens, targets)?,
            Some(masking) => masking.window(validation, index, tokens, targets)?,
        }
        windows.part(tokens, targets);
        Ok(())
    }

    /// Returns whether samples have documents or chats that do not see each other, so that targets are left out.
    pub fn has_documents(&self) -> bool {
        match &self.samples {
            Samples::Windows(windows) => windows.documents.is_some(),
            Samples::Rows(rows, _) => rows.kind() != RowKind::Labelled,
        }
    }

    /// Writes what a sample has beside tokens and targets: the positions of its tokens.
    ///
    /// # Errors
    /// Those of [`Dataset::sample`], and another input.
    pub fn input(&self, position: u64, input: &str, to: SampleNumbers) -> Result<(), DataError> {
        match &self.samples {
            Samples::Rows(rows, _) => self.row_input(rows, rows.trained(position), input, to),
            Samples::Windows(windows) => {
                windows.positions(input, to, |tokens, targets| self.sample(position, tokens, targets))
            }
        }
    }

    /// Writes what an evaluation window has beside tokens and targets.
    ///
    /// # Errors
    /// As [`Dataset::input`].
    pub fn window_input(&self, index: usize, input: &str, to: SampleNumbers) -> Result<(), DataError> {
        match &self.samples {
            Samples::Rows(rows, all) => self.row_input(rows, rows.evaluated(index, *all), input, to),
            Samples::Windows(windows) => {
                windows.positions(input, to, |tokens, targets| self.window(index, tokens, targets))
            }
        }
    }

    /// Writes what a row has beside tokens and targets.
    fn row_input(
        &self,
        rows: &RowSamples,
        row: u32,
        input: &str,
        to: SampleNumbers,
    ) -> Result<(), DataError> {
        if input != REFERENCES {
            return rows::positions(rows, row, input, to);
        }
        let reference = self.references.get().map_or(0.0, |references| references[row as usize]);
        to.write(input, &[reference, rows.class(row)? as f32])
    }

    /// Number of answers of pairs, in all parts; 0 for other samples.
    pub fn answers(&self) -> usize {
        match &self.samples {
            Samples::Rows(rows, _) if rows.kind() == RowKind::Pairs => rows.len(),
            _ => 0,
        }
    }

    /// Reads answer `index` of the file: tokens and targets, `[seq]` each.
    ///
    /// # Errors
    /// The errors of [`Dataset::sample`].
    pub fn answer(&self, index: usize, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        let Samples::Rows(rows, _) = &self.samples else { panic!("only pairs have answers") };
        rows.fill(index as u32, tokens, targets)
    }

    /// Takes the log-probability of each answer under the reference, which are an input of the samples from then on.
    pub fn keep_references(&self, references: Vec<f32>) {
        // Ranks that are threads have the same.
        self.references.get_or_init(|| references);
    }

    /// Number of windows of an evaluation of a run on `tokens` tokens (or rows), with `evaluated` ones in files for evaluation: the later
    /// value of [`Dataset::evaluated`].
    pub fn evaluated_of(tokens: usize, evaluated: Option<usize>, config: &RunConfig) -> usize {
        let (_, held_out) = parts::parts(config, tokens, evaluated);
        if config.data.has_rows() {
            return evaluated_rows(held_out.unwrap_or(0), config);
        }
        let windows = |held_out: usize| held_out.saturating_sub(1) / config.model.seq;
        held_out.map_or(0, |held_out| windows(held_out).clamp(1, config.train.eval_samples))
    }

    /// The share of the evaluation windows whose tokens the training part of `trained` has; None without windows.
    ///
    /// # Errors
    /// The errors of [`Dataset::sample`].
    pub fn trained_share(&self, trained: &Dataset) -> Result<Option<f64>, DataError> {
        let windows = match (&self.samples, &trained.samples) {
            (Samples::Windows(windows), Samples::Windows(trained)) => {
                windows.validation.as_ref().map(|windows| (windows, trained))
            }
            (Samples::Rows(rows, _), Samples::Rows(trained, _)) => return rows.trained_share(trained),
            _ => None,
        };
        let Some((windows, trained)) = windows else { return Ok(None) };
        let found = windows.count_within(trained.train.tokens())?;
        Ok(Some(found as f64 / windows.len() as f64))
    }

    /// Refuses token files that were changed since the run started.
    ///
    /// # Errors
    /// [`DataError::NotTheTokens`], or a file that cannot be read.
    pub fn check_unchanged(&self, digests: &DataDigests) -> Result<(), DataError> {
        let Some(expected) = &digests.tokens else { return Ok(()) };
        let (train, evaluated) = TokenData::checksums_of(expected);
        self.tokens.check_unchanged(train)?;
        self.evaluated_tokens
            .iter()
            .zip(evaluated)
            .try_for_each(|(tokens, expected)| tokens.check_unchanged(expected))
    }

    /// Samples in one epoch.
    pub fn samples_per_epoch(&self) -> u64 {
        match &self.samples {
            Samples::Rows(rows, _) => rows.counts()[0] as u64,
            Samples::Windows(windows) => windows.train.samples_per_epoch(),
        }
    }

    /// Tokens, or rows, of the training part and of the validation part.
    pub fn part_tokens(&self) -> (usize, usize) {
        self.parts
    }
}

impl Windows {
    /// Leaves out the targets that begin another document.
    fn part(&self, tokens: &[u32], targets: &mut [u32]) {
        if let Some(documents) = &self.documents {
            documents.part(tokens, targets);
        }
    }

    /// Writes the positions of a sample's tokens in their documents, which are the only input beside tokens and targets. `sample` reads
    /// the sample.
    fn positions(
        &self,
        input: &str,
        to: SampleNumbers,
        sample: impl Fn(&mut [u32], &mut [u32]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let (Some(documents), POSITIONS, SampleNumbers::Ids(to)) = (&self.documents, input, to) else {
            let reason = format!("the model reads {input}, which token files do not have");
            return Err(DataError::Source { reason });
        };
        let [mut tokens, mut targets] = [(); 2].map(|()| vec![0; to.len()]);
        sample(&mut tokens, &mut targets)?;
        documents.positions(&tokens, to);
        Ok(())
    }
}

/// Number of rows that are evaluated, of those held out; whole pairs.
fn evaluated_rows(held_out: usize, config: &RunConfig) -> usize {
    let evaluated = held_out.min(config.train.eval_samples);
    if config.data.pairs.is_some() { evaluated / 2 * 2 } else { evaluated }
}

/// Ends of documents that do not see each other, in a complete configuration.
fn documents(data: &DataConfig) -> Result<Option<DocumentEnds>, DataError> {
    match (data.documents, data.end_token) {
        (Documents::Joined, _) => Ok(None),
        (Documents::Apart, Some(end_token)) => Ok(Some(DocumentEnds { end_token })),
        (Documents::Apart, None) => Err(DataError::Source { reason: NO_END.to_string() }),
    }
}

/// Masking of samples of a masked model, in a complete configuration. Random tokens are below `ids`, the tokenizer's number of
/// ids, if it is known; a padded table has rows beyond them.
fn masking(config: &RunConfig, ids: Option<usize>) -> Option<Masking> {
    let mask = config.data.mask_token.filter(|_| config.model.arch.objective == Objective::Masked)?;
    // Random tokens are never a mask token that was added after the tokenizer's ids.
    let rows = config.model.vocab.unwrap_or(mask as usize + 1);
    let of_rows = if mask as usize + 1 == rows { rows - 1 } else { rows };
    let ids = ids.filter(|ids| *ids > 0).map_or(of_rows, |ids| ids.min(of_rows));
    Some(Masking::new(config.train.seed, Some(mask), ids))
}
