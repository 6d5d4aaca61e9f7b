//! The data that a run is trained on, in one line and as JSON: what was read, how many tokens it has, and how often the steps use it.

use phalanx_drawing::report::{bytes, plural};
use phalanx_train::dataset::DataRead;
use phalanx_train::{Dataset, RunConfig, parts};
use serde_json::{Value, json};

use crate::host::output::note;

/// The data of a run.
#[derive(Clone, Debug)]
pub struct DataReport {
    read: DataRead,
    /// Tokens of the training part and of the validation part.
    tokens: (u64, u64),
    /// True if the numbers of tokens are estimates.
    is_estimated: bool,
    /// True if samples are rows (labelled ones, or of chats), and tokens stand for rows.
    of_rows: bool,
    seq: usize,
    steps: u64,
    /// Samples of all steps.
    samples: u64,
    /// Windows of one evaluation; 0 if there is none.
    evaluated: usize,
    /// Notes on the data: token files, assumptions about the tokenizer, anything unusual.
    notes: Vec<String>,
}

impl DataReport {
    /// The report for a run whose tokens are made.
    pub fn new(read: DataRead, data: &Dataset, config: &RunConfig) -> DataReport {
        let (training, validation) = data.part_tokens();
        DataReport::of(read, (training as u64, validation as u64), data.evaluated(), config).counted()
    }

    /// The report for a run whose data has about `tokens` tokens, and `held_out` ones in files for evaluation.
    pub fn estimate(
        read: DataRead,
        (tokens, held_out): (usize, Option<usize>),
        evaluated: usize,
        config: &RunConfig,
    ) -> DataReport {
        let (training, validation) = parts::parts(config, tokens, held_out);
        DataReport::of(read, (training as u64, validation.unwrap_or(0) as u64), evaluated, config)
    }

    fn of(read: DataRead, tokens: (u64, u64), evaluated: usize, config: &RunConfig) -> DataReport {
        let report = DataReport {
            read,
            tokens,
            is_estimated: true,
            of_rows: config.data.has_rows(),
            seq: config.model.seq,
            steps: 0,
            samples: 0,
            evaluated,
            notes: Vec::new(),
        };
        let steps = config.steps(report.sequences());
        DataReport { steps, samples: steps.saturating_mul(config.batch.global as u64), ..report }
    }

    /// Sequences of the training part.
    pub fn sequences(&self) -> u64 {
        self.windows(self.tokens.0)
    }

    /// The same with what was said about the data.
    #[must_use]
    pub fn with_notes(self, notes: Vec<String>) -> DataReport {
        DataReport { notes, ..self }
    }

    /// The same for token files, whose tokens are counted.
    #[must_use]
    pub fn counted(self) -> DataReport {
        DataReport { is_estimated: false, ..self }
    }

    /// Says what was skipped, left out, or read in a way that may not be expected: on standard error, whatever else is shown.
    pub fn note_findings(findings: &phalanx_data::Findings) {
        findings.notes().iter().for_each(|line| note(line));
    }

    /// Windows of a part of so many tokens: each needs the token behind it, too. A row is one.
    fn windows(&self, tokens: u64) -> u64 {
        if self.of_rows {
            return tokens;
        }
        tokens.saturating_sub(1) / self.seq as u64
    }

    fn epochs(&self) -> f64 {
        self.samples as f64 / self.windows(self.tokens.0).max(1) as f64
    }

    /// `data: 3 files, 1.2 MiB, 41 documents, 1258291 tokens; ...`.
    pub fn line(&self) -> String {
        let DataRead { files, bytes: size, documents, .. } = &self.read;
        let (training, validation) = self.tokens;
        if self.of_rows {
            return format!(
                "data: {}, {}, {training} rows to train on, {:.2} epochs in {}; {validation} rows held out, {} an evaluation",
                plural(*files as usize, "file"),
                bytes(*size),
                self.epochs(),
                plural(self.steps as usize, "step"),
                self.evaluated
            );
        }
        let documents =
            documents.map_or(String::new(), |count| format!("{}, ", plural(count as usize, "document")));
        let about = if self.is_estimated { "about " } else { "" };
        let epochs = self.epochs();
        let digits = if epochs < 10.0 { 2 } else { 0 };
        let part = match self.evaluated {
            0 => "no validation part".to_string(),
            evaluated => format!(
                "validation part {about}{validation} tokens, {} windows, {evaluated} an evaluation",
                self.windows(validation)
            ),
        };
        format!(
            "data: {}, {}, {documents}{about}{} tokens; {about}{} windows of {} to train on, {epochs:.digits$} epochs in {}; \
             {part}",
            plural(*files as usize, "file"),
            bytes(*size),
            training + validation,
            self.windows(training),
            self.seq,
            plural(self.steps as usize, "step")
        )
    }

    /// The same for programs, with what was skipped.
    pub fn to_json(&self) -> Value {
        let (training, validation) = self.tokens;
        json!({
            "files": self.read.files,
            "bytes": self.read.bytes,
            "documents": self.read.documents,
            "tokens": training + validation,
            "is_estimated": self.is_estimated,
            "windows": self.windows(training),
            "epochs": self.epochs(),
            "validation": {
                "tokens": validation,
                "windows": self.windows(validation),
                "evaluated": self.evaluated,
            },
            "findings": self.read.findings,
            "notes": self.notes,
        })
    }
}
