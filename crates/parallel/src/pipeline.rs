//! Runs a pipeline schedule: one match over its actions.
//!
//! The schedule is data (`plan::pipeline`): for each rank, the actions of its stages and the messages between them.
//! Every channel (sending rank, receiving rank) uses its own group, whose thread moves tensors while the rank
//! computes. A channel of depth d has d receives posted ahead, each into its own memory, and a send waits only for the
//! d-th last one. The depth follows from the schedule (`plan::pipeline::depth`); it is 1 for most.
//! Channels that have no rank in common share a group, so a few groups serve any number of ranks.
//!
//! Cost for each boundary and micro-batch: S bytes of activations in forward and S in backward; with sequence
//! parallelism S / t on each tensor-parallel rank.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group, Pending};
use phalanx_layers::{Activation, Context, Inputs, RowShape, TARGETS, Upload};
use phalanx_plan::pipeline::{Action, Kind, Message, PipelineSchedule, Step, lower_rank};
use phalanx_plan::trace::{Placements, micro_batch_tag};
use phalanx_tensor::{Category, CrossEntropy, Device, Tensor, View};

use crate::stage::{BackwardStart, DeferredStage, SavedStage, SeeLogits, Seen, Stage};
use crate::zero::Chunks;

/// Steps of one rank of a pipeline, and the messages that it receives.
#[derive(Clone, Debug)]
pub struct Program {
    steps: Vec<Step>,
    /// The messages from each rank, in order.
    incoming: BTreeMap<usize, Vec<Message>>,
    /// Messages that a channel holds on each side.
    depth: usize,
}

impl Program {
    /// The program of `rank` in a checked schedule, over channels of depth `depth` (`plan::pipeline::depth`).
    pub fn new(schedule: &PipelineSchedule, rank: usize, depth: usize) -> Program {
        Program::of(lower_rank(schedule, rank), depth)
    }

    /// The program that takes these steps.
    pub fn of(steps: Vec<Step>, depth: usize) -> Program {
        let mut incoming: BTreeMap<usize, Vec<Message>> = BTreeMap::new();
        for step in &steps {
            if let Step::Recv { from, message } = step {
                incoming.entry(*from).or_default().push(*message);
            }
        }
        Program { steps, incoming, depth: depth.max(1) }
    }

    /// Its steps, in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }
}

/// The steps of `rank` in a checked schedule, without backward of the stages before `lowest`, which train nothing.
pub fn steps_with_backward_from(schedule: &PipelineSchedule, rank: usize, lowest: usize) -> Vec<Step> {
    let is_run = |step: &Step| match step {
        Step::Compute(action) => action.kind == Kind::Forward || action.stage >= lowest,
        Step::Send { message, .. } | Step::Recv { message, .. } => {
            message.forward || message.stage_to >= lowest
        }
    };
    lower_rank(schedule, rank).into_iter().filter(is_run).collect()
}

/// Assigns a group to each channel of a schedule: two channels of one rank never share a group.
pub fn wiring(schedule: &PipelineSchedule) -> BTreeMap<(usize, usize), usize> {
    let neighbours = schedule.placement.windows(2).filter(|pair| pair[0] != pair[1]);
    let channels: BTreeSet<(usize, usize)> =
        neighbours.flat_map(|pair| [(pair[0], pair[1]), (pair[1], pair[0])]).collect();
    let mut wiring: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for (from, to) in channels {
        let meets = |(a, b): &(usize, usize)| [*a, *b].iter().any(|rank| [from, to].contains(rank));
        let taken: Vec<usize> =
            wiring.iter().filter(|(pair, _)| meets(pair)).map(|(_, group)| *group).collect();
        let free = (0..).find(|group| !taken.contains(group)).expect("the range is infinite");
        wiring.insert((from, to), free);
    }
    wiring
}

/// The groups that channels use, each over all ranks of the pipeline.
#[derive(Clone, Default)]
pub struct Wires {
    /// The groups, numbered as in [`wiring`].
    pub groups: Vec<Arc<dyn Group>>,
    /// For each channel (sending rank, receiving rank), the number of its group.
    pub wiring: BTreeMap<(usize, usize), usize>,
}

/// The inputs of a run of a program.
pub struct Feed<'a> {
    /// The device that computes.
    pub device: &'a Device,
    /// The context of a micro-batch.
    pub context: &'a dyn Fn(usize) -> Context<'a>,
    /// Uploads an input of a micro-batch.
    pub upload: &'a Upload<'a>,
    /// The input that the first block receives.
    pub first: &'static str,
    /// True if the head reads targets, which are then uploaded before the head's parameters are gathered.
    pub has_targets: bool,
    /// Factors of the loss.
    pub numbers: CrossEntropy,
    /// The first of the elements of the loss to which a micro-batch adds its own.
    pub loss_at: &'a dyn Fn(usize) -> usize,
    /// Number of these elements: the first ones of what the head computes.
    pub loss_width: usize,
    /// Called with each micro-batch of an evaluation and its logits, `[rows, classes]`.
    pub see_logits: Option<SeeMicroBatch<'a>>,
    /// Tensor-parallel ranks that share the rows of activations between stages.
    pub ranks_of_rows: usize,
    /// Placements of the activations between stages.
    pub placements: Placements,
}

/// Called with the number of a micro-batch and its logits, `[rows, classes]`.
pub type SeeMicroBatch<'a> = &'a dyn Fn(usize, View) -> Result<(), CollectiveError>;

/// Called with every tensor of a step: the micro-batch, which tensor it is, and its contents.
pub type WatchMicroBatches<'a> = Option<&'a mut dyn FnMut(usize, Seen, View)>;

/// The messages of a rank while a program runs.
struct Mail<'a> {
    feed: &'a Feed<'a>,
    wires: &'a Wires,
    rank: usize,
    incoming: &'a BTreeMap<usize, Vec<Message>>,
    /// Messages that a channel holds on each side.
    depth: usize,
    /// For each stage of this rank: the shapes of its input and of its output.
    shapes: BTreeMap<usize, [Option<RowShape>; 2]>,
    /// For each sending rank: the number of the next message to ask for, and the pending receives.
    coming: BTreeMap<usize, (usize, VecDeque<Pending<Tensor>>)>,
    /// For each receiving rank: the pending sends.
    going: BTreeMap<usize, VecDeque<Pending<Tensor>>>,
    /// Activations and derivatives that were received, or stay on this rank, and are not used yet: by stage,
    /// micro-batch, and whether they are activations.
    here: BTreeMap<(usize, usize, bool), Activation>,
}

/// The tag on which the two ends of a message must agree.
fn tag(message: &Message) -> u64 {
    let Message { stage_to, micro_batch, forward, .. } = *message;
    micro_batch_tag(stage_to, micro_batch, forward)
}

impl<'a> Mail<'a> {
    fn group(&self, from: usize, to: usize) -> &'a Arc<dyn Group> {
        &self.wires.groups[self.wires.wiring[&(from, to)]]
    }

    /// Allocates memory for the next message from `from`, if there is one, and posts its receive.
    fn post(&mut self, from: usize) {
        let (number, _) = self.coming.entry(from).or_default();
        let Some(message) = self.incoming[&from].get(*number) else { return };
        *number += 1;
        let Feed { device, context, placements, .. } = *self.feed;
        let Context { compute, rows, .. } = context(message.micro_batch);
        let shape = self.shapes[&message.stage_to][usize::from(!message.forward)].expect("a stage beside it");
        let x = device.alloc(
            compute,
            shape.shared(rows.tokens, self.feed.ranks_of_rows),
            Category::Activations,
            "pipeline.received",
        );
        device.place(x.view(), placements);
        let pending = self.group(from, self.rank).recv(x, from, tag(message));
        self.coming.entry(from).or_default().1.push_back(pending);
    }

    /// Waits for the next message from `from` and stores it.
    fn receive(&mut self, from: usize, message: &Message) -> Result<(), CollectiveError> {
        let pending = self.coming.get_mut(&from).and_then(|(_, pending)| pending.pop_front());
        let x = pending.expect("a message that was asked for").wait()?;
        self.post(from);
        self.keep(message.stage_to, message.micro_batch, message.forward, Arc::new(x));
        Ok(())
    }

    fn send(&mut self, to: usize, message: &Message) -> Result<(), CollectiveError> {
        let x = self.take(message.stage_to, message.micro_batch, message.forward);
        let x = (self.feed.context)(message.micro_batch).owned(x, "exchange.copy");
        let pending = self.going.entry(to).or_default();
        if pending.len() >= self.depth
            && let Some(before) = pending.pop_front()
        {
            drop(before.wait()?);
        }
        pending.push_back(self.wires.groups[self.wires.wiring[&(self.rank, to)]].send(x, to, tag(message)));
        Ok(())
    }

    fn keep(&mut self, stage: usize, micro_batch: usize, forward: bool, x: Activation) {
        let known = self.here.insert((stage, micro_batch, forward), x);
        assert!(known.is_none(), "two messages for stage {stage}, micro-batch {micro_batch}");
    }

    fn take(&mut self, stage: usize, micro_batch: usize, forward: bool) -> Activation {
        let found = self.here.remove(&(stage, micro_batch, forward));
        found.unwrap_or_else(|| panic!("stage {stage} has not received micro-batch {micro_batch}"))
    }
}

/// Runs this rank's part of a schedule: forward and backward of every micro-batch. The last stage adds its losses to
/// elements of `loss`. Reductions of gradients may still run when this returns.
///
/// # Errors
/// When a collective fails: a peer died, stalled or disagreed.
pub fn run<'a>(
    (stages, chunks): (&mut [Stage], &mut Chunks),
    program: &'a Program,
    wires: &'a Wires,
    rank: usize,
    feed: &'a Feed<'a>,
    loss: &mut Tensor,
    mut watch: WatchMicroBatches,
) -> Result<(), CollectiveError> {
    let mut mail = Mail {
        feed,
        wires,
        rank,
        incoming: &program.incoming,
        depth: program.depth,
        shapes: stages.iter().map(|stage| (stage.index, stage.network.shapes())).collect(),
        coming: BTreeMap::new(),
        going: BTreeMap::new(),
        here: BTreeMap::new(),
    };
    for from in program.incoming.keys() {
        (0..program.depth).for_each(|_| mail.post(*from));
    }
    let mut held = BetweenActions::default();
    for (number, step) in program.steps.iter().enumerate() {
        feed.device.record_step(number);
        match step {
            Step::Recv { from, message } => mail.receive(*from, message)?,
            Step::Send { to, message } => mail.send(*to, message)?,
            Step::Compute(action) => {
                let stage = stages.iter_mut().find(|stage| stage.index == action.stage);
                let stage = stage.expect("every action belongs to a stage of its rank");
                compute((stage, chunks), action, &mut mail, &mut held, loss, &mut watch)?;
            }
        }
    }
    feed.device.record_step(program.steps.len());
    for sent in std::mem::take(&mut mail.going).into_values().flatten() {
        drop(sent.wait()?);
    }
    assert!(
        mail.here.is_empty() && held.kept.is_empty() && held.later.is_empty(),
        "a schedule uses every message and saved tensor"
    );
    Ok(())
}

/// Tensors saved between the actions of micro-batches, by stage and micro-batch.
#[derive(Default)]
struct BetweenActions<'a> {
    inputs: BTreeMap<(usize, usize), Inputs<'a>>,
    kept: BTreeMap<(usize, usize), SavedStage>,
    later: BTreeMap<(usize, usize), DeferredStage>,
}

fn compute<'a>(
    (stage, chunks): (&mut Stage, &mut Chunks),
    action: &Action,
    mail: &mut Mail<'a>,
    held: &mut BetweenActions<'a>,
    loss: &mut Tensor,
    watch: &mut WatchMicroBatches,
) -> Result<(), CollectiveError> {
    let Action { stage: index, kind, micro_batch } = *action;
    let feed = mail.feed;
    let cx = (feed.context)(micro_batch);
    let key = (index, micro_batch);
    let inputs = held.inputs.remove(&key).unwrap_or_else(|| Inputs::new(feed.upload, micro_batch));
    let cx = Context { keep: cx.keep && stage.is_differentiated(), ..cx }.with(&inputs);
    let reads_targets = stage.is_last() && feed.has_targets;
    let targets = || drop(reads_targets.then(|| inputs.get(TARGETS)));
    chunks.begin_micro_batch(micro_batch);
    let mut seen = watch.as_mut().map(|watch| |seen: Seen, x: View| watch(micro_batch, seen, x));
    let mut seen = seen.as_mut().map(|see| see as &mut dyn FnMut(Seen, View));
    match kind {
        Kind::Forward => {
            let x = match index {
                0 => inputs.lend(feed.first),
                _ => mail.take(index, micro_batch, true),
            };
            let (y, kept) = stage.forward(&cx, chunks, x, &mut seen)?;
            match (stage.is_last(), cx.keep) {
                (true, true) => {}
                (true, false) => {
                    targets();
                    let see = feed.see_logits.map(|see| move |logits: View| see(micro_batch, logits));
                    let see = see.as_ref().map(|see| see as SeeLogits);
                    let part = stage.loss(&cx, chunks, y, feed.numbers, see)?;
                    add_loss(feed, micro_batch, &part, loss);
                }
                (false, _) => mail.keep(index + 1, micro_batch, true, y),
            }
            if cx.keep {
                held.kept.insert(key, kept);
            }
        }
        Kind::Backward | Kind::Input => {
            let kept = held.kept.remove(&key).expect("backward comes after forward");
            targets();
            let from = match stage.is_last() {
                true => BackwardStart::Loss(feed.numbers),
                false => BackwardStart::Derivative(mail.take(index, micro_batch, false)),
            };
            let arrived = match kind {
                Kind::Input => {
                    let (arrived, later) = stage.backward_input(&cx, chunks, kept, from, &mut seen)?;
                    held.later.insert(key, later);
                    arrived
                }
                _ => stage.backward(&cx, chunks, kept, from, &mut seen)?,
            };
            if let Some(part) = arrived.loss {
                add_loss(feed, micro_batch, &part, loss);
            }
            if let Some(dx) = arrived.dx {
                mail.keep(index - 1, micro_batch, false, dx);
            }
        }
        Kind::Weight => {
            let later = held.later.remove(&key).expect("the weight part comes after the input part");
            stage.backward_weight(&cx, chunks, later, &mut seen)?;
        }
    }
    inputs.free(TARGETS);
    if held.kept.contains_key(&key) || held.later.contains_key(&key) {
        held.inputs.insert(key, inputs);
    }
    Ok(())
}

fn add_loss(feed: &Feed, micro_batch: usize, part: &Tensor, loss: &mut Tensor) {
    let (at, width) = ((feed.loss_at)(micro_batch), feed.loss_width);
    feed.device.add(part.view().range(0..width), loss.view_mut().range(at..at + width));
}
