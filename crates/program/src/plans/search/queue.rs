//! The order in which candidates are appraised: by their estimates, in multiples that plans of candidates like them have shown.
//!
//! An estimate that is too short by half would otherwise keep all better candidates waiting. A kind of which nothing is known counts as the
//! best that is known, so that each kind that may win is tried.

use std::collections::{BTreeMap, HashMap};

use super::candidate::{Candidate, Kind, Like};
use super::estimate::Estimate;

/// Shares of the smallest multiple that others of a kind, and others like it, have at least.
const MARGIN_OF_KIND: f64 = 0.97;
const MARGIN_OF_LIKE: f64 = 0.9;

/// Multiples of estimates, by what decides how good these are.
#[derive(Debug, Default)]
pub(super) struct Multiples {
    of_kind: HashMap<Kind, f64>,
    of_like: HashMap<Like, f64>,
    smallest: Option<f64>,
}

impl Multiples {
    /// Notes what a plan has shown; the smallest multiple counts.
    pub(super) fn note(&mut self, of: &Candidate, multiple: f64) {
        let smaller = |known: &mut f64| *known = known.min(multiple);
        self.of_kind.entry(of.kind()).and_modify(smaller).or_insert(multiple);
        self.of_like.entry(of.like()).and_modify(smaller).or_insert(multiple);
        self.smallest = Some(self.smallest.map_or(multiple, |known| known.min(multiple)));
    }

    /// What it is at least, by those of the same kind or of others like it, with a margin; 1 where nothing is known.
    pub(super) fn min_expected(&self, of: &Candidate) -> f64 {
        let kind = self.of_kind.get(&of.kind()).map(|known| known * MARGIN_OF_KIND);
        let like = || self.of_like.get(&of.like()).map(|known| known * MARGIN_OF_LIKE);
        kind.or_else(like).unwrap_or(1.0).max(1.0)
    }

    /// That of candidates of the same kind, of others like it, or of all; 1 where nothing is known.
    pub(super) fn expected(&self, of: &Candidate) -> f64 {
        let kind = self.of_kind.get(&of.kind());
        let known = kind.or_else(|| self.of_like.get(&of.like())).copied();
        known.or(self.smallest).unwrap_or(1.0)
    }
}

impl Multiples {
    /// Candidates, first those that are expected to be fastest.
    pub(super) fn in_expected_order<'a>(
        &self,
        candidates: &'a [(Candidate, Estimate)],
    ) -> impl Iterator<Item = &'a (Candidate, Estimate)> {
        let expected = |(candidate, estimate): &(Candidate, Estimate)| {
            self.expected(candidate) * estimate.parts.seconds() / candidate.global as f64
        };
        let mut all: Vec<(f64, usize)> = candidates.iter().map(expected).zip(0..).collect();
        all.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        all.into_iter().map(|(_, number)| &candidates[number])
    }
}

/// Candidates by kind, each fastest first by its estimate.
pub(super) struct Queue(BTreeMap<Kind, std::vec::IntoIter<usize>>);

impl Queue {
    /// All candidates, which are sorted by their estimates.
    pub(super) fn of(candidates: &[(Candidate, Estimate)]) -> Queue {
        let mut kinds: BTreeMap<Kind, Vec<usize>> = BTreeMap::new();
        for (number, (candidate, _)) in candidates.iter().enumerate() {
            kinds.entry(candidate.kind()).or_default().push(number);
        }
        Queue(kinds.into_iter().map(|(kind, numbers)| (kind, numbers.into_iter())).collect())
    }

    /// The number of the next candidate that is expected to be fastest, with its seconds for a sequence.
    pub(super) fn next(
        &mut self,
        candidates: &[(Candidate, Estimate)],
        multiples: &Multiples,
    ) -> Option<(usize, f64)> {
        let expected = |number: usize| {
            let (candidate, estimate) = &candidates[number];
            multiples.expected(candidate) * estimate.parts.seconds() / candidate.global as f64
        };
        let heads = self.0.iter().filter_map(|(kind, numbers)| Some((*kind, *numbers.as_slice().first()?)));
        let best = heads.map(|(kind, number)| (kind, number, expected(number)));
        let (kind, number, seconds) = best.min_by(|a, b| a.2.total_cmp(&b.2).then(a.1.cmp(&b.1)))?;
        self.0.get_mut(&kind)?.next();
        Some((number, seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plans::search::estimate::Parts;

    fn candidates() -> Vec<(Candidate, Estimate)> {
        let of = |zero, micro, kernels| {
            let candidate = Candidate { global: 1, zero, micro, ..Candidate::NONE };
            (candidate, Estimate { parts: Parts { kernels, ..Parts::default() }, bytes: 1 })
        };
        vec![of(3, 1, 1.0), of(3, 2, 1.1), of(1, 1, 1.5), of(1, 2, 1.6)]
    }

    /// What a plan shows of one kind lets another come first; of an unknown kind the best is expected that any has shown.
    #[test]
    fn kinds_whose_estimates_were_too_short_wait() {
        let (candidates, mut multiples) = (candidates(), Multiples::default());
        let mut queue = Queue::of(&candidates);
        let mut next = |multiples: &Multiples| queue.next(&candidates, multiples).map(|(number, _)| number);
        assert_eq!(next(&multiples), Some(0));
        multiples.note(&candidates[0].0, 2.0);
        // Nothing is known of the other kind: both are twice as slow.
        assert_eq!(next(&multiples), Some(1));
        multiples.note(&candidates[2].0, 1.0);
        assert_eq!([next(&multiples), next(&multiples), next(&multiples)], [Some(2), Some(3), None]);
        assert_eq!(
            (multiples.min_expected(&candidates[1].0), multiples.min_expected(&candidates[3].0)),
            (1.94, 1.0)
        );
    }
}
