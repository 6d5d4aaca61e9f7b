//! Activation checkpointing: no bit of the results differs, and fewer activations are kept.

use crate::rig::Case;
use phalanx_layers::{Checkpointing, Draw};
use phalanx_models::Dropouts;

const CHECKPOINTING: [Checkpointing; 4] = [
    Checkpointing::None,
    Checkpointing::Selective,
    Checkpointing::Blocks { every: 1 },
    Checkpointing::Blocks { every: 2 },
];

/// Loss and gradients as bits.
fn bits(case: &Case) -> Vec<(String, Vec<u32>)> {
    let gradients = case.gradients();
    let loss = ("loss".to_string(), vec![gradients.loss.to_bits()]);
    let of = |(name, values): (String, Vec<f32>)| (name, values.iter().map(|v| v.to_bits()).collect());
    std::iter::once(loss).chain(gradients.by_name.into_iter().map(of)).collect()
}

#[test]
fn no_choice_changes_a_bit() {
    let dropout = Dropouts { embedding: 0.1, attention: 0.2, residual: 0.3 };
    for family in Case::families() {
        let plain = bits(&family);
        let model = family.model.dropping(dropout);
        let draw = Some(Draw { seed: 3, step: 1, first_sample: 0 });
        for case in [family.clone(), Case { model, draw, ..family }] {
            let expected = bits(&case);
            assert_eq!(expected == plain, case.draw.is_none(), "{}: dropout drops", case.folder);
            for checkpointing in CHECKPOINTING {
                for split in [false, true] {
                    let case = Case { checkpointing, split, ..case.clone() };
                    let same = bits(&case) == expected;
                    assert!(same, "{}: {checkpointing:?}, split {split}, draws {:?}", case.folder, case.draw);
                }
            }
        }
    }
}

/// Dropout is applied at the same points as in transformers, with separate keys: each probability alone changes the
/// loss differently.
#[test]
fn every_dropout_drops() {
    for family in Case::families() {
        let none = Dropouts::default();
        let mut losses = vec![family.gradients().loss.to_bits()];
        for dropout in [
            Dropouts { embedding: 0.2, ..none },
            Dropouts { attention: 0.2, ..none },
            Dropouts { residual: 0.2, ..none },
        ] {
            let model = family.model.dropping(dropout);
            let draw = Some(Draw { seed: 3, step: 1, first_sample: 0 });
            losses.push(Case { model, draw, ..family.clone() }.gradients().loss.to_bits());
        }
        losses.sort_unstable();
        losses.dedup();
        assert_eq!(losses.len(), 4, "{}", family.folder);
    }
}

/// In elements a token, of width h = 32 and the MLP's i (128 and 64): the sum behind attention, a block's
/// output, and what is between.
#[test]
fn what_a_block_keeps() {
    let h = 32;
    for (case, i, whole, selective) in [
        // Norm, sum, norm, output; queries, keys, values; attention; before and after GELU.
        // Rebuilt: both norms, attention, GELU.
        (Case::gpt2(phalanx_tensor::DType::F32), 128, 8, 5),
        // Sum, norm, sum, output (a norm); the rest as above. Rebuilt: attention, GELU.
        (Case::bert(phalanx_tensor::DType::F32), 64, 8, 7),
    ] {
        for (checkpointing, kept) in [
            (Checkpointing::None, whole * h + 2 * i),
            (Checkpointing::Selective, selective * h + i),
            (Checkpointing::Blocks { every: 1 }, h),
        ] {
            let case = Case { checkpointing, ..case.clone() };
            assert_eq!(case.kept(1), kept, "{}: {checkpointing:?}", case.folder);
        }
    }
}
