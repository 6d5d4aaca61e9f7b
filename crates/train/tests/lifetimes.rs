//! Tensors that live longer than in the dry run, planted one by one: the arena stops the run before another tensor is
//! written over them, on every rank, and names both call sites.
//!
//! The plan is that of the model; the layers that then run keep the input of one block in a place of their own for
//! longer. Over memory in which every tensor lies alone, the same layers run to the end.

use crate::rig;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::rig::{Build, each_rank};
use phalanx_collectives::{Buffers, Call, CollectiveOp, Group, Pending, Statistics};
use phalanx_cpu::Cpu;
use phalanx_layers::{
    Activation, AnyLayer, AnyOwn, AnySaved, Block, Call as LayerCall, Context, Failure, Layer, Network,
    ParameterSpec,
};
use phalanx_models::Gpt2;
use phalanx_tensor::{Arena, Category, Device, Tensor};
use phalanx_train::config::{Checkpointing, CheckpointingWord};
use phalanx_train::rank::Batch;
use phalanx_train::{Groups, Rank, RunConfig, RunPlan, Spec};

/// The phase of a run in which tensors are kept for longer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum During {
    Step,
    Diagnosis,
    Evaluation,
    Save,
}

/// Thread that drops a kept tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Dropped {
    ByTheRank,
    OnAnotherThread,
}

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    configure: fn(&mut RunConfig),
    during: During,
    /// Block of the network whose input is kept, and for how many more blocks (forward in an evaluation, else
    /// backward).
    block: usize,
    longer: usize,
    dropped: Dropped,
    /// Words of the error.
    words: &'static [&'static str],
}

/// Tensors that the recomputed forward of a block would write over the previous block's input.
const RECOMPUTED: &[&str] = &[
    "`layer_norm.y` (allocation ",
    "layer_norm.rs:",
    "would overwrite `linear.y` (allocation ",
    "linear.rs:",
    "still live",
];

/// Tensors that would be written over the output of the previous block.
const LINEAR: &[&str] =
    &[", allocated at ", "would overwrite `linear.y` (allocation ", "linear.rs:", "still live"];

const AGREEMENT: &[&str] =
    &["`agreement` (allocation 1 of phase save", "would overwrite `agreement`", "saving.rs:"];

/// 1f1b over two ranks, 4 micro-batches.
fn pipeline(config: &mut RunConfig) {
    (config.parallel.pipeline, config.parallel.data) = (2, Some(1));
    config.batch.micro = Some(2);
}

fn checkpointing(config: &mut RunConfig) {
    config.memory.checkpointing = Checkpointing::Word(CheckpointingWord::Block);
}

fn selective(config: &mut RunConfig) {
    config.memory.checkpointing = Checkpointing::Word(CheckpointingWord::Selective);
}

/// Two ranks, 2 micro-batches.
fn zero(config: &mut RunConfig, stage: u8) {
    checkpointing(config);
    (config.parallel.data, config.parallel.zero) = (Some(2), stage);
    config.batch.micro = Some(2);
}

const PLAIN: Case = Case {
    name: "one block longer, with checkpointing of blocks",
    configure: checkpointing,
    during: During::Step,
    block: 3,
    longer: 1,
    dropped: Dropped::ByTheRank,
    words: RECOMPUTED,
};

const EVALUATION: Case = Case {
    name: "in an evaluation",
    configure: |_| {},
    during: During::Evaluation,
    words: &["`linear_gelu.pre` (allocation ", "linear_gelu.rs:", "would overwrite `linear.y`", "linear.rs:"],
    ..PLAIN
};

const CASES: &[Case] = &[
    PLAIN,
    Case { name: "two blocks longer", longer: 2, ..PLAIN },
    Case { name: "the input of another block", block: 2, ..PLAIN },
    Case { name: "dropped on another thread", dropped: Dropped::OnAnotherThread, ..PLAIN },
    Case { name: "ZeRO 0", configure: |c| zero(c, 0), words: LINEAR, ..PLAIN },
    Case { name: "ZeRO 1", configure: |c| zero(c, 1), words: LINEAR, ..PLAIN },
    Case { name: "ZeRO 2", configure: |c| zero(c, 2), words: LINEAR, ..PLAIN },
    Case { name: "ZeRO 3, two blocks longer", configure: |c| zero(c, 3), longer: 2, words: LINEAR, ..PLAIN },
    Case {
        name: "in a pipeline",
        configure: pipeline,
        words: &["would overwrite `pipeline.received`", "pipeline.rs:", "still live"],
        ..PLAIN
    },
    Case {
        name: "with selective checkpointing",
        configure: selective,
        block: 5,
        words: &["`layer_norm.y_again` (allocation ", "layer_norm.rs:", "would overwrite", "linear.rs:"],
        ..PLAIN
    },
    Case { name: "in a diagnosis", during: During::Diagnosis, ..PLAIN },
    EVALUATION,
    Case {
        name: "in an evaluation, dropped on another thread",
        dropped: Dropped::OnAnotherThread,
        longer: 2,
        ..EVALUATION
    },
    Case { name: "in a save", during: During::Save, words: AGREEMENT, ..PLAIN },
    Case {
        name: "in a save by two ranks",
        configure: |c| zero(c, 1),
        during: During::Save,
        words: AGREEMENT,
        ..PLAIN
    },
    Case {
        name: "past the end of the step",
        configure: |_| {},
        block: 1,
        longer: 2,
        words: &["`embedding.y` (allocation ", "embedding.rs:", "still live at the end of phase step"],
        ..PLAIN
    },
];

/// A tensor that is kept too long: for how many more blocks, and its contents.
struct Kept {
    blocks: usize,
    tensor: Activation,
    bits: Vec<u32>,
}

/// The tensors that one rank keeps too long.
struct Hoard {
    case: Case,
    armed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Inputs of the block whose backward has not come.
    waiting: VecDeque<Activation>,
    late: Vec<Kept>,
    /// Number of tensors that were dropped, and how many of them had been overwritten.
    dropped: usize,
    overwritten: usize,
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.view().as_slice::<f32>().iter().map(|x| x.to_bits()).collect()
}

impl Hoard {
    fn new(case: Case) -> Arc<Hoard> {
        Arc::new(Hoard { case, armed: AtomicBool::new(false), state: Mutex::default() })
    }

    fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }

    /// One more block is done.
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.late.iter_mut().for_each(|kept| kept.blocks -= 1);
        let due: Vec<Kept> = state.late.extract_if(.., |kept| kept.blocks == 0).collect();
        for Kept { tensor, bits: held, .. } in due {
            state.dropped += 1;
            state.overwritten += usize::from(bits(&tensor) != held);
            match self.case.dropped {
                Dropped::ByTheRank => drop(tensor),
                Dropped::OnAnotherThread => std::thread::spawn(move || drop(tensor)).join().unwrap(),
            }
        }
    }

    fn keep(&self, tensor: Activation) {
        let bits = bits(&tensor);
        self.state.lock().unwrap().late.push(Kept { blocks: self.case.longer, tensor, bits });
    }
}

/// A block that notifies the hoard when it is done, and gives it its input if it is the chosen block.
struct Hoarding {
    layer: Box<dyn AnyLayer>,
    chosen: bool,
    hoard: Arc<Hoard>,
}

impl Layer for Hoarding {
    type Own = AnyOwn;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.layer.parameters()
    }

    fn forward(&self, cx: &Context, call: LayerCall) -> Result<(Activation, AnySaved), Failure> {
        let kept = (self.chosen && self.hoard.is_armed()).then(|| call.x.clone());
        let out = self.layer.forward(cx, call)?;
        if cx.keep {
            self.hoard.state.lock().unwrap().waiting.extend(kept);
        } else {
            self.hoard.pass();
            kept.into_iter().for_each(|x| self.hoard.keep(x));
        }
        Ok(out)
    }

    fn backward(
        &self,
        cx: &Context,
        saved: AnySaved,
        call: LayerCall,
    ) -> Result<Option<Activation>, Failure> {
        let dx = self.layer.backward(cx, saved, call)?;
        self.hoard.pass();
        if self.chosen {
            let kept = self.hoard.state.lock().unwrap().waiting.pop_front();
            kept.into_iter().for_each(|x| self.hoard.keep(x));
        }
        Ok(dx)
    }
}

/// The model's network, in which one block's input is kept too long.
fn network(spec: &Spec, groups: &Groups, hoard: &Arc<Hoard>) -> Network {
    let mut network = spec.network(&groups.tensor);
    let blocks = network.blocks.into_iter().enumerate().map(|(number, block)| {
        let chosen = number == hoard.case.block;
        let layer = Box::new(Hoarding { layer: block.layer, chosen, hoard: Arc::clone(hoard) });
        Block { layer, ..block }
    });
    network.blocks = blocks.collect();
    network
}

/// A group that keeps the tensor of each all_reduce while it is armed, and gives back another.
struct HoardingGroup {
    group: Arc<dyn Group>,
    hoard: Arc<Hoard>,
    heap: Device,
}

impl Group for HoardingGroup {
    fn name(&self) -> &'static str {
        self.group.name()
    }
    fn members(&self) -> &[usize] {
        self.group.members()
    }
    fn rank(&self) -> usize {
        self.group.rank()
    }
    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn submit(&self, call: Call) -> Pending<Buffers> {
        if call.op != CollectiveOp::AllReduce || !self.hoard.is_armed() {
            return self.group.submit(call);
        }
        let buffers = self.group.submit(call).wait().expect("no rank dies");
        let kept = buffers.source.expect("an all_reduce has one tensor");
        let mut other = self.heap.alloc(kept.dtype(), kept.shape(), Category::Workspace, "other");
        self.heap.copy(kept.view(), other.view_mut());
        self.hoard.pass();
        self.hoard.keep(Arc::new(kept));
        Pending::ready(Buffers { source: Some(other), target: None })
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }

    fn take_statistics(&self) -> Statistics {
        self.group.take_statistics()
    }
}

/// The result of a rank: losses and norms, and how many tensors were kept and overwritten.
type Reached = (Vec<f32>, usize, usize);

/// Runs two steps, an evaluation and a save, in one of which the hoard is armed; by rank.
fn run(case: Case, heap: bool) -> Vec<Result<Reached, String>> {
    let (model, mut config) = rig::golden_config();
    let model = Gpt2 { layers: 4, ..model };
    (case.configure)(&mut config);
    let plan = RunPlan::new(rig::spec(&model, &config)).unwrap();
    let hoards: Vec<Arc<Hoard>> = (0..plan.spec.world_size()).map(|_| Hoard::new(case)).collect();
    let layers = |spec: &Spec, groups: &Groups| network(spec, groups, &hoards[groups.world.rank()]);
    let groups = |_: &Device, _: &Spec, mut groups: Groups| {
        if case.during == During::Save {
            let hoard = Arc::clone(&hoards[groups.world.rank()]);
            let heap = Device::new(Cpu::new(1), Arena::heap());
            groups.world = Arc::new(HoardingGroup { group: Arc::clone(&groups.world), hoard, heap });
        }
        groups
    };
    let steps = rig::golden_steps();
    let body = |engine: &mut Rank, rank: usize| {
        let hoard = &hoards[rank];
        let arm = |during: During| hoard.armed.store(case.during == during, Ordering::Relaxed);
        engine.initialise(1).map_err(|error| error.to_string())?;
        let mut seen = Vec::new();
        for (number, sequences) in (1..).zip(&steps[..3]) {
            arm(During::Step);
            let batch = rig::batch(engine, &config, sequences);
            let outcome = engine.step(number, &batch, false).map_err(|error| error.to_string())?;
            seen.extend([outcome.loss, outcome.grad_norm]);
        }
        arm(During::Diagnosis);
        let batch = rig::batch(engine, &config, &steps[3]);
        assert_eq!(
            engine
                .diagnose(4, &batch, plan.spec.batch.targets_per_step, 1.0)
                .map_err(|error| error.to_string())?,
            None
        );
        arm(During::Evaluation);
        let mut windows = Batch::with_rows(config.batch.global / config.data(), config.model.seq);
        windows.tokens.fill(1);
        seen.push(engine.evaluate(&windows).map_err(|error| error.to_string())?.loss);
        arm(During::Save);
        engine.save(|_, _| Ok(())).map_err(|error| error.to_string())?;
        hoard.armed.store(false, Ordering::Relaxed);
        let state = std::mem::take(&mut *hoard.state.lock().unwrap());
        Ok((seen, state.dropped + state.late.len(), state.overwritten))
    };
    let build = Build { network: &layers, groups: &groups, heap };
    let ended = each_rank(&plan, &plan.spec, &build, &body);
    ended.into_iter().map(|ended| ended.and_then(|reached| reached)).collect()
}

#[test]
fn a_tensor_that_lives_too_long_stops_the_run() {
    for case in CASES {
        let name = case.name;
        // Without memory reuse, the planted code gives correct results.
        for ended in run(*case, true) {
            let (_, kept, overwritten) = ended.unwrap_or_else(|error| panic!("{name}, on the heap: {error}"));
            assert!(overwritten == 0, "{name}, on the heap: {kept} tensors kept, {overwritten} overwritten");
        }
        let ended = run(*case, false);
        let errors = ended.iter().map(|ended| match ended {
            Ok((_, kept, overwritten)) => {
                panic!("{name}: a rank kept {kept} tensors, {overwritten} were overwritten, and it went on")
            }
            Err(error) => error,
        });
        let names_both = |error: &String| case.words.iter().all(|words| error.contains(words));
        let (own, others): (Vec<_>, Vec<_>) = errors.partition(|error| names_both(error));
        assert!(!own.is_empty(), "{name}: no rank names {:?}: {others:?}", case.words);
        for other in others {
            assert!(other.contains("the job ended because"), "{name}: {other}");
        }
    }
}

/// A tensor is kept too long, but nothing else is planned in its memory meanwhile: the run continues, with correct
/// results.
#[test]
fn a_tensor_that_is_in_nobodys_way_stops_nothing() {
    let case = Case { configure: |_| {}, block: 4, ..PLAIN };
    let (heap, planned) = (run(case, true), run(case, false));
    assert!(matches!(&planned[..], [Ok((losses, 3, 0))] if !losses.is_empty()), "{planned:?}");
    assert_eq!(planned, heap);
}
