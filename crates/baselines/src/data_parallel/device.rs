//! One device of DataParallel and its part of a step.
//!
//! All devices run the same function. Device 0 also holds the state that lasts from step to step ([`RootState`]).

use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group, Statistics};
use phalanx_layers::{Activation, Call, Context, Draw, ParameterSpec, Parameters};
use phalanx_optim::{LossScale, Verdict};
use phalanx_plan::{ChunkError, Peak};
use phalanx_tensor::{
    Category, Clip, DType, Device, IGNORED, Tensor, View, ViewMut, VocabularyLoss, vocabulary_blocks,
};
use phalanx_trace::PhaseName;

use super::{DataParallelError, Outcome};
use crate::whole::{ALONE, Gradients, Norm, Whole};
use phalanx_train::RunError;
use phalanx_train::rank::Batch;
use phalanx_train::saving::WINDOW;
use phalanx_train::spec::Spec;
use phalanx_train::state::{PARAMETERS, Read};

/// The device that holds the parameters.
const ROOT: usize = 0;

/// A device with its copy of the model.
pub(super) struct Replica {
    device: Device,
    group: Arc<dyn Group>,
    pub(super) spec: Spec,
    whole: Whole,
    loss_in_forward: bool,
    /// Sequences of this device's part: the batch divided by the devices, rounded up. Sequences beyond the batch are
    /// padding, whose targets are ignored.
    rows: usize,
    /// The state that lasts from step to step; only on device 0.
    held: Option<RootState>,
}

/// Parameters, gradients and optimizer state, which last from step to step.
struct RootState {
    /// Flat, in the compute type; None while it is being copied.
    parameters: Option<Tensor>,
    /// Flat, in the type of accumulation.
    gradients: Option<Tensor>,
    /// f32 parameters, if the compute type has 16 bits.
    masters: Option<Tensor>,
    states: Vec<Tensor>,
    norm: Norm,
    applied: u64,
    loss_scale: LossScale,
}

impl RootState {
    fn new(device: &Device, spec: &Spec, whole: &Whole) -> RootState {
        let flat =
            |dtype, category, name| -> Tensor { device.alloc(dtype, [whole.elements()], category, name) };
        let (precision, optimizer) = (spec.precision, Category::Optimizer);
        RootState {
            parameters: Some(flat(precision.compute, Category::Parameters, "parameters")),
            gradients: Some(flat(precision.accumulate, Category::Gradients, "gradients")),
            masters: precision.has_master().then(|| flat(DType::F32, optimizer, "master_weights")),
            states: spec
                .optimizer
                .states()
                .iter()
                .map(|_| flat(DType::F32, optimizer, "optimizer_state"))
                .collect(),
            norm: Norm::new(device, whole),
            applied: 0,
            loss_scale: LossScale::new(spec.loss_scaling),
        }
    }

    /// The f32 parameters.
    fn exact(&self) -> &Tensor {
        let parameters = self.parameters.as_ref().expect("absent only during a step");
        self.masters.as_ref().unwrap_or(parameters)
    }
}

impl Replica {
    /// Allocates the state that lasts, which is on device 0.
    pub(super) fn new(
        device: Device,
        group: Arc<dyn Group>,
        spec: &Spec,
        loss_in_forward: bool,
    ) -> Result<Replica, ChunkError> {
        let whole = Whole::new(spec.whole(), 1)?;
        let held = || (group.rank() == ROOT).then(|| RootState::new(&device, spec, &whole));
        let held = device.phase(PhaseName::Init, held);
        let rows = spec.micro_batch_size.div_ceil(group.world_size());
        Ok(Replica { device, group, spec: spec.clone(), whole, loss_in_forward, rows, held })
    }

    /// Fills parameters, and sets optimizer states to zero.
    pub(super) fn load(&mut self, mut read: impl Read) -> Result<(), RunError> {
        let held = self.held.as_mut().expect("device 0 loads");
        let mut window = vec![0f32; WINDOW];
        for (p, spec) in self.whole.network.parameters.iter().enumerate() {
            let place = self.whole.range(p);
            for start in (0..place.len()).step_by(WINDOW) {
                let out = &mut window[..(place.len() - start).min(WINDOW)];
                read(PARAMETERS, spec, &spec.stripe(), start as u64..(start + out.len()) as u64, out)?;
                let here = place.start + start..place.start + start + out.len();
                let parameters = held.parameters.as_mut().expect("absent only during a step");
                let own = parameters.view_mut().range(here.clone());
                match &mut held.masters {
                    None => self.device.upload(out, own),
                    Some(masters) => {
                        self.device.upload(out, masters.view_mut().range(here.clone()));
                        self.device.convert(masters.view().range(here), own);
                    }
                }
            }
        }
        held.states.iter_mut().for_each(|state| self.device.fill(state.view_mut(), 0.0));
        Ok(())
    }

    /// The f32 parameters by name.
    pub(super) fn parameters(&self) -> Vec<(String, Vec<f32>)> {
        let exact = self.held.as_ref().expect("device 0 holds the state").exact();
        let one = |(p, spec): (usize, &ParameterSpec)| {
            let mut out = vec![0f32; spec.elements()];
            let view = exact.view().range(self.whole.range(p));
            self.device.download(view, &mut out).expect("kernels of the processor do not fail");
            (spec.name.clone(), out)
        };
        self.whole.network.parameters.iter().enumerate().map(one).collect()
    }

    /// Calls `see` with the gradient of each parameter in the last step.
    pub(super) fn gradients(&self, mut see: impl FnMut(&Device, usize, View)) {
        let held = self.held.as_ref().expect("device 0 holds the state");
        let gradients = held.gradients.as_ref().expect("absent only during a step");
        for parameter in 0..self.whole.network.parameters.len() {
            see(&self.device, parameter, gradients.view().range(self.whole.range(parameter)));
        }
    }

    /// The statistics of its group since the last call.
    pub(super) fn take_statistics(&self) -> Statistics {
        self.group.take_statistics()
    }

    /// The measured peak of the device's memory.
    pub(super) fn peak(&self) -> Peak {
        self.device.arena().peak().expect("a planned arena measures its peak")
    }

    /// Runs step `number` (from 1). Device 0 has the batch and returns the outcome.
    pub(super) fn step(
        &mut self,
        number: u64,
        batch: Option<&Batch>,
    ) -> Result<Option<Outcome>, DataParallelError> {
        let device = self.device.clone();
        let outcome = device.try_phase(PhaseName::Step, || self.run(number, batch))?;
        match outcome {
            Some((Outcome { loss, grad_norm, lr, .. }, Verdict::Stuck)) => {
                Err(DataParallelError::NonFinite { step: number, loss, grad_norm, lr })
            }
            outcome => Ok(outcome.map(|(outcome, _)| outcome)),
        }
    }

    /// Runs the phases of a step in order.
    fn run(
        &mut self,
        number: u64,
        batch: Option<&Batch>,
    ) -> Result<Option<(Outcome, Verdict)>, CollectiveError> {
        let device = self.device.clone();
        let scale = self.held.as_ref().map_or(1.0, |held| held.loss_scale.scale());
        let tokens = Arc::new(self.scatter(batch.map(|b| &b.tokens[..]), 0, "batch.tokens")?);
        let targets = self.targets(batch)?;
        let parameters = self.replicate()?;
        let mut gradients = self.room_for_gradients();
        let cx = Context {
            draw: Some(self.draw(number)),
            ..Context::new(&device, self.spec.precision.compute, [self.rows, self.spec.seq])
        };
        let (x, saved) = self.whole.forward(&cx, parameters.view(), tokens);
        let mut written = self.whole.gradients(&mut gradients);
        let (loss, dx) = match self.loss_in_forward {
            true => self.loss_here(&cx, parameters.view(), &mut written, x, targets, scale)?,
            false => self.loss_on_root(&cx, parameters.view(), &mut written, x, targets, scale)?,
        };
        self.whole.backward(&cx, parameters.view(), &mut written, saved, dx);
        drop(written);
        let gradients = self.reduce(gradients)?;
        self.update(scale, loss, parameters, gradients)
    }

    /// Sends part r of the ids `[batch, seq]` on device 0 to device r: `[rows, seq]`. The last rows may be padding.
    fn scatter(
        &self,
        ids: Option<&[u32]>,
        padding: u32,
        name: &'static str,
    ) -> Result<Tensor, CollectiveError> {
        let (rows, seq) = (self.rows, self.spec.seq);
        let whole = ids.map(|ids| self.upload(ids, padding));
        let part = self.device.alloc(DType::U32, [rows, seq], Category::Activations, name);
        Ok(self.group.scatter(whole, part, ROOT).wait()?.1)
    }

    /// Uploads ids to device 0, `[devices * rows, seq]`.
    fn upload(&self, ids: &[u32], padding: u32) -> Tensor {
        let (rows, seq) = (self.rows * self.group.world_size(), self.spec.seq);
        let mut whole =
            self.device.alloc(DType::U32, [rows, seq], Category::Activations, "data_parallel.ids");
        assert_eq!(
            ids.len(),
            self.spec.micro_batch_size * seq,
            "ids of a batch of {} x {seq}",
            self.spec.micro_batch_size
        );
        self.device.upload(ids, whole.view_mut().range(0..ids.len()));
        let rest = vec![padding; rows * seq - ids.len()];
        self.device.upload(&rest, whole.view_mut().range(ids.len()..rows * seq));
        whole
    }

    /// The targets on the devices that compute a loss: those of this part, or all of them on device 0.
    fn targets(&self, batch: Option<&Batch>) -> Result<Option<Tensor>, CollectiveError> {
        if let Some(batch) = batch.filter(|_| !self.device.is_meta()) {
            let planned = self.spec.step_targets().here;
            assert_eq!(batch.counted_targets(), planned, "the loss here is a mean over the planned targets");
        }
        let targets = batch.map(|b| &b.targets[..]);
        match self.loss_in_forward {
            true => self.scatter(targets, IGNORED, "batch.targets").map(Some),
            false => Ok(targets.map(|targets| self.upload(targets, IGNORED))),
        }
    }

    /// Copies the flat parameters from device 0.
    fn replicate(&mut self) -> Result<Tensor, CollectiveError> {
        let fresh = || {
            let elements = self.whole.elements();
            let compute = self.spec.precision.compute;
            self.device.alloc(compute, [elements], Category::Parameters, "replica.parameters")
        };
        let parameters = match &mut self.held {
            Some(held) => held.parameters.take().expect("absent only during a step"),
            None => fresh(),
        };
        self.group.broadcast(parameters, ROOT).wait()
    }

    fn room_for_gradients(&mut self) -> Tensor {
        match &mut self.held {
            Some(held) => held.gradients.take().expect("absent only during a step"),
            None => {
                let elements = self.whole.elements();
                let accumulate = self.spec.precision.accumulate;
                self.device.alloc(accumulate, [elements], Category::Gradients, "replica.gradients")
            }
        }
    }

    /// The dropout draw of this part: its masks are a part of those of the whole batch.
    fn draw(&self, number: u64) -> Draw {
        let first_sample = (self.group.rank() * self.rows) as u64;
        Draw { seed: self.spec.seed, step: number, first_sample }
    }

    /// Each device computes the loss of its own part; the sum is on device 0. Also returns dx of the head.
    fn loss_here(
        &self,
        cx: &Context,
        parameters: View,
        gradients: &mut Gradients,
        x: Activation,
        targets: Option<Tensor>,
        scale: f32,
    ) -> Result<(Option<Tensor>, Activation), CollectiveError> {
        let numbers = self.spec.cross_entropy(self.spec.targets_per_step, self.share(scale)?);
        let targets = targets.expect("each device has the targets of its part");
        let own = gradients.of(&self.whole, self.whole.network.head_index(), parameters);
        let call = Call::new(Parameters::new(&own), x);
        let (loss, dx) = self.whole.head().loss(cx, call, &targets, numbers).expect(ALONE);
        let devices = self.group.world_size();
        let all = (self.group.rank() == ROOT).then(|| cx.statistics([devices], "data_parallel.losses"));
        let (mut loss, all) = self.group.gather(loss, all, ROOT).wait()?;
        if let Some(all) = &all {
            for other in 1..devices {
                cx.device.add(all.view().range(other..other + 1), loss.view_mut());
            }
        }
        Ok((all.is_some().then_some(loss), dx.expect("dx was asked for")))
    }

    /// The loss scale of device 0 (f16 only; otherwise 1).
    fn share(&self, loss_scale: f32) -> Result<f32, CollectiveError> {
        if self.spec.precision.compute != DType::F16 {
            return Ok(1.0);
        }
        let mut shared = self.device.alloc(DType::F32, [1], Category::Workspace, "data_parallel.loss_scale");
        self.device.fill(shared.view_mut(), loss_scale);
        let shared = self.group.broadcast(shared, ROOT).wait()?;
        Ok(self.device.fetch([shared.view()])?[0])
    }

    /// Gathers the logits `[rows * seq, vocab]` of all devices on device 0 and scatters their derivatives. Also returns
    /// dx of the head.
    fn loss_on_root(
        &self,
        cx: &Context,
        parameters: View,
        gradients: &mut Gradients,
        x: Activation,
        targets: Option<Tensor>,
        scale: f32,
    ) -> Result<(Option<Tensor>, Activation), CollectiveError> {
        let head = self.whole.head().as_linear().expect("the plan refuses other heads");
        let own = self.whole.head_parameters(parameters);
        let rows = x.shape().rows_cols();
        let logits = self.whole.head().logits(cx, Parameters::new(&own), x.view().reshape(rows));
        let [rows, vocab] = logits.dims();
        let devices = self.group.world_size();
        let all = || cx.activation([devices * rows, vocab], "data_parallel.gathered_logits");
        let all = (self.group.rank() == ROOT).then(all);
        let (part, mut all) = self.group.gather(logits, all, ROOT).wait()?;
        let loss = match (&mut all, &targets) {
            (Some(all), Some(targets)) => Some(self.loss_of(cx, all.view_mut(), targets, scale)),
            _ => None,
        };
        let (all, dlogits) = self.group.scatter(all, part, ROOT).wait()?;
        drop((all, targets));
        let own = gradients.of(&self.whole, self.whole.network.head_index(), parameters);
        let dx = head.logits_backward(cx, Parameters::new(&own), &x, dlogits.view());
        Ok((loss, Arc::new(dx)))
    }

    /// The loss `[1]` of all logits, which are replaced by their derivatives.
    fn loss_of(&self, cx: &Context, mut logits: ViewMut, targets: &Tensor, scale: f32) -> Tensor {
        let [rows, vocab] = logits.dims();
        let numbers = self.spec.cross_entropy(self.spec.targets_per_step, scale);
        let work = |dtype, shape: [usize; 2], name| cx.device.alloc(dtype, shape, Category::Workspace, name);
        let mut blocks = work(DType::F32, [rows, 4 * vocabulary_blocks(vocab)], "head.blocks");
        let mut statistics = work(DType::F32, [rows, 4], "head.statistics");
        let mut sum = cx.device.alloc(DType::F64, [1], Category::Workspace, "head.sum");
        let targets = targets.view().reshape([rows]);
        cx.device.logits_statistics(logits.reborrow(), targets, 0, blocks.view_mut(), statistics.view_mut());
        let statistics = statistics.view().reshape([1, rows, 4]);
        let exponentials = Some(logits);
        cx.device.run(VocabularyLoss {
            statistics,
            blocks: blocks.view(),
            targets,
            first: 0,
            columns: vocab,
            classes: vocab,
            numbers,
            exponentials,
            loss: sum.view_mut(),
            accumulate: false,
        });
        let mut loss = cx.statistics([1], "head.loss");
        cx.device.scaled(sum.view(), numbers.scale, loss.view_mut());
        loss
    }

    /// Sums the gradients on device 0, in the communication type.
    fn reduce(&self, gradients: Tensor) -> Result<Tensor, CollectiveError> {
        let precision = self.spec.precision;
        if precision.communicate == precision.accumulate {
            return self.group.reduce(gradients, ROOT).wait();
        }
        let mut gradients = gradients;
        let elements = self.whole.elements();
        let name = "gradients.sent";
        let mut sent = self.device.alloc(precision.communicate, [elements], Category::Communication, name);
        self.device.convert(gradients.view(), sent.view_mut());
        let sent = self.group.reduce(sent, ROOT).wait()?;
        if self.group.rank() == ROOT {
            self.device.convert(sent.view(), gradients.view_mut());
        }
        Ok(gradients)
    }

    /// On device 0: norm, clipping, one step of the optimizer. On other devices, the step's tensors are freed.
    fn update(
        &mut self,
        scale: f32,
        loss: Option<Tensor>,
        mut parameters: Tensor,
        gradients: Tensor,
    ) -> Result<Option<(Outcome, Verdict)>, CollectiveError> {
        let (Some(held), Some(loss)) = (&mut self.held, loss) else { return Ok(None) };
        let (device, spec) = (&self.device, &self.spec);
        let clip = Clip { max_norm: spec.clip, loss_scale: scale };
        let (norm, _) = held.norm.compute(device, &self.whole, gradients.view(), clip);
        let [loss, grad_norm] = device.fetch([loss.view(), norm])?;
        let lr = spec.schedule_of_rate.lr(held.applied);
        let verdict = held.loss_scale.judge(loss.is_finite() && grad_norm.is_finite());
        if verdict == Verdict::Apply {
            held.applied += 1;
            let own = parameters.view_mut();
            let written = match &mut held.masters {
                Some(masters) => (masters.view_mut(), Some(own)),
                None => (own, None),
            };
            let optimizer = (&spec.optimizer, held.applied, lr);
            let from = (gradients.view(), held.norm.factor());
            self.whole.update(device, optimizer, 0..self.whole.elements(), written, from, &mut held.states);
        }
        held.parameters = Some(parameters);
        held.gradients = Some(gradients);
        let skipped = verdict != Verdict::Apply;
        Ok(Some((Outcome { loss, grad_norm, lr, skipped, loss_scale: scale }, verdict)))
    }
}
