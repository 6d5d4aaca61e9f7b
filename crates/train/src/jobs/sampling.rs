//! Sampling of the next token from the logits.

use std::cmp::Ordering;

/// Sampling parameters of the next token. They apply in this order: temperature, `top_k`, `top_p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Only the k most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens whose probabilities together reach this; 1 for all (Holtzman et al., arXiv
    /// 1904.09751).
    pub top_p: f32,
    /// Tokens that are dropped from the context at once when it is full, at least 1. With 1 the model always sees as
    /// many tokens as it can. With more, fewer tokens are computed again.
    pub shift: usize,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    /// The distribution of the model.
    fn default() -> Sampling {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, shift: 1, seed: 1 }
    }
}

impl Sampling {
    /// The tokens that may come next, the most likely first, with their weights: that of the first is 1. The others come in
    /// falling order only where `top_p` needs it, since to sort a vocabulary takes longer than a small model. A token whose
    /// logit is minus infinity is none of them.
    pub fn candidates(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let likelier = |a: &u32, b: &u32| likelier(logits, *a, *b);
        let mut order: Vec<u32> =
            (0u32..).zip(logits).filter(|(_, logit)| **logit != f32::NEG_INFINITY).map(|(i, _)| i).collect();
        if self.temperature <= 0.0 {
            return order.into_iter().min_by(likelier).map(|best| (best, 1.0)).into_iter().collect();
        }
        if (1..order.len()).contains(&self.top_k) {
            order.select_nth_unstable_by(self.top_k, likelier);
            order.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            order.sort_unstable_by(likelier);
        } else if let Some(best) = (0..order.len()).min_by(|a, b| likelier(&order[*a], &order[*b])) {
            order.swap(0, best);
        }
        let max = logits[order[0] as usize];
        let weight = |i: u32| (i, f64::from((logits[i as usize] - max) / self.temperature).exp());
        let mut weights: Vec<(u32, f64)> = order.into_iter().map(weight).collect();
        weights.truncate(nucleus(&weights, self.top_p));
        weights
    }

    /// The candidate that `at` in [0, 1) falls on.
    pub(crate) fn draw(&self, logits: &[f32], at: f64) -> u32 {
        let candidates = self.candidates(logits);
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        let mut left = at * total;
        for (token, weight) in &candidates {
            left -= weight;
            if left < 0.0 {
                return *token;
            }
        }
        candidates[0].0
    }
}

/// The larger logit first, of equal ones the smaller token.
fn likelier(logits: &[f32], a: u32, b: u32) -> Ordering {
    logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b))
}

/// Number of the first candidates that together reach the share `top_p` of all; at least one.
fn nucleus(weights: &[(u32, f64)], top_p: f32) -> usize {
    if top_p >= 1.0 {
        return weights.len();
    }
    let enough = f64::from(top_p) * weights.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut sum = 0.0;
    let before_enough = weights.iter().take_while(|(_, weight)| {
        let more = sum < enough;
        sum += weight;
        more
    });
    before_enough.count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits of the probabilities 0.1, 0.5, 0.15, 0.25.
    fn logits() -> Vec<f32> {
        [0.1f32, 0.5, 0.15, 0.25].map(f32::ln).to_vec()
    }

    fn probabilities(how: Sampling) -> Vec<(u32, f64)> {
        let candidates = how.candidates(&logits());
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        candidates.into_iter().map(|(token, weight)| (token, weight / total)).collect()
    }

    fn check(how: Sampling, expected: &[(u32, f64)]) {
        let mut found = probabilities(how);
        found[1..].sort_by(|(_, a), (_, b)| b.total_cmp(a));
        assert_eq!(found.len(), expected.len(), "{how:?}: {found:?}");
        for ((token, p), (expected_token, expected_p)) in found.iter().zip(expected) {
            assert_eq!(token, expected_token, "{how:?}: {found:?}");
            assert!((p - expected_p).abs() < 1e-6, "{how:?}: {found:?}");
        }
    }

    #[test]
    fn candidates_follow_temperature_top_k_and_top_p() {
        let all = Sampling::default();
        check(all, &[(1, 0.5), (3, 0.25), (2, 0.15), (0, 0.1)]);
        check(Sampling { temperature: 0.0, ..all }, &[(1, 1.0)]);
        check(Sampling { top_k: 2, ..all }, &[(1, 2.0 / 3.0), (3, 1.0 / 3.0)]);
        check(Sampling { top_k: 9, ..all }, &[(1, 0.5), (3, 0.25), (2, 0.15), (0, 0.1)]);
        // The smallest set of tokens that reaches the share: 0.5, 0.75, 0.9, 1.
        check(Sampling { top_p: 0.01, ..all }, &[(1, 1.0)]);
        check(Sampling { top_p: 0.49, ..all }, &[(1, 1.0)]);
        check(Sampling { top_p: 0.6, ..all }, &[(1, 2.0 / 3.0), (3, 1.0 / 3.0)]);
        check(Sampling { top_p: 0.8, ..all }, &[(1, 5.0 / 9.0), (3, 2.5 / 9.0), (2, 1.5 / 9.0)]);
        // Of the two that top_k leaves, the first has 2/3.
        check(Sampling { top_k: 2, top_p: 0.6, ..all }, &[(1, 1.0)]);
        check(Sampling { top_k: 2, top_p: 0.7, ..all }, &[(1, 2.0 / 3.0), (3, 1.0 / 3.0)]);
        // At temperature 0.5 the probabilities are squared: 0.25, 0.0625, 0.0225, 0.01 of 0.345.
        check(Sampling { temperature: 0.5, top_p: 0.75, ..all }, &[(1, 0.8), (3, 0.2)]);
    }

    #[test]
    fn draws_have_the_frequencies_of_the_candidates() {
        let how = Sampling { top_p: 0.8, ..Sampling::default() };
        let mut counts = [0usize; 4];
        let draws = 9000;
        for i in 0..draws {
            counts[how.draw(&logits(), (i as f64 + 0.5) / draws as f64) as usize] += 1;
        }
        // 5/9, 2.5/9 and 1.5/9 of all; the token outside of the nucleus never.
        assert_eq!(counts[0], 0);
        for (token, expected) in [(1, 5000), (3, 2500), (2, 1500)] {
            assert!(counts[token].abs_diff(expected) <= 1, "{counts:?}");
        }
    }

    #[test]
    fn a_logit_of_minus_infinity_is_never_a_candidate() {
        let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 1.0];
        for how in [
            Sampling::default(),
            Sampling { temperature: 0.0, ..Sampling::default() },
            Sampling { temperature: 100.0, ..Sampling::default() },
            Sampling { top_k: 3, ..Sampling::default() },
            Sampling { top_p: 0.99, ..Sampling::default() },
        ] {
            let tokens: Vec<u32> = how.candidates(&logits).into_iter().map(|(token, _)| token).collect();
            assert!(
                tokens.iter().all(|token| [1, 3].contains(token)) && tokens[0] == 3,
                "{how:?}: {tokens:?}"
            );
        }
    }

    #[test]
    fn equal_logits_take_the_smaller_token() {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(greedy.draw(&[1.0, 3.0, 3.0], 0.9), 1);
        let two = Sampling { top_k: 2, ..Sampling::default() };
        assert_eq!(two.candidates(&[3.0, 3.0, 3.0]), [(0, 1.0), (1, 1.0)]);
    }
}
