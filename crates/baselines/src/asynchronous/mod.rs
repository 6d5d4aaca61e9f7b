//! Asynchronous updates with bounded staleness: parameter servers, sharded over the workers themselves (Dean et al.,
//! "Large Scale Distributed Deep Networks", 2012; Ho et al., "More Effective Distributed ML via a Stale Synchronous
//! Parallel Parameter Server", 2013).
//!
//! Each of N ranks is a *worker* with a whole copy of the parameters and a part of the data, and the *server* of 1/N
//! of the flat space, of which it has f32 parameters and optimizer states. A worker's step: gradient of the mean
//! loss of its own part, its ranges to their servers ("push"), the ranges back ("answer"). A server applies each
//! push as it comes, scaled by the clip factor of the worker's own norm, and counts updates: the learning rate is
//! that of updates / N, Adam's correction that of updates.
//!
//! The bound: a worker starts step k when every other has pushed step k - 1 - max_staleness; a server holds its
//! answer to push p back until all others have pushed p - max_staleness. So between the answer to a push and the
//! next push the other workers, each from push p - m at least to push p + 1 + m at most, make no more than
//! (N - 1) (2 m + 1) updates that its parameters have not seen: the *staleness* of the push (Ho et al., section 3:
//! the window of a read).
//!
//! One thread for each worker but the own serves it: it receives, applies under the server's lock, waits for the bound
//! on a condition variable, answers. It allocates nothing: all buffers are made in phase `init`. The device's threads
//! are the worker's; servers compute on one of their own.
//!
//! Bytes a step of a worker: P (N - 1) / N gradients out and as many parameters in. Memory a rank beside parameters
//! and gradients: 1/N of states and f32 parameters, and four buffers of P / N for each other rank.

mod exchange;
mod links;
mod server;
mod state;
mod train;
mod worker;

use std::sync::Arc;

use phalanx_collectives::CollectiveError;
use phalanx_cpu::Cpu;
use phalanx_plan::MemoryError;
use phalanx_tensor::{Device, refused_thread};
use phalanx_trace::PhaseName;

pub use links::Links;
pub use train::{Place, Record, train};
pub use worker::Done;

use crate::whole::Whole;
use exchange::Mail;
use phalanx_train::groups::GroupSource;
use phalanx_train::planning::{PlanError, RankPlan, RunPlan, parameters_at};
use phalanx_train::rank::Batch;
use phalanx_train::run::RunError;
use phalanx_train::saving;
use phalanx_train::spec::Spec;
use server::Server;
use worker::Worker;

/// Updates of other workers that one push's parameters had not seen, at most, of `ranks` ranks.
pub fn staleness_bound(ranks: usize, max_staleness: u64) -> u64 {
    (ranks as u64 - 1) * (2 * max_staleness + 1)
}

/// Fills the batch of a step, whose number it is told.
pub type NextBatch<'a> = dyn FnMut(u64, &mut Batch) -> Result<(), RunError> + 'a;

/// What a run of some steps leaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// By step: mean loss of this worker's part of the batch, before the push.
    pub losses: Vec<f32>,
    /// Over this worker's pushes and all servers.
    pub staleness_mean: f64,
    /// The largest.
    pub staleness_max: u64,
    /// Seconds between a push and the last answer to it: sending, updates, and what the bound held back.
    pub waited_s: f64,
}

/// Worker and server of one rank. See the module's head.
pub struct Asynchronous<'a> {
    device: Device,
    links: Links<'a>,
    spec: Spec,
    whole: Whole,
    server: Server,
    worker: Worker,
    /// By worker: what its pushes come in and its answers leave from; away while threads have it.
    incoming: Vec<Option<Mail>>,
}

/// Runs every rank dry: `spec` of a mesh of data alone. The traces of ranks are not compared, since who serves when
/// is not known before; every message is, when it is sent.
///
/// # Errors
/// A trace that cannot be placed.
pub fn plan(spec: Spec) -> Result<RunPlan, PlanError> {
    let whole = spec.whole();
    let of = |rank: usize| -> Result<RankPlan, MemoryError> {
        RankPlan::of(&dry_run(&spec, rank), Default::default(), parameters_at(&spec, &whole, 0))
    };
    let ranks = (0..spec.world_size()).map(of).collect::<Result<Vec<_>, _>>()?;
    Ok(RunPlan::of_ranks(spec, ranks, &whole))
}

/// One rank's life on `Meta`.
fn dry_run(spec: &Spec, rank: usize) -> phalanx_trace::Trace {
    let device = Device::meta(spec.threads);
    let recorder = Arc::clone(device.recorder().expect("Meta records"));
    let source = GroupSource::Meta(recorder, rank);
    let mut engine = Asynchronous::new(device.clone(), Links::new(&source, spec.world_size()), spec, 0);
    let never = "nothing fails on Meta";
    engine.load(|_, _, _, _| Ok(())).expect(never);
    let batch = Batch::with_rows(spec.micro_batch_size * spec.micro_batches, spec.seq);
    engine.worker.step(&engine.whole, &engine.server, &engine.links, &batch).expect(never);
    engine.gather().expect(never);
    if spec.evaluation_batches > 0 {
        engine
            .evaluate(&Batch::with_rows(spec.micro_batch_size * spec.evaluation_batches, spec.seq))
            .expect(never);
    }
    saving::save(&mut engine, |_, _| Ok(())).expect(never);
    saving::report(&engine, |_| Ok(())).expect(never);
    device.take_trace(rank)
}

impl<'a> Asynchronous<'a> {
    /// Allocates everything: the phase `init` of the plan. Parameters are to be loaded.
    ///
    /// # Panics
    /// On a mesh of more than data, which a checked configuration has not.
    pub fn new(device: Device, links: Links<'a>, spec: &Spec, max_staleness: u64) -> Asynchronous<'a> {
        let ranks = spec.world_size();
        assert_eq!((spec.mesh.data, links.ranks()), (ranks, ranks), "workers have the whole model");
        let whole = Whole::new(spec.whole(), ranks).expect("the model was laid out when its run was planned");
        let serving = match device.is_meta() {
            true => device.clone(),
            false => Device::new(Cpu::new(1), Arc::clone(device.arena())),
        };
        let rank = links.rank();
        let make = || {
            let server = Server::new(serving, spec, &whole, rank, max_staleness);
            let worker = Worker::new(&device, spec, &whole, rank);
            let mail = |other: usize| (other != rank).then(|| Mail::new(&device, spec, &whole));
            (server, worker, (0..ranks).map(mail).collect())
        };
        let (server, worker, incoming) = device.phase(PhaseName::Init, make);
        Asynchronous { device, links, spec: spec.clone(), whole, server, worker, incoming }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.links.rank()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Steps done: pushes over workers.
    pub fn steps(&self) -> u64 {
        self.server.steps()
    }

    /// `steps` steps of this worker, while its server serves the others; returns when all workers are done and
    /// parameters are gathered. `next_batch` fills the batch of a step, which it is told (from 1, those before
    /// included). `after` each step may say that it was the last here: the others go on.
    ///
    /// # Errors
    /// When a rank died, stalled or disagreed, or a gradient is not finite with no smaller loss scale left to try.
    /// None may follow.
    pub fn run(
        &mut self,
        steps: u64,
        next_batch: &mut NextBatch<'_>,
        after: &mut dyn FnMut(&Done) -> bool,
    ) -> Result<Report, RunError> {
        self.server.begin();
        self.worker.steps = self.server.steps();
        let mails: Vec<(usize, Mail)> =
            self.incoming.iter_mut().enumerate().filter_map(|(w, mail)| Some((w, mail.take()?))).collect();
        let Asynchronous { links, whole, server, worker, .. } = self;
        let (links, whole, server) = (&*links, &*whole, &*server);
        let (done, mails) = std::thread::scope(|scope| {
            let guard = Guard { links, server };
            let serve = |(other, mail)| {
                let work = move || {
                    let _guard = Guard { links, server };
                    server.serve(whole, links, other, mail).map(|mail| (other, mail))
                };
                let started = std::thread::Builder::new().spawn_scoped(scope, work);
                started.map_err(|error| {
                    RunError::Threads(refused_thread("a thread that serves a worker", &error))
                })
            };
            let mut threads = Vec::new();
            let started = mails.into_iter().try_for_each(|mail| {
                threads.push(serve(mail)?);
                Ok(())
            });
            let done = started.and_then(|()| worker.work(whole, server, links, steps, next_batch, after));
            if let Err(error) = &done {
                guard.end(&error.to_string());
            }
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<_, CollectiveError>>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            (done, threads.into_iter().map(join).collect::<Vec<_>>())
        });
        let report = done?;
        for mail in mails {
            let (other, mail) = mail?;
            self.incoming[other] = Some(mail);
        }
        self.gather()?;
        Ok(report)
    }
}

/// Ends the job when a thread of this rank unwinds, so that no other waits for it.
struct Guard<'a> {
    links: &'a Links<'a>,
    server: &'a Server,
}

impl Guard<'_> {
    fn end(&self, reason: &str) {
        self.server.fail(self.links.abort(reason));
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.end("a thread of this worker panicked");
        }
    }
}
