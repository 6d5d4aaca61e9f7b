//! Labelled rows of a run: read from files, encoded into the run's token file, and read from there as samples.

use std::path::Path;

use phalanx_data::{
    DataError, FoundClasses, RowKind, RowOrder, RowSamples, Rows, Tokenizer, Tokens, token_paths, write_rows,
};
use phalanx_layers::POSITIONS;
use phalanx_models::labels::numbered;
use phalanx_models::limits::MAX_LABELS;

use crate::config::{DataConfig, Paths, RunConfig};
use crate::data::learned::Learned;
use crate::data::prepared::{DataRead, Prepared};
use crate::data::token_data::TOKENS_FILE;
use crate::engine::batch::SampleNumbers;

/// Keys that a note names.
const SHOWN: usize = 5;

/// The rows of a configuration, and their classes.
pub struct LabelledRows {
    /// Rows to train on, and those for evaluation alone.
    parts: [Option<Rows>; 2],
    /// Names of the classes.
    pub labels: Vec<String>,
    /// For people.
    pub notes: Vec<String>,
}

impl LabelledRows {
    /// Reads the files of `config`. The classes are those of `model.labels`, else those of the rows to train on.
    ///
    /// # Errors
    /// Files that cannot be read, rows that are wrong, labels that are not among the classes.
    pub fn read(config: &RunConfig) -> Result<LabelledRows, DataError> {
        let DataConfig { rows, validation_rows, text_key, .. } = &config.data;
        let read = |paths: &Option<Paths>, key| {
            let paths = paths.as_ref().map(Paths::paths);
            let read = paths.map(|paths| Rows::read(&token_paths(&paths)?, text_key)).transpose();
            read.map_err(|error| error.of_key(key))
        };
        let parts = [read(rows, "data.rows")?, read(validation_rows, "data.validation_rows")?];
        let train = parts[0].as_ref().expect("data.rows names files");
        let mut notes = Vec::new();
        let given = config.model.keys.labels();
        let labels = match given.is_empty() {
            false => given,
            true => {
                let labels = match train.classes(MAX_LABELS)? {
                    FoundClasses::Numbers(count) => numbered(count),
                    FoundClasses::Names(names) => names,
                };
                notes.push(format!(
                    "model.labels was left out: {} classes, as the rows have them, {}",
                    labels.len(),
                    listed(&labels)
                ));
                labels
            }
        };
        let mut seen = vec![0; labels.len()];
        for row in &train.rows {
            seen[train.class(row, &labels)?] += 1;
        }
        let unseen = labels.iter().zip(&seen).filter(|(_, count)| **count == 0);
        let unseen: Vec<String> = unseen.map(|(label, _)| label.clone()).collect();
        if !unseen.is_empty() {
            notes.push(format!("no row to train on is of the classes {}", listed(&unseen)));
        }
        let unread: Vec<String> = parts.iter().flatten().flat_map(|rows| rows.unread.clone()).collect();
        if !unread.is_empty() {
            notes.push(format!("of the rows is not read: {}", listed(&unread)));
        }
        if let Some(evaluated) = &parts[1] {
            evaluated.rows.iter().try_for_each(|row| evaluated.class(row, &labels).map(drop))?;
        }
        Ok(LabelledRows { parts, labels, notes })
    }

    /// Numbers of rows to train on, and of those for evaluation alone.
    pub fn counts(&self) -> (usize, Option<usize>) {
        let [train, evaluated] = self.parts.each_ref().map(|rows| rows.as_ref().map(|rows| rows.rows.len()));
        (train.unwrap_or(0), evaluated)
    }

    /// Describes the files.
    pub fn describe(&self) -> DataRead {
        let all = || self.parts.iter().flatten();
        DataRead {
            files: all().map(|rows| rows.files.len() as u64).sum(),
            bytes: all().map(|rows| rows.bytes).sum(),
            documents: Some(all().map(|rows| rows.rows.len() as u64).sum()),
            findings: None,
        }
    }

    /// Encodes the rows into the token file of `folder`, and writes the tokenizer there.
    ///
    /// # Errors
    /// Another tokenizer than that which the model has `learned`, one without the tokens around a text, a folder that cannot be
    /// written.
    pub fn prepare(
        self,
        config: &RunConfig,
        folder: &Path,
        learned: &Learned,
    ) -> Result<Prepared, DataError> {
        let (tokenizer, of_tokenizer) = learned.for_text(&config.data, None)?;
        let parts = self.parts.each_ref().map(Option::as_ref);
        let seq = config.model.seq;
        let (written, cut) = write_rows(&folder.join(TOKENS_FILE), &tokenizer, seq, parts, &self.labels)?;
        tokenizer.save(folder)?;
        let mut notes = [&self.notes[..], &of_tokenizer].concat();
        if cut > 0 {
            let rows = written.documents;
            notes.push(format!("{cut} of {rows} rows are longer than model.seq = {seq} and were cut: of two texts the longer one"));
        }
        let vocab = tokenizer.vocab_size();
        let (read, labels) = (self.describe(), self.labels);
        Ok(Prepared { tokens: written.documents, vocab, tokenizer: Some(tokenizer), read, notes, labels })
    }
}

fn listed(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    let more = names.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    shown.join(", ") + &more
}

/// Opens the rows, or the chats, in the token file of a run.
///
/// # Errors
/// A file that has no rows, or those for another `model.seq`.
pub fn open(tokens: Tokens, config: &RunConfig) -> Result<RowSamples, DataError> {
    let (order, seed) = (config.data.order.into(), config.train.seed);
    let kind = match &config.data {
        DataConfig { pairs: Some(_), .. } => RowKind::Pairs,
        DataConfig { chat: Some(_), .. } => RowKind::Chats,
        _ => RowKind::Labelled,
    };
    let order = RowOrder { order, seed, held_out: config.data.validation };
    RowSamples::open(kind, tokens, config.model.seq, order)
}

/// Writes the positions of a row's tokens, the only input beside tokens and targets.
///
/// # Errors
/// Those of reading, and another input.
pub fn positions(rows: &RowSamples, row: u32, input: &str, to: SampleNumbers) -> Result<(), DataError> {
    let (POSITIONS, SampleNumbers::Ids(to)) = (input, to) else {
        let reason = format!("the model reads {input}, which rows and chats do not have");
        return Err(DataError::Source { reason });
    };
    rows.positions(row, to)
}

/// Returns whether a tokenizer can frame rows; for a plan, which encodes none.
///
/// # Errors
/// As [`phalanx_data::RowEncoder::new`].
pub fn check_tokenizer(tokenizer: &Tokenizer, seq: usize) -> Result<(), DataError> {
    phalanx_data::RowEncoder::new(tokenizer, seq).map(drop)
}
