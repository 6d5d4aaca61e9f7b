//! Estimates of a run's data for a plan, which does not tokenise text.

use std::path::Path;

use anyhow::{Result, bail};
use phalanx_data::{TokenFiles, Tokenizer};
use phalanx_train::chats::Chats;
use phalanx_train::config::Documents;
use phalanx_train::dataset::{self, DataRead, TextProgress};
use phalanx_train::learned::Learned;
use phalanx_train::rows::{self, LabelledRows};
use phalanx_train::token_data::TokenData;
use phalanx_train::{Dataset, RunConfig, parts};

use crate::host::machine;
use crate::host::output::note;
use crate::plans::data_report::DataReport;
use crate::plans::resolve::{Initial, Vocabulary};
use crate::plans::tokenizing;

/// Estimate of a run's data without tokenising it.
#[derive(Clone)]
pub struct Estimate {
    /// Number of its tokens, and of those in files for evaluation.
    pub tokens: (usize, Option<usize>),
    /// Number of windows of an evaluation.
    pub evaluated: usize,
    /// Data that the run would be trained on, if the configuration names data.
    pub data: Option<DataReport>,
}

/// The vocabulary of the tokenizer or token files of `config`, and an estimate of its data.
///
/// # Errors
/// Missing or unreadable data, ids other than those that the model has learned, and data that is certainly too short for a
/// sequence.
pub fn estimate_data(config: &RunConfig, initial: Initial) -> Result<(Vocabulary, Estimate)> {
    let data = &config.data;
    let learned = initial.learned(config)?;
    learned.notes().iter().for_each(|line| note(line));
    if data.rows.is_some() {
        return estimate_rows(config, &learned);
    }
    if data.chat.is_some() || data.pairs.is_some() {
        return count_chats(config, &learned);
    }
    if data.tokens.is_some() {
        let files = TokenData::open(data, Path::new(""))?;
        let mut notes = files.check_looks(data)?;
        let (tokenizer, of_tokenizer) = learned.for_tokens(data, &files.train.files()[0])?;
        notes.extend(of_tokenizer);
        let ids = files.train.vocab_size().or(tokenizer.as_ref().map(Tokenizer::vocab_size));
        let tokens @ (count, held_out) = (files.train.len(), files.evaluated.as_ref().map(TokenFiles::len));
        parts::check(config, &files.train.origin(), count, held_out)?;
        notes.extend(files.describe(None));
        notes.iter().for_each(|line| note(line));
        let vocabulary = Vocabulary::of(ids.unwrap_or(0), files.train.origin(), tokenizer.as_ref());
        let evaluated = Dataset::evaluated_of(count, held_out, config);
        let report = DataReport::estimate(DataRead::of_tokens(files.files())?, tokens, evaluated, config);
        return Ok((
            vocabulary,
            Estimate { tokens, evaluated, data: Some(report.counted().with_notes(notes)) },
        ));
    }
    let corpus = dataset::open_corpus(data, &mut |stage| {
        if let TextProgress::Read(findings) = stage {
            DataReport::note_findings(findings);
        }
    })?;
    let Some(corpus) = corpus else {
        let vocabulary = Vocabulary::unknown("a configuration without data.text and data.tokens");
        // Assumes that there are as many windows as requested.
        let evaluated = Dataset::evaluated_of(usize::MAX, None, config);
        return Ok((vocabulary, Estimate { tokens: (usize::MAX, None), evaluated, data: None }));
    };
    let (tokenizer, mut notes) = learned.for_text(data, Some(&corpus))?;
    let read = DataRead::of_text(corpus.findings());
    // A token of a byte-pair encoding is about four bytes; a token of the other tokenizers is one byte, except for rare
    // characters.
    let (bytes, is_small) = (read.bytes as usize, tokenizer.vocab_size() <= 1024);
    let tokens = if is_small { bytes } else { bytes / 4 };
    notes.extend(short_parts(config, &read, tokens, is_small)?);
    notes.iter().for_each(|line| note(line));
    let origin = format!("the tokenizer {}", tokenizer.describe());
    let vocabulary = Vocabulary::of(tokenizer.vocab_size(), origin, Some(&tokenizer));
    let evaluated = Dataset::evaluated_of(tokens, None, config);
    let report = DataReport::estimate(read, (tokens, None), evaluated, config);
    Ok((vocabulary, Estimate { tokens: (tokens, None), evaluated, data: Some(report.with_notes(notes)) }))
}

/// The same for labelled rows, which are counted and not encoded.
fn estimate_rows(config: &RunConfig, learned: &Learned) -> Result<(Vocabulary, Estimate)> {
    let rows = LabelledRows::read(config)?;
    let (tokenizer, of_tokenizer) = learned.for_text(&config.data, None)?;
    rows::check_tokenizer(&tokenizer, config.model.seq)?;
    let notes = [&rows.notes[..], &of_tokenizer].concat();
    notes.iter().for_each(|line| note(line));
    let tokens @ (count, held_out) = rows.counts();
    let evaluated = Dataset::evaluated_of(count, held_out, config);
    let report = DataReport::estimate(rows.describe(), tokens, evaluated, config).counted().with_notes(notes);
    let origin = format!("the tokenizer {}", tokenizer.describe());
    let vocabulary =
        Vocabulary::of(tokenizer.vocab_size(), origin, Some(&tokenizer)).with_labels(rows.labels);
    Ok((vocabulary, Estimate { tokens, evaluated, data: Some(report) }))
}

/// The same for chats, which are encoded to count their rows.
fn count_chats(config: &RunConfig, learned: &Learned) -> Result<(Vocabulary, Estimate)> {
    let chats = tokenizing::with_progress(false, &|_| {}, |watch| {
        Chats::encode(config, learned, machine::cores(), watch)
    })?;
    chats.notes.iter().for_each(|line| note(line));
    let tokens @ (count, held_out) = chats.counts();
    let evaluated = Dataset::evaluated_of(count, held_out, config);
    let report =
        DataReport::estimate(chats.read, tokens, evaluated, config).counted().with_notes(chats.notes);
    let (tokenizer, ids) = (&chats.tokenizer, chats.tokenizer.vocab_size());
    let vocabulary = Vocabulary::of(ids, format!("the tokenizer {}", tokenizer.describe()), Some(tokenizer));
    Ok((vocabulary, Estimate { tokens, evaluated, data: Some(report) }))
}

/// Refuses text of about `tokens` tokens that is certainly too short for a sequence of each part; a note about one that may be.
fn short_parts(config: &RunConfig, read: &DataRead, tokens: usize, is_small: bool) -> Result<Vec<String>> {
    let estimate = if is_small { "" } else { ", of which the tokens are estimated" };
    let origin = format!("{}{estimate}", config.data.text.join(", "));
    let Err(error) = parts::check(config, &origin, tokens, None) else { return Ok(Vec::new()) };
    // No token is shorter than a byte, but for those between documents, and where a tokenizer normalises its text.
    let between = (read.documents.unwrap_or(0).saturating_sub(1) as usize).saturating_mul(2);
    let max = (read.bytes as usize).saturating_add(between);
    if parts::check(config, "", if is_small { max } else { max.saturating_mul(4) }, None).is_err() {
        return Err(error.into());
    }
    Ok(vec![format!("`train` may refuse this: {error}")])
}

/// The vocabulary for a run on random tokens; nothing is read if the configuration gives it.
///
/// # Errors
/// Documents that are to be kept apart, and the errors of [`estimate_data`].
pub fn random_tokens(config: &RunConfig, initial: Initial) -> Result<(Vocabulary, ())> {
    if config.data.documents == Documents::Apart {
        bail!("data.documents = \"apart\": random tokens have no documents; leave it out");
    }
    if config.data.chat.is_some() || config.data.pairs.is_some() {
        bail!("data.chat and data.pairs: random tokens have no chats and no answers; leave them out");
    }
    if config.data.rows.is_some() || !config.model.keys.labels().is_empty() {
        bail!(
            "a model with classes (model.labels) is measured by training it: random tokens are no labelled rows"
        );
    }
    match config.model.vocab.or_else(|| config.model.published_vocab()) {
        Some(_) => Ok((Vocabulary::unknown("random tokens"), ())),
        None => Ok((estimate_data(config, initial)?.0, ())),
    }
}
