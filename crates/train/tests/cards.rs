//! Ranks with cards of their own, which exchange data between the cards: every collective as through shared memory, bit for bit, and
//! training as through host memory, bit for bit.
//!
//! Needs four cards, a driver, NVRTC in the folder `PHALANX_NVRTC` and NCCL; the emulator of the driver has as many cards as
//! `PHALANX_EMULATOR_CARDS` says, and fails every call after a report (`cargo xtask cuda-emulator` runs these tests with four). Without them the tests say so and check nothing.
#![allow(clippy::print_stderr, reason = "a test that checks nothing says so")]

use crate::rig;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::rig::{Ran, Steps, assert_same_state, devices, same_bits};
use half::{bf16, f16};
use phalanx_collectives::linked::linked;
use phalanx_collectives::{CollectiveError, Endpoint, Group, Options, threads};
use phalanx_cpu::Cpu;
use phalanx_cuda::{Found, unplanned_device};
use phalanx_models::Gpt2;
use phalanx_plan::trace::Stream;
use phalanx_tensor::operations::{Elementwise, Operation};
use phalanx_tensor::{Arena, Category, DType, Device, Element, Immediate, Kernels, Memory, Tensor};
use phalanx_train::RunConfig;
use phalanx_train::config::{Communication, DeviceKind, Float};

/// The process has one driver, which a failure makes unusable: tests take turns.
static TURN: Mutex<()> = Mutex::new(());

fn options() -> phalanx_cuda::Options {
    phalanx_cuda::Options {
        nvrtc: std::env::var_os("PHALANX_NVRTC").map(Into::into),
        nccl: std::env::var_os("PHALANX_NCCL").map(Into::into),
        cache: option_env!("CARGO_TARGET_TMPDIR").map(|folder| Path::new(folder).join("phalanx/cuda")),
        communicators: vec![4],
        ..phalanx_cuda::Options::default()
    }
}

/// None, with a line that says why, where there are not so many cards or no library.
fn turn(test: &str, cards: usize) -> Option<MutexGuard<'static, ()>> {
    let why = match Found::look(&options()) {
        Err(error) => error.to_string(),
        Ok(found) if found.cards.len() < cards => format!("{} cards of {cards}", found.cards.len()),
        Ok(Found { nccl: Ok(None), .. }) => phalanx_cuda::NO_NCCL.to_string(),
        Ok(Found { nccl: Err(wrong), .. }) => wrong,
        Ok(_) => return Some(TURN.lock().unwrap_or_else(PoisonError::into_inner)),
    };
    eprintln!("{test}: skipped: {why}");
    None
}

const CARD_BYTES: u64 = 64 << 20;

fn card_of(rank: usize) -> Device {
    unplanned_device(&options(), rank, CARD_BYTES, Cpu::new(1)).unwrap()
}

fn processor() -> Device {
    let backend = Arc::new(Immediate::new(Cpu::new(1)));
    Device::with_memories(backend, Arena::heap(), Arena::heap_of(Memory::Host))
}

/// Runs `body` on the group of each rank, on the processor or on cards of their own; results by rank.
fn on_ranks<T: Send>(
    world: usize,
    on_cards: bool,
    deadline: Duration,
    body: impl Fn(&dyn Group, &Device) -> T + Sync,
) -> Vec<T> {
    let one = |endpoint: Endpoint| {
        let endpoint = endpoint.with_options(Options { deadline, ..Options::default() });
        let group = endpoint.group("data");
        if !on_cards {
            return body(&*group, &processor());
        }
        let device = card_of(endpoint.rank());
        let group = linked(group, &device);
        group.connect().unwrap();
        body(&*group, &device)
    };
    std::thread::scope(|scope| {
        let one = &one;
        let ranks: Vec<_> =
            threads(world).into_iter().map(|endpoint| scope.spawn(move || one(endpoint))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const DEADLINE: Duration = Duration::from_secs(60);

/// A type of elements with values of very different sizes, so that any other order of additions changes the bits.
trait Sample: Element {
    fn sample(value: f64) -> Self;
}

impl Sample for f32 {
    fn sample(value: f64) -> f32 {
        value as f32
    }
}
impl Sample for bf16 {
    fn sample(value: f64) -> bf16 {
        bf16::from_f64(value)
    }
}
impl Sample for f16 {
    fn sample(value: f64) -> f16 {
        f16::from_f64(value)
    }
}
impl Sample for f64 {
    fn sample(value: f64) -> f64 {
        value / 3.0
    }
}

fn tensor<T: Sample>(device: &Device, rank: usize, elements: usize) -> Tensor {
    let value = |i: usize| {
        let h = ((rank * 7919 + i * 104_729 + 12_345) as u32).wrapping_mul(2_654_435_761);
        T::sample((f64::from(h) / f64::from(u32::MAX) - 0.5) * 10f64.powi((h % 9) as i32 - 4))
    };
    let values: Vec<T> = (0..elements).map(value).collect();
    let mut tensor = device.alloc(T::DTYPE, [elements], Category::Communication, "test");
    device.upload(&values, tensor.view_mut());
    tensor
}

/// The bytes of the first `elements` of a tensor.
fn bytes<T: Sample>(device: &Device, tensor: &Tensor, elements: std::ops::Range<usize>) -> Vec<u8> {
    let mut values = vec![T::sample(0.0); elements.len()];
    device.download(tensor.view().range(elements), &mut values).unwrap();
    bytemuck::cast_slice(&values).to_vec()
}

/// Results of every collective, with one rank's values.
fn all_calls<T: Sample>(g: &dyn Group, device: &Device, part: usize) -> Vec<Vec<u8>> {
    let (rank, world) = (g.rank(), g.world_size());
    let (whole, mine) = (part * world, rank * part..(rank + 1) * part);
    let mut found = Vec::new();
    let x = |elements| tensor::<T>(device, rank, elements);
    // With an odd count, parts are short; a long one goes in two steps.
    for count in [1, part + 1, 40 * part + 3] {
        let sum = g.all_reduce(x(count)).wait().unwrap();
        found.push(bytes::<T>(device, &sum, 0..count));
        let sum = g.reduce(x(count), count % world).wait().unwrap();
        found.push(if count % world == rank { bytes::<T>(device, &sum, 0..count) } else { Vec::new() });
    }
    for accumulate in [false, true] {
        let (_, shard) =
            g.reduce_scatter(x(whole), tensor::<T>(device, 77, part), accumulate).wait().unwrap();
        found.push(bytes::<T>(device, &shard, 0..part));
    }
    let sum = g.reduce_scatter_in_place(x(whole)).wait().unwrap();
    found.push(bytes::<T>(device, &sum, mine.clone()));
    let (_, all) = g.all_gather(x(part), tensor::<T>(device, 5, whole)).wait().unwrap();
    found.push(bytes::<T>(device, &all, 0..whole));
    let all = g.all_gather_in_place(x(whole)).wait().unwrap();
    found.push(bytes::<T>(device, &all, 0..whole));
    let (_, all) = g.all_to_all(x(whole), tensor::<T>(device, 5, whole)).wait().unwrap();
    found.push(bytes::<T>(device, &all, 0..whole));
    for root in 0..world {
        let same = g.broadcast(x(part), root).wait().unwrap();
        found.push(bytes::<T>(device, &same, 0..part));
        let to = (rank == root).then(|| tensor::<T>(device, 5, whole));
        let (_, all) = g.gather(x(part), to, root).wait().unwrap();
        found.push(all.map_or(Vec::new(), |all| bytes::<T>(device, &all, 0..whole)));
        let from = (rank == root).then(|| x(whole));
        let (_, own) = g.scatter(from, tensor::<T>(device, 5, part), root).wait().unwrap();
        found.push(bytes::<T>(device, &own, 0..part));
    }
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    let received = if rank == 0 {
        g.send(x(part), next, 1).wait().unwrap();
        g.recv(tensor::<T>(device, 5, part), previous, 1).wait().unwrap()
    } else {
        let received = g.recv(tensor::<T>(device, 5, part), previous, 1).wait().unwrap();
        g.send(x(part), next, 1).wait().unwrap();
        received
    };
    found.push(bytes::<T>(device, &received, 0..part));
    g.barrier().wait().unwrap();
    found
}

fn check_collectives<T: Sample>(world: usize, part: usize) {
    let calls = |on_cards| on_ranks(world, on_cards, DEADLINE, |g, device| all_calls::<T>(g, device, part));
    let (expected, found) = (calls(false), calls(true));
    for (rank, (expected, found)) in expected.iter().zip(&found).enumerate() {
        for (call, (expected, found)) in expected.iter().zip(found).enumerate() {
            assert!(expected == found, "{} on rank {rank} of {world}, call {call}", T::DTYPE.name());
        }
    }
}

#[test]
fn collectives_between_cards_have_the_bits_of_shared_memory() {
    let Some(_turn) = turn("collectives", 4) else { return };
    for world in [2, 3, 4] {
        check_collectives::<f32>(world, 1000);
        check_collectives::<bf16>(world, 333);
    }
    check_collectives::<f16>(3, 1000);
    check_collectives::<f64>(3, 5);
}

#[test]
fn calls_that_differ_are_refused_before_a_byte_moves() {
    let Some(_turn) = turn("calls that differ", 2) else { return };
    let errors = on_ranks(2, true, DEADLINE, |g, device| {
        g.all_reduce(tensor::<f32>(device, 0, 100 + g.rank())).wait().unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, CollectiveError::Disagreement { .. }), "{error}");
    }
}

/// A rank whose part has been issued, and that then waits forever for a rank that stops.
#[test]
fn a_rank_that_stops_is_named() {
    let Some(_turn) = turn("a rank that stops", 3) else { return };
    let results = on_ranks(3, true, Duration::from_millis(700), |g, device| {
        if g.rank() == 1 {
            std::thread::sleep(Duration::from_secs(3));
            return None;
        }
        Some(g.all_gather(tensor::<f32>(device, 0, 8), tensor::<f32>(device, 0, 24)).wait().map(drop))
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            None => assert_eq!(rank, 1),
            Some(Ok(())) => panic!("rank {rank} went on"),
            Some(Err(error)) => assert!(error.to_string().contains("rank 1"), "{error}"),
        }
    }
}

/// A processor whose `fill` waits for a message.
struct Held {
    inner: Arc<Cpu>,
    go: Mutex<Receiver<()>>,
}

impl Kernels for Held {
    fn name(&self) -> &'static str {
        "held"
    }

    fn threads(&self) -> usize {
        1
    }

    fn execute(&self, operation: Operation) {
        if let Operation::Elementwise(Elementwise::Fill(_)) = &operation {
            self.go.lock().unwrap().recv().unwrap();
        }
        self.inner.execute(operation);
    }
}

/// Two ranks gather and add 1, while the card of rank 1 stands behind work of its host. Both have issued everything before that goes on;
/// or else rank 1 ends the job instead. What the ranks found.
fn gathered_behind_held_work(aborts: bool) -> Vec<Result<Vec<f32>, String>> {
    let (go, wait) = channel();
    let (wait, issued, failed) = (Mutex::new(Some(wait)), Barrier::new(2), Barrier::new(2));
    let one = |endpoint: Endpoint| {
        let rank = endpoint.rank();
        let go_on = (rank == 1).then(|| wait.lock().unwrap().take().unwrap());
        let (_, never) = channel();
        let held = Held { inner: Cpu::new(1), go: Mutex::new(go_on.unwrap_or(never)) };
        let device = unplanned_device(&options(), rank, CARD_BYTES, Arc::new(held)).unwrap();
        let endpoint = endpoint.with_options(Options { deadline: DEADLINE, ..Options::default() });
        let group = linked(endpoint.group("data"), &device);
        group.connect().unwrap();
        let filled = |value: f32, elements: usize| {
            let mut tensor = device.alloc(DType::F32, [elements], Category::Communication, "test");
            device.upload(&vec![value; elements], tensor.view_mut());
            tensor
        };
        // Kernels are loaded while no call runs.
        let (own, mut all, ones) = (filled(rank as f32, 8), filled(0.0, 16), filled(1.0, 16));
        device.add(ones.view(), all.view_mut());
        device.synchronize().unwrap();

        let work = (rank == 1).then(|| {
            let on_host = device.alloc_host(DType::F32, [1], Category::Workspace, "held");
            device.run_on_host("held", vec![on_host], |host, tensors| host.fill(tensors[0].view_mut(), 1.0))
        });
        if let Some(work) = &work {
            device.run_after(work.done(), Stream::Compute);
        }
        let (_, mut all) = group.all_gather(own, all).wait().unwrap();
        device.add(ones.view(), all.view_mut());
        // Nobody comes here who has waited for the card of rank 1.
        issued.wait();
        if aborts && rank == 1 {
            group.abort("no room on its disk");
        } else if rank == 1 {
            go.send(()).unwrap();
        }
        let mut found = vec![0f32; 16];
        // A copy into memory that is not the driver's would block within the driver.
        let read = |found: &mut [f32]| {
            let read = device.synchronize().and_then(|()| device.download(all.view(), found));
            read.map_err(|error| error.to_string())
        };
        let since = Instant::now();
        let result = if rank == 0 || !aborts { Some(read(&mut found)) } else { None };
        assert!(since.elapsed() < DEADLINE / 4, "found after {:?}", since.elapsed());
        failed.wait();
        if aborts && rank == 1 {
            go.send(()).unwrap();
        }
        let result = result.unwrap_or_else(|| read(&mut found));
        if aborts {
            let next = group.all_gather(filled(0.0, 8), filled(0.0, 16)).wait().map(drop);
            assert!(next.is_err(), "a call of a job that has ended");
        }
        drop(work);
        // The emulator unloads kernels only when no card stands.
        failed.wait();
        result.map(|()| found)
    };
    std::thread::scope(|scope| {
        let one = &one;
        let ranks: Vec<_> = threads(2).into_iter().map(|rank| scope.spawn(move || one(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn who_waits_for_a_call_goes_on_before_the_cards_have_come_to_it() {
    let Some(_turn) = turn("waits of the card", 2) else { return };
    let expected: Vec<f32> = [[1.0; 8], [2.0; 8]].concat();
    for found in gathered_behind_held_work(false) {
        assert_eq!(found.unwrap(), expected);
    }
}

#[test]
fn a_rank_that_fails_behind_a_wait_is_named_by_the_next_wait_of_the_host() {
    let Some(_turn) = turn("a rank that fails behind a wait", 2) else { return };
    let found = gathered_behind_held_work(true);
    let failure = found[0].as_ref().unwrap_err();
    for words in ["all_gather", "rank 1", "no room on its disk"] {
        assert!(failure.contains(words), "{failure}");
    }
    assert!(found[1].is_err());
}

/// Two ranks on one card are refused by the library, with what helps.
#[test]
fn two_ranks_on_a_card_are_refused() {
    let Some(_turn) = turn("two ranks on a card", 1) else { return };
    let errors: Vec<String> = std::thread::scope(|scope| {
        let one = |endpoint: Endpoint| {
            let device = card_of(0);
            let group = linked(endpoint.group("data"), &device);
            group.connect().unwrap_err().to_string()
        };
        let ranks: Vec<_> =
            threads(2).into_iter().map(|endpoint| scope.spawn(move || one(endpoint))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for error in errors {
        assert!(error.contains("invalid usage") && error.contains("device.communication"), "{error}");
    }
}

/// The golden model, on 4 sequences of 8 tokens a step.
fn small(compute: Float) -> (Gpt2, RunConfig, Steps) {
    let (model, mut config) = rig::golden_config();
    (config.model.seq, config.batch.global, config.batch.micro) = (8, 4, Some(1));
    config.precision.compute = compute;
    config.precision.initial_scale_power = 10;
    config.device.kind = DeviceKind::Cuda;
    let short = |step: &Vec<Vec<u32>>| step[..4].iter().map(|tokens| tokens[..9].to_vec()).collect();
    (model, config, rig::golden_steps()[..2].iter().map(short).collect())
}

fn on_cards(model: &Gpt2, config: &RunConfig, steps: &Steps) -> Ran {
    let ran = devices::on_cards(|| rig::run(model, config, steps));
    assert_eq!(ran.peaks, ran.planned, "peak == plan");
    ran
}

#[test]
fn training_between_cards_has_the_bits_of_training_through_host_memory() {
    let Some(_turn) = turn("training", 4) else { return };
    for ([pipeline, data, tensor], zero, compute) in [
        ([1, 2, 1], 3, Float::F32),
        ([1, 1, 2], 0, Float::F16),
        ([2, 2, 1], 2, Float::Bf16),
        ([2, 1, 2], 0, Float::F32),
    ] {
        let (model, mut config, steps) = small(compute);
        let parallel = &mut config.parallel;
        (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
        (parallel.zero, parallel.sequence_parallel) = (zero, tensor > 1);
        config.device.communication = Communication::Host;
        let through_host = on_cards(&model, &config, &steps);
        config.device.communication = Communication::Nccl;
        let between = on_cards(&model, &config, &steps);
        let made = devices::made();
        let (follows, waits) = (made.follows(), made.waits());
        println!("[{pipeline}, {data}, {tensor}], stage {zero}: {follows} waits by cards, {waits} by hosts");
        assert!(follows > 0, "every wait blocks the host");
        let what = format!("{pipeline} x {data} x {tensor}, stage {zero}, {compute:?}");
        assert!(same_bits(&between.losses, &through_host.losses), "{what}: losses");
        assert!(same_bits(&between.grad_norms, &through_host.grad_norms), "{what}: norms");
        assert_same_state(&what, &between.state, &through_host.state);
    }
}

/// Each rank has a group of one communicator for each axis of several ranks, and one for each direction between stages.
#[test]
fn communicators_are_those_of_the_mesh() {
    let (model, mut config, _) = small(Float::F32);
    config.device.communication = Communication::Nccl;
    for ([pipeline, data, tensor], expected) in
        [([1, 1, 1], 0), ([1, 2, 1], 1), ([1, 2, 2], 2), ([2, 1, 1], 3), ([2, 2, 2], 5)]
    {
        let parallel = &mut config.parallel;
        (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
        let spec = phalanx_train::Spec::new(&config, model.clone(), 4, 1).unwrap();
        let communicators = spec.communicators();
        assert!(communicators.iter().all(|ranks| *ranks == 2), "{communicators:?}");
        assert_eq!(communicators.len(), expected, "{pipeline} x {data} x {tensor}");
    }
}
