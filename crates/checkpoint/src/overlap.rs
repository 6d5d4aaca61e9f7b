//! Computes the overlap of a stored and a requested part of a tensor, without listing the runs of either.
//!
//! Both parts are a [`Stripe`] and a range of its elements. [`Overlaps`] iterates over the overlap in
//! the order of the whole tensor, computing each step by arithmetic. [`ReadSpans`] merges short neighbouring runs, so that
//! one read of a window serves thousands of them, and leaves long runs alone, so that they need no copy.

use std::iter::{Peekable, Take};
use std::ops::Range;

use phalanx_plan::Stripe;

/// Consecutive elements that two parts have in common. Both ranges have the same length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// Elements of the stored part.
    pub(crate) source: Range<u64>,
    /// Elements of the wanted part.
    pub(crate) target: Range<u64>,
}

/// The common elements of two parts, in order.
///
/// P runs of the source and Q of the target, between the first and the last common element, cost
/// at most P + Q steps of a few divisions.
#[derive(Clone)]
pub(crate) struct Overlaps {
    source: Stripe,
    target: Stripe,
    /// Elements of the source that are not processed yet.
    rest: Range<u64>,
    wanted: Range<u64>,
}

impl Overlaps {
    /// The overlaps of two parts of one tensor. Each part is a stripe, which fits the tensor, and a range of its
    /// elements.
    pub(crate) fn new(source: (Stripe, Range<u64>), target: (Stripe, Range<u64>)) -> Overlaps {
        // The same cut on both sides is one run.
        let same = source.0 == target.0;
        let flat = |stripe: Stripe| if same { Stripe::whole(u64::MAX) } else { stripe };
        Overlaps { source: flat(source.0), target: flat(target.0), rest: source.1, wanted: target.1 }
    }
}

impl Iterator for Overlaps {
    type Item = Overlap;

    fn next(&mut self) -> Option<Overlap> {
        while !self.rest.is_empty() {
            let local = self.rest.start;
            let to = self.target.locals_before(self.source.global(local)).max(self.wanted.start);
            if to >= self.wanted.end {
                break;
            }
            let from = self.source.locals_before(self.target.global(to));
            if from > local {
                // No element between here and there is wanted.
                self.rest.start = from;
                continue;
            }
            let left = self.source.run_left(from).min(self.target.run_left(to));
            let count = left.min(self.rest.end - from).min(self.wanted.end - to);
            self.rest.start = from + count;
            return Some(Overlap { source: from..from + count, target: to..to + count });
        }
        None
    }
}

/// Limits for combining overlaps into reads, in elements.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Maximum length of a span, gaps included; at least `alone`.
    pub(crate) window: u64,
    /// Overlaps of at least this length are read on their own, directly into the target.
    pub(crate) alone: u64,
    /// Maximum gap between two overlaps of a span; gaps are read and discarded.
    pub(crate) gap: u64,
}

/// Overlaps that are read with one read of the source.
pub(crate) struct ReadSpan {
    /// The range to read: from the first element of the first overlap to the last element of the last overlap.
    pub(crate) source: Range<u64>,
    /// Its overlaps: at least one.
    pub(crate) overlaps: Take<Overlaps>,
    /// The target, if the span has only one overlap.
    pub(crate) single: Option<Range<u64>>,
}

impl ReadSpan {
    /// Copies the overlaps from `window`, which holds the span's source, to `out`, which holds the target starting at
    /// element `out_start`. Returns the number of elements. An element is `width` items of the slices.
    pub(crate) fn scatter<T: Copy>(&self, window: &[T], width: usize, out: &mut [T], out_start: u64) -> u64 {
        let mut elements = 0;
        for Overlap { source, target } in self.overlaps.clone() {
            let from = (source.start - self.source.start) as usize * width;
            let to = (target.start - out_start) as usize * width;
            let count = (source.end - source.start) as usize * width;
            out[to..to + count].copy_from_slice(&window[from..from + count]);
            elements += source.end - source.start;
        }
        elements
    }
}

/// Iterates over all overlaps in order, grouped into [`ReadSpan`]s.
pub(crate) struct ReadSpans {
    overlaps: Peekable<Overlaps>,
    /// A copy of `overlaps` at the start of the next span, from which the span iterates again.
    again: Overlaps,
    limits: Limits,
}

impl ReadSpans {
    pub(crate) fn new(overlaps: Overlaps, limits: Limits) -> ReadSpans {
        assert!(limits.alone <= limits.window, "an overlap that is not read alone must fit a window");
        ReadSpans { overlaps: overlaps.clone().peekable(), again: overlaps, limits }
    }
}

impl Iterator for ReadSpans {
    type Item = ReadSpan;

    fn next(&mut self) -> Option<ReadSpan> {
        let Limits { window, alone, gap } = self.limits;
        let first = self.overlaps.next()?;
        let start = first.source.start;
        self.again.rest.start = start;
        let length = |overlap: &Overlap| overlap.source.end - overlap.source.start;
        let (mut end, mut count) = (first.source.end, 1);
        if length(&first) < alone {
            let joins = |end: u64, next: &Overlap| {
                length(next) < alone && next.source.start - end <= gap && next.source.end - start <= window
            };
            while let Some(next) = self.overlaps.next_if(|next| joins(end, next)) {
                (end, count) = (next.source.end, count + 1);
            }
        }
        let single = (count == 1).then_some(first.target);
        Some(ReadSpan { source: start..end, overlaps: self.again.clone().take(count), single })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stripe(run: u64, ranks: u64, rank: u64) -> Stripe {
        Stripe { run, ranks, rank }
    }

    /// Compares every pair of parts of 48 elements with a search element by element.
    #[test]
    fn overlaps_are_what_both_hold() {
        let stripes = [
            stripe(48, 1, 0),
            stripe(24, 2, 1),
            stripe(4, 2, 0),
            stripe(4, 2, 1),
            stripe(3, 4, 2),
            stripe(1, 3, 1),
            stripe(2, 4, 3),
        ];
        let limits = [(12, 3, 2), (100, 100, 100), (5, 1, 0)];
        for (source, target) in stripes.iter().flat_map(|&a| stripes.iter().map(move |&b| (a, b))) {
            let counts = [source, target].map(|stripe| stripe.local_elements(48).unwrap());
            for (cut, left) in [(0, 0), (1, 3), (3, 1), (2, 5)] {
                let from = cut..counts[0] - left;
                let to = left..counts[1] - cut;
                let local = |element: u64| to.clone().find(|&to| target.global(to) == element);
                let expected: Vec<(u64, u64)> =
                    from.clone().filter_map(|from| Some((from, local(source.global(from))?))).collect();
                let overlaps = Overlaps::new((source, from.clone()), (target, to.clone()));
                let pairs = |overlap: Overlap| overlap.source.zip(overlap.target);
                assert_eq!(overlaps.clone().flat_map(pairs).collect::<Vec<_>>(), expected);
                for (window, alone, gap) in limits {
                    let all_spans = ReadSpans::new(overlaps.clone(), Limits { window, alone, gap });
                    let mut found = Vec::new();
                    for span in all_spans {
                        let length = span.source.end - span.source.start;
                        let one = span.overlaps.clone().count() == 1;
                        assert_eq!(span.single.is_some(), one);
                        assert!(one || length <= window);
                        found.extend(span.overlaps.flat_map(pairs));
                    }
                    assert_eq!(found, expected, "{source} {target}");
                }
            }
        }
    }

    /// Long runs are read alone, distant neighbours separately, near ones together.
    #[test]
    fn spans_by_hand() {
        let part = |stripe: Stripe| (stripe, 0..stripe.local_elements(48).unwrap());
        let spans = |target, window, alone, gap| {
            let overlaps = Overlaps::new(part(stripe(48, 1, 0)), part(target));
            let all_spans = ReadSpans::new(overlaps, Limits { window, alone, gap });
            all_spans.map(|span| (span.source.start, span.source.end)).collect::<Vec<_>>()
        };
        assert_eq!(spans(stripe(4, 2, 1), 48, 48, 48), [(4, 48)]);
        assert_eq!(
            spans(stripe(4, 2, 1), 48, 48, 3),
            (0..6).map(|i| (8 * i + 4, 8 * i + 8)).collect::<Vec<_>>()
        );
        assert_eq!(spans(stripe(4, 2, 1), 12, 12, 4), [(4, 16), (20, 32), (36, 48)]);
        assert_eq!(spans(stripe(12, 2, 0), 48, 12, 48), [(0, 12), (24, 36)]);
        assert_eq!(spans(stripe(48, 1, 0), 8, 8, 0), [(0, 48)]);
    }
}
