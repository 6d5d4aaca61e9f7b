//! Changes of a resumed run to what it trains or measures: one line per key, with the consequence.
//!
//! Keys that only say where and how the same is computed have no line of their own: they are named together.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use phalanx_checkpoint::Checkpoint;
use phalanx_data::DataError;
use phalanx_train::dataset::DataDigests;
use phalanx_train::state::position;
use phalanx_train::{Dataset, RunConfig};
use toml::Table;

use crate::{earlier, keys};

/// Keys with other lines of their own, or without a meaning for what is trained.
const SAID_ELSEWHERE: [&str; 10] = [
    "train.steps",
    "train.threads",
    "train.sample",
    "train.keep",
    "schedule.decay_steps",
    "schedule.restart_step",
    "precision.compute",
    "precision.products",
    "device.kernels",
    "recorded.decided",
];

/// Keys that name the data.
const DATA: [&str; 7] = [
    "data.text",
    "data.extensions",
    "data.text_key",
    "data.tokens",
    "data.validation_tokens",
    "data.token_type",
    "data.tokenizer",
];

/// Comparison of the last start of a run with this one.
pub struct Changes<'a> {
    /// The configuration of the last start.
    pub before: &'a RunConfig,
    /// The configuration of this start.
    pub now: &'a RunConfig,
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
        let [before, now] = [self.before, self.now].map(Table::try_from);
        let (before, now) = (before?, now?);
        let names: BTreeSet<String> = [&before, &now]
            .into_iter()
            .flat_map(|table| keys::flat(table).map(|(name, _)| name))
            .filter(|name| keys::lookup(&before, name) != keys::lookup(&now, name))
            .filter(|name| !SAID_ELSEWHERE.contains(&name.as_str()))
            .collect();
        let value = |table: &Table, name: &str| {
            keys::lookup(table, name).map_or("left out".to_string(), ToString::to_string)
        };
        let describe =
            |name: &String| format!("{name} is {} and was {}", value(&now, name), value(&before, name));
        let mut lines: Vec<String> = Vec::new();
        let mut others: Vec<String> = Vec::new();
        for name in &names {
            match self.meaning(name) {
                Some(meaning) => lines.push(format!("{}: {meaning}", describe(name))),
                None => others.push(describe(name)),
            }
        }
        if names.iter().any(|name| DATA.contains(&name.as_str())) {
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
        if is > was && self.checkpoint.step() > 0 && !has_other_data(self.before, self.now) {
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

    /// Consequence of a changed key for the run; `None` if it changes neither samples nor losses.
    fn meaning(&self, key: &str) -> Option<String> {
        let (was, is) = (self.before, self.now);
        let other_order = "the samples that are left of this epoch are others: some of those that it has had come again, and some never come";
        let other_windows =
            "the validation loss is that of other windows, and does not compare with the ones before";
        Some(match key {
            "data.validation" if is.data.validation == 0.0 => {
                "nothing is held out or evaluated, and what was held out is trained on".to_string()
            }
            "data.validation" => {
                format!("{other_windows}; what is no longer held out is trained on")
            }
            "data.documents" | "data.end_token" => {
                "tokens see other ones than before, and other targets are predicted: losses do not compare with the ones before".to_string()
            }
            "train.seed" => format!("{other_order}; the masks of dropout are others, too"),
            "data.order" => other_order.to_string(),
            "data.mask_token" => "another token hides the ones that are predicted".to_string(),
            "model.seq" => {
                let beyond = match is.model.seq > was.model.seq {
                    true => format!("; positions from {} on were not trained before", was.model.seq),
                    false => String::new(),
                };
                format!(
                    "the text is cut into other windows: {other_order}; {other_windows}; a step has {} tokens and had {}{beyond}",
                    is.batch.global * is.model.seq,
                    was.batch.global * was.model.seq
                )
            }
            "train.eval_samples" => other_windows.to_string(),
            "batch.global" => format!(
                "a step has {} tokens and had {}, while optimizer.lr and schedule count steps as before",
                is.batch.global * is.model.seq,
                was.batch.global * was.model.seq
            ),
            "loss.label_smoothing" | "loss.z_loss" => {
                "training losses have another term, and do not compare with the ones before; validation losses do".to_string()
            }
            "parallel.updates" => "losses and rates of steps count otherwise".to_string(),
            _ => return None,
        })
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

/// Returns whether a resumed run reads other files than before.
pub fn has_other_data(before: &RunConfig, now: &RunConfig) -> bool {
    let (was, is) = (&before.data, &now.data);
    was.text != is.text
        || was.tokens != is.tokens
        || was.validation_tokens != is.validation_tokens
        || was.token_type != is.token_type
        || was.extensions != is.extensions
        || was.text_key != is.text_key
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
