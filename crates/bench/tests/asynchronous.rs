//! Asynchronous updates: one worker is the synchronous engine, several stay within the bound, whoever is slow, dies or
//! goes on from a checkpoint.

use crate::golden;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::golden::{fill, synchronous, weights};
use crate::rig::{State, assert_same_state, golden_config, golden_steps, same_bits, spec};
use phalanx_bench::baselines::asynchronous::{
    self, Asynchronous, Done, Links, Pushes, Report, server_device, staleness_bound,
};
use phalanx_checkpoint::Checkpoint;
use phalanx_collectives::{Endpoint, Options, threads};
use phalanx_cpu::Cpu;
use phalanx_models::Gpt2;
use phalanx_plan::MemoryPlan;
use phalanx_tensor::{Arena, Device, Region};
use phalanx_train::RunError;
use phalanx_train::config::{Float, OptimizerKind, ParameterGroup, Reduce, Updates};
use phalanx_train::dataset::{DataDigests, prepare};
use phalanx_train::groups::GroupSource;
use phalanx_train::job::{Job, Start};
use phalanx_train::learned::Learned;
use phalanx_train::metrics::StepRecord;
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::run::{Engine, RankEnvironment, Silent};
use phalanx_train::{Dataset, Groups, ResolvedConfig, RunConfig, Spec, Summary};

/// A change to a configuration.
type Change = fn(&mut RunConfig);

/// The golden configuration with this number of workers and this bound on staleness.
fn asynchronous_config(ranks: usize, max_staleness: u64) -> (Gpt2, RunConfig) {
    let (model, mut config) = golden_config();
    config.parallel.data = Some(ranks);
    config.parallel.updates = Updates::Asynchronous;
    config.parallel.max_staleness = max_staleness;
    (model, config)
}

/// Runs `body` on every rank, a thread over an arena that replays its plan. A thread that panics gives `None`.
fn on_ranks<T: Send>(
    model: &Gpt2,
    config: &RunConfig,
    body: &(dyn Fn(&mut Asynchronous) -> T + Sync),
) -> Vec<Option<T>> {
    let plan = asynchronous::plan(spec(model, config)).unwrap();
    let max_staleness = config.parallel.max_staleness;
    let one = |endpoint: Endpoint| {
        let rank = endpoint.rank();
        let memory = plan.ranks[rank].memory.clone();
        let planned = memory.peak;
        let region = Region::anonymous(memory.arena_bytes as usize).unwrap();
        let device = Device::new(Cpu::new(1), Arena::replaying(memory, region));
        let options = Options { deadline: Duration::from_secs(60), ..Options::default() };
        let endpoint = endpoint.with_options(options);
        let links = Links::new(&GroupSource::Host(&endpoint), &plan.spec);
        let mut engine =
            Asynchronous::new(device.clone(), server_device(&device), links, &plan.spec, max_staleness);
        let out = body(&mut engine);
        let peak = engine.device().arena().peak().unwrap();
        assert!(peak.bytes <= planned.bytes, "rank {rank}");
        (out, peak == planned)
    };
    std::thread::scope(|scope| {
        let one = &one;
        let spawned: Vec<_> =
            threads(plan.spec.world_size()).into_iter().map(|e| scope.spawn(move || one(e))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, (T, bool)>| {
            let (out, at_peak) = thread.join().ok()?;
            assert!(at_peak, "measured and planned peak");
            Some(out)
        };
        spawned.into_iter().map(join).collect()
    })
}

/// Fills the batch of a worker with its part of the golden step, as the synchronous engine shares it.
fn own_part(config: &RunConfig, rank: usize) -> impl Fn(u64, &mut Batch) -> Result<(), RunError> + use<> {
    let steps = golden_steps();
    let own = config.batch.global / config.parallel.data.unwrap_or(1);
    move |number, batch| {
        let step = &steps[(number as usize - 1) % steps.len()];
        fill(batch, &step[rank * own..(rank + 1) * own]);
        Ok(())
    }
}

/// The results of a worker.
struct Ran {
    report: Report,
    done: Vec<Done>,
    /// The pushes of all workers that its server received.
    pushes: Pushes,
    pieces: Vec<(&'static str, usize, std::ops::Range<u64>, Vec<f32>)>,
}

/// All workers from the golden weights.
fn run(model: &Gpt2, config: &RunConfig, steps: u64) -> Vec<Ran> {
    let body = |engine: &mut Asynchronous| {
        engine.import(&weights()).unwrap();
        let part = own_part(config, engine.rank());
        let mut done = Vec::new();
        let mut after = |step: &Done| {
            done.push(step.clone());
            false
        };
        let report = engine.run(steps, &mut |n, b| part(n, b), &mut after).unwrap();
        assert_eq!(engine.steps(), steps);
        let mut pushes = Pushes::default();
        done.iter().for_each(|done| pushes.extend(done.pushes.clone()));
        pushes.extend(engine.take_pushes());
        Ran { report, done, pushes, pieces: engine.pieces() }
    };
    on_ranks(model, config, &body).into_iter().map(Option::unwrap).collect()
}

/// For each "state/parameter": all elements, each from exactly one rank.
fn merge(model: &Gpt2, config: &RunConfig, ran: &[Ran]) -> State {
    let network = spec(model, config).model.whole();
    let mut merged = State::new();
    for (state, parameter, range, numbers) in ran.iter().flat_map(|ran| &ran.pieces) {
        let parameter = &network.parameters[*parameter];
        let fresh = || vec![f32::NAN; parameter.elements()];
        let whole = merged.entry(format!("{state}/{}", parameter.name)).or_insert_with(fresh);
        let place = &mut whole[range.start as usize..range.end as usize];
        assert!(place.iter().all(|x| x.is_nan()), "{} twice", parameter.name);
        place.copy_from_slice(numbers);
    }
    assert!(merged.values().flatten().all(|x| !x.is_nan()), "every element has an owner");
    merged
}

/// A single worker is its own server and waits for nobody. It makes the calls of the synchronous engine in the same
/// order, so the bits are equal. With several micro-batches it equals `reduce = "defer"`, which also accumulates
/// gradients in place.
#[test]
fn one_worker_is_the_synchronous_engine() {
    let changes: [(&str, Change); 6] = [
        ("adamw", |_| {}),
        ("groups", |c| {
            let parameters = vec!["*.bias".into(), "*.wpe.*".into()];
            c.optimizer.group = vec![ParameterGroup { parameters, lr: Some(1e-2), weight_decay: Some(0.05) }];
        }),
        ("sgd", |c| (c.optimizer.kind, c.optimizer.lr) = (OptimizerKind::Sgd, 0.1)),
        ("micro-batches", |c| c.batch.micro = Some(2)),
        ("bf16", |c| c.precision.compute = Float::Bf16),
        ("f16 that overflows, sent in bf16", |c| {
            (c.precision.compute, c.precision.communicate) = (Float::F16, Some(Float::Bf16));
            (c.precision.initial_scale_power, c.precision.hysteresis) = (24, 1);
        }),
    ];
    for (name, change) in changes {
        let (model, mut config) = asynchronous_config(1, 0);
        change(&mut config);
        let mut expected = config.clone();
        expected.parallel.updates = Updates::Synchronous;
        if config.batch.micro.is_some() {
            expected.batch.reduce = Reduce::Defer;
        }
        let expected = synchronous(&model, &expected, &golden_steps());
        let ran = run(&model, &config, 20);
        assert!(same_bits(&ran[0].report.losses, &expected.losses), "{name}");
        let norms: Vec<f32> = ran[0].done.iter().map(|done| done.outcome.grad_norm).collect();
        assert!(same_bits(&norms, &expected.grad_norms), "{name}");
        assert_same_state(name, &merge(&model, &config, &ran), &expected.state);
        assert_eq!((ran[0].report.staleness_mean, ran[0].report.staleness_max), (0.0, 0), "{name}");
        let skipped = ran[0].done.iter().filter(|done| done.outcome.skipped).count();
        assert_eq!(skipped > 0, name.starts_with("f16"), "{name}");
    }
}

/// The loss falls, and no worker's parameters are older than the bound allows.
#[test]
fn several_workers_learn_within_the_bound() {
    for (ranks, max_staleness) in [(2, 0), (2, 3), (3, 1), (4, 0), (4, 3)] {
        let (model, mut config) = asynchronous_config(ranks, max_staleness);
        config.batch.global = if ranks == 3 { 6 } else { 8 };
        // A quarter of the synchronous rate: up to four updates a step.
        config.optimizer.lr = 3e-3 / ranks as f64;
        let what = format!("{ranks} workers, {max_staleness} ahead");
        let ran = run(&model, &config, 40);
        merge(&model, &config, &ran);
        let bound = staleness_bound(ranks, max_staleness);
        let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
        for Ran { report, done, .. } in &ran {
            assert_eq!(report.losses.len(), 40, "{what}");
            // The golden data are the same 20 steps twice, so the loss is lower the second time.
            assert!(
                mean(&report.losses[30..]) < mean(&report.losses[..10]) - 0.1,
                "{what}: {:?}",
                report.losses
            );
            assert!(report.staleness_max <= bound, "{what}: {} > {bound}", report.staleness_max);
            assert!(done.iter().all(|done| done.staleness.len() == ranks), "{what}");
            assert!(report.staleness_mean <= report.staleness_max as f64, "{what}");
        }
        // Every server applied every push; the staleness of all pushes adds up to the updates of other workers.
        let stale: u64 = ran.iter().flat_map(|ran| &ran.done).map(|done| done.staleness[0]).sum();
        assert!(stale > 0, "{what}: nobody was ever between two steps of another");
        servers_know_all_workers(&what, &ran);
    }
}

/// The statistics of every server cover each push of each worker once: losses, gradient norms and staleness.
fn servers_know_all_workers(what: &str, ran: &[Ran]) {
    let done: Vec<&Done> = ran.iter().flat_map(|ran| &ran.done).collect();
    let sum = |value: &dyn Fn(&Done) -> f32| done.iter().map(|done| f64::from(value(done))).sum::<f64>();
    let (losses, norms) = (sum(&|done| done.outcome.loss), sum(&|done| done.outcome.grad_norm));
    for (server, Ran { pushes, .. }) in ran.iter().enumerate() {
        assert_eq!((pushes.count, pushes.total), (done.len() as u64, done.len() as u64), "{what}");
        // The same f64 additions in another order.
        assert!((pushes.loss_sum - losses).abs() < 1e-9 * losses, "{what}: {} and {losses}", pushes.loss_sum);
        assert!((pushes.grad_norm_sum - norms).abs() < 1e-9 * norms, "{what}");
        let mut staleness = BTreeMap::new();
        for done in &done {
            *staleness.entry(done.staleness[server]).or_insert(0) += 1;
        }
        assert_eq!(pushes.staleness, staleness, "{what}");
    }
}

/// A worker that pauses before its second push holds the others back exactly at the bound.
#[test]
fn a_slow_worker_holds_others_back_by_the_bound_alone() {
    for max_staleness in [0, 2, 30] {
        let (model, config) = asynchronous_config(2, max_staleness);
        let steps = 12;
        // Step k of the fast worker needs push k - 1 - max_staleness of the slow one, which has pushed once.
        let last = steps.min(1 + 1 + max_staleness);
        let [fast, slow] = [AtomicU64::new(0), AtomicU64::new(0)];
        let finished = AtomicBool::new(false);
        let wait = |what: &str, done: &dyn Fn() -> bool| {
            let start = Instant::now();
            while !done() {
                assert!(start.elapsed() < Duration::from_secs(50), "{max_staleness} ahead: {what}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let body = |engine: &mut Asynchronous| {
            engine.import(&weights()).unwrap();
            let rank = engine.rank();
            let part = own_part(&config, rank);
            let mut next = |number: u64, batch: &mut Batch| {
                part(number, batch)?;
                [&fast, &slow][rank].store(number, Ordering::SeqCst);
                if number == 2 && rank == 0 {
                    // Ensures that the slow worker's first answer has seen at most one push of this one.
                    wait("the slow worker has its first answer", &|| slow.load(Ordering::SeqCst) == 2);
                }
                if number == 2 && rank == 1 {
                    let there = || match last == steps {
                        true => finished.load(Ordering::SeqCst),
                        false => fast.load(Ordering::SeqCst) == last,
                    };
                    wait("the fast worker goes on", &there);
                    // Time in which it could make further steps, if the bound allowed it.
                    std::thread::sleep(Duration::from_millis(100));
                    assert_eq!(fast.load(Ordering::SeqCst), last, "{max_staleness} ahead");
                }
                Ok(())
            };
            let mut after = |done: &Done| {
                finished.fetch_or(rank == 0 && done.step == steps, Ordering::SeqCst);
                if rank == 0 && done.step == 2 && last > 2 {
                    // Only pushes that were received count: two of this worker and one of the slow one.
                    assert_eq!(done.pushes.total, 3, "{max_staleness} ahead");
                }
                false
            };
            engine.run(steps, &mut next, &mut after).unwrap()
        };
        let reports: Vec<Report> = on_ranks(&model, &config, &body).into_iter().map(Option::unwrap).collect();
        let bound = staleness_bound(2, max_staleness);
        assert!(reports.iter().all(|report| report.staleness_max <= bound), "{max_staleness} ahead");
        // The slow worker's second push had seen at most one of the fast worker's pushes by then. The fast worker's
        // last step was pushed unless the bound held it back.
        let pushed = if last == steps { last } else { last - 1 };
        assert!(reports[1].staleness_max >= pushed - 1, "{max_staleness} ahead: {reports:?}");
    }
}

/// The pause of a slow worker counts in its own steps.
#[test]
fn slowness_is_the_slow_workers_own() {
    let (model, config) = asynchronous_config(2, 100);
    let order = Mutex::new(Vec::new());
    let body = |engine: &mut Asynchronous| {
        engine.import(&weights()).unwrap();
        let rank = engine.rank();
        let part = own_part(&config, rank);
        let mut next = |number: u64, batch: &mut Batch| {
            part(number, batch)?;
            order.lock().unwrap().push(rank);
            if rank == 1 {
                std::thread::sleep(Duration::from_millis(300));
            }
            Ok(())
        };
        let start = Instant::now();
        engine.run(6, &mut next, &mut |_| false).unwrap();
        start.elapsed()
    };
    let took: Vec<Duration> = on_ranks(&model, &config, &body).into_iter().map(Option::unwrap).collect();
    assert!(took[1] >= Duration::from_millis(1800), "it slept six times: {took:?}");
    // The fast one's steps all began before the slow one's last.
    assert_eq!(order.into_inner().unwrap().last(), Some(&1));
}

/// A rank that waits for a worker that died gets an error that names it.
#[test]
fn a_worker_that_dies_ends_the_run() {
    for (ranks, max_staleness) in [(2, 0), (3, 0), (3, 50)] {
        let (model, mut config) = asynchronous_config(ranks, max_staleness);
        config.batch.global = 6;
        let body = |engine: &mut Asynchronous| {
            engine.import(&weights()).unwrap();
            let rank = engine.rank();
            let part = own_part(&config, rank);
            let mut next = |number: u64, batch: &mut Batch| {
                part(number, batch)?;
                assert!(rank != 1 || number < 3, "worker 1 dies on purpose");
                Ok(())
            };
            engine.run(20, &mut next, &mut |_| false).unwrap_err()
        };
        let plan = asynchronous::plan(spec(&model, &config)).unwrap();
        // Peaks of a failed run are undefined, so engines are run without the check.
        let errors: Vec<Option<RunError>> = std::thread::scope(|scope| {
            let (plan, body) = (&plan, &body);
            let one = move |endpoint: Endpoint| {
                let memory = plan.ranks[endpoint.rank()].memory.clone();
                let region = Region::anonymous(memory.arena_bytes as usize).unwrap();
                let device = Device::new(Cpu::new(1), Arena::replaying(memory, region));
                let links = Links::new(&GroupSource::Host(&endpoint), &plan.spec);
                body(&mut Asynchronous::new(
                    device.clone(),
                    server_device(&device),
                    links,
                    &plan.spec,
                    max_staleness,
                ))
            };
            let spawned: Vec<_> = threads(ranks).into_iter().map(|e| scope.spawn(move || one(e))).collect();
            spawned.into_iter().map(|thread| thread.join().ok()).collect()
        });
        for (rank, error) in errors.into_iter().enumerate() {
            match (rank, error) {
                (1, error) => assert!(error.is_none(), "it panicked"),
                (_, error) => {
                    let text = error.expect("the others return").to_string();
                    assert!(text.contains("rank 1"), "rank {rank}: {text}");
                }
            }
        }
    }
}

/// A loss that is not finite ends the run on all ranks, with the error of the rank that had it.
#[test]
fn a_worker_that_diverges_says_so_to_all() {
    let (model, mut config) = asynchronous_config(2, 50);
    config.optimizer.lr = 1e30;
    config.optimizer.clip = 0.0;
    let body = |engine: &mut Asynchronous| {
        engine.import(&weights()).unwrap();
        let part = own_part(&config, engine.rank());
        engine.run(20, &mut |n, b| part(n, b), &mut |_| false).unwrap_err().to_string()
    };
    for text in on_ranks(&model, &config, &body) {
        let text = text.unwrap();
        assert!(text.contains("training diverged") && text.contains("optimizer.lr"), "{text}");
    }
}

/// A checkpoint holds the parameters and states of the servers, in a layout that every run can read.
#[test]
fn a_synchronous_run_goes_on_from_a_checkpoint_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let (model, config) = asynchronous_config(2, 2);
    let body = |engine: &mut Asynchronous| {
        engine.import(&weights()).unwrap();
        let part = own_part(&config, engine.rank());
        let report = engine.run(10, &mut |n, b| part(n, b), &mut |_| false).unwrap();
        let state = serde_json::json!({ "step": 10 });
        let path = engine.save_checkpoint(folder.path(), 10, &state).unwrap();
        assert_eq!(path, folder.path().join("step-10"));
        let ran = Ran { report, done: Vec::new(), pushes: engine.take_pushes(), pieces: engine.pieces() };
        // The same engine resumes from its own checkpoint with the same pieces.
        engine.restore(&Checkpoint::open(&path).unwrap()).unwrap();
        assert_eq!(engine.pieces(), ran.pieces);
        ran
    };
    let ran: Vec<Ran> = on_ranks(&model, &config, &body).into_iter().map(Option::unwrap).collect();
    let saved = merge(&model, &config, &ran);
    let checkpoint = Checkpoint::open(&folder.path().join("step-10")).unwrap();
    assert_eq!(phalanx_train::state::updates(&checkpoint).unwrap().applied, 10);
    let mut alone = config.clone();
    (alone.parallel.data, alone.parallel.updates) = (Some(1), Updates::Synchronous);
    let of = spec(&model, &alone);
    let mut rank = Rank::new(Device::new(Cpu::new(1), Arena::heap()), Groups::alone(&of), &of).unwrap();
    rank.restore(&checkpoint).unwrap();
    assert_same_state("restored", &golden::run_synchronous(&mut rank, 10, &[]).state, &saved);
    let steps = golden_steps();
    let on = golden::run_synchronous(&mut rank, 10, &steps[10..]);
    assert_eq!(rank.updates().applied, 20);
    // And back: four workers from the synchronous run's checkpoint.
    rank.save_checkpoint(folder.path(), 20, &serde_json::json!({ "step": 20 })).unwrap();
    let (model, config) = asynchronous_config(4, 1);
    let body = |engine: &mut Asynchronous| {
        engine.restore(&Checkpoint::open(&folder.path().join("step-20")).unwrap()).unwrap();
        assert_eq!(engine.steps(), 20);
        let pieces = engine.pieces();
        let part = own_part(&config, engine.rank());
        let mut numbers = Vec::new();
        let mut next = |number: u64, batch: &mut Batch| {
            numbers.push(number);
            part(number, batch)?;
            Ok(())
        };
        let report = engine.run(2, &mut next, &mut |_| false).unwrap();
        assert_eq!(numbers, [21, 22]);
        Ran { report, done: Vec::new(), pushes: engine.take_pushes(), pieces }
    };
    let ran: Vec<Ran> = on_ranks(&model, &config, &body).into_iter().map(Option::unwrap).collect();
    assert_same_state("back", &merge(&model, &config, &ran), &on.state);
}

/// One rank of a run in a folder, as the binary would run it.
fn train(config: &RunConfig, model: &Gpt2, run: &std::path::Path, start: Start) -> Vec<Summary> {
    let data = || Dataset::open_checked(config, run, model.vocab, None).unwrap().0;
    let of = Spec::new(config, model.clone(), data().evaluated(), 1).unwrap();
    let plan = asynchronous::plan(of).unwrap();
    let ranks = plan.spec.world_size();
    let memory: Vec<_> = plan.ranks.iter().map(|rank| rank.memory.clone()).collect();
    let (config, run) = (ResolvedConfig::new(config.clone()).unwrap(), run.to_path_buf());
    let digests = DataDigests::default();
    let job = Job {
        config,
        plan: plan.into(),
        data: Box::new(data()),
        run,
        digests,
        start,
        evaluates_first: false,
        peak_flops_per_s: Some(1e9),
    };
    let stop_requested = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (job, stop_requested) = (&job, &stop_requested);
        let one = move |endpoint: Endpoint, memory: MemoryPlan| {
            let region = endpoint.arena(memory.arena_bytes as usize).unwrap();
            let device = Device::new(Cpu::new(1), Arena::replaying(memory, region));
            let place = RankEnvironment {
                device,
                groups: Links::new(&GroupSource::Host(&endpoint), &job.plan.spec),
                stop_requested,
                note_step: &|step| endpoint.note(step),
                foreign_bytes: &|| 0,
            };
            asynchronous::train(job, place, &mut Silent).unwrap()
        };
        let spawned: Vec<_> =
            threads(ranks).into_iter().zip(memory).map(|(e, m)| scope.spawn(move || one(e, m))).collect();
        spawned.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All workers are done with step 3 before it is saved, and with step 6 at the end: up to there, the metrics count all of
/// their tokens and the staleness of each of their gradients.
fn every_push_is_in_the_metrics(path: &std::path::Path, config: &RunConfig) {
    let text = std::fs::read_to_string(path).unwrap();
    let tokens_per_step = (config.batch.global * config.model.seq) as u64;
    let mut gradients = 0;
    for record in text.lines().filter_map(|line| serde_json::from_str::<StepRecord>(line).ok()) {
        let staleness = record.staleness.unwrap();
        gradients += staleness.staleness_counts.iter().map(|(_, count)| count).sum::<u64>();
        let largest = staleness.staleness_counts.last().map_or(0, |(staleness, _)| *staleness);
        assert_eq!(staleness.staleness_max, largest);
        // Two workers, each with half of the tokens of a step.
        assert_eq!(record.tokens, gradients * tokens_per_step / 2, "step {}", record.step);
        if record.step % 3 == 0 {
            assert_eq!(gradients, 2 * record.step);
        }
    }
    assert_eq!(gradients, 12);
}

/// A run writes metrics with staleness, evaluations, checkpoints and `memory.json`, and resumes from the last
/// checkpoint.
#[test]
fn a_run_leaves_what_runs_leave() {
    let folder = tempfile::tempdir().unwrap();
    let (model, mut config) = asynchronous_config(2, 1);
    let model = Gpt2 { vocab: 256, ..model };
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "the quick brown fox jumps over the lazy dog; ".repeat(60)).unwrap();
    config.data.text = vec![text.to_str().unwrap().into()];
    config.model.vocab = Some(256);
    (config.train.steps, config.train.eval_every, config.train.save_every) = (6, 4, 3);
    config.check().unwrap();
    let run = folder.path().join("run");
    std::fs::create_dir(&run).unwrap();
    prepare(&config, &run, 1, &Learned::default(), &mut |_| {}).unwrap();
    let lines = |key: &str| -> Vec<u64> {
        let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let values = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        values.filter(|value| value[key].is_number()).map(|value| value["step"].as_u64().unwrap()).collect()
    };
    for summary in train(&config, &model, &run, Start::Fresh) {
        assert_eq!((summary.step, summary.stopped), (6, false));
        assert!(summary.loss.is_some_and(f32::is_finite) && summary.val_loss.is_some_and(f32::is_finite));
        assert_eq!(summary.checkpoint, Some(run.join("checkpoints/step-6")));
    }
    assert_eq!(lines("staleness_max"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(lines("val_loss"), [4, 6]);
    every_push_is_in_the_metrics(&run.join("metrics.jsonl"), &config);
    let memory: serde_json::Value =
        serde_json::from_slice(&std::fs::read(run.join("memory.json")).unwrap()).unwrap();
    assert_eq!(memory["ranks"].as_array().unwrap().len(), 2);
    config.train.steps = 8;
    let from = run.join("checkpoints/step-3");
    for summary in train(&config, &model, &run, Start::Resume(from)) {
        assert_eq!((summary.step, summary.checkpoint), (8, Some(run.join("checkpoints/step-8"))));
    }
    assert_eq!(lines("staleness_max"), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(lines("val_loss"), [4, 8]);
}
