//! A worker: gradients of its own part of the data, pushed to the servers, answered with parameters.

use std::sync::Arc;
use std::time::Instant;

use phalanx_collectives::CollectiveError;
use phalanx_layers::{Activation, Call, Context, Parameters};
use phalanx_optim::{LossScale, LossScaling, Verdict};
use phalanx_tensor::{Category, Clip, CrossEntropy, DType, Device, Tensor};
use phalanx_trace::PhaseName;

use super::exchange::{Mail, Push};
use super::links::Links;
use super::pushes::Pushes;
use super::server::Server;
use super::{NextBatch, Report};
use crate::whole::{ALONE, Norm, Whole};
use phalanx_train::RunError;
use phalanx_train::rank::{Batch, MeanLoss, zeroed};
use phalanx_train::spec::Spec;
use phalanx_train::targets::mean_over;

/// The results of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss of this worker's part of the batch.
    pub loss: f32,
    /// Norm of its gradient, before clipping and without the loss scale.
    pub grad_norm: f32,
    /// Learning rate, as this worker counts steps.
    pub lr: f64,
    /// Loss scale of the step, where there is one (f16).
    pub loss_scale: Option<f32>,
    /// Loss scale of the next step.
    pub next_loss_scale: Option<f32>,
    /// Whether the gradient overflowed, and nothing was pushed.
    pub skipped: bool,
    /// For each server: updates by others that the parameters of the step had not seen. Empty for a skipped step.
    pub staleness: Vec<u64>,
    /// The pushes of all workers that this rank's server received since the previous step of this worker.
    pub pushes: Pushes,
    /// Seconds between the push and the last answer.
    pub waited_s: f64,
    /// Bytes that this rank sent since the previous step, as worker and as server.
    pub sent_bytes: u64,
}

/// A worker of asynchronous training.
pub(super) struct Worker {
    pub(super) device: Device,
    spec: Spec,
    rank: usize,
    /// Flat, in the compute type; None during a gather.
    pub(super) parameters: Option<Tensor>,
    /// Flat, in the type of accumulation.
    gradients: Tensor,
    norm: Norm,
    /// Buffer in which a server's range of the gradient is rounded, if it is communicated in another type.
    rounded: Option<Tensor>,
    /// Buffers for each server.
    mails: Vec<Option<Mail>>,
    pub(super) loss_scale: LossScale,
    /// Number of pushes in this run.
    sent: u64,
    /// Steps done, including earlier runs.
    pub(super) steps: u64,
}

impl Worker {
    pub(super) fn new(device: &Device, spec: &Spec, whole: &Whole, rank: usize) -> Worker {
        let flat =
            |dtype, category, name| -> Tensor { device.alloc(dtype, [whole.elements()], category, name) };
        let precision = spec.precision;
        let own = whole.part(rank, spec.world_size()).len();
        let rounded = || device.alloc(precision.communicate, [own], Category::Communication, "push.rounded");
        let mail = |server: usize| (server != rank).then(|| Mail::new(device, spec, whole));
        Worker {
            parameters: Some(flat(precision.compute, Category::Parameters, "parameters")),
            gradients: flat(precision.accumulate, Category::Gradients, "gradients"),
            norm: Norm::new(device, whole),
            rounded: (precision.communicate != precision.accumulate).then(rounded),
            mails: (0..spec.world_size()).map(mail).collect(),
            loss_scale: LossScale::new(spec.loss_scaling),
            sent: 0,
            steps: 0,
            device: device.clone(),
            spec: spec.clone(),
            rank,
        }
    }

    /// Runs `steps` steps, then tells all servers that there are no more.
    pub(super) fn work(
        &mut self,
        whole: &Whole,
        server: &Server,
        links: &Links,
        steps: u64,
        next_batch: &mut NextBatch<'_>,
        after: &mut dyn FnMut(&Done) -> bool,
    ) -> Result<Report, RunError> {
        let mut batch = Batch::with_rows(self.spec.micro_batch_size * self.spec.micro_batches, self.spec.seq);
        let mut report = Report::default();
        let (mut staleness, mut counted) = (0, 0);
        self.sent = 0;
        for _ in 0..steps {
            next_batch(self.steps + 1, &mut batch)?;
            let done = self.step(whole, server, links, &batch)?;
            report.losses.push(done.loss);
            report.waited_s += done.waited_s;
            staleness += done.staleness.iter().sum::<u64>();
            counted += done.staleness.len();
            report.staleness_max =
                report.staleness_max.max(done.staleness.iter().copied().max().unwrap_or(0));
            if after(&done) {
                break;
            }
        }
        report.staleness_mean = staleness as f64 / counted.max(1) as f64;
        self.leave(server, links)?;
        Ok(report)
    }

    /// Runs one step on this worker's part of the batch, until all servers have answered.
    pub(super) fn step(
        &mut self,
        whole: &Whole,
        server: &Server,
        links: &Links,
        batch: &Batch,
    ) -> Result<Done, RunError> {
        let device = self.device.clone();
        let (number, scale) = (self.steps + 1, self.loss_scale.scale());
        let lr = self.spec.schedule_of_rate.lr(self.steps);
        let done = device.try_phase(PhaseName::Step, || {
            // The batch of a dry run is not read.
            let planned = self.spec.step_targets().here;
            let targets = if device.is_meta() { planned } else { batch.counted_targets() };
            let loss = self.gradient(whole, number, batch, targets, scale);
            self.round(whole);
            let clip = Clip { max_norm: self.spec.clip, loss_scale: scale };
            let (norm, factor) = self.norm.compute(&device, whole, self.gradients.view(), clip);
            let [loss, grad_norm, factor] = device.fetch([loss.view(), norm, factor])?;
            let loss = MeanLoss::over(targets, loss).loss;
            let loss_scale = self.shown_loss_scale();
            let finite = loss.is_finite() && grad_norm.is_finite();
            let push = match if targets == 0 { Verdict::Skip } else { self.loss_scale.judge(finite) } {
                Verdict::Apply => Push::Gradient,
                Verdict::Skip => Push::Skipped,
                Verdict::Stuck => return Err(self.stuck(links, number, [loss, grad_norm])),
            };
            let start = Instant::now();
            let staleness = self.exchange(whole, server, links, push, [factor, loss, grad_norm])?;
            Ok::<_, CollectiveError>(Done {
                step: number,
                loss,
                grad_norm,
                lr,
                loss_scale,
                next_loss_scale: self.shown_loss_scale(),
                skipped: push != Push::Gradient,
                staleness: if push == Push::Gradient { staleness } else { Vec::new() },
                pushes: server.take_pushes(),
                waited_s: start.elapsed().as_secs_f64(),
                sent_bytes: links.take_statistics().sent_bytes,
            })
        })?;
        self.steps = number;
        Ok(done)
    }

    /// Runs forward and backward of all micro-batches, which accumulate gradients in place. Returns the mean loss over this worker's
    /// `targets`, `[1]`.
    fn gradient(
        &mut self,
        whole: &Whole,
        number: u64,
        batch: &Batch,
        targets: usize,
        loss_scale: f32,
    ) -> Tensor {
        let Worker { device, spec, rank, parameters, gradients, .. } = self;
        let flat = parameters.as_ref().expect("parameters are absent only during a gather").view();
        let mut loss = zeroed(device, "step.loss");
        let mut written = whole.gradients(gradients);
        let numbers = spec.cross_entropy(targets, loss_scale);
        for micro_batch in 0..spec.micro_batches {
            let cx = Context {
                draw: Some(spec.draw(number, micro_batch, *rank)),
                ..Context::new(device, spec.precision.compute, [spec.micro_batch_size, spec.seq])
            };
            let tokens: Activation =
                Arc::new(upload(device, spec, &batch.tokens, micro_batch, "batch.tokens"));
            let (x, saved) = whole.forward(&cx, flat, tokens);
            let targets = upload(device, spec, &batch.targets, micro_batch, "batch.targets");
            let (part, dx) = {
                let parameters = written.of(whole, whole.network.head_index(), flat);
                let call = Call::new(Parameters::new(&parameters), x);
                whole.head().loss(&cx, call, &targets, numbers).expect(ALONE)
            };
            drop(targets);
            device.add(part.view(), loss.view_mut());
            whole.backward(&cx, flat, &mut written, saved, dx.expect("dx was asked for"));
        }
        loss
    }

    /// Sends every server its range of the gradient, and receives the answers. `numbers` are clip factor, loss and
    /// gradient norm. Returns the staleness of the push for each server.
    fn exchange(
        &mut self,
        whole: &Whole,
        server: &Server,
        links: &Links,
        push: Push,
        [factor, loss, grad_norm]: [f32; 3],
    ) -> Result<Vec<u64>, CollectiveError> {
        self.sent += 1;
        let tag = self.sent;
        let (ranks, rank) = (self.spec.world_size(), self.rank);
        let others: Vec<usize> = (0..ranks).filter(|other| *other != rank).collect();
        let mut in_flight = Vec::with_capacity(others.len());
        for other in &others {
            let Mail { mut header, mut gradient, staleness, parameters } = self.take(*other);
            self.device.upload(&[push.code(), factor, loss, grad_norm], header.view_mut());
            self.pack(whole, *other, &mut gradient);
            let group = links.to_server(*other);
            let header = group.send(header, *other, tag);
            let (sent, kept) = match push {
                Push::Gradient => (Some(group.send(gradient, *other, tag)), None),
                _ => (None, Some(gradient)),
            };
            let answer = (group.recv(staleness, *other, tag), group.recv(parameters, *other, tag));
            in_flight.push((header, sent, kept, answer));
        }
        let mut staleness = vec![0; ranks];
        staleness[rank] = self.push_here(whole, server, push, [loss, grad_norm]);
        let mut parameters = self.parameters.take().expect("parameters are absent only during a gather");
        server.answer(links, rank, parameters.view_mut().range(server.range.clone()))?;
        for (other, (header, sent, kept, (stale, answer))) in others.iter().zip(in_flight) {
            let header = header.wait()?;
            let gradient = sent.map(|sent| sent.wait()).transpose()?.or(kept).expect("sent or kept");
            let (stale, answer) = (stale.wait()?, answer.wait()?);
            staleness[*other] = self.device.fetch([stale.view()])?[0] as u64;
            let range = whole.part(*other, ranks);
            self.device.copy(answer.view(), parameters.view_mut().range(range));
            self.mails[*other] = Some(Mail { header, gradient, staleness: stale, parameters: answer });
        }
        self.parameters = Some(parameters);
        Ok(staleness)
    }

    /// Pushes to the server of this rank, without a message.
    fn push_here(&self, whole: &Whole, server: &Server, push: Push, numbers: [f32; 2]) -> u64 {
        if push != Push::Gradient {
            return server.apply(whole, self.rank, None, numbers);
        }
        let gradient = self.gradients.view().range(server.range.clone());
        server.apply(whole, self.rank, Some((gradient, self.norm.factor())), numbers)
    }

    /// Rounds the gradient to the communication type, including this rank's own range, so that the result does not
    /// depend on the distribution over servers.
    fn round(&mut self, whole: &Whole) {
        let Some(rounded) = &mut self.rounded else { return };
        let ranks = self.spec.world_size();
        for range in (0..ranks).map(|server| whole.part(server, ranks)) {
            self.device.convert(self.gradients.view().range(range.clone()), rounded.view_mut());
            self.device.convert(rounded.view(), self.gradients.view_mut().range(range));
        }
    }

    /// Copies the range of the gradient that belongs to another server.
    fn pack(&self, whole: &Whole, server: usize, to: &mut Tensor) {
        let from = self.gradients.view().range(whole.part(server, self.spec.world_size()));
        match from.dtype() == to.dtype() {
            true => self.device.copy(from, to.view_mut()),
            false => self.device.convert(from, to.view_mut()),
        }
    }

    /// Tells all servers that this worker is done.
    fn leave(&mut self, server: &Server, links: &Links) -> Result<(), CollectiveError> {
        server.leave(self.rank);
        let tag = self.sent + 1;
        let (ranks, rank) = (self.spec.world_size(), self.rank);
        for other in (0..ranks).filter(|other| *other != rank) {
            let mut mail = self.take(other);
            self.device.upload(&[Push::Done.code(), 0.0, 0.0, 0.0], mail.header.view_mut());
            mail.header = links.to_server(other).send(mail.header, other, tag).wait()?;
            self.mails[other] = Some(mail);
        }
        Ok(())
    }

    fn take(&mut self, server: usize) -> Mail {
        self.mails[server].take().expect("buffers are put back after each exchange")
    }

    fn shown_loss_scale(&self) -> Option<f32> {
        (self.loss_scale.scaling() != LossScaling::Off).then(|| self.loss_scale.scale())
    }

    /// Ends the job for all ranks, because this worker cannot continue.
    fn stuck(&self, links: &Links, step: u64, [loss, grad_norm]: [f32; 2]) -> CollectiveError {
        links.abort(&format!(
            "step {step} of worker {}: loss {loss}, gradient norm {grad_norm}: training diverged and nothing was \
             pushed; lower optimizer.lr or set optimizer.clip, then start again or --resume",
            self.rank
        ))
    }

    /// This worker's part of the mean loss over the `targets` of all windows, and whether `stop` has ended the evaluation between two
    /// batches (1) or not (0), `[2]`.
    pub(super) fn evaluate(
        &self,
        whole: &Whole,
        windows: &Batch,
        targets: usize,
        stop: &dyn Fn() -> bool,
    ) -> Tensor {
        let Worker { device, spec, .. } = self;
        let flat = self.parameters.as_ref().expect("parameters are absent only during a gather").view();
        let mut sums = device.alloc(DType::F32, [2], Category::Activations, "evaluate.loss");
        device.fill(sums.view_mut(), 0.0);
        let numbers = CrossEntropy::scaled(mean_over(targets));
        let new = Context::new(device, spec.precision.compute, [spec.micro_batch_size, spec.seq]);
        let cx = Context { keep: false, ..new };
        for micro_batch in 0..windows.tokens.len() / (spec.micro_batch_size * spec.seq) {
            if stop() {
                device.fill(sums.view_mut().range(1..2), 1.0);
                device.leave_out_rest();
                break;
            }
            let tokens: Activation =
                Arc::new(upload(device, spec, &windows.tokens, micro_batch, "batch.tokens"));
            let (x, _) = whole.forward(&cx, flat, tokens);
            let targets = upload(device, spec, &windows.targets, micro_batch, "batch.targets");
            let own = whole.head_parameters(flat);
            let call = Call { input_wanted: false, ..Call::new(Parameters::new(&own), x) };
            let (part, _) = whole.head().loss(&cx, call, &targets, numbers).expect(ALONE);
            device.add(part.view(), sums.view_mut().range(0..1));
        }
        sums
    }
}

/// Ids of micro-batch `micro_batch` on the device, `[micro_batch_size, seq]`.
fn upload(device: &Device, spec: &Spec, ids: &[u32], micro_batch: usize, name: &'static str) -> Tensor {
    let elements = spec.micro_batch_size * spec.seq;
    let shape = [spec.micro_batch_size, spec.seq];
    let mut tensor = device.alloc(DType::U32, shape, Category::Activations, name);
    device.upload(&ids[micro_batch * elements..(micro_batch + 1) * elements], tensor.view_mut());
    tensor
}
