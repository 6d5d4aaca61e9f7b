//! The engine of one rank.
//!
//! A [`Rank`] is made the same way for the dry run and for training: on `Meta` with a group that only
//! records, or on a device with a group that moves bytes. What it allocates, in which order, is the plan.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group};
use phalanx_layers::{Activation, Context, Network};
use phalanx_optim::LossScale;
use phalanx_parallel::{Options, Zero, evaluate};
use phalanx_tensor::{Category, CrossEntropy, DType, Device, Tensor};

use crate::planning::Spec;

/// One rank's model, its part of the memory, and its buffers for batches.
pub struct Rank {
    pub(crate) device: Device,
    pub(crate) network: Network,
    pub(crate) zero: Zero,
    pub(crate) spec: Spec,
    /// Updates done: what Adam's bias correction and the learning rate are functions of.
    pub(crate) applied: u64,
    /// Steps that overflowed and were not applied.
    pub(crate) skipped: u64,
    pub(crate) loss_scale: LossScale,
    /// For the counts of a diagnosis, `[1]`. It stays, so that a diagnosis needs no more than a step.
    pub(crate) count: Option<Tensor>,
}

/// Tokens and targets of this rank, on the host: micro-batch after micro-batch.
#[derive(Default)]
pub struct Batch {
    /// `[micro_batches, micro, seq]`
    pub tokens: Vec<u32>,
    /// The same, shifted by one.
    pub targets: Vec<u32>,
}

impl Batch {
    /// Room for `rows` sequences of `seq` tokens.
    pub fn with_rows(rows: usize, seq: usize) -> Batch {
        Batch { tokens: vec![0; rows * seq], targets: vec![0; rows * seq] }
    }
}

impl Rank {
    /// Allocates everything that stays: the phase `init` of the plan.
    pub fn new(
        device: Device,
        group: Arc<dyn Group>,
        spec: &Spec,
        orders: &BTreeMap<&'static str, Vec<u32>>,
    ) -> Rank {
        Rank::with_network(device, group, spec, spec.network(), orders)
    }

    /// As [`Rank::new`], with the layers of `network` in place of the model's: they have its parameters and
    /// take its memory.
    pub fn with_network(
        device: Device,
        group: Arc<dyn Group>,
        spec: &Spec,
        network: Network,
        orders: &BTreeMap<&'static str, Vec<u32>>,
    ) -> Rank {
        let options = Options {
            stage: spec.stage,
            overlap: spec.overlap,
            prefetch: spec.prefetch,
            micro_batches: spec.micro_batches,
            defer: spec.defer,
            precision: spec.precision,
            rule: spec.rule,
        };
        let make = || {
            let zero = Zero::new(&device, group, &network, Arc::clone(&spec.layout), options, orders);
            (zero, device.alloc(DType::F32, [1], Category::Workspace, "diagnose.count"))
        };
        let (zero, count) = device.phase("init", make);
        let loss_scale = LossScale::new(spec.loss_scaling);
        let spec = spec.clone();
        Rank { device, network, zero, spec, applied: 0, skipped: 0, loss_scale, count: Some(count) }
    }

    /// The process group.
    pub fn group(&self) -> &dyn Group {
        self.zero.group()
    }

    /// Its chunks of parameters, gradients and states.
    pub fn zero(&self) -> &Zero {
        &self.zero
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Mean loss over `batches` micro-batches of this rank and those of all others, `Err` from the group.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<f32, CollectiveError> {
        let device = self.device.clone();
        device.try_phase("evaluate", || {
            self.zero.begin("evaluate");
            let mut loss = self.zeroed("evaluate.loss");
            let rows = self.spec.micro * self.spec.seq;
            let total = batch.tokens.len() * self.group().world_size();
            for i in 0..batch.tokens.len() / rows {
                let (tokens, targets) = self.upload(batch, i);
                let compute = self.spec.precision.compute;
                let cx = Context { device: &device, compute, keep: false, draw: None };
                let numbers = CrossEntropy::scaled(1.0 / total as f32);
                let part = evaluate(&self.network, &mut self.zero, &cx, tokens, &targets, numbers)?;
                device.add(part.view(), loss.view_mut());
            }
            let loss = self.group().all_reduce(loss).wait()?;
            Ok(device.fetch(loss.view()))
        })
    }

    /// Micro-batch `index` on the device: tokens and targets, `[micro, seq]`.
    pub(crate) fn upload(&self, batch: &Batch, index: usize) -> (Activation, Tensor) {
        let elements = self.spec.micro * self.spec.seq;
        let rows = index * elements..(index + 1) * elements;
        let make = |from: &[u32], name| {
            let shape = [self.spec.micro, self.spec.seq];
            let mut tensor = self.device.alloc(DType::U32, shape, Category::Activations, name);
            self.device.upload(from, tensor.view_mut());
            tensor
        };
        let tokens = make(&batch.tokens[rows.clone()], "batch.tokens");
        (Arc::new(tokens), make(&batch.targets[rows], "batch.targets"))
    }

    /// A number that starts at zero, `[1]`.
    pub(crate) fn zeroed(&self, name: &'static str) -> Tensor {
        let mut scalar = self.device.alloc(DType::F32, [1], Category::Activations, name);
        self.device.fill(scalar.view_mut(), 0.0);
        scalar
    }
}
