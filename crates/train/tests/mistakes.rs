//! Collectives that are skipped, doubled or misplaced, planted one by one: each is an error of the plan that names
//! tensor, axis and place, and each is seen by the oracle of one rank when it is executed after all.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for who runs the test")]

mod rig;

use phalanx_checkpoint::HuggingFaceDir;
use phalanx_parallel::tensor::{Mistake, Wrong};
use phalanx_train::{Rank, RunConfig, RunPlan, Spec};

/// A mistake, the mesh (pipeline, data, tensor) that it is made on, whether with sequence parallelism, and words
/// of the plan's error.
type Case = (&'static str, Wrong, [usize; 3], bool, &'static [&'static str]);

const CASES: &[Case] = &[
    ("row.y", Wrong::Skipped, [1, 1, 2], false, &["`tensor`", "row.rs"]),
    ("row.y", Wrong::Doubled, [1, 1, 2], false, &["`tensor`", "already replicated"]),
    ("row.y", Wrong::OtherAxis, [1, 2, 2], false, &["`data`", "wrong"]),
    ("row.y", Wrong::Doubled, [1, 1, 2], true, &["`tensor`", "already replicated"]),
    ("row.bias", Wrong::Skipped, [1, 1, 2], false, &["`tensor`", "add_positions"]),
    ("column.dx", Wrong::Skipped, [1, 1, 2], false, &["`tensor`", "partial sum"]),
    ("column.dx", Wrong::Doubled, [1, 1, 2], false, &["`tensor`", "already replicated"]),
    ("column.dx", Wrong::OtherAxis, [1, 2, 2], false, &["`data`", "wrong"]),
    // The conjugate of a scatter (a slice) in place of that of a gather.
    ("column.dx", Wrong::Skipped, [1, 1, 2], true, &["`tensor`", "partial sum"]),
    ("column.x", Wrong::Skipped, [1, 1, 2], true, &["`tensor`"]),
    ("row.dy", Wrong::Skipped, [1, 1, 2], true, &["`tensor`"]),
    ("row.dy", Wrong::Doubled, [1, 1, 2], true, &["`tensor`", "already replicated"]),
    ("embedding.y", Wrong::Skipped, [1, 1, 2], false, &["`tensor`", "partial sum"]),
    ("embedding.y", Wrong::Doubled, [1, 1, 2], false, &["`tensor`", "already replicated"]),
    ("head.statistics", Wrong::Skipped, [1, 1, 2], false, &["`tensor`", "head"]),
    ("head.dx", Wrong::Skipped, [1, 1, 2], false, &["`tensor`", "partial sum"]),
    ("head.dx", Wrong::Doubled, [1, 1, 2], true, &["`tensor`", "already replicated"]),
    ("rows.partial", Wrong::Skipped, [1, 1, 2], true, &["`tensor`", "ln_"]),
    ("partial.sum", Wrong::Skipped, [1, 1, 2], true, &["`tensor`", "partial sum"]),
    ("partial.sum", Wrong::Doubled, [1, 1, 2], true, &["`tensor`", "already replicated"]),
    ("tied.sum", Wrong::Skipped, [2, 1, 1], false, &["`pipeline`", "partial sum", "wte"]),
    ("tied.sum", Wrong::Doubled, [2, 1, 1], false, &["`pipeline`", "already replicated"]),
    ("data.reduce", Wrong::Skipped, [1, 2, 1], false, &["`data`", "partial sum"]),
    ("data.reduce", Wrong::Doubled, [1, 2, 1], false, &["`data`", "already replicated"]),
    ("loss.scale", Wrong::Skipped, [1, 2, 1], false, &["the loss", "weight"]),
    ("norm.replicas", Wrong::Skipped, [1, 1, 2], false, &["norm counts", "every replica but one"]),
    ("pipeline.order", Wrong::Skipped, [2, 1, 1], false, &["pipeline", "tag"]),
];

/// Mistakes that ranks see when they are executed, before any number is wrong, and words of their error.
const REFUSED: &[(&str, &str)] = &[("pipeline.order", "tag")];

fn config([pipeline, data, tensor]: [usize; 3], sequence_parallel: bool) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    parallel.sequence_parallel = sequence_parallel;
    config.batch.micro = Some(if pipeline > 1 { 2 } else { 8 / data });
    config
}

/// Losses and norms of three steps, rank by rank, or the error of the first rank that has one.
fn execute(config: &RunConfig, mistake: Option<Mistake>) -> Result<Vec<Vec<f32>>, String> {
    let (model, _) = rig::golden_config();
    let plan = RunPlan::new(rig::spec(&model, config)).unwrap();
    let spec = Spec { mistake, ..plan.spec.clone() };
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
    rig::on_planned_ranks(&plan, &spec, &|spec, groups| spec.network(groups), &body).into_iter().collect()
}

/// Largest relative difference from the oracle's losses and norms, over all ranks.
fn difference(ranks: &[Vec<f32>], oracle: &[f32]) -> f32 {
    assert!(!ranks.is_empty());
    ranks.iter().map(|seen| rig::relative_difference(seen, oracle)).fold(0.0, f32::max)
}

/// Sums of the same numbers in another order, as in mesh.rs: without a mistake.
const SAME: f32 = 2000.0 / 16_777_216.0;

/// A mistake changes a whole term.
const WRONG: f32 = 1e-3;

/// What an executed mistake leads to.
fn check_executed(config: &RunConfig, mistake: Mistake, oracle: &[f32]) -> Result<(), String> {
    let seen = execute(config, Some(mistake));
    println!("    executed: {:?}\n", seen.as_ref().map(|ranks| difference(ranks, oracle)));
    match (seen, REFUSED.iter().find(|(at, _)| *at == mistake.at)) {
        (Ok(ranks), None) if difference(&ranks, oracle) >= WRONG => Ok(()),
        (Ok(ranks), None) => Err(format!("executed, off by {} only", difference(&ranks, oracle))),
        (Err(error), Some((_, words))) if error.contains(words) => Ok(()),
        (seen, refused) => Err(format!("executed: {seen:?}, expected an error: {refused:?}")),
    }
}

#[test]
fn every_mistake_is_an_error_of_the_plan_and_seen_by_one_rank() {
    let (model, _) = rig::golden_config();
    let mut missed = Vec::new();
    let [oracle] = &execute(&config([1, 1, 1], false), None).unwrap()[..] else { panic!("one rank") };
    let mut right = Vec::new();
    for (at, wrong, mesh, sequence, words) in CASES {
        let mistake = Mistake { at, wrong: *wrong };
        let config = config(*mesh, *sequence);
        let what = format!("{at} {wrong:?} on {mesh:?}, sequence parallelism {sequence}");
        let planned = RunPlan::new(Spec { mistake: Some(mistake), ..rig::spec(&model, &config) });
        match planned {
            Ok(_) => missed.push(format!("{what}: planned without an error")),
            Err(error) => {
                let text = error.to_string();
                println!("{what}:\n    {text}\n");
                for word in *words {
                    if !text.contains(word) {
                        missed.push(format!("{what}: {word} is not in: {text}"));
                    }
                }
            }
        }
        if !right.contains(&(mesh, sequence)) {
            right.push((mesh, sequence));
            let off = difference(&execute(&config, None).unwrap(), oracle);
            assert!(off < SAME, "{mesh:?}, sequence parallelism {sequence}, no mistake: off by {off}");
        }
        missed.extend(check_executed(&config, mistake, oracle).err().map(|text| format!("{what}: {text}")));
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}
