//! Operations on rows: layer norm, and the cross entropy of a vocabulary.

use phalanx_tensor::arguments::{VOCABULARY_BLOCK, vocabulary_blocks};
use phalanx_tensor::operations::{Magnitudes, Normalization, Vocabulary};
use phalanx_tensor::preference::PREFERENCE_SUMS;
use phalanx_tensor::{
    LayerNormBackward, Preference, PreferenceLoss, RowNorm, View, VocabularyLoss, VocabularyStatistics,
    WholeSums,
};

use crate::error::Error;
use crate::faults::Checked;
use crate::launch::products::{Layouts, Tiles};
use crate::launch::sums::RowBlocks;
use crate::launch::{Issue, ROWS_MAX, THREADS, numbers};
use crate::modules::Launch;
use crate::programs::{Program, Source};
use phalanx_tensor::Layout;

/// Blocks of statistics that a warp computes.
const STATISTICS_AT_ONCE: u64 = 4;

/// Bytes of `Answer` of `preference.cu`.
const ANSWER_BYTES: usize = 3 * size_of::<f64>();

/// Vectors in all rows, elements of one, and elements of a row.
fn vectors(x: View, gamma: View, norm: RowNorm) -> [usize; 3] {
    let [rows, columns] = x.shape().rows_cols();
    [rows * norm.count, gamma.elements(), columns]
}

/// Sums over ranks, if they are given, and the elements of one.
fn whole(sums: Option<WholeSums>) -> (Option<View>, usize) {
    sums.map_or((None, 1), |WholeSums { sums, elements }| (Some(sums), elements))
}

impl Issue<'_> {
    pub(super) fn normalization(&mut self, operation: Normalization) -> Result<(), Error> {
        match operation {
            Normalization::LayerNorm(o) => {
                let ([n, hidden, stride], RowNorm { eps, offset, first, count, .. }) =
                    (vectors(o.x, o.gamma, o.norm), o.norm);
                let (sums, elements) = whole(o.squares);
                let program = Program::of(Source::LayerNorm, o.x.dtype());
                let arguments = numbers![
                    o.x,
                    o.gamma,
                    o.beta,
                    &o.y,
                    o.mean.as_ref(),
                    &o.rstd,
                    sums,
                    n,
                    hidden,
                    stride,
                    first,
                    count,
                    elements,
                    offset,
                    eps
                ];
                self.over_rows(program, "layer_norm", n, arguments)
            }
            Normalization::NormSums(o) => {
                let ([n, hidden, stride], RowNorm { offset, first, count, .. }) =
                    (vectors(o.x, o.gamma, o.norm), o.norm);
                let program = Program::of(Source::LayerNorm, o.x.dtype());
                let arguments =
                    numbers![o.x, o.gamma, o.dy, &o.sums, n, hidden, stride, first, count, offset];
                self.over_rows(program, "norm_sums", n, arguments)
            }
            Normalization::LayerNormBackward(o) => self.layer_norm_backward(o),
        }
    }

    fn layer_norm_backward(&mut self, o: LayerNormBackward) -> Result<(), Error> {
        let ([n, hidden, stride], RowNorm { offset, first, count, .. }) =
            (vectors(o.x, o.gamma, o.norm), o.norm);
        let (sums, elements) = whole(o.products);
        let program = Program::of(Source::LayerNorm, o.x.dtype());
        let (mean, rstd) = (o.mean, o.rstd);
        let gradients = o.gradients.each_ref().map(Option::as_ref);
        if gradients.iter().any(Option::is_some) {
            let blocks = RowBlocks::new(n, hidden, 2);
            let partial = self.scratch(blocks.bytes())?;
            let arguments =
                numbers![o.x, mean, rstd, o.dy, partial, n, hidden, stride, first, count, blocks.grain];
            let kernel = if count == 1 { "layer_norm_parameter_sums" } else { "head_norm_parameter_sums" };
            self.over_blocks(program, kernel, &blocks, arguments)?;
            self.add_blocks(&blocks, gradients, o.accumulate_parameters, partial, o.x.dtype())?;
        }
        let arguments = numbers![
            o.x,
            o.gamma,
            mean,
            rstd,
            o.dy,
            &o.dx,
            sums,
            n,
            hidden,
            stride,
            first,
            count,
            elements,
            offset,
            o.accumulate_input
        ];
        self.over_rows(program, "layer_norm_backward", n, arguments)
    }

    pub(super) fn magnitudes(&mut self, operation: Magnitudes) -> Result<(), Error> {
        match operation {
            Magnitudes::WeightSquares(o) => {
                let program = Program::of(Source::Magnitudes, o.a.dtype());
                let [inputs, outputs, rank] = o.extents();
                let (of_output, of_input) = match o.w.layout {
                    Layout::OutIn => (inputs, 1usize),
                    Layout::InOut => (1, outputs),
                };
                let arguments = numbers![
                    o.w.matrix, o.a, o.b, &o.squares, inputs, outputs, rank, of_output, of_input, o.scale
                ];
                self.over_rows(program, "weight_squares", outputs, arguments)
            }
            Magnitudes::Rescale(o) => {
                let program = Program::of(Source::Magnitudes, o.x.dtype());
                let ([rows, stride], columns) = (o.x.shape().rows_cols(), o.magnitudes.elements());
                let [x, y] = [o.x, o.y.as_view()].map(|x| x.range(o.first..x.elements()));
                let n = rows * columns;
                let arguments = numbers![x, o.magnitudes, o.squares, o.bias, y, stride, columns, n];
                self.over_fours(program, "rescale", n, arguments)
            }
            Magnitudes::RescaleGradient(o) => {
                let program = Program::of(Source::Magnitudes, o.x.dtype());
                let ([rows, stride], columns) = (o.x.shape().rows_cols(), o.dm.elements());
                let [x, dy] = [o.x, o.dy].map(|x| x.range(o.first..x.elements()));
                let blocks = RowBlocks::new(rows, columns, 1);
                let partial = self.scratch(blocks.bytes())?;
                let arguments =
                    numbers![x, dy, o.squares, o.bias, partial, rows, columns, stride, blocks.grain];
                self.over_blocks(program, "rescale_sums", &blocks, arguments)?;
                self.add_blocks(&blocks, [Some(&o.dm)], o.accumulate, partial, o.x.dtype())
            }
        }
    }

    pub(super) fn vocabulary(&mut self, operation: Vocabulary) -> Result<(), Error> {
        match operation {
            Vocabulary::VocabularyStatistics(o) => self.vocabulary_statistics(o),
            Vocabulary::LogitsStatistics(o) => {
                let [rows, columns] = o.logits.dims();
                let (program, count) =
                    (Program::of(Source::CrossEntropy, o.logits.dtype()), vocabulary_blocks(columns));
                let blocks = (count as u64).div_ceil(STATISTICS_AT_ONCE * u64::from(THREADS / 32));
                let launch = Launch {
                    program,
                    kernel: "logits_statistics",
                    grid: [blocks, (rows as u64).min(ROWS_MAX)],
                    threads: THREADS,
                    shared_bytes: 0,
                };
                let arguments = numbers![&o.logits, o.targets, o.first, &o.blocks, rows, columns];
                self.launch(launch, arguments)?;
                let arguments = numbers![&o.blocks, &o.statistics, rows, count];
                self.over_rows(program, "join_statistics", rows, arguments)
            }
            Vocabulary::VocabularyLoss(o) => self.vocabulary_loss(o),
            Vocabulary::PreferenceLoss(o) => self.preference_loss(o),
        }
    }

    fn vocabulary_statistics(&mut self, o: VocabularyStatistics) -> Result<(), Error> {
        let [rows, hidden] = o.x.shape().rows_cols();
        let [_, columns] = o.w.in_out();
        let element = o.x.dtype();
        let stride = o.exponentials.as_ref().map_or(0, |e| e.dims::<2>()[1]);
        let program = Program { tf32: self.tf32, ..Program::of(Source::CrossEntropy, element) };
        let (kernel, layouts) = match o.w.layout {
            Layout::InOut => ("vocabulary_statistics", Layouts::Plain),
            Layout::OutIn => ("vocabulary_statistics_with_transposed", Layouts::RightTransposed),
        };
        let tiles = Tiles::LARGE;
        assert_eq!(tiles.columns, VOCABULARY_BLOCK, "a tile is as wide as a block of statistics");
        let launch = Launch {
            program,
            kernel,
            grid: [tiles.blocks(rows, columns), 1],
            threads: tiles.threads,
            shared_bytes: tiles.shared_bytes(layouts, element),
        };
        let arguments = numbers![
            o.x,
            o.w.matrix,
            o.bias,
            o.targets,
            o.first,
            o.exponentials.as_ref(),
            stride,
            &o.blocks,
            rows,
            columns,
            hidden
        ];
        self.launch(launch, arguments)?;
        let arguments = numbers![&o.blocks, &o.statistics, rows, vocabulary_blocks(columns)];
        self.over_rows(program, "join_statistics", rows, arguments)
    }

    fn vocabulary_loss(&mut self, o: VocabularyLoss) -> Result<(), Error> {
        let [parts, rows, _] = o.statistics.dims();
        let exponentials = o.exponentials.as_ref();
        let stride = exponentials.map_or(0, |e| e.dims::<2>()[1]);
        // Without exponentials, any type serves: nothing is written.
        let element = exponentials.map_or(phalanx_tensor::DType::F32, |e| e.dtype());
        let losses = self.scratch(rows * size_of::<f64>())?;
        let (fault, call) = self.checked(Checked::Target { classes: o.classes });
        let arguments = numbers![
            o.statistics,
            parts,
            o.blocks,
            o.targets,
            o.first,
            o.classes,
            o.numbers.gradient_scale,
            o.numbers.label_smoothing,
            o.numbers.z_loss,
            exponentials,
            o.weights,
            o.losses.as_ref(),
            losses,
            rows,
            o.columns,
            stride,
            fault,
            call
        ];
        self.by_block(Program::of(Source::CrossEntropy, element), "vocabulary_loss", rows, arguments)?;
        let arguments = numbers![losses, rows, &o.loss, o.accumulate];
        self.one_block(Program::of_f64(Source::NormF64), "sum_losses", arguments)
    }

    fn preference_loss(&mut self, o: PreferenceLoss) -> Result<(), Error> {
        let [sequences, seq] = o.targets.dims();
        let program = Program::of_f64(Source::Preference);
        let answers = self.scratch(sequences * ANSWER_BYTES)?;
        let sums = &o.sums;
        let log_probabilities = sums.as_view().range(PREFERENCE_SUMS..PREFERENCE_SUMS + sequences);
        let arguments = numbers![o.losses, o.targets, seq, answers, log_probabilities];
        self.by_block(program, "sum_answers", sequences, arguments)?;
        let Preference { kind, beta, label_smoothing, gamma, weights: [chosen, rejected], kl_pairs } =
            o.preference;
        let arguments = numbers![
            answers,
            o.references,
            sequences,
            kind as u32,
            beta,
            label_smoothing,
            gamma,
            chosen,
            rejected,
            kl_pairs,
            o.scale,
            sums
        ];
        self.one_block(program, "pair_losses", arguments)?;
        self.by_block(program, "weigh_answers", sequences, numbers![answers, seq, &o.weights])
    }
}
