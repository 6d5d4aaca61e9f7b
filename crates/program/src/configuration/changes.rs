//! Changes of a resumed run to what it trains or measures: one line per key, with the consequence.
//!
//! Keys that only say where and how the same is computed have no line of their own: they are named together.

use anyhow::{Result, bail};
use phalanx_checkpoint::Checkpoint;
use phalanx_data::DataError;
use phalanx_train::config::{Key, Resume};
use phalanx_train::dataset::DataDigests;
use phalanx_train::position::position;
use phalanx_train::{Dataset, RunConfig};

use crate::configuration::changed_keys::{ChangedKey, has_other_data};
use crate::configuration::earlier;

/// Comparison of the last start of a run with this one.
pub struct Changes<'a> {
    /// The configuration of the last start.
    pub before: &'a RunConfig,
    /// The configuration of this start.
    pub now: &'a RunConfig,
    /// The keys in which they differ.
    pub changed: &'a [ChangedKey],
    /// The checkpoint from which the run goes on.
    pub checkpoint: &'a Checkpoint,
}

impl Changes<'_> {
    /// A line for each change of what is trained or measured.
    ///
    /// # Errors
    /// A change after which the validation loss would be that of tokens on which the model was trained.
    pub fn lines(&self) -> Result<Vec<String>> {
        self.refuse_trained_validation()?;
        let mut lines: Vec<String> = Vec::new();
        let mut others: Vec<String> = Vec::new();
        for change in self.changed {
            match change.key.resume {
                Resume::Unsaid => {}
                Resume::Said(follows) if !follows.is_empty() => {
                    lines.push(format!("{change}: {}", self.meaning(change.key, follows)));
                }
                Resume::Said(_) | Resume::Free | Resume::Data | Resume::Fixed(_) => {
                    others.push(change.to_string());
                }
            }
        }
        if has_other_data(self.changed, |_| true) {
            lines.push(self.of_other_data());
        }
        if !others.is_empty() {
            lines.push(format!("from here on, {}", others.join(", ")));
        }
        Ok(lines)
    }

    /// Tokens that were trained on must not become the validation part. Its share only ever shrank before: the model was trained on
    /// all that is outside of the checkpoint's.
    fn refuse_trained_validation(&self) -> Result<()> {
        let stored = earlier::config_of_checkpoint(self.checkpoint.state()).ok();
        let was = stored.as_ref().map_or(self.before, |(stored, _)| stored).data.validation;
        let is = self.now.data.validation;
        if is > was && self.checkpoint.step() > 0 && !has_other_data(self.changed, is_file) {
            let keep = if was == 0.0 { "0 (no evaluation)".to_string() } else { format!("{was} or less") };
            bail!(
                "data.validation = {is}, but {} was trained with data.validation = {was}: the model has learned the tokens that would \
                 be held out now, and its validation loss would be too low. Give {keep}, or start a new run with another --run; \
                 nothing was changed",
                self.checkpoint.dir().display()
            );
        }
        Ok(())
    }

    /// Consequence of a changed key for the run: `follows`, with the numbers that it has here.
    fn meaning(&self, key: &Key, follows: &str) -> String {
        let (was, is) = (self.before, self.now);
        let tokens = |config: &RunConfig| config.batch.global * config.model.seq;
        let step = format!("a step has {} tokens and had {}", tokens(is), tokens(was));
        match key.path().as_str() {
            "data.validation" if is.data.validation == 0.0 => {
                "nothing is held out or evaluated, and what was held out is trained on".to_string()
            }
            "batch.global" => format!("{step}; {follows}"),
            "model.seq" => {
                let beyond = match is.model.seq > was.model.seq {
                    true => format!("; positions from {} on were not trained before", was.model.seq),
                    false => String::new(),
                };
                format!("{follows}; {step}{beyond}")
            }
            _ => follows.to_string(),
        }
    }

    /// Consequence of training on other data.
    fn of_other_data(&self) -> String {
        let samples = position(self.checkpoint).map_or(0, |position| position.samples);
        let tokens = DataDigests::of(self.checkpoint).tokens.map_or(String::new(), |digest| {
            format!(" (tokens {})", digest.chars().take(12).collect::<String>())
        });
        format!(
            "other data than before{tokens}: the run goes on with sample {samples} of it, and losses do not compare with the \
             ones before"
        )
    }
}

/// Returns whether a key names files. Another tokenizer reads the same text.
pub fn is_file(key: &Key) -> bool {
    key.name != "tokenizer"
}

/// Share of windows above which a validation part counts as trained on, beyond those that are alike in any text of the kind.
const ALIKE: f64 = 0.05;

/// Checks the validation part of other data against `trained`, the data until now: describes how many of its windows the model was trained
/// on.
///
/// # Errors
/// A validation part that the model has learned.
pub fn check_other_validation(now: &Dataset, trained: Result<Dataset, DataError>) -> Result<String> {
    let trained = match trained {
        Ok(trained) => trained,
        Err(error) => {
            return Ok(format!(
                "whether the model was trained on the validation part of the other data cannot be checked: {error}"
            ));
        }
    };
    let Some(share) = now.trained_share(&trained)? else {
        return Ok("nothing is held out of the other data".to_string());
    };
    let usual = trained.trained_share(&trained)?.unwrap_or(0.0);
    let percent = format!("{:.0} % of the validation windows of the other data", 100.0 * share);
    if share > usual + ALIKE {
        bail!(
            "{percent} are among the tokens that the model was trained on, and its validation loss would be too low. Give \
             other files, or these in another order, or data.validation=0 for no evaluation, or start a new run with another \
             --run; nothing was changed"
        );
    }
    Ok(format!("{percent} are among the tokens that the model was trained on until now"))
}
