//! A worker: gradients of its own part of the data, pushed to the servers, answered with parameters.

use std::time::Instant;

use phalanx_collectives::CollectiveError;
use phalanx_optim::Verdict;
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Device, View};
use phalanx_train::rank::{Batch, Rank, Replica};
use phalanx_train::spec::{BatchPart, Spec};
use phalanx_train::step::Outcome;
use phalanx_train::{Groups, RunError};

use super::exchange::{Mail, Push, part, put};
use super::links::Links;
use super::pushes::Pushes;
use super::server::Server;
use super::{NextBatch, Report};

/// The results of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// Number of the step, from 1.
    pub step: u64,
    /// Loss, norm and loss scale of this worker's part of the batch. Where it was skipped, nothing was pushed.
    pub outcome: Outcome,
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
    pub(super) rank: Rank,
    spec: Spec,
    number: usize,
    /// Buffers for each server.
    mails: Vec<Option<Mail>>,
    /// Number of pushes in this run.
    sent: u64,
    /// Steps done, including earlier runs.
    pub(super) steps: u64,
}

impl Worker {
    /// Allocates a copy of a model that `spec` holds in one chunk.
    pub(super) fn new(device: &Device, groups: Groups, spec: &Spec) -> Worker {
        let number = groups.world.rank();
        let (network, replica) = (spec.model.whole(), Some(Replica { updates: false }));
        let rank = Rank::allocate(device.clone(), groups, spec, network, replica);
        let mail =
            |server: usize| (server != number).then(|| Mail::new(device, &spec.mesh, spec.precision.types));
        Worker {
            rank: rank.expect("there are no links to connect between processors"),
            mails: (0..spec.world_size()).map(mail).collect(),
            sent: 0,
            steps: 0,
            spec: spec.clone(),
            number,
        }
    }

    /// Runs `steps` steps, then tells all servers that there are no more.
    pub(super) fn work(
        &mut self,
        server: &Server,
        links: &Links,
        steps: u64,
        next_batch: &mut NextBatch<'_>,
        after: &mut dyn FnMut(&Done) -> bool,
    ) -> Result<Report, RunError> {
        let BatchPart { micro_batch_size, micro_batches, seq, .. } = self.spec.batch;
        let mut batch = Batch::with_rows(micro_batch_size * micro_batches, seq);
        let mut report = Report::default();
        let (mut staleness, mut counted) = (0, 0);
        self.sent = 0;
        for _ in 0..steps {
            next_batch(self.steps + 1, &mut batch)?;
            let done = self.step(server, links, &batch)?;
            report.losses.push(done.outcome.loss);
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
    pub(super) fn step(&mut self, server: &Server, links: &Links, batch: &Batch) -> Result<Done, RunError> {
        let device = self.rank.device().clone();
        let number = self.steps + 1;
        let lr = self.spec.update.schedule_of_rate.lr(self.steps);
        let done = device.try_phase(PhaseName::Step, || {
            // The batch of a dry run is not read.
            let planned = self.spec.batch.step_targets().here;
            let targets = if device.is_meta() { planned } else { batch.counted_targets() };
            let loss = self.rank.own_gradients(number, batch, targets, self.rank.loss_scale())?;
            let nobody = self.rank.stop_requests(false);
            let (outcome, verdict) = self.rank.judge(targets, lr, loss, nobody)?;
            let push = match verdict {
                Verdict::Apply => Push::Gradient,
                Verdict::Skip => Push::Skipped,
                Verdict::Stuck => return Err(self.stuck(links, number, &outcome)),
            };
            let start = Instant::now();
            let staleness = self.exchange(server, links, push, &outcome)?;
            Ok::<_, CollectiveError>(Done {
                step: number,
                outcome,
                staleness: if push == Push::Gradient { staleness } else { Vec::new() },
                pushes: server.take_pushes(),
                waited_s: start.elapsed().as_secs_f64(),
                sent_bytes: links.take_statistics().sent_bytes,
            })
        })?;
        self.steps = number;
        Ok(done)
    }

    /// Sends every server its range of the gradient, and receives the answers. Returns the staleness of the push for each
    /// server.
    fn exchange(
        &mut self,
        server: &Server,
        links: &Links,
        push: Push,
        outcome: &Outcome,
    ) -> Result<Vec<u64>, CollectiveError> {
        self.sent += 1;
        let tag = self.sent;
        let (device, spec, number) = (self.rank.device().clone(), &self.spec, self.number);
        let (ranks, numbers) = (spec.world_size(), [outcome.loss, outcome.grad_norm]);
        let [factor] = device.fetch([self.rank.gradient_factor()])?;
        let others: Vec<usize> = (0..ranks).filter(|other| *other != number).collect();
        let (mails, mut in_flight) = (&mut self.mails, Vec::with_capacity(others.len()));
        let (mut staleness, here) = (vec![0; ranks], server.range.clone());
        self.rank.with_gradients(|gradients: View, own_factor: View| {
            for other in &others {
                let mail = mails[*other].take().expect("buffers are put back after each exchange");
                let Mail { mut header, mut gradient, staleness, parameters } = mail;
                device.upload(&[push.code(), factor, numbers[0], numbers[1]], header.view_mut());
                put(&device, gradients.range(part(&spec.mesh, *other)), gradient.view_mut());
                let group = links.to_server(*other);
                let header = group.send(header, *other, tag);
                let (sent, kept) = match push {
                    Push::Gradient => (Some(group.send(gradient, *other, tag)), None),
                    _ => (None, Some(gradient)),
                };
                let answer = (group.recv(staleness, *other, tag), group.recv(parameters, *other, tag));
                in_flight.push((header, sent, kept, answer));
            }
            // This rank's server needs no message.
            let own = (push == Push::Gradient).then(|| (gradients.range(here.clone()), own_factor));
            staleness[number] = server.apply(number, own, numbers);
            Ok(())
        })?;
        let mut in_flight = others.iter().zip(in_flight);
        self.rank.chunks_mut().lend_parameters(|mut parameters| {
            server.answer(links, number, parameters.view_mut().range(here.clone()))?;
            for (other, (header, sent, kept, (stale, answer))) in in_flight.by_ref() {
                let header = header.wait()?;
                let gradient = sent.map(|sent| sent.wait()).transpose()?.or(kept).expect("sent or kept");
                let (stale, answer) = (stale.wait()?, answer.wait()?);
                staleness[*other] = device.fetch([stale.view()])?[0] as u64;
                device.copy(answer.view(), parameters.view_mut().range(part(&spec.mesh, *other)));
                mails[*other] = Some(Mail { header, gradient, staleness: stale, parameters: answer });
            }
            Ok(parameters)
        })?;
        Ok(staleness)
    }

    /// Tells all servers that this worker is done.
    fn leave(&mut self, server: &Server, links: &Links) -> Result<(), CollectiveError> {
        server.leave(self.number);
        let tag = self.sent + 1;
        let (ranks, number) = (self.spec.world_size(), self.number);
        for other in (0..ranks).filter(|other| *other != number) {
            let mut mail = self.mails[other].take().expect("buffers are put back after each exchange");
            self.rank.device().upload(&[Push::Done.code(), 0.0, 0.0, 0.0], mail.header.view_mut());
            mail.header = links.to_server(other).send(mail.header, other, tag).wait()?;
            self.mails[other] = Some(mail);
        }
        Ok(())
    }

    /// Ends the job for all ranks, because this worker cannot continue.
    fn stuck(&self, links: &Links, step: u64, outcome: &Outcome) -> CollectiveError {
        let Outcome { loss, grad_norm, .. } = outcome;
        links.abort(&format!(
            "step {step} of worker {}: loss {loss}, gradient norm {grad_norm}: training diverged and nothing was \
             pushed; lower optimizer.lr or set optimizer.clip, then start again or --resume",
            self.number
        ))
    }
}
