//! The server of one range of the model, a rank of ZeRO-3 that updates its shard, and who has pushed how often.
//!
//! Everything is behind one lock: pushes are applied one after the other, in the order in which they come to it.

use std::mem::ManuallyDrop as Kept;
use std::ops::Range;
use std::sync::Arc;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use phalanx_collectives::CollectiveError;
use phalanx_optim::LearningRate;
use phalanx_parallel::zero::Update;
use phalanx_plan::{Precision, ZeroStage};
use phalanx_tensor::{Device, View, ViewMut};
use phalanx_train::Groups;
use phalanx_train::rank::Rank;
use phalanx_train::spec::Spec;

use super::exchange::{HEADER, Mail, Push, part, put};
use super::links::Links;
use super::pushes::Pushes;

/// Longest sleep of a held answer between two checks.
const SLICE: Duration = Duration::from_millis(50);

/// The server of one range of the parameters.
pub(super) struct Server {
    pub(super) device: Device,
    pub(super) range: Range<usize>,
    max_staleness: u64,
    schedule: Arc<dyn LearningRate>,
    state: Mutex<Served>,
    changed: Condvar,
}

/// The state that the lock guards.
pub(super) struct Served {
    /// Parameters and optimizer states of the range, in f32, as the shard of a rank under ZeRO-3.
    pub(super) rank: Rank,
    /// Updates applied.
    pub(super) version: u64,
    /// Pushes of all workers. The total includes earlier runs.
    pub(super) pushes: Pushes,
    /// For each worker: its pushes in this run.
    pushed: Vec<u64>,
    /// For each worker: number of updates that the parameters of its last answer include.
    seen: Vec<u64>,
    /// For each worker: whether it has no more steps.
    done: Vec<bool>,
    failed: Option<CollectiveError>,
}

impl Server {
    /// Allocates the server's shard of a model that `spec` holds in one chunk.
    pub(super) fn new(device: Device, groups: Groups, spec: &Spec, max_staleness: u64) -> Server {
        let (ranks, range) = (spec.world_size(), part(&spec.mesh, groups.world.rank()));
        // It stores no gradient: each is applied as it arrives.
        let mut sharded = spec.clone();
        (sharded.zero.stage, sharded.zero.update_in_backward) = (ZeroStage::Three, true);
        (sharded.precision.types, sharded.batch.micro_batches) = (Precision::F32, 1);
        let rank = Rank::allocate(device.clone(), groups, &sharded, spec.model.whole(), None);
        let served = Served {
            rank: rank.expect("there are no links to connect between processors"),
            version: 0,
            pushes: Pushes::default(),
            pushed: vec![0; ranks],
            seen: vec![0; ranks],
            done: vec![false; ranks],
            failed: None,
        };
        Server {
            range,
            max_staleness,
            schedule: Arc::clone(&spec.update.schedule_of_rate),
            state: Mutex::new(served),
            changed: Condvar::new(),
            device,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Served> {
        // After a panic in an update, only the error is used.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Starts a run, in which all workers have the server's current parameters.
    pub(super) fn begin(&self) {
        let mut served = self.lock();
        let version = served.version;
        served.pushed.fill(0);
        served.seen.fill(version);
        served.done.fill(false);
        served.pushes.take();
    }

    /// Statistics over the pushes since the last call.
    pub(super) fn take_pushes(&self) -> Pushes {
        self.lock().pushes.take()
    }

    /// Number of steps: pushes divided by workers.
    pub(super) fn steps(&self) -> u64 {
        let served = self.lock();
        served.pushes.total / served.pushed.len() as u64
    }

    /// Learning rate of update `number`, from 1. Steps are updates divided by workers.
    fn lr(&self, number: u64, ranks: usize) -> f64 {
        self.schedule.lr((number - 1) / ranks as u64)
    }

    /// Applies a push of `worker`: gradient and clip factor, or None for a skipped step; `numbers` are its loss and
    /// gradient norm. Returns its staleness: the updates by other workers since its last answer.
    pub(super) fn apply(&self, worker: usize, push: Option<(View, View)>, numbers: [f32; 2]) -> u64 {
        let mut served = self.lock();
        let served = &mut *served;
        let staleness = served.version - served.seen[worker];
        served.pushes.add(numbers, push.is_some().then_some(staleness));
        if let Some((gradient, factor)) = push {
            served.version += 1;
            let lr = self.lr(served.version, served.pushed.len());
            let update = Update { number: served.version, lr: lr as f32, applies: true };
            served.rank.chunks_mut().update_with(update, gradient, factor);
        }
        served.pushed[worker] += 1;
        self.changed.notify_all();
        staleness
    }

    /// Reads the parameters of the range for the next step of `worker`, as soon as the staleness bound allows it to
    /// start.
    ///
    /// # Errors
    /// When the job ends meanwhile. The wait is bounded, because the thread that serves the slow worker has a deadline.
    pub(super) fn answer(&self, links: &Links, worker: usize, to: ViewMut) -> Result<(), CollectiveError> {
        let mut served = self.lock();
        while let Some(error) = served.failed.clone().map(Err).or_else(|| self.holds(&served, worker)) {
            error?;
            served =
                self.changed.wait_timeout(served, SLICE).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
            links.check()?;
        }
        served.seen[worker] = served.version;
        self.read(&mut served, to)
    }

    /// `Some` while another worker is too far behind for this one's next step.
    fn holds(&self, served: &Served, worker: usize) -> Option<Result<(), CollectiveError>> {
        let turn = served.pushed[worker];
        let behind = |o: usize| {
            o != worker && !served.done[o] && served.pushed[o].saturating_add(self.max_staleness) < turn
        };
        let held = (0..served.pushed.len()).any(behind);
        held.then_some(Ok(()))
    }

    /// Reads the current parameters of the range.
    pub(super) fn read(&self, served: &mut Served, mut to: ViewMut) -> Result<(), CollectiveError> {
        served.rank.chunks_mut().lend_parameters(|own| {
            put(&self.device, own.view(), to.reborrow());
            Ok(own)
        })
    }

    /// Notes that a worker has no more steps, so that no other waits for it.
    pub(super) fn leave(&self, worker: usize) {
        self.lock().done[worker] = true;
        self.changed.notify_all();
    }

    /// Notes that the job has ended, which ends all waits.
    pub(super) fn fail(&self, error: CollectiveError) {
        self.lock().failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Serves `worker` until it is done, without allocations.
    ///
    /// # Errors
    /// When the worker died, stalled or disagreed, or the job ended. All waits at this server then end with the error.
    pub(super) fn serve(&self, links: &Links, worker: usize, mail: Mail) -> Result<Mail, CollectiveError> {
        let served = self.serve_until_done(links, worker, mail);
        if let Err(error) = &served {
            self.fail(error.clone());
        }
        served
    }

    fn serve_until_done(&self, links: &Links, worker: usize, mail: Mail) -> Result<Mail, CollectiveError> {
        let group = links.of_worker(worker);
        // If a call fails, its buffers are lost, and the others are not freed either: this rank's worker may be inside
        // a phase, whose end checks the live allocations.
        let Mail { header, gradient, staleness, parameters } = mail;
        let (mut header, mut gradient) = (Kept::new(header), Kept::new(gradient));
        let (mut staleness, mut parameters) = (Kept::new(staleness), Kept::new(parameters));
        for tag in 1.. {
            header = Kept::new(group.recv(Kept::into_inner(header), worker, tag).wait()?);
            let mut head = [0f32; HEADER];
            self.device.download(header.view(), &mut head)?;
            let [code, _, loss, grad_norm] = head;
            let (push, numbers) = (Push::from_code(code), [loss, grad_norm]);
            if push == Push::Done {
                break;
            }
            let stale = match push {
                Push::Gradient => {
                    gradient = Kept::new(group.recv(Kept::into_inner(gradient), worker, tag).wait()?);
                    let factor = header.view().range(1..2);
                    self.apply(worker, Some((gradient.view(), factor)), numbers)
                }
                _ => self.apply(worker, None, numbers),
            };
            self.answer(links, worker, parameters.view_mut())?;
            self.device.upload(&[stale as f32], staleness.view_mut());
            staleness = Kept::new(group.send(Kept::into_inner(staleness), worker, tag).wait()?);
            parameters = Kept::new(group.send(Kept::into_inner(parameters), worker, tag).wait()?);
        }
        self.leave(worker);
        let [header, gradient, staleness, parameters] =
            [header, gradient, staleness, parameters].map(Kept::into_inner);
        Ok(Mail { header, gradient, staleness, parameters })
    }
}
