//! Mutants of chunk programs that their check accepts, executed on simulated accelerators: each has the numbers and the state of the
//! program as it was made. A mutant that it should have refused shows itself as other bits, a race, a panic or a buffer that is not there.

use crate::phases::{Phase, in_chunks, shown};
use crate::rig;
use crate::rig::State;
use phalanx_plan::program::{Program, check};
use phalanx_system::random::SplitMix64;
use phalanx_testing::program_mutants::mutants;
use phalanx_testing::sweeps;
use phalanx_train::config::Tier;
use phalanx_train::rank::Rank;
use phalanx_train::{RunConfig, RunPlan};

/// The phases that a mutant runs: each of those with a program, behind others.
const WALK: [Phase; 7] =
    [Phase::Step, Phase::Evaluate, Phase::Step, Phase::Diagnose, Phase::Skipped, Phase::Step, Phase::Save];

/// Mutants of a configuration that are executed, unless all are.
const EXECUTED: usize = 12;

/// The programs of a rank, of which one is changed.
fn programs(engine: &Rank) -> Vec<Program> {
    engine.chunks().programs().iter().map(|program| (**program).clone()).collect()
}

/// Numbers and state of the walk; `mutant`: number of the mutant that all ranks execute, among those of all phases, or none. Ranks have as
/// many actions as each other, so that it is the same one.
fn walked(config: &RunConfig, plan: &RunPlan, mutant: Option<(usize, usize)>) -> (Vec<Vec<u32>>, State) {
    let build = rig::Build { heap: true, ..rig::Build::default() };
    let ranks = rig::each_rank(plan, &plan.spec, &build, &|engine, _| {
        if let Some((phase, number)) = mutant {
            let mut program = programs(engine).swap_remove(phase);
            program.actions = all(&program).swap_remove(number);
            engine.chunks_mut().set_program(program);
        }
        engine.initialise(1).unwrap();
        let mut number = 0;
        WALK.map(|phase| shown(engine, config, phase, &mut number))
    });
    let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.unwrap_or_else(|text| panic!("{text}"))).collect();
    let numbers = ranks[0].iter().map(|(numbers, _)| numbers.clone()).collect();
    (numbers, rig::merge(plan, ranks.into_iter().map(|[.., (_, saved)]| saved)))
}

/// The lists of all mutants of a program.
fn all(program: &Program) -> Vec<Vec<phalanx_plan::program::Action>> {
    let mut random = SplitMix64::new(7);
    let mutants = mutants(&program.actions, &mut |below| random.next_u64() % below);
    mutants.into_iter().map(|mutant| mutant.actions).collect()
}

/// The phase and the number of each mutant that the checks of all ranks accept, with the same collectives on all of them.
fn accepted(plan: &RunPlan) -> Vec<(usize, usize)> {
    let build = rig::Build { heap: true, ..rig::Build::default() };
    let of_ranks = rig::each_rank(plan, &plan.spec, &build, &|engine, _| {
        let (described, originals) = (engine.chunks().described().clone(), programs(engine));
        let peaks = check(&described, &originals, None).unwrap();
        let mut accepted = Vec::new();
        for phase in 0..originals.len() {
            for (number, actions) in all(&originals[phase]).into_iter().enumerate() {
                let mut changed = originals.clone();
                changed[phase].actions = actions;
                let agrees = phalanx_plan::program::check::agree(&originals[phase], &changed[phase]).is_ok();
                if agrees && check(&described, &changed, Some(peaks)).is_ok() {
                    accepted.push((phase, number));
                }
            }
        }
        accepted
    });
    let of_ranks: Vec<_> = of_ranks.into_iter().map(|accepted| accepted.unwrap()).collect();
    let on_all = |mutant: &(usize, usize)| of_ranks.iter().all(|accepted| accepted.contains(mutant));
    of_ranks[0].iter().copied().filter(on_all).collect()
}

type Change = fn(&mut RunConfig);

/// Ranks, stage, and what else a configuration has.
const CASES: [(usize, u8, Change); 6] = [
    (2, 2, |_| {}),
    (1, 0, |c| c.batch.micro = Some(1)),
    (2, 3, |c| (c.memory.optimizer, c.memory.gradients) = (Tier::Host, Tier::Host)),
    (1, 1, |c| {
        (c.memory.optimizer, c.memory.gradients) = (Tier::Host, Tier::Host);
        c.memory.delayed_update = true;
    }),
    (2, 1, |c| {
        (c.memory.update_in_backward, c.optimizer.clip) = (true, 0.0);
        c.memory.optimizer = Tier::Host;
    }),
    (1, 3, |c| {
        (c.memory.gradients_in_place, c.precision.accumulate) = (true, phalanx_train::config::Float::Bf16);
    }),
];

#[test]
fn accepted_mutants_change_no_bit() {
    let mut random = SplitMix64::new(5);
    for (world, zero, change) in CASES {
        let mut config = in_chunks(world, zero);
        change(&mut config);
        let (model, _) = rig::golden_config();
        let spec = rig::addressed(rig::spec(&model, &config), false).counting_targets();
        let plan = RunPlan::new(spec).unwrap();
        let (numbers, state) = walked(&config, &plan, None);
        let mut mutants = accepted(&plan);
        println!("{world} ranks, stage {zero}: {} mutants are accepted", mutants.len());
        assert!(mutants.len() > EXECUTED, "{} mutants are accepted", mutants.len());
        if !sweeps::are_whole() {
            let mut pick = || mutants.swap_remove((random.next_u64() % mutants.len() as u64) as usize);
            mutants = (0..EXECUTED).map(|_| pick()).collect();
        }
        for mutant in mutants {
            let what = format!("{world} ranks, stage {zero}, mutant {mutant:?}");
            let (own, own_state) = walked(&config, &plan, Some(mutant));
            assert_eq!(own, numbers, "{what}");
            rig::assert_same_state(&what, &state, &own_state);
        }
    }
}
