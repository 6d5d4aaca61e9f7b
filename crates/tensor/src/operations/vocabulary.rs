//! Cross entropy of logits over a vocabulary.
//!
//! It is cut so that several devices may each hold a part of the vocabulary, classes `first ..`: a rank needs four
//! numbers a row from the others (Megatron-LM's vocabulary-parallel cross entropy, Shoeybi et al., arXiv
//! 1909.08053). A device that holds the whole vocabulary is one part.

use phalanx_plan::trace::{Axis, DType, Placement, Site};

use super::products::product_flops;
use super::{floats, same};
use crate::arguments::{CrossEntropy, Weight, holds_rows, vocabulary_blocks};
use crate::device::Device;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Rule, WHOLE_SUMS, operand, result, weight};
use crate::placement::table::Mark;
use crate::preference::{PREFERENCE_SUMS, Preference};
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Cross entropy.
    Vocabulary { VocabularyStatistics, LogitsStatistics, VocabularyLoss, PreferenceLoss, }
}

operation! {
    /// The logits `x · w (+ bias)` of one part of a vocabulary, in f32 and never stored, as statistics.
    VocabularyStatistics {
        /// `[rows, hidden]`
        x: View<'a>,
        /// `[hidden, columns]`, by its layout.
        w: Weight<'a>,
        /// `[columns]`
        bias: Option<View<'a>>,
        /// The class of each row, `[rows]` u32.
        targets: View<'a>,
        /// Class of column 0.
        first: usize,
        /// For training: `[rows, columns]` or `[rows, logits_stride(columns)]` exponentials relative to the largest logit of their
        /// block, overwritten; with zeros in the padding.
        exponentials: Option<ViewMut<'a>>,
        /// `[rows, 4 * vocabulary_blocks(columns)]` f32: the statistics of each
        /// [`VOCABULARY_BLOCK`](crate::arguments::VOCABULARY_BLOCK) columns, overwritten.
        blocks: ViewMut<'a>,
        /// `[rows, 4]` f32: of each row the largest logit, the sum of exponentials relative to it, the sum of logits,
        /// and the logit of the target (0 where this part does not hold it); overwritten.
        statistics: ViewMut<'a>,
    }
}

impl Describe for VocabularyStatistics<'_> {
    const NAME: &'static str = "vocabulary_statistics";

    fn check(&self) {
        let VocabularyStatistics { x, w, bias, targets, exponentials, blocks, statistics, .. } = self;
        let [rows, hidden] = x.shape().rows_cols();
        let [w_in, columns] = w.in_out();
        assert_eq!((w_in, targets.elements(), targets.dtype()), (hidden, rows, DType::U32), "{x:?}, {w:?}");
        check_statistics([rows, columns], blocks, statistics);
        assert!(bias.is_none_or(|b| (b.elements(), b.dtype()) == (columns, x.dtype())), "{bias:?} for {w:?}");
        same(&[x.dtype(), w.matrix.dtype()]);
        if let Some(e) = exponentials {
            let [e_rows, stride] = e.dims();
            assert!(holds_rows(stride, columns), "{e:?} of {x:?}, {w:?}");
            assert_eq!((e_rows, e.dtype()), (rows, x.dtype()), "{e:?} of {x:?}, {w:?}");
        }
    }

    fn price(&self) -> Price {
        let VocabularyStatistics { x, w, exponentials, blocks, statistics, .. } = self;
        let stored = exponentials.as_ref().map_or(0, |e| e.bytes());
        let bytes = x.bytes() + w.matrix.bytes() + stored + blocks.bytes() + statistics.bytes();
        Price::product(x.dtype(), product_flops(x.shape().rows_cols()[0], *w), bytes)
    }

    /// The results of one part of the classes belong to that part alone, and are to be gathered.
    fn follow(&self, recorder: &Recorder, site: Site) {
        let VocabularyStatistics { x, w, bias, targets, exponentials, blocks, statistics, .. } = self;
        let blocks = result("blocks", "ro", blocks, false);
        let exponentials = exponentials.as_ref().map(|e| result("exponentials", "ro", e, false));
        let rule = Rule {
            op: Self::NAME,
            factors: &[
                operand("x", "ri", *x),
                operand("w", weight(w.layout), w.matrix),
                operand("targets", "r", *targets),
            ],
            addends: &[bias.map(|b| operand("bias", "o", b))],
            results: &[blocks, exponentials.unwrap_or(blocks)],
            whole: &[('i', WHOLE_SUMS)],
        };
        recorder.follow(&rule, site);
        recorder.follow_row_statistics(Self::NAME, [*targets, blocks.view], statistics, site);
    }
}

operation! {
    /// As [`VocabularyStatistics`], from logits that are stored: those are read as they were rounded, and become the
    /// exponentials.
    LogitsStatistics {
        /// `[rows, columns]`, becomes exponentials.
        logits: ViewMut<'a>,
        /// The class of each row, `[rows]` u32.
        targets: View<'a>,
        /// Class of column 0.
        first: usize,
        /// As in [`VocabularyStatistics`].
        blocks: ViewMut<'a>,
        /// As in [`VocabularyStatistics`].
        statistics: ViewMut<'a>,
    }
}

impl Describe for LogitsStatistics<'_> {
    const NAME: &'static str = "logits_statistics";

    fn check(&self) {
        let LogitsStatistics { logits, targets, blocks, statistics, .. } = self;
        let [rows, columns] = logits.dims();
        assert_eq!((targets.elements(), targets.dtype()), (rows, DType::U32), "{targets:?} of {logits:?}");
        check_statistics([rows, columns], blocks, statistics);
        floats([logits.dtype(); 2]);
    }

    fn price(&self) -> Price {
        Price::bytes(2 * self.logits.bytes() + self.blocks.bytes() + self.statistics.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let LogitsStatistics { logits, targets, blocks, statistics, .. } = self;
        let blocks = result("blocks", "ro", blocks, false);
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("logits", "ro", logits.as_view()), operand("targets", "r", *targets)],
            addends: &[],
            results: &[blocks, result("exponentials", "ro", logits, false)],
            whole: &[],
        };
        recorder.follow(&rule, site);
        recorder.follow_row_statistics(Self::NAME, [*targets, blocks.view], statistics, site);
    }
}

operation! {
    /// From the statistics of all parts: the sum of the rows' losses, one after the other in f64, goes (+)= to `loss`
    /// (not times `numbers.scale`), and `exponentials` become the derivatives of this part's logits times
    /// `numbers.gradient_scale`.
    VocabularyLoss {
        /// `[parts, rows, 4]` f32, in the order of the parts.
        statistics: View<'a>,
        /// As [`VocabularyStatistics`] left them.
        blocks: View<'a>,
        /// The class of each row, `[rows]` u32: below `classes`, or [`IGNORED`](crate::IGNORED).
        targets: View<'a>,
        /// Class of this part's column 0.
        first: usize,
        /// Classes of this part.
        columns: usize,
        /// Classes of all parts.
        classes: usize,
        /// Scale, label smoothing, z-loss.
        numbers: CrossEntropy,
        /// For training: this part's exponentials, which become derivatives. Padding stays zeros.
        exponentials: Option<ViewMut<'a>>,
        /// `[rows]` f32: factors of the rows' derivatives; each is 1 if they are not given.
        weights: Option<View<'a>>,
        /// `[rows]` f32: the loss of each row, overwritten.
        losses: Option<ViewMut<'a>>,
        /// `[1]` f64
        loss: ViewMut<'a>,
        /// True to accumulate into `loss`.
        accumulate: bool,
    }
}

impl Describe for VocabularyLoss<'_> {
    const NAME: &'static str = "vocabulary_loss";

    fn check(&self) {
        let VocabularyLoss {
            statistics,
            blocks,
            targets,
            first,
            columns,
            classes,
            exponentials,
            weights,
            losses,
            loss,
            ..
        } = self;
        let [parts, rows, four] = statistics.dims();
        let are_of_rows = |elements: usize, dtype: DType| (elements, dtype) == (rows, DType::F32);
        assert!(weights.is_none_or(|w| are_of_rows(w.elements(), w.dtype())), "{weights:?} of {rows} rows");
        assert!(losses.as_ref().is_none_or(|l| are_of_rows(l.elements(), l.dtype())), "{losses:?}");
        assert!(parts > 0 && four == 4, "{statistics:?}");
        same(&[DType::F32, statistics.dtype(), blocks.dtype()]);
        assert_eq!((targets.elements(), targets.dtype()), (rows, DType::U32), "{targets:?} of {rows} rows");
        assert_eq!((loss.elements(), loss.dtype()), (1, DType::F64), "{loss:?}");
        assert_eq!(
            blocks.elements(),
            rows * 4 * vocabulary_blocks(*columns),
            "{blocks:?}, {columns} columns"
        );
        assert!(first + columns <= *classes, "classes {first} .. {} of {classes}", first + columns);
        if let Some(e) = exponentials {
            let [e_rows, stride] = e.dims();
            assert!(e_rows == rows && holds_rows(stride, *columns), "{e:?}, {columns} columns");
        }
    }

    fn price(&self) -> Price {
        let stored = self.exponentials.as_ref().map_or(0, |e| 2 * e.bytes());
        Price::bytes(self.statistics.bytes() + self.blocks.bytes() + stored)
    }

    /// The loss needs the statistics of all classes; derivatives stay where their classes are.
    fn follow(&self, recorder: &Recorder, site: Site) {
        let VocabularyLoss { statistics, targets, exponentials, weights, losses, loss, accumulate, .. } =
            self;
        let mut sums = vec![result("loss", "", loss, *accumulate)];
        sums.extend(losses.as_ref().map(|losses| result("losses", "r", losses, false)));
        let sum = Rule {
            op: Self::NAME,
            factors: &[operand("statistics", "rk", *statistics), operand("targets", "r", *targets)],
            addends: &[],
            results: &sums,
            whole: &[],
        };
        recorder.follow(&sum, site);
        let Some(exponentials) = exponentials else { return };
        let mut factors = vec![operand("exponentials", "ro", exponentials.as_view())];
        factors.extend(weights.map(|weights| operand("weights", "r", weights)));
        let derivatives = Rule {
            op: Self::NAME,
            factors: &factors,
            addends: &[],
            results: &[result("derivatives", "ro", exponentials, false)],
            whole: &[],
        };
        recorder.follow(&derivatives, site);
    }
}

operation! {
    /// From the losses of the tokens of answers, the loss of their preferences ([`Preference`]) and the factors of the tokens' derivatives.
    /// Two neighbouring sequences are a pair.
    PreferenceLoss {
        /// `[sequences * seq]` f32, as [`VocabularyLoss`] leaves them.
        losses: View<'a>,
        /// `[sequences, seq]` u32: those of an answer are not [`IGNORED`](crate::IGNORED). A pair without any in its first sequence is none.
        targets: View<'a>,
        /// `[sequences, 2]` f32: log-probabilities under the reference, and 1 for chosen answers or 0.
        references: View<'a>,
        /// The loss.
        preference: Preference,
        /// Factor of the sums.
        scale: f32,
        /// `[sequences * seq]` f32, overwritten.
        weights: ViewMut<'a>,
        /// `[PREFERENCE_SUMS + sequences]` f32, overwritten: sums over pairs, times `scale`, and the log-probability of each sequence.
        sums: ViewMut<'a>,
    }
}

impl Describe for PreferenceLoss<'_> {
    const NAME: &'static str = "preference_loss";

    fn check(&self) {
        let PreferenceLoss { losses, targets, references, preference, weights, sums, .. } = self;
        let [sequences, seq] = targets.dims();
        assert!(sequences > 0 && sequences.is_multiple_of(2), "{sequences} sequences are no pairs");
        let kl_pairs = preference.kl_pairs;
        assert!(kl_pairs > 0 && (sequences / 2).is_multiple_of(kl_pairs), "{preference:?} of {targets:?}");
        assert_eq!(
            (losses.elements(), weights.elements()),
            (sequences * seq, sequences * seq),
            "{targets:?}"
        );
        assert_eq!(references.dims(), [sequences, 2], "{targets:?}");
        assert_eq!(sums.elements(), PREFERENCE_SUMS + sequences, "{sums:?} of {targets:?}");
        same(&[DType::F32, losses.dtype(), references.dtype(), weights.dtype(), sums.dtype()]);
        assert_eq!(targets.dtype(), DType::U32, "{targets:?}");
    }

    fn price(&self) -> Price {
        let PreferenceLoss { losses, targets, references, weights, sums, .. } = self;
        Price::bytes(losses.bytes() + targets.bytes() + references.bytes() + weights.bytes() + sums.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let PreferenceLoss { losses, targets, references, weights, sums, .. } = self;
        let rule = Rule {
            op: Self::NAME,
            factors: &[
                operand("losses", "r", *losses),
                operand("targets", "r", *targets),
                operand("references", "rk", *references),
            ],
            addends: &[],
            results: &[result("weights", "r", weights, false), result("sums", "", sums, false)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

impl Recorder {
    /// Statistics are placed as their rows are; those of logits that are cut by classes are to be gathered.
    fn follow_row_statistics(
        &self,
        op: &'static str,
        [targets, blocks]: [View; 2],
        statistics: &ViewMut,
        site: Site,
    ) {
        let rule = Rule {
            op,
            factors: &[operand("targets", "r", targets)],
            addends: &[],
            results: &[result("statistics", "rk", statistics, false)],
            whole: &[],
        };
        self.follow(&rule, site);
        let known = |view: View| self.mark_of(view).unwrap_or(Mark::REPLICATED);
        let (mut own, cut) = (known(statistics.as_view()), known(blocks));
        let rows = known(statistics.as_view());
        for axis in Axis::ALL.into_iter().filter(|axis| self.is_checked(*axis)) {
            let by_classes = matches!(cut.get(axis), Some(Placement::Shard(_)));
            if by_classes && rows.get(axis) == Some(Placement::Replicated) {
                own = own.with(axis, Some(Placement::Shard(0)));
            }
        }
        self.mark(statistics.as_view(), Some(own));
    }
}

impl Device {
    /// As the operation [`VocabularyStatistics`], from logits `[rows, columns]` of classes `first ..` that are stored: they
    /// become exponentials, where they lie.
    #[track_caller]
    pub fn logits_statistics(
        &self,
        logits: ViewMut,
        targets: View,
        first: usize,
        blocks: ViewMut,
        statistics: ViewMut,
    ) {
        self.run(LogitsStatistics { logits, targets, first, blocks, statistics });
    }
}

#[track_caller]
fn check_statistics([rows, columns]: [usize; 2], blocks: &ViewMut, statistics: &ViewMut) {
    assert_eq!(blocks.elements(), rows * 4 * vocabulary_blocks(columns), "{blocks:?}, {columns} columns");
    assert_eq!((statistics.elements(), statistics.dtype()), (4 * rows, DType::F32), "{statistics:?}");
    same(&[DType::F32, blocks.dtype()]);
}
