//! Programs of small ranks: their text, and their check.

use phalanx_plan::program::{
    ChunkSpec, GradientBuffering, Invariant, PHASES, Piece, Policies, Program, RankChunks, StageChunks,
    Terms, TiedChunks, check,
};
use phalanx_plan::trace::{DType, Memory, PhaseName};
use phalanx_plan::{Action, Kind, Precision, Step, ZeroStage};

/// 16-bit parameters, gradients that accumulate in f32.
const MIXED: Precision = Precision { compute: DType::BF16, accumulate: DType::F32, communicate: DType::F32 };

/// Policies of two ranks with one micro-batch.
pub fn policies(stage: ZeroStage) -> Policies {
    Policies {
        stage,
        overlap: true,
        prefetch: 1,
        defer: false,
        micro_batches: 1,
        sums_by_tree: false,
        precision: MIXED,
        data_ranks: 2,
        host_addressable: true,
        in_place: false,
        updates_on_host: false,
        delayed: false,
        in_backward: false,
    }
}

/// The same with two micro-batches.
fn several(stage: ZeroStage) -> Policies {
    Policies { micro_batches: 2, ..policies(stage) }
}

/// The same with gradients that are communicated in another type than that in which they accumulate.
fn rounded(policies: Policies) -> Policies {
    let precision = Precision { communicate: DType::BF16, ..policies.precision };
    Policies { precision, ..policies }
}

/// A stage of two blocks, which share a chunk, and perhaps a head, which shares one with the second.
fn stage(index: usize, first_chunk: usize, has_head: bool) -> StageChunks {
    let tiles = vec![4_096, 4_096];
    let chunk = ChunkSpec {
        elements: 16_384,
        is_whole: false,
        dtype: DType::BF16,
        parameters: Memory::Device,
        gradients: Memory::Device,
        optimizer: Memory::Device,
        states: vec![tiles.clone(); 2],
        gradient_tiles: Vec::new(),
        scaled: vec![0; 2],
        parameter_count: 4,
        counted: 0..8_192,
        is_summed_over_data_alone: true,
        tiles,
    };
    let head = has_head.then(|| vec![2]);
    StageChunks {
        index,
        first_block: 2 * index,
        first_chunk,
        uses: [vec![0, 1], vec![1, 2]].into_iter().chain(head).collect(),
        has_head,
        lowest: 0,
        chunks: vec![chunk; 3],
        trained: 3,
        is_updated: true,
        terms: Terms::default(),
        squares: 12,
        first_tile: 2 * first_chunk,
    }
}

/// The actions of micro-batches, one behind another.
fn steps(actions: &[(usize, Kind)], micro_batches: usize) -> Vec<Step> {
    let of = |micro_batch| {
        let action = move |(stage, kind): &(usize, Kind)| {
            Step::Compute(Action { stage: *stage, kind: *kind, micro_batch })
        };
        actions.iter().map(action)
    };
    (0..micro_batches).flat_map(of).collect()
}

/// A rank with one stage of three chunks.
pub fn rank(policies: Policies) -> RankChunks {
    RankChunks {
        stages: vec![stage(0, 0, true)],
        ties: Vec::new(),
        step: steps(&[(0, Kind::Forward), (0, Kind::Backward)], policies.micro_batches),
        evaluation: steps(&[(0, Kind::Forward)], 1),
        norms: 6,
        policies,
    }
}

/// A rank with the first and the last of several stages, which share a parameter with other ranks, and split backward.
fn two_stages(policies: Policies) -> RankChunks {
    let mut first = stage(0, 0, false);
    first.terms = Terms { pieces: vec![Piece { chunk: 1, start: 64, elements: 64 }], elements: 64 };
    let parts = [(0, Kind::Forward), (1, Kind::Forward), (1, Kind::Input), (0, Kind::Input)];
    let actions = [&parts[..], &[(1, Kind::Weight), (0, Kind::Weight)]].concat();
    RankChunks {
        stages: vec![first, stage(1, 3, true)],
        ties: vec![TiedChunks { copies: vec![(0, 0), (5, 0)], elements: 8_192, is_shared: true }],
        step: steps(&actions, policies.micro_batches),
        evaluation: steps(&[(0, Kind::Forward), (1, Kind::Forward)], 1),
        norms: 12,
        policies,
    }
}

/// A rank whose last chunk is frozen, and whose first block trains nothing.
fn frozen(policies: Policies) -> RankChunks {
    let mut rank = rank(policies);
    let own = &mut rank.stages[0];
    own.uses = vec![vec![2], vec![0, 2], vec![1]];
    (own.trained, own.lowest) = (2, 1);
    rank
}

/// A rank whose parameters and states stay in other memories.
fn away(policies: Policies, parameters: Memory, optimizer: Memory) -> RankChunks {
    let mut rank = rank(policies);
    for chunk in &mut rank.stages[0].chunks {
        (chunk.parameters, chunk.optimizer) = (parameters, optimizer);
    }
    rank
}

/// A rank whose gradients and states stay in other memories.
fn gradients_away(policies: Policies, gradients: Memory, optimizer: Memory) -> RankChunks {
    let mut rank = rank(policies);
    let part = policies.part(16_384);
    // Where micro-batches accumulate in one buffer, all of it is stored between them.
    let is_whole = policies.buffering() == GradientBuffering::InPlace && policies.micro_batches > 1;
    let tiles = |elements: u64| match gradients {
        Memory::Host if policies.host_addressable => vec![elements],
        _ => vec![4_096; elements as usize / 4_096],
    };
    for chunk in &mut rank.stages[0].chunks {
        (chunk.gradients, chunk.optimizer) = (gradients, optimizer);
        (chunk.tiles, chunk.states) = (vec![4_096; part as usize / 4_096], Vec::new());
        chunk.scaled = vec![0; chunk.tiles.len()];
        chunk.gradient_tiles = tiles(if is_whole && !policies.has_tree() { 16_384 } else { part });
        if policies.stage == ZeroStage::Zero {
            chunk.counted = 8_192..16_384;
        }
    }
    rank
}

/// The same, with a sum over the tensor axis in one chunk, and one that is shared by stages.
fn sums_away(policies: Policies) -> RankChunks {
    let mut rank = gradients_away(policies, Memory::Disk, Memory::Disk);
    rank.ties = vec![TiedChunks { copies: vec![(0, 64)], elements: 64, is_shared: true }];
    let stage = &mut rank.stages[0];
    let piece = |start| Piece { chunk: 1, start, elements: 64 };
    stage.terms = Terms { pieces: vec![piece(64), piece(4_096)], elements: 128 };
    (0..2).for_each(|c| stage.chunks[c].is_summed_over_data_alone = false);
    rank
}

/// Policies of a device whose memory the host cannot address.
fn far(policies: Policies) -> Policies {
    Policies { host_addressable: false, ..policies }
}

/// Ranks with all policies, and their names.
pub fn ranks() -> Vec<(&'static str, RankChunks)> {
    use ZeroStage::{One, Three, Two, Zero};
    let tree = |policies, micro_batches| Policies { micro_batches, sums_by_tree: true, ..policies };
    let mut ranks = vec![
        ("stage 0", rank(policies(Zero))),
        ("stage 0, 2 micro-batches", rank(several(Zero))),
        ("stage 0, rounded", rank(rounded(policies(Zero)))),
        ("stage 1", rank(policies(One))),
        ("stage 1, 2 micro-batches, deferred", rank(Policies { defer: true, ..several(One) })),
        ("stage 1, 2 micro-batches, rounded", rank(rounded(several(One)))),
        ("stage 2", rank(policies(Two))),
        ("stage 2, no overlap", rank(Policies { overlap: false, ..policies(Two) })),
        ("stage 2, 2 micro-batches, settled", rank(Policies { host_addressable: false, ..several(Two) })),
        ("stage 3", rank(policies(Three))),
        ("stage 3, prefetch 0", rank(Policies { prefetch: 0, ..policies(Three) })),
        ("stage 3, prefetch 2, 2 micro-batches", rank(Policies { prefetch: 2, ..several(Three) })),
        ("stage 3, no overlap, rounded", rank(rounded(Policies { overlap: false, ..policies(Three) }))),
        ("stage 3, one rank", rank(Policies { data_ranks: 1, ..several(Three) })),
        ("stage 1, a tree of 3 micro-batches", rank(tree(policies(One), 3))),
        ("stage 2, a tree of 4 micro-batches, rounded", rank(rounded(tree(policies(Two), 4)))),
        (
            "stage 3, a tree of 5 micro-batches, deferred",
            rank(Policies { defer: true, ..tree(policies(Three), 5) }),
        ),
        ("stage 2, frozen", frozen(policies(Two))),
        ("stage 3, frozen", frozen(policies(Three))),
        ("stage 0, two stages", two_stages(policies(Zero))),
        ("stage 2, two stages", two_stages(policies(Two))),
        ("stage 3, two stages, 2 micro-batches", two_stages(several(Three))),
        ("stage 0, in place", rank(Policies { in_place: true, ..policies(Zero) })),
        ("stage 1, in place, rounded", rank(rounded(Policies { in_place: true, ..policies(One) }))),
        ("stage 3, in place", rank(Policies { in_place: true, ..policies(Three) })),
        ("stage 1, states on disk", away(policies(One), Memory::Device, Memory::Disk)),
        ("stage 2, states in host memory", away(far(policies(Two)), Memory::Device, Memory::Host)),
        ("stage 3, everything on disk", away(policies(Three), Memory::Disk, Memory::Disk)),
        ("stage 3, everything on a far disk", away(far(several(Three)), Memory::Disk, Memory::Disk)),
        ("stage 3, one rank, parameters in host memory", {
            let policies = Policies { data_ranks: 1, prefetch: 0, ..far(policies(Three)) };
            away(policies, Memory::Host, Memory::Device)
        }),
    ];
    ranks.extend(ranks_with_updates_elsewhere());
    ranks
}

/// Ranks whose gradients stay in other memories, or whose updates are by the host, delayed or within backward.
fn ranks_with_updates_elsewhere() -> Vec<(&'static str, RankChunks)> {
    use ZeroStage::{One, Three, Two, Zero};
    let delayed = |policies| Policies { delayed: true, updates_on_host: true, ..policies };
    let within = |policies| Policies { in_backward: true, ..policies };
    vec![
        ("stage 0, gradients on disk", gradients_away(several(Zero), Memory::Disk, Memory::Device)),
        ("stage 1, gradients in host memory, deferred, no overlap", {
            let policies = Policies { defer: true, overlap: false, ..several(One) };
            gradients_away(policies, Memory::Host, Memory::Device)
        }),
        ("stage 2, gradients on a far disk, deferred", {
            gradients_away(far(Policies { defer: true, ..several(Two) }), Memory::Disk, Memory::Host)
        }),
        ("stage 3, gradients in host memory, rounded", {
            gradients_away(rounded(several(Three)), Memory::Host, Memory::Host)
        }),
        ("stage 2, sums over other axes on disk", sums_away(policies(Two))),
        ("stage 1, sums over other axes on a far disk", sums_away(far(policies(One)))),
        ("stage 1, the host updates", {
            let policies = Policies { updates_on_host: true, ..far(policies(One)) };
            away(policies, Memory::Device, Memory::Host)
        }),
        ("stage 3, the host updates from disk", {
            let policies = Policies { updates_on_host: true, ..far(policies(Three)) };
            away(policies, Memory::Disk, Memory::Disk)
        }),
        ("stage 2, delayed", gradients_away(delayed(policies(Two)), Memory::Host, Memory::Host)),
        ("stage 0, delayed", gradients_away(delayed(several(Zero)), Memory::Host, Memory::Host)),
        ("stage 3, delayed, far", gradients_away(delayed(far(policies(Three))), Memory::Host, Memory::Host)),
        ("stage 2, within backward", rank(within(policies(Two)))),
        ("stage 3, within backward, far disk", {
            away(within(far(policies(Three))), Memory::Disk, Memory::Disk)
        }),
        ("stage 0, within backward, the host updates, rounded", {
            let policies = Policies { updates_on_host: true, ..rounded(within(far(policies(Zero)))) };
            let mut rank = away(policies, Memory::Device, Memory::Host);
            rank.stages[0].chunks[0].is_summed_over_data_alone = false;
            rank
        }),
    ]
}

/// The programs of a rank.
pub fn programs(rank: &RankChunks) -> Vec<Program> {
    PHASES.iter().map(|phase| rank.lower(*phase)).collect()
}

#[test]
fn every_combination_of_policies_passes_the_check() {
    for (name, rank) in ranks() {
        let programs = programs(&rank);
        let peaks = check(&rank, &programs, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(check(&rank, &programs, Some(peaks)), Ok(peaks), "{name}");
    }
}

#[test]
fn a_smaller_budget_is_refused() {
    let rank = rank(policies(ZeroStage::Three));
    let programs = programs(&rank);
    let mut peaks = check(&rank, &programs, None).unwrap();
    peaks.0[0] -= 1;
    let error = check(&rank, &programs, Some(peaks)).unwrap_err();
    assert_eq!((error.broken, error.phase), (Invariant::Memory, PhaseName::Step), "{error}");
    assert!(error.word.starts_with('+') && error.site.file.ends_with("gradients.rs"), "{error}");
}

/// The text of programs, as in `program_texts.txt`.
#[test]
fn the_text_of_programs() {
    let of = |stage| rank(policies(stage));
    let in_place = Policies { in_place: true, ..policies(ZeroStage::One) };
    let far_parameters = away(far(policies(ZeroStage::Three)), Memory::Disk, Memory::Device);
    let states_in_host = away(far(policies(ZeroStage::One)), Memory::Device, Memory::Host);
    let shown = [
        ("stage 0", of(ZeroStage::Zero), PhaseName::Step),
        ("stage 2", of(ZeroStage::Two), PhaseName::Step),
        ("stage 2", of(ZeroStage::Two), PhaseName::Save),
        ("stage 3", of(ZeroStage::Three), PhaseName::Step),
        ("stage 3", of(ZeroStage::Three), PhaseName::Evaluate),
        ("stage 2 with a frozen chunk", frozen(policies(ZeroStage::Two)), PhaseName::Step),
        ("stage 3 with parameters two copies away", far_parameters, PhaseName::Evaluate),
        ("stage 1 with states in host memory", states_in_host, PhaseName::Step),
        ("stage 1 with gradients in place", rank(in_place), PhaseName::Step),
    ];
    let texts = shown.map(|(name, rank, phase)| format!("{name}, {phase}:\n{}\n", rank.lower(phase)));
    assert_eq!(texts.join("\n"), include_str!("program_texts.txt"));
}

/// What runs will have of chunks, said by lists that pass the check: each with the words of a step that it has, and that it has not.
#[test]
fn what_comes_is_expressible() {
    let three = policies(ZeroStage::Three);
    // Rows of 4-bit blocks, which the layer expands where it packs them: they are gathered as words.
    let mut quantised = frozen(three);
    quantised.stages[0].chunks[2].dtype = DType::Nf4;
    let mut matrices = away(three, Memory::Device, Memory::Disk);
    matrices.stages[0].chunks[1].scaled = vec![4_096, 0];
    // A forward with the adapter switched off, whose log-probabilities are the reference, and one with it.
    let mut twice = frozen(three);
    twice.step = steps(&[(0, Kind::Forward), (0, Kind::Forward), (0, Kind::Backward)], 1);
    let cases: [(&str, RankChunks, &[&str], &[&str]); 4] = [
        ("frozen", frozen(three), &["+P2", "-P2", "B1.0"], &["g2", "s2", "o2", "w2", "p2<", "B0.0"]),
        ("quantised", quantised, &["all_gather(P2<p2)", "-P2"], &["g2", "o2"]),
        ("matrices", matrices, &["+vx1.0", "-vx1.0"], &["vx1.1", "vx0"]),
        ("two forwards", twice, &["F0.0", "B1.0"], &["B0.0"]),
    ];
    for (name, rank, has, has_not) in cases {
        let programs = programs(&rank);
        check(&rank, &programs, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = programs[0].to_string();
        let missing: Vec<_> = has.iter().filter(|word| !text.contains(**word)).collect();
        let wrong: Vec<_> = has_not.iter().filter(|word| text.contains(**word)).collect();
        assert!(
            missing.is_empty() && wrong.is_empty(),
            "{name}: without {missing:?}, with {wrong:?}\n{text}"
        );
        let forwards = text.matches("F0.0").count();
        assert_eq!(forwards, if name == "two forwards" { 2 } else { 1 }, "{name}");
    }
}
