//! Asynchronous updates with bounded staleness: a parameter server that is sharded over the workers (Dean et al.,
//! "Large Scale Distributed Deep Networks", 2012; Ho et al., "More Effective Distributed ML via a Stale Synchronous
//! Parallel Parameter Server", 2013).
//!
//! Each of N ranks is a *worker*, with a whole copy of the parameters and a part of the data. It is also the *server* of
//! 1/N of the flat parameters, for which it holds f32 parameters and optimizer states. In a step, a worker computes the
//! gradient of the mean loss of its own part, sends each range of it to its server (the *push*), and receives that range
//! of the parameters back (the *answer*). A server applies each push when it arrives, scaled by the clip factor of the
//! worker's own norm, and counts updates. The learning rate is that of step updates / N; Adam's bias correction uses the
//! number of updates.
//!
//! The bound: a worker starts step k when every other has pushed step k - 1 - max_staleness; a server holds its
//! answer to push p back until all others have pushed p - max_staleness. So between the answer to a push and the
//! next push the other workers, each from push p - m at least to push p + 1 + m at most, make no more than
//! (N - 1) (2 m + 1) updates that its parameters have not seen: the *staleness* of the push (Ho et al., section 3:
//! the window of a read).
//!
//! Each other worker is served by one thread. It receives a push, applies it under the server's lock, waits for the bound
//! on a condition variable, and answers. It allocates nothing: all buffers are made in phase `init`. The device's threads
//! belong to the worker; servers compute on a thread of their own.
//!
//! Cost: in a step, a worker sends P (N - 1) / N gradients and receives as many parameters. Besides parameters and
//! gradients, a rank holds 1/N of the states and f32 parameters, and four buffers of P / N for each other rank.

mod exchange;
mod links;
mod pushes;
mod server;
mod state;
mod train;
mod worker;

use std::sync::Arc;

use phalanx_collectives::CollectiveError;
use phalanx_cpu::Cpu;
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{ChunkSize, MemoryError};
use phalanx_tensor::{Device, refused_thread};

pub use links::Links;
pub use pushes::Pushes;
pub use train::train;
pub use worker::Done;

use exchange::Mail;
use phalanx_train::RunError;
use phalanx_train::groups::GroupSource;
use phalanx_train::planning::{PlanError, RankPlan, RunPlan, parameters_at};
use phalanx_train::position::Position;
use phalanx_train::rank::Batch;
use phalanx_train::run::Engine as _;
use phalanx_train::saving;
use phalanx_train::spec::{BatchPart, Spec};
use server::Server;
use worker::Worker;

/// The largest possible staleness of a push: the updates by other workers that its parameters did not include.
pub fn staleness_bound(ranks: usize, max_staleness: u64) -> u64 {
    (ranks as u64 - 1) * (2 * max_staleness + 1)
}

/// Fills the batch of the step with the given number.
pub type NextBatch<'a> = dyn FnMut(u64, &mut Batch) -> Result<(), RunError> + 'a;

/// The results of some steps of one worker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The mean loss of this worker's part of the batch in each step, before the push.
    pub losses: Vec<f32>,
    /// Mean staleness over this worker's pushes and all servers.
    pub staleness_mean: f64,
    /// Largest staleness.
    pub staleness_max: u64,
    /// Seconds between a push and its last answer: sending, updating, and waiting for the staleness bound.
    pub waited_s: f64,
}

/// The worker and the server of one rank.
pub struct Asynchronous<'a> {
    device: Device,
    links: Links<'a>,
    server: Server,
    worker: Worker,
    /// For each worker the buffers of its pushes and answers; `None` while a thread that serves the worker has them.
    incoming: Vec<Option<Mail>>,
    /// Position of the run when it started; None before its first steps.
    started: Option<Position>,
}

/// Runs every rank on `Meta`. The mesh of `spec` must have a data axis only. The traces of the ranks are not compared,
/// since the order in which servers answer is only known at run time; each message is checked when it is sent.
///
/// # Errors
/// A trace that cannot be placed.
pub fn plan(spec: Spec) -> Result<RunPlan, PlanError> {
    let whole = spec.model.whole();
    let of = |rank: usize| -> Result<RankPlan, MemoryError> {
        RankPlan::of(&dry_run(&spec, rank), parameters_at(&spec, &whole, 0))
    };
    let ranks = (0..spec.world_size()).map(of).collect::<Result<Vec<_>, _>>()?;
    Ok(RunPlan::of_ranks(spec, ranks, &whole))
}

/// Everything that one rank does, run on `Meta`.
fn dry_run(spec: &Spec, rank: usize) -> phalanx_plan::trace::Trace {
    let device = Device::meta(spec.device.threads);
    let recorder = Arc::clone(device.recorder().expect("Meta records"));
    let source = GroupSource::Meta(recorder, rank);
    let links = Links::new(&source, spec);
    // There is one worker in a dry run, which waits for no other.
    let mut engine = Asynchronous::new(device.clone(), device.clone(), links, spec, u64::MAX);
    let never = "nothing fails on Meta";
    engine.fill(|rank| rank.load(|_, _, _, _| Ok(()))).expect(never);
    let BatchPart { micro_batch_size, micro_batches, seq, .. } = spec.batch;
    let batch = Batch::with_rows(micro_batch_size * micro_batches, seq);
    engine.worker.step(&engine.server, &engine.links, &batch).expect(never);
    if spec.batch.evaluation_batches > 0 {
        let windows = Batch::with_rows(spec.batch.evaluation_rows(), seq);
        engine.evaluate_unless(&windows, &|| false).expect(never);
    }
    saving::save(&mut engine.server.lock().rank, |_, _| Ok(())).expect(never);
    saving::report(&engine, |_| Ok(())).expect(never);
    device.take_trace(rank)
}

/// The device of a server: one thread of the host processor, over the memory of the worker's device.
pub fn server_device(worker: &Device) -> Device {
    Device::new(Cpu::new(1), Arc::clone(worker.arena()))
}

impl<'a> Asynchronous<'a> {
    /// Allocates everything: the phase `init` of the plan. The caller loads the parameters. The worker computes on
    /// `device`, the server on `serving`, over the same memory (see [`server_device`]).
    ///
    /// # Panics
    /// On a mesh with other axes than data, which a checked configuration does not have.
    pub fn new(
        device: Device,
        serving: Device,
        links: Links<'a>,
        spec: &Spec,
        max_staleness: u64,
    ) -> Asynchronous<'a> {
        let ranks = spec.world_size();
        assert_eq!((spec.mesh.axes.data, links.ranks()), (ranks, ranks), "workers have the whole model");
        let spec = spec.with_chunks(ChunkSize::Elements(u64::MAX)).expect("it was laid out for its plan");
        let (rank, groups) = (links.rank(), links.groups());
        let make = || {
            let server = Server::new(serving, groups.clone(), &spec, max_staleness);
            let worker = Worker::new(&device, groups.clone(), &spec);
            let mail =
                |other: usize| (other != rank).then(|| Mail::new(&device, &spec.mesh, spec.precision.types));
            (server, worker, (0..ranks).map(mail).collect())
        };
        let (server, worker, incoming) = device.phase(PhaseName::Init, make);
        Asynchronous { device, links, server, worker, incoming, started: None }
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.links.rank()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of steps done: pushes divided by workers.
    pub fn steps(&self) -> u64 {
        self.server.steps()
    }

    /// Statistics over the pushes of all workers that this rank's server received since its worker's last step.
    pub fn take_pushes(&self) -> Pushes {
        self.server.take_pushes()
    }

    /// Runs `steps` steps of this worker while its server serves the others; returns when all workers are done and
    /// the parameters are gathered. `next_batch` fills the batch of a step with a given number, which counts from 1 over
    /// all runs. `after` is called after each step and may stop this worker; the others continue.
    ///
    /// # Errors
    /// When a rank died, stalled or disagreed, or a gradient is not finite with no smaller loss scale left to try.
    /// The engine cannot be used afterwards.
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
        let Asynchronous { links, server, worker, .. } = self;
        let (links, server) = (&*links, &*server);
        let (done, mails) = std::thread::scope(|scope| {
            let guard = Guard { links, server };
            let serve = |(other, mail)| {
                let work = move || {
                    let _guard = Guard { links, server };
                    server.serve(links, other, mail).map(|mail| (other, mail))
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
            let done = started.and_then(|()| worker.work(server, links, steps, next_batch, after));
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
