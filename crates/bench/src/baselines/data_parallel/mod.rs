//! Data parallelism in one process, like `torch.nn.DataParallel`: replicate, scatter, parallel_apply, gather.
//!
//! Device 0 holds parameters, gradients and optimizer states. In every step each device takes its part of the batch, the
//! parameters are copied to the other devices, each device runs forward on its part, the outputs are gathered on device
//! 0, which takes the loss and scatters its derivative, each device runs backward, gradients are added up on device 0
//! (along the tree of every reduction here), and it updates.
//!
//! The outputs of a language model are logits, `[batch * seq, vocab]`, the largest tensor of a small model: that all
//! of them lie on device 0 is why its memory runs full first. With `loss_in_forward` each device takes its own loss,
//! and only losses are gathered: what users of DataParallel did about it.
//!
//! Bytes a step, P parameters over N devices, L of logits: parameters out P (N - 1), gradients in P (N - 1), logits
//! and their derivatives 2 L (N - 1) / N. DDP moves 2 P (N - 1) / N a rank, keeps P resident everywhere, and no
//! device is special.

mod head;
mod replica;

use std::sync::Arc;

use phalanx_checkpoint::HuggingFaceDir;
use phalanx_collectives::{
    CollectiveError, Endpoint, Group, Isa, MetaGroup, Options, Solo, Statistics, threads,
};
use phalanx_cpu::Cpu;
use phalanx_cpu::Options as Computing;
use phalanx_optim::Verdict;
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{
    ChunkError, ChunkSize, Disagreement, MemoryError, MemoryPlan, Peak, compare, plan_memory,
};
use phalanx_tensor::{Arena, Device, IGNORED, Region, refused_thread};
use phalanx_train::RunError;
use phalanx_train::groups::GroupSource;
use phalanx_train::rank::{Batch, Numbers, Rank};
use phalanx_train::spec::{BatchPart, Spec};
use phalanx_train::step::Outcome;

use replica::DeviceReplica;

/// The device that holds the state.
const ROOT: usize = 0;

/// The plan of a run: its specification and the memory of each device.
#[derive(Clone)]
pub struct DataParallelPlan {
    /// A run of one rank whose micro-batch is the whole batch.
    pub spec: Spec,
    /// True if each device computes its own loss.
    pub loss_in_forward: bool,
    /// For each device: offsets and peaks by category.
    pub memory: Vec<MemoryPlan>,
}

impl DataParallelPlan {
    /// Devices of the process.
    pub fn devices(&self) -> usize {
        self.memory.len()
    }

    /// Peak bytes of device 0 above those of device 1; None with a single device.
    pub fn uneven_bytes(&self) -> Option<u64> {
        let [first, second, ..] = &self.memory[..] else { return None };
        Some(first.peak.bytes.saturating_sub(second.peak.bytes))
    }
}

/// Why a run was refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum DataParallelError {
    /// The system cannot start a thread.
    #[error(transparent)]
    Threads(std::io::Error),
    /// No devices, or more than sequences.
    #[error("{given} devices for a batch of {batch} sequences: expected 1 to {batch}")]
    Devices {
        /// Devices asked for.
        given: usize,
        /// Sequences of the batch.
        batch: usize,
    },
    /// The configuration has several ranks.
    #[error(
        "DataParallel runs devices of one process, and the configuration has {ranks} ranks: set them to 1"
    )]
    Ranks {
        /// Ranks of the mesh.
        ranks: usize,
    },
    /// The configuration cuts the batch in micro-batches.
    #[error(
        "DataParallel computes a batch at once, and the configuration cuts it in {given}: leave batch.micro out"
    )]
    MicroBatches {
        /// Micro-batches of a step.
        given: usize,
    },
    /// The head gives no logits that could be gathered.
    #[error("the model's head does not give logits apart from its loss: set loss_in_forward")]
    Head,
    /// The model reads no targets.
    #[error("the model reads no targets, by which DataParallel knows how many samples of a batch count")]
    Targets,
    /// The parameters have no flat space.
    #[error(transparent)]
    Chunks(#[from] ChunkError),
    /// A dry run cannot be placed: a bug of the engine.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Devices would issue different collectives: a bug of the engine.
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    /// A collective between devices failed: the thread of one panicked.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A step that cannot be applied.
    #[error(
        "step {step}: loss {loss}, gradient norm {grad_norm}, lr {lr:e}: training diverged and the step was not \
         applied; lower optimizer.lr or set optimizer.clip, then start again"
    )]
    NonFinite {
        /// The step.
        step: u64,
        /// Its loss.
        loss: f32,
        /// Its gradient norm.
        grad_norm: f32,
        /// Its learning rate.
        lr: f64,
    },
    /// The system refuses memory.
    #[error("the memory of device {device}, {bytes} bytes: {source}")]
    Arena {
        /// The device.
        device: usize,
        /// Bytes of its arena.
        bytes: u64,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// The devices of one process, with one model copied to all of them in each step.
pub struct DataParallel {
    /// The devices; during a step, each is driven by its own thread.
    replicas: Vec<(Endpoint, DeviceReplica)>,
    spec: Spec,
    steps: u64,
}

impl DataParallel {
    /// Plans the devices by a dry run of each.
    ///
    /// # Errors
    /// A configuration of several ranks or micro-batches, more devices than sequences, a model without targets, a head that gives no logits.
    pub fn plan(
        spec: &Spec,
        devices: usize,
        loss_in_forward: bool,
    ) -> Result<DataParallelPlan, DataParallelError> {
        let batch = spec.batch.micro_batch_size;
        if devices == 0 || devices > batch {
            return Err(DataParallelError::Devices { given: devices, batch });
        }
        if spec.world_size() > 1 {
            return Err(DataParallelError::Ranks { ranks: spec.world_size() });
        }
        if spec.batch.micro_batches > 1 {
            return Err(DataParallelError::MicroBatches { given: spec.batch.micro_batches });
        }
        if !spec.model.definition.has_targets() {
            return Err(DataParallelError::Targets);
        }
        if !loss_in_forward && spec.model.whole().head.is_none_or(|head| head.as_linear().is_none()) {
            return Err(DataParallelError::Head);
        }
        let mut traces = Vec::new();
        let of_devices = on_devices(spec, devices)?;
        for rank in 0..devices {
            let device = Device::meta(spec.device.threads);
            let recorder = Arc::clone(device.recorder().expect("Meta records"));
            let group = Arc::new(MetaGroup::new("devices", rank, devices, Arc::clone(&recorder)));
            let source = GroupSource::Meta(recorder, rank);
            let mut replica = DeviceReplica::new(&device, &source, group, &of_devices, loss_in_forward);
            match rank {
                ROOT => replica.rank.load(|_, _, _, _| Ok(())).expect("nothing fails on Meta"),
                _ => device.phase(PhaseName::Load, || ()),
            }
            let part = Batch::of(&of_devices.batch, of_devices.batch.micro_batch_size);
            replica.step(1, &part, spec.batch.targets_per_step, 1.0).expect("nothing fails on Meta");
            traces.push(device.take_trace(rank));
        }
        compare(&traces)?;
        let memory = traces.iter().map(plan_memory).collect::<Result<_, _>>()?;
        Ok(DataParallelPlan { spec: spec.clone(), loss_in_forward, memory })
    }

    /// Creates the devices, each with an arena that replays its plan. They compute, sum and copy with the instruction
    /// set `isa`. The caller loads the parameters.
    ///
    /// # Errors
    /// When the system does not have that much memory.
    pub fn new(plan: &DataParallelPlan, isa: Isa) -> Result<DataParallel, DataParallelError> {
        let (spec, devices) = (&plan.spec, plan.devices());
        let of_devices = on_devices(spec, devices)?;
        let mut replicas = Vec::new();
        for (rank, endpoint) in threads(devices).into_iter().enumerate() {
            // Every call is waited for at once, so a thread for it would gain nothing.
            let endpoint = endpoint.with_options(Options { overlap: false, isa, ..Options::default() });
            let memory = plan.memory[rank].clone();
            let bytes = memory.arena_bytes;
            let fail = |source| DataParallelError::Arena { device: rank, bytes, source };
            let region = Region::anonymous(bytes as usize).map_err(fail)?;
            let cpu = Cpu::with_options(Computing { isa, ..Computing::new(spec.device.threads) })
                .map_err(DataParallelError::Threads)?;
            let device = Device::new(cpu, Arena::replaying(memory, region));
            let group: Arc<dyn Group> = match devices {
                1 => Arc::new(Solo::new("devices").with_isa(isa)),
                _ => endpoint.group("devices"),
            };
            let source = GroupSource::Host(&endpoint);
            let replica = DeviceReplica::new(&device, &source, group, &of_devices, plan.loss_in_forward);
            replicas.push((endpoint, replica));
        }
        Ok(DataParallel { replicas, spec: spec.clone(), steps: 0 })
    }

    /// Fills parameters with initial values from the seed.
    ///
    /// # Errors
    /// When the system starts no more threads.
    pub fn initialise(&mut self, seed: u64) -> Result<(), RunError> {
        self.replicas[ROOT].1.rank.initialise(seed)
    }

    /// Fills parameters with the weights of a Hugging Face directory.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape, or unreadable.
    pub fn import(&mut self, dir: &HuggingFaceDir) -> Result<(), RunError> {
        self.replicas[ROOT].1.rank.import(dir)
    }

    /// Runs one step on a batch of samples with targets.
    ///
    /// # Errors
    /// A loss or norm that is not finite, with no smaller loss scale left to try.
    ///
    /// # Panics
    /// When a device's thread panics; the others end with it.
    pub fn step(&mut self, batch: &Batch) -> Result<Outcome, DataParallelError> {
        self.steps += 1;
        let (number, targets) = (self.steps, self.spec.batch.targets_per_step);
        assert_eq!(batch.counted_targets(), targets, "the loss here is a mean over the planned targets");
        let scale = self.replicas[ROOT].1.rank.loss_scale();
        let parts = parts(batch, &self.spec.batch, self.replicas.len());
        let (first, others) = self.replicas.split_first_mut().expect("there is a device");
        let drive = |(endpoint, replica): &mut (Endpoint, DeviceReplica), part: &Batch| {
            let _guard = Guard(endpoint);
            replica.step(number, part, targets, scale)
        };
        let (outcome, verdict) = std::thread::scope(|scope| {
            let mut spawned = Vec::new();
            for (other, part) in others.iter_mut().zip(&parts[1..]) {
                let work = move || drive(other, part).map(drop);
                let started = std::thread::Builder::new().spawn_scoped(scope, work).map_err(|error| {
                    let error = refused_thread("a thread for a device", &error);
                    // Devices that were already started wait for this one.
                    first.0.abort(&error.to_string());
                    DataParallelError::Threads(error)
                });
                spawned.push(started?);
            }
            let outcome = drive(first, &parts[ROOT]);
            for thread in spawned {
                match thread.join() {
                    Ok(done) => done?,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok::<_, DataParallelError>(outcome?.expect("the first device has an outcome"))
        })?;
        if verdict == Verdict::Stuck {
            let Outcome { loss, grad_norm, lr, .. } = outcome;
            return Err(DataParallelError::NonFinite { step: number, loss, grad_norm, lr });
        }
        Ok(outcome)
    }

    /// The first device, which holds parameters, the sum of the gradients, and optimizer states.
    pub fn root(&self) -> &Rank {
        &self.replicas[ROOT].1.rank
    }

    /// For each device: the statistics of its communication since the last call.
    pub fn take_statistics(&self) -> Vec<Statistics> {
        self.replicas.iter().map(|(_, replica)| replica.group.take_statistics()).collect()
    }

    /// For each device: the measured peak.
    pub fn peaks(&self) -> Vec<Peak> {
        let peak = |(_, replica): &(Endpoint, DeviceReplica)| replica.rank.device().arena().peak();
        self.replicas.iter().map(|of| peak(of).expect("a planned arena measures its peak")).collect()
    }
}

/// The run of a batch that is cut over devices, with the whole model in one chunk. The last parts may be smaller, and padded.
fn on_devices(spec: &Spec, devices: usize) -> Result<Spec, ChunkError> {
    let mut spec = spec.clone();
    spec.batch.micro_batch_size = spec.batch.micro_batch_size.div_ceil(devices);
    spec.mesh.axes.data = devices;
    spec.with_chunks(ChunkSize::Elements(u64::MAX))
}

/// The parts of a batch; rows beyond it are padding, whose targets are ignored.
fn parts(batch: &Batch, part: &BatchPart, devices: usize) -> Vec<Batch> {
    let rows = batch.rows(part);
    let each = rows.div_ceil(devices);
    let one = |device: usize| Batch {
        tokens: cut(&batch.tokens, (rows, each), device, 0),
        targets: cut(&batch.targets, (rows, each), device, IGNORED),
        others: batch
            .others
            .iter()
            .map(|(name, of)| (*name, cut_numbers(of, (rows, each), device)))
            .collect(),
    };
    (0..devices).map(one).collect()
}

/// The `device`-th `each` rows of `rows`, padded.
fn cut<T: Copy>(of: &[T], (rows, each): (usize, usize), device: usize, padding: T) -> Vec<T> {
    let elements = of.len() / rows * each;
    let mut part = of.chunks(elements.max(1)).nth(device).unwrap_or_default().to_vec();
    part.resize(elements, padding);
    part
}

fn cut_numbers(of: &Numbers, rows: (usize, usize), device: usize) -> Numbers {
    match of {
        Numbers::Ids(ids) => Numbers::Ids(cut(ids, rows, device, 0)),
        Numbers::Floats(floats) => Numbers::Floats(cut(floats, rows, device, 0.0)),
    }
}

/// Ends the job when the thread of a device unwinds, so that no other waits for it.
struct Guard<'a>(&'a Endpoint);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort("the thread of a device panicked");
        }
    }
}
