//! Losses of preferences: of two answers to a prompt, one chosen and one rejected, or of one answer with a label.
//!
//! An answer is known by the sum of the logarithms of its tokens' probabilities, its number of tokens, and that sum under the reference
//! model. All functions compute in f64. Sources: DPO (Rafailov et al., arXiv 2305.18290), its robust form (Chowdhury et al., 2403.00409),
//! IPO (Azar et al., 2310.12036), ORPO (Hong et al., 2403.07691), SimPO (Meng et al., 2405.14734), KTO (Ethayarajh et al., 2402.01306);
//! normalisations as in TRL.

/// Numbers that a loss of preferences reports as sums over pairs: the losses, the rewards of chosen and of rejected answers, the pairs that the
/// model orders as their labels do, and the chosen answers.
pub const PREFERENCE_SUMS: usize = 5;

/// A loss of preferences, and its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preference {
    /// The loss.
    pub kind: PreferenceKind,
    /// Factor of rewards; of IPO, of the distance from the reference; of ORPO, of the odds ratio's term.
    pub beta: f32,
    /// Share of pairs whose labels are wrong, for the robust loss and SimPO.
    pub label_smoothing: f32,
    /// Margin between the rewards of SimPO.
    pub gamma: f32,
    /// Weights of chosen answers and of rejected ones in KTO.
    pub weights: [f32; 2],
    /// Number of neighbouring pairs over whose second answers KTO's distance from the reference is a mean.
    pub kl_pairs: usize,
}

/// Kinds of losses of preferences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreferenceKind {
    /// `-log sigmoid(beta h)`, where h is what chosen and rejected answer have gained over the reference, subtracted.
    Dpo,
    /// The same for labels that are wrong with a known probability.
    Robust,
    /// The same with means over tokens.
    DpoNorm,
    /// `(h - 1 / (2 beta))²`, with means over tokens.
    Ipo,
    /// Mean over the chosen answer's tokens of their losses, and `-beta log sigmoid(log odds ratio)` of both means. No reference.
    Orpo,
    /// `-log sigmoid(beta h - gamma)` of means over tokens. No reference.
    Simpo,
    /// `w (1 - sigmoid(±(beta gain - beta kl)))` of the first answer of a pair, which is chosen or rejected. The second one is an answer to
    /// another prompt, of which the distance kl is taken and no derivative.
    Kto,
}

/// An answer as the model and its reference see it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Answer {
    /// Sum of the logarithms of its tokens' probabilities.
    pub log_probability: f64,
    /// The same under the reference; 0 for losses without one.
    pub reference: f64,
    /// Its number of tokens.
    pub tokens: f64,
}

/// The loss of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairLoss {
    /// The numbers that are summed over pairs.
    pub sums: [f64; PREFERENCE_SUMS],
    /// The loss derived by the log-probability of each answer.
    pub derivatives: [f64; 2],
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

impl PreferenceKind {
    /// Returns whether the loss compares with a reference model.
    pub fn has_reference(self) -> bool {
        !matches!(self, PreferenceKind::Orpo | PreferenceKind::Simpo)
    }
}

impl Preference {
    /// The loss of a pair; of KTO, `kl` is the distance from the reference ([`Preference::distance`]), and `is_chosen` the label.
    pub fn of_pair(&self, [first, second]: [Answer; 2], kl: f64, is_chosen: bool) -> PairLoss {
        if self.kind == PreferenceKind::Kto {
            return self.of_answer(first, kl, is_chosen);
        }
        let is_mean = !matches!(self.kind, PreferenceKind::Dpo | PreferenceKind::Robust);
        let divisors = [first, second].map(|answer| if is_mean { answer.tokens.max(1.0) } else { 1.0 });
        let gain = |answer: Answer, divisor: f64| (answer.log_probability - answer.reference) / divisor;
        let gains = [gain(first, divisors[0]), gain(second, divisors[1])];
        let (loss, [by_first, by_second]) = self.of_gains(gains);
        // TRL's rewards of losses with a reference are those of whole answers.
        let rewarded = if self.kind.has_reference() { [1.0; 2] } else { divisors };
        let [chosen, rejected] =
            [gain(first, rewarded[0]), gain(second, rewarded[1])].map(|gain| f64::from(self.beta) * gain);
        let is_right = f64::from(u8::from(chosen > rejected));
        PairLoss {
            sums: [loss, chosen, rejected, is_right, 1.0],
            derivatives: [by_first / divisors[0], by_second / divisors[1]],
        }
    }

    /// The loss of a pair by its gains, and its derivatives.
    fn of_gains(&self, [c, r]: [f64; 2]) -> (f64, [f64; 2]) {
        let (beta, smoothing) = (f64::from(self.beta), f64::from(self.label_smoothing));
        // -log sigmoid(beta x), of which the share `flipped` counts for the other order, with its derivative.
        let ordered = |x: f64, flipped: f64| {
            let (right, wrong) = (log_sigmoid(beta * x), log_sigmoid(-beta * x));
            let loss = -(1.0 - flipped) * right - flipped * wrong;
            (loss, -beta * ((1.0 - flipped) * sigmoid(-beta * x) - flipped * sigmoid(beta * x)))
        };
        let h = c - r;
        let (loss, by_h) = match self.kind {
            PreferenceKind::Dpo | PreferenceKind::DpoNorm => ordered(h, 0.0),
            PreferenceKind::Robust => {
                let (straight, flipped) = (ordered(h, 0.0), ordered(-h, 0.0));
                let divisor = 1.0 - 2.0 * smoothing;
                let loss = ((1.0 - smoothing) * straight.0 - smoothing * flipped.0) / divisor;
                (loss, ((1.0 - smoothing) * straight.1 + smoothing * flipped.1) / divisor)
            }
            PreferenceKind::Ipo => {
                let x = h - 1.0 / (2.0 * beta);
                (x * x, 2.0 * x)
            }
            PreferenceKind::Simpo => ordered(h - f64::from(self.gamma) / beta, smoothing),
            PreferenceKind::Orpo => {
                // log(p / (1 - p)) of p = exp(x), x below 0.
                let complement = |x: f64| (-x.min(-f64::MIN_POSITIVE).exp_m1()).max(f64::MIN_POSITIVE);
                let log_odds = (c - complement(c).ln()) - (r - complement(r).ln());
                let by_odds = -beta * sigmoid(-log_odds);
                let loss = -c - beta * log_sigmoid(log_odds);
                return (loss, [by_odds / complement(c) - 1.0, -by_odds / complement(r)]);
            }
            PreferenceKind::Kto => unreachable!("its answers are no pairs"),
        };
        (loss, [by_h, -by_h])
    }

    fn of_answer(&self, answer: Answer, kl: f64, is_chosen: bool) -> PairLoss {
        let beta = f64::from(self.beta);
        let reward = beta * (answer.log_probability - answer.reference);
        let (sign, weight) = if is_chosen { (1.0, self.weights[0]) } else { (-1.0, self.weights[1]) };
        let (weight, by_label) = (f64::from(weight), sign * (reward - beta * kl));
        let is_right = f64::from(u8::from(by_label > 0.0));
        let (chosen, rejected) = if is_chosen { (reward, 0.0) } else { (0.0, reward) };
        let of_chosen = f64::from(u8::from(is_chosen));
        let slope = sigmoid(by_label) * sigmoid(-by_label);
        PairLoss {
            sums: [weight * sigmoid(-by_label), chosen, rejected, is_right, of_chosen],
            derivatives: [-weight * sign * beta * slope, 0.0],
        }
    }

    /// KTO's distance from the reference, at least 0, from second answers of pairs.
    pub fn distance(seconds: impl ExactSizeIterator<Item = Answer>) -> f64 {
        let count = seconds.len().max(1) as f64;
        let gains = seconds.map(|answer| answer.log_probability - answer.reference);
        (gains.sum::<f64>() / count).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [PreferenceKind; 7] = [
        PreferenceKind::Dpo,
        PreferenceKind::Robust,
        PreferenceKind::DpoNorm,
        PreferenceKind::Ipo,
        PreferenceKind::Orpo,
        PreferenceKind::Simpo,
        PreferenceKind::Kto,
    ];

    /// Central differences in f64: an error of about the square of the step, and of 1e-16 over it.
    #[test]
    fn derivatives_are_differences_of_losses() {
        let answers = [(-12.3, -11.9, 7.0), (-30.5, -29.0, 19.0), (-0.4, -0.5, 3.0)];
        for kind in KINDS {
            let (weights, kl_pairs) = ([1.0, 0.7], 1);
            let of = Preference { kind, beta: 0.3, label_smoothing: 0.1, gamma: 0.5, weights, kl_pairs };
            for (first, second) in [(0, 1), (1, 0), (2, 1), (0, 2)] {
                let answer = |at: usize, moved: f64| {
                    let (log_probability, reference, tokens) = answers[at];
                    let reference = if kind.has_reference() { reference } else { 0.0 };
                    Answer { log_probability: log_probability + moved, reference, tokens }
                };
                let pair =
                    |a: f64, b: f64| of.of_pair([answer(first, a), answer(second, b)], 0.2, first == 0);
                let (at, step) = (pair(0.0, 0.0), 1e-5);
                let by_first = (pair(step, 0.0).sums[0] - pair(-step, 0.0).sums[0]) / (2.0 * step);
                let by_second = (pair(0.0, step).sums[0] - pair(0.0, -step).sums[0]) / (2.0 * step);
                for (found, expected) in at.derivatives.into_iter().zip([by_first, by_second]) {
                    assert!((found - expected).abs() < 1e-8, "{kind:?}: {found} for {expected}");
                }
            }
        }
    }

    #[test]
    fn losses_are_finite_far_away() {
        for kind in KINDS {
            let of = Preference {
                kind,
                beta: 0.1,
                label_smoothing: 0.0,
                gamma: 0.5,
                weights: [1.0; 2],
                kl_pairs: 1,
            };
            for (c, r) in [(-1e5, -1.0), (-1.0, -1e5), (0.0, 0.0)] {
                let answer = |sum: f64| Answer { log_probability: sum, reference: 0.0, tokens: 10.0 };
                let PairLoss { sums, derivatives } = of.of_pair([answer(c), answer(r)], 0.0, true);
                let all = || sums.into_iter().chain(derivatives);
                assert!(all().all(f64::is_finite), "{kind:?} {c} {r}: {sums:?} {derivatives:?}");
            }
        }
    }
}
