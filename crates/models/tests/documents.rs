//! Documents that lie in one sequence and do not see each other: each has what it has alone in a sequence of its own.

use phalanx_layers::Checkpointing;
use phalanx_tensor::{DType, IGNORED};

use crate::rig::{Case, Gradients};

/// Learned positions; rotary ones, with heads that share keys and values, norms of heads, a window, layers without positions.
const MODELS: [&str; 5] =
    ["gpt2", "decoders/llama", "decoders/qwen3", "decoders/qwen2_window", "decoders/smollm3"];

/// Lengths of the documents of each sequence of 16, again and again.
const LENGTHS: [&[usize]; 3] = [&[5, 1, 10], &[16], &[7, 9]];

fn case(folder: &'static str, compute: DType) -> Case {
    if folder == "gpt2" { Case::gpt2(compute) } else { Case::decoder(folder, compute) }
}

/// The documents of a case, as `row..row`.
fn documents(case: &Case) -> Vec<std::ops::Range<usize>> {
    let [batch, _] = case.shape;
    let lengths = LENGTHS.iter().cycle().take(batch).copied().flatten();
    let ends = lengths.scan(0, |end, length| {
        *end += length;
        Some(*end - length..*end)
    });
    ends.collect()
}

/// The case with its documents: the last token of each has no target.
fn packed(case: &Case) -> Case {
    let mut targets = case.targets.clone();
    documents(case).iter().for_each(|document| targets[document.end - 1] = IGNORED);
    let positions = documents(case).into_iter().flat_map(|document| 0..document.len() as u32).collect();
    Case { targets, positions: Some(positions), ..case.clone() }
}

/// Each document that has a target, alone.
fn alone(packed: &Case) -> Vec<Case> {
    let of = |rows: std::ops::Range<usize>| Case {
        shape: [1, rows.len()],
        tokens: packed.tokens[rows.clone()].to_vec(),
        targets: packed.targets[rows].to_vec(),
        positions: None,
        ..packed.clone()
    };
    documents(packed).into_iter().filter(|document| document.len() > 1).map(of).collect()
}

fn counted(case: &Case) -> usize {
    case.targets.iter().filter(|target| **target != IGNORED).count()
}

/// The largest difference, of the largest number.
fn apart(got: &[f32], expected: impl ExactSizeIterator<Item = f64>) -> f64 {
    assert_eq!(got.len(), expected.len());
    let (difference, largest) = got.iter().zip(expected).fold((0f64, 1e-30), |(apart, largest), (x, y)| {
        assert!(x.is_finite());
        ((f64::from(*x) - y).abs().max(apart), y.abs().max(largest))
    });
    difference / largest
}

/// Checks logits, loss and gradients against those of the documents alone. In f32 the logits have the same bits: keys that are not
/// seen add zeros to sums of one order. The others are sums of fewer than 2^7 numbers, each with an error of `unit`; in 16 bits
/// their terms were rounded, and in pairs of keys that begin elsewhere.
#[test]
fn each_document_has_what_it_has_alone() {
    for (folder, (compute, unit)) in MODELS.into_iter().flat_map(|folder| {
        let types = [(DType::F32, -24), (DType::BF16, -8), (DType::F16, -11)];
        types.map(|(compute, exponent)| (folder, (compute, 2f64.powi(exponent))))
    }) {
        let loss_scale = if compute == DType::F16 { 1024.0 } else { 1.0 };
        let packed = packed(&Case { loss_scale, ..case(folder, compute) });
        let documents = alone(&packed);
        let what = format!("{folder} in {compute:?}");
        let (logits, loss) = packed.forward();
        let (each, losses): (Vec<_>, Vec<_>) = documents.iter().map(Case::forward).unzip();
        let each: Vec<f32> = each.concat();
        let bound = if compute == DType::F32 { 0.0 } else { 8.0 * unit };
        let off = apart(&logits, each.iter().map(|x| f64::from(*x)));
        assert!(off <= bound, "{what}: logits {off:.1e} apart");
        let share = |case: &Case| counted(case) as f64 / counted(&packed) as f64;
        let mean: f64 =
            documents.iter().zip(&losses).map(|(case, loss)| share(case) * f64::from(*loss)).sum();
        assert!((f64::from(loss) - mean).abs() < 128.0 * unit.min(2f64.powi(-24)).max(bound / 64.0) * mean);
        let bound = if compute == DType::F32 { 128.0 * unit } else { 16.0 * unit };
        let (got, each): (Gradients, Vec<Gradients>) =
            (packed.gradients(), documents.iter().map(Case::gradients).collect());
        for (number, (name, got)) in got.by_name.iter().enumerate() {
            let mut sum = vec![0f64; got.len()];
            for (case, gradients) in documents.iter().zip(&each) {
                let values = &gradients.by_name[number].1;
                sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += share(case) * f64::from(*x));
            }
            let off = apart(got, sum.into_iter());
            assert!(off <= bound, "{what}: the gradient of {name} is {off:.1e} apart");
        }
    }
}

/// Without their positions, documents see each other.
#[test]
fn documents_that_are_joined_are_others() {
    for folder in MODELS {
        let packed = packed(&case(folder, DType::F32));
        assert_ne!(Case { positions: None, ..packed.clone() }.forward().0, packed.forward().0, "{folder}");
        // A sequence that is one document has the bits that it has without positions.
        let [batch, seq] = packed.shape;
        let whole = (0..batch).flat_map(|_| 0..seq as u32).collect();
        let whole = Case { positions: Some(whole), ..case(folder, DType::F32) };
        assert_eq!(case(folder, DType::F32).forward(), whole.forward(), "{folder}");
    }
}

#[test]
fn what_is_computed_again_or_in_two_parts_changes_no_bit() {
    for folder in ["gpt2", "decoders/llama"] {
        let packed = packed(&case(folder, DType::F32));
        let expected = packed.gradients();
        for checkpointing in [Checkpointing::Selective, Checkpointing::Blocks { every: 1 }] {
            for split in [false, true] {
                let got = Case { checkpointing, split, ..packed.clone() }.gradients();
                assert!(got.by_name == expected.by_name, "{folder}: {checkpointing:?}, split {split}");
            }
        }
    }
}

#[test]
fn tensor_parallel_ranks_follow_one_rank_and_every_tensor_is_placed_as_its_reader_needs() {
    for (folder, (ranks, sequence)) in ["gpt2", "decoders/llama"]
        .into_iter()
        .flat_map(|folder| [(2, false), (2, true), (4, true)].map(|layout| (folder, layout)))
    {
        let packed = packed(&case(folder, DType::F32));
        let (one, over) = (packed.gradients(), packed.gradients_over(ranks, sequence));
        for ((name, one), (other, over)) in one.by_name.iter().zip(&over.by_name) {
            assert_eq!(name, other);
            // Sums of fewer than 2^7 numbers in f32, in another order.
            let off = apart(over, one.iter().map(|x| f64::from(*x)));
            assert!(off <= 2f64.powi(-17), "{folder}, {ranks} ranks, {sequence}: {name} is {off:.1e} apart");
        }
        for rank in 0..ranks {
            let (_, trace) = packed.dry_run(ranks, rank, sequence);
            let faults: Vec<String> = trace.faults.iter().map(ToString::to_string).collect();
            assert_eq!(faults, [""; 0], "{folder}, {ranks} ranks, sequence {sequence}");
        }
    }
}
