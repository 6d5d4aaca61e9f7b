//! `[preference]`: the loss of pairs of answers.

use phalanx_tensor::{Preference, PreferenceKind};

use super::bounds::MAX_SEQUENCES;
use super::check::refuse;
use super::declare::Conversion::Same;
use super::declare::Resume::Said;
use super::declare::{AXOLOTL, KEY, LLAMA_FACTORY};
use super::needs::{Need, SET};
use super::{ConfigError, RunConfig};

/// Consequence for a resumed run.
const OTHER_LOSS: &str = "losses and rewards do not compare with the ones before";

const OF_PAIRS: Need = Need::is_for(&[("data.pairs", SET)], "");

table! {
    /// `[preference]`: the loss of `data.pairs`. Names and defaults are those of TRL.
    "preference" PreferenceConfig {
        /// The loss of a pair.
        kind: Kind = Kind::Dpo, KEY.resume(Said(OTHER_LOSS)).needs(&[OF_PAIRS]);
        /// Factor of rewards: how near the model stays to its reference. SimPO's authors take 2 to 2.5.
        beta: f64 = 0.1, KEY.resume(Said(OTHER_LOSS)).above(0.0, f32::MAX as f64).needs(&[OF_PAIRS])
            .foreign(&[(AXOLOTL, "rl_beta", Same, ""), (LLAMA_FACTORY, "pref_beta", Same, "")]);
        /// Probability that a pair's answers are confused.
        label_smoothing: f64 = 0.0, KEY.resume(Said(OTHER_LOSS)).from(0.0, 0.499)
            .needs(&[Need::any(&[("preference.kind", &["robust", "simpo"])], "")])
            .foreign(&[(AXOLOTL, "dpo_label_smoothing", Same, "")]);
        /// Margin of SimPO between the rewards.
        gamma: f64 = 0.5, KEY.resume(Said(OTHER_LOSS)).from(0.0, f32::MAX as f64)
            .needs(&[Need::is_for(&[("preference.kind", &["simpo"])], "")])
            .foreign(&[(AXOLOTL, "simpo_gamma", Same, ""), (LLAMA_FACTORY, "simpo_gamma", Same, "")]);
        /// Weight of KTO's chosen answers.
        desirable_weight: f64 = 1.0, KEY.resume(Said(OTHER_LOSS)).from(0.0, f32::MAX as f64)
            .needs(&[Need::is_for(&[("preference.kind", &["kto"])], "")])
            .foreign(&[(AXOLOTL, "kto_desirable_weight", Same, ""), (LLAMA_FACTORY, "kto_chosen_weight", Same, "")]);
        /// Weight of KTO's rejected answers.
        undesirable_weight: f64 = 1.0, KEY.resume(Said(OTHER_LOSS)).from(0.0, f32::MAX as f64)
            .needs(&[Need::is_for(&[("preference.kind", &["kto"])], "")])
            .foreign(&[(AXOLOTL, "kto_undesirable_weight", Same, ""), (LLAMA_FACTORY, "kto_rejected_weight", Same, "")]);
        /// Number of KTO's answers over which the distance from the reference is a mean: a divisor of those of a micro-batch. When left
        /// out: those of a micro-batch, so that the loss depends on its size.
        kl_answers: Option<usize> = None, KEY.resume(Said(OTHER_LOSS)).from(1.0, MAX_SEQUENCES)
            .needs(&[Need::is_for(&[("preference.kind", &["kto"])], "")]);
    }
}

words! {
    /// Losses of preferences.
    Kind {
        /// Direct preference optimisation: `-log sigmoid(beta h)`; h is what the chosen answer has gained over the reference, minus that of
        /// the rejected one.
        Dpo = "dpo",
        /// DPO of pairs that are confused with the probability `label_smoothing`.
        Robust = "robust",
        /// DPO of means over tokens (TRL's `sigmoid_norm`).
        DpoNorm = "dpo-norm",
        /// `(h - 1 / (2 beta))²` of means over tokens.
        Ipo = "ipo",
        /// The loss of the chosen answer's tokens and the odds ratio of both answers, without a reference.
        Orpo = "orpo",
        /// `-log sigmoid(beta h - gamma)` of means over tokens, without a reference.
        Simpo = "simpo",
        /// Answers with a label, one by one.
        Kto = "kto",
    }
}

impl From<Kind> for PreferenceKind {
    fn from(kind: Kind) -> PreferenceKind {
        match kind {
            Kind::Dpo => PreferenceKind::Dpo,
            Kind::Robust => PreferenceKind::Robust,
            Kind::DpoNorm => PreferenceKind::DpoNorm,
            Kind::Ipo => PreferenceKind::Ipo,
            Kind::Orpo => PreferenceKind::Orpo,
            Kind::Simpo => PreferenceKind::Simpo,
            Kind::Kto => PreferenceKind::Kto,
        }
    }
}

impl RunConfig {
    /// The loss of preferences; None where samples are no pairs.
    pub fn preference_loss(&self) -> Option<Preference> {
        self.data.pairs.as_ref()?;
        let &PreferenceConfig {
            kind,
            beta,
            label_smoothing,
            gamma,
            desirable_weight,
            undesirable_weight,
            kl_answers,
        } = &self.preference;
        Some(Preference {
            kind: kind.into(),
            beta: beta as f32,
            label_smoothing: label_smoothing as f32,
            gamma: gamma as f32,
            weights: [desirable_weight as f32, undesirable_weight as f32],
            kl_pairs: kl_answers.unwrap_or(self.micro_batch_size() / 2).max(1),
        })
    }

    /// Returns whether answers are compared with those of a reference model, the one before the first step.
    pub fn has_reference(&self) -> bool {
        self.preference_loss().is_some_and(|preference| preference.kind.has_reference())
    }

    /// Refuses what a loss of preferences cannot be computed with.
    pub(super) fn check_preference(&self) -> Result<(), ConfigError> {
        let Some(Preference { kl_pairs, .. }) = self.preference_loss() else { return Ok(()) };
        let micro = self.micro_batch_size();
        if !micro.is_multiple_of(2) {
            let expected = format!(
                "makes micro-batches of {micro} sequences (batch.micro), and the two answers of a pair are neighbours: it must be even"
            );
            return Err(refuse("batch.global", self.batch.global, expected));
        }
        if !(micro / 2).is_multiple_of(kl_pairs) {
            let expected = format!("must divide the {} answers of a micro-batch (batch.micro)", micro / 2);
            return Err(refuse("preference.kl_answers", kl_pairs, expected));
        }
        let dropouts = self.model.dropouts();
        let dropped = [dropouts.embedding, dropouts.attention, dropouts.residual, self.lora.dropout as f32];
        for (key, value) in [
            ("model.dropout", dropped.into_iter().fold(0.0, f32::max).into()),
            ("loss.label_smoothing", self.loss.label_smoothing),
            ("loss.z_loss", self.loss.z_loss),
        ] {
            if value > 0.0 {
                let expected = "must be 0 with data.pairs: log-probabilities of whole answers are compared";
                return Err(refuse(key, value, expected));
            }
        }
        Ok(())
    }
}
