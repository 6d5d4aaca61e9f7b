//! Programs without the repetitions of their steady state, and with them again.

use phalanx_plan::pipeline::{Abridged, Step, abridge, lower_rank};
use phalanx_plan::{Plan, generate, lower};

/// The whole program: the period before the gap as often as it was left out, with later micro-batches.
fn whole(Abridged { steps, omitted }: &Abridged) -> Vec<Step> {
    let (before, behind) = steps.split_at(omitted.at);
    let period = &before[omitted.at - omitted.steps..];
    let copies = (1..=omitted.periods)
        .flat_map(|copy| period.iter().map(move |step| step.later(copy * omitted.micro_batches)));
    let behind = behind.iter().map(|step| step.later(omitted.all_micro_batches()));
    before.iter().copied().chain(copies).chain(behind).collect()
}

#[test]
fn what_is_left_out_is_what_repeats() {
    for (name, chunks) in [
        ("model", 1),
        ("1f1b", 1),
        ("zb-h1", 1),
        ("zb-h2", 1),
        ("zb-v", 2),
        ("interleaved", 2),
        ("interleaved", 3),
    ] {
        let plan = name.parse::<Plan>().expect("a name").with_chunks(chunks);
        for (ranks, micro_batches) in [(1, 9), (2, 16), (4, 40), (6, 72)] {
            let schedule = generate(plan, ranks, micro_batches).expect("legal");
            for (rank, steps) in lower(&schedule).into_iter().enumerate() {
                assert_eq!(lower_rank(&schedule, rank), steps);
                let abridged =
                    abridge(&steps).unwrap_or_else(|| panic!("{plan} {ranks} x {micro_batches}: {rank}"));
                assert!(abridged.steps.len() < steps.len());
                assert_eq!(whole(&abridged), steps, "{plan} {ranks} x {micro_batches}: {rank}");
            }
        }
    }
}

/// The steps that are left of a long step depend on the number of ranks alone.
#[test]
fn a_longer_step_leaves_no_more() {
    let left = |micro_batches| {
        let schedule = generate(Plan::OneForwardOneBackward, 8, micro_batches).expect("legal");
        abridge(&lower_rank(&schedule, 0)).expect("it repeats itself").steps.len()
    };
    assert_eq!(left(64), left(512));
}

/// All forwards, then all backwards: no micro-batch is complete before the last has begun.
#[test]
fn gpipe_is_left_whole() {
    let schedule = generate(Plan::GPipe, 2, 64).expect("legal");
    assert_eq!(abridge(&lower_rank(&schedule, 0)), None);
    let few = generate(Plan::OneForwardOneBackward, 4, 6).expect("legal");
    assert_eq!(abridge(&lower_rank(&few, 1)), None);
}
