//! A rank ends the job while others are inside a layer: on every rank, forward or backward of the stage returns the
//! collective's error. No rank panics or hangs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::rig::{BATCH, HIDDEN, ROWS, SEQ, block, norm};
use phalanx_collectives::{CollectiveError, Endpoint, Group, Solo, threads};
use phalanx_cpu::Cpu;
use phalanx_layers::{
    AnyLayer, Block, BlockRole, Call, Context, Embedding, Init, Inputs, LinearCrossEntropy, Network,
    Parameter, ParameterSpec, Parameters, PositionTable, Recompute, RowShape, Rows, TARGETS,
};
use phalanx_optim::{Optimizer, RatesByName};
use phalanx_parallel::stage::BackwardStart;
use phalanx_parallel::zero::{Arithmetic, Holding, Options, Residence, Schedules, SumGroups};
use phalanx_parallel::{BlockInputs, Chunks, InputOptions, Seen, Stage, TensorParallel, Watch};
use phalanx_plan::pipeline::{Action, Kind, Step};
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{ChunkSize, ParameterSize, Precision, lay_out};
use phalanx_tensor::{Arena, Category, CrossEntropy, DType, Device, Tensor};

const VOCAB: usize = 50;
/// Maximum wait of a rank.
const DEADLINE: Duration = Duration::from_secs(30);
const NUMBERS: CrossEntropy =
    CrossEntropy { scale: 1.0, gradient_scale: 1.0, label_smoothing: 0.0, z_loss: 0.0 };

/// The calls of a stage.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pass {
    Forward,
    Loss,
    Backward,
    BackwardInput,
    BackwardWeight,
}

/// Moment at which rank 1 ends the job.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// Instead of making a call.
    Before(Pass),
    /// Within a call, when it has seen this tensor.
    At(Pass, Seen),
}

/// Embedding, a block, one that is recomputed, a norm, and the head.
fn network(tensor: &TensorParallel) -> Network {
    let embedding = Embedding {
        tokens: "tokens".into(),
        positions: Some(PositionTable { name: "positions".into(), rows: SEQ }),
        types: None,
        vocab: VOCAB,
        added: 0,
        hidden: HIDDEN,
        init: Init::Normal(1.0),
    };
    let layers: [Box<dyn AnyLayer>; 4] = [
        tensor.embedding(embedding),
        Box::new(block(tensor, (0.0, 0.0))),
        Box::new(Recompute(block(tensor, (0.0, 0.0)))),
        tensor.rows(norm("ln_f")),
    ];
    let named = layers.into_iter().enumerate();
    let (role, output) = (BlockRole::Transformer, RowShape::tokens(HIDDEN));
    let blocks = named.map(|(i, layer)| Block { name: format!("block {i}"), role, layer, output }).collect();
    let head = LinearCrossEntropy {
        weight: "head".into(),
        bias: None,
        vocab: VOCAB,
        added: 0,
        hidden: HIDDEN,
        init: Init::Normal(1.0),
    };
    Network::new(blocks, tensor.head(head))
}

fn stage(device: &Device, tensor: &TensorParallel, calls: &[Pass]) -> (Stage, Chunks) {
    let network = network(tensor);
    let size = |p: &ParameterSpec| ParameterSize::new(&p.name, p.elements() as u64);
    let sizes: Vec<ParameterSize> = network.parameters.iter().map(size).collect();
    let layout = Arc::new(lay_out(&sizes, 1, &ChunkSize::None).unwrap());
    let held = Holding {
        stage: 0,
        layout,
        answers: vec![true; network.parameters.len()],
        tied: vec![false; network.parameters.len()],
        is_updated: true,
    };
    let options = Options {
        stage: phalanx_plan::ZeroStage::Zero,
        overlap: false,
        prefetch: 0,
        defer: false,
        residence: vec![Residence::DEVICE],
        buffer: 1 << 20,
        updates_on_host: true,
        delayed_update: false,
        gradients_in_place: false,
        update_in_backward: false,
    };
    let arithmetic = Arithmetic {
        precision: Precision::F32,
        micro_batches: 1,
        sums_by_tree: false,
        optimizer: &Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 },
        rates: &RatesByName::default(),
    };
    let solo: Arc<dyn Group> = Arc::new(Solo::new("data"));
    let inputs = BlockInputs::new(InputOptions::ON_DEVICE, &solo);
    let kind = |call: &Pass| match call {
        Pass::Forward => Some(Kind::Forward),
        Pass::Backward => Some(Kind::Backward),
        Pass::BackwardInput => Some(Kind::Input),
        Pass::BackwardWeight => Some(Kind::Weight),
        Pass::Loss => None,
    };
    let steps =
        calls.iter().filter_map(kind).map(|kind| Step::Compute(Action { stage: 0, kind, micro_batch: 0 }));
    let steps: Vec<Step> = steps.collect();
    let schedules = Schedules {
        step: steps.clone(),
        evaluation: steps,
        parameters: network.parameters.len(),
        slots: [1, 0],
    };
    let sums = SumGroups { data: solo.clone(), tensor: solo.clone(), world: solo };
    let of_stage = (&options, arithmetic);
    let mut chunks = Chunks::new(device, sums, &[(&network, held)], of_stage, (schedules, Vec::new()));
    let evaluates = calls.contains(&Pass::Loss);
    chunks.begin(if evaluates { PhaseName::Evaluate } else { PhaseName::Step });
    (Stage { index: 0, network, inputs }, chunks)
}

fn ids(device: &Device) -> Tensor {
    let ids: Vec<u32> = (0..ROWS).map(|i| (i * 17 % VOCAB) as u32).collect();
    let mut tensor = device.alloc(DType::U32, [BATCH, SEQ], Category::Activations, "test");
    device.upload(&ids, tensor.view_mut());
    tensor
}

/// A sequence of calls that all ranks make.
struct Walk {
    ranks: usize,
    sequence: bool,
    calls: &'static [Pass],
    when: Option<When>,
    /// Number of calls that all ranks together have begun.
    begun: AtomicUsize,
}

impl Walk {
    /// Ends the job when every rank has begun the same number of calls, so that none is still in the previous one.
    fn end(&self, endpoint: &Endpoint, calls: usize) {
        let start = Instant::now();
        while self.begun.load(Ordering::Acquire) < calls * self.ranks {
            assert!(start.elapsed() < DEADLINE, "the others do not come");
            std::thread::yield_now();
        }
        endpoint.abort("rank 1 had enough");
    }
}

/// Runs one rank; rank 1 ends the job at the given point. Returns the error, and the call that returned it.
fn walk(endpoint: &Endpoint, walk: &Walk) -> Result<(), (Pass, CollectiveError)> {
    let Walk { sequence, calls, when, .. } = *walk;
    let group: Arc<dyn Group> = endpoint.group("tensor");
    let (rank, ranks) = (group.rank(), group.world_size());
    let tensor = TensorParallel::new(group, sequence);
    let device = Device::new(Cpu::new(1), Arena::heap());
    let (mut stage, mut chunks) = stage(&device, &tensor, calls);
    let chunks = &mut chunks;
    let first_row = if sequence { rank * ROWS / ranks } else { 0 };
    let rows = Rows::all([BATCH, SEQ]).from(first_row);
    let cx = Context { rows, ..Context::new(&device, DType::F32, rows.tokens) };
    let inputs = Inputs::only(TARGETS, Arc::new(ids(&device)));
    let cx = cx.with(&inputs);
    let (mut x, mut kept, mut later) = (None, None, None);
    for (i, call) in calls.iter().enumerate() {
        walk.begun.fetch_add(1, Ordering::AcqRel);
        let end = || walk.end(endpoint, i + 1);
        let mut see = |seen: Seen, _: phalanx_tensor::View| {
            if rank == 1 && when == Some(When::At(*call, seen)) {
                end();
            }
        };
        let mut watch: Watch = Some(&mut see);
        if rank == 1 && when == Some(When::Before(*call)) {
            end();
            return endpoint.check().map_err(|error| (*call, error));
        }
        let done = match call {
            Pass::Forward => stage.forward(&cx, chunks, Arc::new(ids(&device)), &mut watch).map(|(y, k)| {
                (x, kept) = (Some(y), Some(k));
            }),
            Pass::Loss => stage.loss(&cx, chunks, x.take().unwrap(), NUMBERS, None).map(drop),
            Pass::Backward => {
                let from = BackwardStart::Loss(NUMBERS);
                stage.backward(&cx, chunks, kept.take().unwrap(), from, &mut watch).map(drop)
            }
            Pass::BackwardInput => {
                let from = BackwardStart::Loss(NUMBERS);
                stage.backward_input(&cx, chunks, kept.take().unwrap(), from, &mut watch).map(|(_, l)| {
                    later = Some(l);
                })
            }
            Pass::BackwardWeight => stage.backward_weight(&cx, chunks, later.take().unwrap(), &mut watch),
        };
        done.map_err(|error| (*call, error))?;
    }
    Ok(())
}

/// All ranks, by rank. One that panics fails the test.
fn walks(
    (ranks, sequence): (usize, bool),
    overlap: bool,
    calls: &'static [Pass],
    when: Option<When>,
) -> Vec<Result<(), (Pass, CollectiveError)>> {
    let options = phalanx_collectives::Options {
        overlap,
        deadline: DEADLINE,
        ..phalanx_collectives::Options::default()
    };
    let shared = Walk { ranks, sequence, calls, when, begun: AtomicUsize::new(0) };
    let shared = &shared;
    std::thread::scope(|scope| {
        let start = |endpoint: Endpoint| {
            let endpoint = endpoint.with_options(options.clone());
            scope.spawn(move || walk(&endpoint, shared))
        };
        let handles: Vec<_> = threads(ranks).into_iter().map(start).collect();
        handles.into_iter().map(|h| h.join().expect("an error, not a panic")).collect()
    })
}

use Pass::{Backward, BackwardInput, BackwardWeight, Forward, Loss};

const EVALUATION: &[Pass] = &[Forward, Loss];
const STEP: &[Pass] = &[Forward, Backward];
const SPLIT: &[Pass] = &[Forward, BackwardInput, BackwardWeight];

/// The number of the head.
const HEAD: usize = 4;

/// A sequence of calls, a point in it before its last collective, and the call that then fails on the other ranks.
const PLACES: [(&[Pass], When, Pass); 13] = [
    (EVALUATION, When::Before(Forward), Forward),
    (EVALUATION, When::Before(Loss), Loss),
    (STEP, When::At(Forward, Seen::Output { block: 0 }), Forward),
    (STEP, When::At(Forward, Seen::Output { block: 1 }), Forward),
    (STEP, When::At(Forward, Seen::Parameter { block: 2, index: 0 }), Forward),
    (STEP, When::Before(Backward), Backward),
    (STEP, When::At(Backward, Seen::Parameter { block: HEAD, index: 0 }), Backward),
    (STEP, When::At(Backward, Seen::Loss), Backward),
    (STEP, When::At(Backward, Seen::InputGradient { block: 3 }), Backward),
    (STEP, When::At(Backward, Seen::InputGradient { block: 2 }), Backward),
    (SPLIT, When::Before(BackwardInput), BackwardInput),
    (SPLIT, When::At(BackwardInput, Seen::InputGradient { block: HEAD }), BackwardInput),
    (SPLIT, When::At(BackwardInput, Seen::InputGradient { block: 2 }), BackwardInput),
];

#[test]
fn a_job_that_ends_inside_a_layer_is_an_error_of_the_stage() {
    let expected = CollectiveError::Aborted { rank: 1, reason: "rank 1 had enough".into() };
    // With shared rows the gradient of a token table gathers rows of its own, in the second part of backward.
    let of_rows = [
        (STEP, When::At(Backward, Seen::InputGradient { block: 1 }), Backward),
        (SPLIT, When::Before(BackwardWeight), BackwardWeight),
        (SPLIT, When::At(BackwardWeight, Seen::Gradient { block: 1, index: 0 }), BackwardWeight),
    ];
    for axis in [(2, false), (3, false), (2, true), (3, true)] {
        for overlap in [false, true] {
            let more = if axis.1 { &of_rows[..] } else { &[] };
            for (calls, when, fails) in PLACES.iter().chain(more) {
                let what = format!("(ranks, sequence) {axis:?}, overlap {overlap}, {when:?}");
                let results = walks(axis, overlap, calls, Some(*when));
                for (rank, result) in results.into_iter().enumerate() {
                    assert_eq!(result, Err((*fails, expected.clone())), "{what}, rank {rank}");
                }
            }
        }
    }
}

/// The same sequences without a failure.
#[test]
fn walks_that_nobody_ends() {
    for sequence in [false, true] {
        for calls in [EVALUATION, STEP, SPLIT] {
            assert_eq!(walks((3, sequence), true, calls, None), vec![Ok(()); 3], "{calls:?}");
        }
    }
}

/// A layer returns the error as its cause, for callers that run layers without a stage.
#[test]
fn a_layer_says_why_it_failed() {
    let mut ended = threads(2).into_iter();
    let (own, other) = (ended.next().unwrap(), ended.next().unwrap());
    other.abort("over");
    let tensor = TensorParallel::new(own.group("tensor"), false);
    let device = Device::new(Cpu::new(1), Arena::heap());
    let layer = network(&tensor).blocks.remove(0).layer;
    let tables: Vec<Tensor> = layer
        .parameters()
        .iter()
        .map(|spec| device.alloc(DType::F32, spec.shape.as_slice(), Category::Parameters, "test"))
        .collect();
    let own = Parameter::read_all(&tables);
    let cx = Context::new(&device, DType::F32, [BATCH, SEQ]);
    let call = Call::new(Parameters::new(&own), Arc::new(ids(&device)));
    let failure = layer.forward(&cx, call).err().expect("the job has ended");
    let cause = failure.0.downcast_ref::<CollectiveError>();
    assert_eq!(cause, Some(&CollectiveError::Aborted { rank: 1, reason: "over".into() }));
    assert_eq!(failure.to_string(), "the job ended because of rank 1: over");
}
