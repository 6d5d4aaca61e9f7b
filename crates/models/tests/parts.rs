//! Parameters of tensor-parallel ranks: the parts make up the whole, and in the dry run of a step every tensor has the placement
//! that its reader needs.

use std::collections::BTreeMap;

use crate::rig::Case;
use phalanx_layers::{ParameterSpec, Part};
use phalanx_testing::planted::{FaultKind, PlantedFault, sites};

const LAYOUTS: [(usize, bool); 4] = [(2, false), (2, true), (4, false), (4, true)];

/// Local shapes of the packed projection, of the projection after it, and of the MLP's first and second layer.
fn expected(case: &Case, ranks: usize) -> BTreeMap<&'static str, Vec<usize>> {
    let shape = match case.folder {
        "gpt2" => [
            ("transformer.h.1.attn.c_attn.weight", [32, 96 / ranks]),
            ("transformer.h.1.attn.c_proj.weight", [32 / ranks, 32]),
            ("transformer.h.1.mlp.c_fc.weight", [32, 128 / ranks]),
            ("transformer.h.1.mlp.c_proj.weight", [128 / ranks, 32]),
        ],
        _ => [
            ("bert.encoder.layer.1.attention.self.key.weight", [32 / ranks, 32]),
            ("bert.encoder.layer.1.attention.output.dense.weight", [32, 32 / ranks]),
            ("bert.encoder.layer.1.intermediate.dense.weight", [64 / ranks, 32]),
            ("bert.encoder.layer.1.output.dense.weight", [32, 64 / ranks]),
        ],
    };
    shape.into_iter().map(|(name, shape)| (name, shape.to_vec())).collect()
}

#[test]
fn parts_of_every_parameter_make_up_the_whole() {
    for case in Case::families() {
        let whole = case.dry_run(1, 0, false).0;
        for (ranks, sequence) in LAYOUTS {
            let specs: Vec<_> = (0..ranks).map(|rank| case.dry_run(ranks, rank, sequence).0).collect();
            for (number, whole) in whole.iter().enumerate() {
                let parts: Vec<&ParameterSpec> = specs.iter().map(|specs| &specs[number]).collect();
                check_parts(whole, &parts, sequence);
            }
            let mut expected = expected(&case, ranks);
            for spec in &specs[ranks - 1] {
                if let Some(shape) = expected.remove(spec.name.as_str()) {
                    assert_eq!(spec.shape, shape, "{} over {ranks} ranks", spec.name);
                }
            }
            assert_eq!(expected.len(), 0, "{expected:?}");
        }
    }
}

/// Every element of the whole is on one rank, or all are on every rank.
fn check_parts(whole: &ParameterSpec, parts: &[&ParameterSpec], sequence: bool) {
    let name = &whole.name;
    let everywhere = parts[0].part.is_none();
    let mut held = vec![0; whole.elements()];
    for part in parts {
        assert_eq!((&part.name, part.init), (name, whole.init));
        assert_eq!(part.whole_shape(), whole.shape, "{name}");
        assert_eq!(part.part.is_none(), everywhere, "{name}");
        if let Some(Part { dim, .. }) = part.part {
            let others = |shape: &[usize]| [&shape[..dim], &shape[dim + 1..]].concat();
            assert_eq!(others(&part.shape), others(&whole.shape), "{name}: only dimension {dim} is split");
        }
        let count = part.stripe().local_elements(whole.elements() as u64);
        assert_eq!(count, Some(part.elements() as u64), "{name}: {:?} of {:?}", part.shape, whole.shape);
        for (_, run) in part.stripe().runs(0..part.elements() as u64) {
            held[run.start as usize..run.end as usize].iter_mut().for_each(|n| *n += 1);
        }
        assert!(!part.partial || (sequence && everywhere), "{name} is partial");
    }
    let times = if everywhere { parts.len() } else { 1 };
    assert!(held.iter().all(|n| *n == times), "{name}: every element is held {times} time(s)");
}

#[test]
fn a_dry_run_finds_every_tensor_placed_as_its_reader_needs() {
    for case in Case::families() {
        for split in [false, true] {
            let case = Case { split, ..case.clone() };
            for (ranks, sequence) in LAYOUTS {
                for rank in 0..ranks {
                    let (_, trace) = case.dry_run(ranks, rank, sequence);
                    let faults: Vec<String> = trace.faults.iter().map(ToString::to_string).collect();
                    assert_eq!(faults, [""; 0], "{}, {ranks} ranks, sequence {sequence}", case.folder);
                }
            }
        }
    }
}

/// Tries every collective: those in the layers of a block, at both ends of the model, and in the transform before its head.
#[test]
fn a_dry_run_finds_every_collective_that_is_left_out() {
    use sites::*;
    let both = [EMBEDDING_Y, ROW_Y, COLUMN_DX, HEAD_STATISTICS, HEAD_DX];
    let with_sequence = [EMBEDDING_DY, COLUMN_X, COLUMN_X_AGAIN, ROW_DY, HEAD_X];
    for case in Case::families() {
        for sequence in [false, true] {
            for site in both.into_iter().chain(with_sequence.into_iter().filter(|_| sequence)) {
                let fault = Some(PlantedFault { site, kind: FaultKind::Dropped });
                let (_, trace) = case.dry_run_with(2, 0, sequence, fault);
                assert!(!trace.faults.is_empty(), "{}: {site:?} left out, {sequence}", case.folder);
            }
        }
    }
}
