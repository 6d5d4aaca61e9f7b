//! Collectives that are dropped, doubled or misplaced, planted one by one under every ZeRO stage: each is an error of
//! the plan that names tensor, axis and call site, and each is seen when it is executed after all: its losses and
//! norms are not those of one rank.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for who runs the test")]

use crate::rig;
use std::sync::Arc;

use phalanx_checkpoint::HuggingFaceDir;
use phalanx_collectives::Group;
use phalanx_layers::Network;
use phalanx_parallel::pipeline::Wires;
use phalanx_plan::Coordinates;
use phalanx_tensor::Device;
use phalanx_testing::planted::FaultKind::{BiasedTerms, Doubled, Dropped, OtherGroup, OtherMicroBatch};
use phalanx_testing::planted::sites::*;
use phalanx_testing::planted::{FaultKind, Planted, PlantedFault, Renumbered};
use phalanx_testing::sweeps;
use phalanx_train::{Groups, Rank, RunConfig, RunPlan, Spec};

/// A planted fault.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Plant {
    /// A collective.
    Call(CallSite, FaultKind),
    /// Under sequence parallelism, norms do not say that their gradients are terms of a sum over the tensor axis.
    NormsNotPartial,
    /// The loss is the mean over the tokens of a single micro-batch of a single replica.
    MeanOfOneMicroBatch,
    /// Every tensor-parallel rank counts the parameters that all of them have in the gradient norm.
    ReplicasCounted,
}

use Plant::{Call, MeanOfOneMicroBatch, NormsNotPartial, ReplicasCounted};

/// A fault, the mesh (pipeline, data, tensor) on which it is planted, whether with sequence parallelism, and words of
/// the plan's error.
type Case = (Plant, [usize; 3], bool, &'static [&'static str]);

const CASES: &[Case] = &[
    (Call(ROW_Y, Dropped), [1, 1, 2], false, &["`tensor`", "row.rs"]),
    (Call(ROW_Y, Doubled), [1, 1, 2], false, &["`tensor`", "already replicated"]),
    (Call(ROW_Y, OtherGroup), [1, 2, 2], false, &["`data`", "wrong"]),
    (Call(ROW_Y, Doubled), [1, 1, 2], true, &["`tensor`", "already replicated"]),
    (Call(ROW_Y, BiasedTerms), [1, 1, 2], false, &["`tensor`", "add_positions"]),
    (Call(COLUMN_DX, Dropped), [1, 1, 2], false, &["`tensor`", "partial sum"]),
    (Call(COLUMN_DX, Doubled), [1, 1, 2], false, &["`tensor`", "already replicated"]),
    (Call(COLUMN_DX, OtherGroup), [1, 2, 2], false, &["`data`", "wrong"]),
    // The conjugate of a scatter (a slice) in place of that of a gather.
    (Call(COLUMN_DX, Dropped), [1, 1, 2], true, &["`tensor`", "partial sum"]),
    (Call(COLUMN_X, Dropped), [1, 1, 2], true, &["`tensor`"]),
    (Call(ROW_DY, Dropped), [1, 1, 2], true, &["`tensor`"]),
    (Call(ROW_DY, Doubled), [1, 1, 2], true, &["`tensor`", "already replicated"]),
    (Call(EMBEDDING_Y, Dropped), [1, 1, 2], false, &["`tensor`", "partial sum"]),
    (Call(EMBEDDING_Y, Doubled), [1, 1, 2], false, &["`tensor`", "already replicated"]),
    (Call(HEAD_STATISTICS, Dropped), [1, 1, 2], false, &["`tensor`", "head"]),
    (Call(HEAD_DX, Dropped), [1, 1, 2], false, &["`tensor`", "partial sum"]),
    (Call(HEAD_DX, Doubled), [1, 1, 2], true, &["`tensor`", "already replicated"]),
    (NormsNotPartial, [1, 1, 2], true, &["`tensor`", "ln_"]),
    (Call(PARTIAL_SUM, Dropped), [1, 1, 2], true, &["`tensor`", "partial sum"]),
    (Call(PARTIAL_SUM, Doubled), [1, 1, 2], true, &["`tensor`", "already replicated"]),
    (Call(TIED_SUM, Dropped), [2, 1, 1], false, &["`pipeline`", "partial sum", "wte"]),
    (Call(TIED_SUM, Doubled), [2, 1, 1], false, &["`pipeline`", "already replicated"]),
    (Call(DATA_REDUCE, Dropped), [1, 2, 1], false, &["`data`", "partial sum"]),
    (Call(DATA_REDUCE, Doubled), [1, 2, 1], false, &["`data`", "already replicated"]),
    (MeanOfOneMicroBatch, [1, 2, 1], false, &["the loss", "weight"]),
    (ReplicasCounted, [1, 1, 2], false, &["norm counts", "every replica but one"]),
    (Call(PIPELINE_SEND, OtherMicroBatch), [2, 1, 1], false, &["pipeline", "tag"]),
];

/// Faults that ranks see when they are executed, before any number is wrong, and words of their error.
const REFUSED: &[(Plant, &str)] = &[(Call(PIPELINE_SEND, OtherMicroBatch), "tag")];

impl Plant {
    fn spec(self, mut spec: Spec) -> Spec {
        spec.batch.targets_per_step = match self {
            MeanOfOneMicroBatch => spec.batch.micro_batch_size * spec.batch.targets_per_sequence,
            _ => spec.batch.targets_per_step,
        };
        spec
    }

    fn groups(self, device: &Device, spec: &Spec, groups: Groups) -> Groups {
        match self {
            Call(site, kind) => {
                let (fault, other) = (PlantedFault { site, kind }, Arc::clone(&groups.data));
                let plant = |group: Arc<dyn Group>| Planted::around(group, fault, device, &other);
                let Groups {
                    world,
                    pipeline,
                    data,
                    tensor,
                    wires: Wires { groups: wires, wiring },
                    linked,
                    piece_bytes,
                    ties,
                } = groups;
                Groups {
                    world: plant(world),
                    pipeline: plant(pipeline),
                    data: plant(data),
                    tensor: plant(tensor),
                    wires: Wires { groups: wires.into_iter().map(plant).collect(), wiring },
                    linked,
                    piece_bytes,
                    ties: ties.into_iter().map(|tie| tie.map(plant)).collect(),
                }
            }
            ReplicasCounted => {
                let at = spec.mesh.axes.coordinates(groups.world.rank());
                let first = spec.mesh.axes.rank(Coordinates { tensor: 0, ..at });
                Groups { world: Renumbered::around(groups.world, first), ..groups }
            }
            NormsNotPartial | MeanOfOneMicroBatch => groups,
        }
    }

    fn network(self, spec: &Spec, groups: &Groups) -> Network {
        let mut network = spec.network(&groups.tensor);
        if self == NormsNotPartial {
            let norms = network.parameters.iter_mut().filter(|parameter| parameter.name.contains(".ln_"));
            norms.for_each(|norm| norm.partial = false);
        }
        network
    }

    fn plan(self, spec: Spec) -> Result<RunPlan, String> {
        let make = |device: Device, groups: Groups, spec: &Spec| {
            let groups = self.groups(&device, spec, groups);
            let network = self.network(spec, &groups);
            Rank::with_network(device, groups, spec, network)
        };
        RunPlan::with_ranks(self.spec(spec), &make).map_err(|error| error.to_string())
    }
}

fn config([pipeline, data, tensor]: [usize; 3], sequence_parallel: bool, zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    (parallel.sequence_parallel, parallel.zero) = (sequence_parallel, zero);
    config.batch.micro = Some(if pipeline > 1 { 2 } else { 8 / data });
    config
}

/// Losses and norms of three steps, rank by rank, or the error of the first rank that has one.
fn execute(config: &RunConfig, plant: Option<Plant>) -> Result<Vec<Vec<f32>>, String> {
    let (model, _) = rig::golden_config();
    let plan = RunPlan::new(rig::spec(&model, config)).unwrap();
    let steps = rig::golden_steps();
    let body = |engine: &mut Rank, _: usize| {
        engine.import(&HuggingFaceDir::open(&rig::golden().join("gpt2")).unwrap()).unwrap();
        let mut seen = Vec::new();
        for (i, step) in steps[..3].iter().enumerate() {
            let batch = rig::batch(engine, config, step);
            let outcome = engine.step(i as u64 + 1, &batch, false).map_err(|error| error.to_string())?;
            seen.extend([outcome.loss, outcome.grad_norm]);
        }
        Ok(seen)
    };
    let Some(plant) = plant else {
        return rig::on_planned_ranks(&plan, &|spec, groups| spec.network(&groups.tensor), &body)
            .into_iter()
            .collect();
    };
    let groups = |device: &Device, spec: &Spec, groups| plant.groups(device, spec, groups);
    let network = |spec: &Spec, groups: &Groups| plant.network(spec, groups);
    let spec = plant.spec(plan.spec.clone());
    // A fault may use other memory than planned.
    let build = rig::Build { network: &network, groups: &groups, heap: true };
    let ended = rig::each_rank(&plan, &spec, &build, &body);
    ended.into_iter().map(|rank| rank.unwrap_or_else(|text| panic!("a rank panicked: {text}"))).collect()
}

/// Losses and norms of one rank: all its groups are worlds of one.
fn oracle() -> Vec<f32> {
    let config = config([1, 1, 1], false, 0);
    let (model, _) = rig::golden_config();
    let alone = Groups::alone(&rig::spec(&model, &config));
    let named = [&alone.world, &alone.pipeline, &alone.data, &alone.tensor];
    assert!(named.iter().all(|group| group.world_size() == 1) && alone.wires.groups.is_empty());
    let [seen] = &execute(&config, None).unwrap()[..] else { panic!("one rank") };
    seen.clone()
}

/// Largest relative difference from the oracle's losses and norms, over all ranks.
fn difference(ranks: &[Vec<f32>], oracle: &[f32]) -> f32 {
    assert!(!ranks.is_empty());
    ranks.iter().map(|seen| rig::relative_difference(seen, oracle)).fold(0.0, f32::max)
}

/// Sums of the same numbers in another order, as in mesh.rs: without a fault.
const SAME: f32 = 2000.0 / 16_777_216.0;

/// A fault changes at least a whole term.
const WRONG: f32 = 1e-3;

/// The effect of an executed fault.
fn check_executed(config: &RunConfig, plant: Plant, oracle: &[f32]) -> Result<(), String> {
    let seen = execute(config, Some(plant));
    println!("    executed: {:?}\n", seen.as_ref().map(|ranks| difference(ranks, oracle)));
    match (seen, REFUSED.iter().find(|(refused, _)| *refused == plant)) {
        (Ok(ranks), None) if difference(&ranks, oracle) >= WRONG => Ok(()),
        (Ok(ranks), None) => Err(format!("executed, off by {} only", difference(&ranks, oracle))),
        (Err(error), Some((_, words))) if error.contains(words) => Ok(()),
        (seen, refused) => Err(format!("executed: {seen:?}, expected an error: {refused:?}")),
    }
}

/// Describes what is wrong with the plan's error, if anything.
fn check_planned(spec: Spec, plant: Plant, words: &[&str]) -> Result<(), String> {
    let Err(text) = plant.plan(spec) else { return Err("planned without an error".to_string()) };
    println!("    {text}\n");
    match words.iter().find(|word| !text.contains(**word)) {
        None => Ok(()),
        Some(word) => Err(format!("{word} is not in: {text}")),
    }
}

/// Plans every fault. Executes each fourth, in whole sweeps all: the four stages together execute all of them.
fn check_stage(zero: u8) {
    let (model, _) = rig::golden_config();
    let (oracle, mut missed, mut right) = (oracle(), Vec::new(), Vec::new());
    for (number, (plant, mesh, sequence, words)) in CASES.iter().enumerate() {
        let config = config(*mesh, *sequence, zero);
        let what = format!("{plant:?} on {mesh:?}, sequence parallelism {sequence}, ZeRO-{zero}");
        println!("{what}:");
        if !right.contains(&(mesh, sequence)) {
            right.push((mesh, sequence));
            let off = difference(&execute(&config, None).unwrap(), &oracle);
            assert!(off < SAME, "{mesh:?}, sequence parallelism {sequence}, no fault: off by {off}");
        }
        let planned = check_planned(rig::spec(&model, &config), *plant, words);
        let is_executed = sweeps::are_whole() || number % 4 == usize::from(zero);
        let executed = if is_executed { check_executed(&config, *plant, &oracle) } else { Ok(()) };
        for checked in [planned, executed] {
            missed.extend(checked.err().map(|text| format!("{what}: {text}")));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn every_fault_is_an_error_of_the_plan_and_seen_by_one_rank_under_zero_0() {
    check_stage(0);
}

#[test]
fn under_zero_1() {
    check_stage(1);
}

#[test]
fn under_zero_2() {
    check_stage(2);
}

#[test]
fn under_zero_3() {
    check_stage(3);
}
