//! Continues text with a trained model. It computes the whole context for every token, without a cache.

use std::sync::Arc;

use phalanx_checkpoint::Checkpoint;
use phalanx_layers::{Checkpointing, Context, Network};
use phalanx_models::Model;
use phalanx_parallel::TensorParallel;
use phalanx_random::{GOLDEN, SplitMix64};
use phalanx_tensor::{Category, DType, Device, Shape, Tensor};

use crate::error::RunError;
use crate::state::PARAMETERS;

/// How the next token is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Only the k most likely tokens; 0 for all.
    pub top_k: usize,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// A model with all parameters on one rank, for forward only.
pub struct Generator {
    device: Device,
    network: Network,
    parameters: Vec<Tensor>,
    positions: usize,
    vocab: usize,
}

impl Generator {
    /// Loads the parameters of a checkpoint into `device`, whose memory is not planned.
    ///
    /// # Errors
    /// A damaged checkpoint or one of another shape.
    pub fn load(model: &dyn Model, from: &Checkpoint, device: Device) -> Result<Generator, RunError> {
        let network = model.network(&TensorParallel::solo(), Checkpointing::None);
        let shape_of_model = model.shape();
        let mut parameters = Vec::new();
        for spec in &network.parameters {
            from.expect(PARAMETERS, &spec.name, &spec.shape, DType::F32)?;
            let shape = Shape::from(spec.shape.as_slice());
            let mut tensor = device.alloc(DType::F32, shape, Category::Parameters, "generator.parameter");
            let mut values = vec![0f32; spec.elements()];
            let elements = 0..values.len() as u64;
            from.read(PARAMETERS, &spec.name, elements, bytemuck::cast_slice_mut(&mut values))?;
            device.upload(&values, tensor.view_mut());
            parameters.push(tensor);
        }
        Ok(Generator {
            device,
            network,
            parameters,
            positions: shape_of_model.positions,
            vocab: shape_of_model.vocab,
        })
    }

    /// Appends `count` tokens to `tokens` (not empty), and calls `seen` with each.
    ///
    /// # Errors
    /// The first error of `seen`, which ends the sampling.
    pub fn extend<E>(
        &self,
        tokens: &mut Vec<u32>,
        count: usize,
        how: Sampling,
        mut seen: impl FnMut(u32) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut random = SplitMix64::new(how.seed ^ GOLDEN);
        for _ in 0..count {
            let start = tokens.len().saturating_sub(self.positions);
            let mut logits = self.logits(&tokens[start..]);
            let next = draw(&mut logits, how, random.next_fraction());
            tokens.push(next);
            seen(next)?;
        }
        Ok(())
    }

    /// Logits of the token after `context`, `[vocab]`.
    pub fn logits(&self, context: &[u32]) -> Vec<f32> {
        let seq = context.len();
        let cx = Context { keep: false, ..Context::new(&self.device, DType::F32, [1, seq]) };
        let mut tokens = self.device.alloc(DType::U32, [1, seq], Category::Activations, "generator.tokens");
        self.device.upload(context, tokens.view_mut());
        let views = |uses: &Vec<usize>| uses.iter().map(|p| self.parameters[*p].view()).collect::<Vec<_>>();
        let mut x = Arc::new(tokens);
        for (block, uses) in self.network.blocks.iter().zip(&self.network.uses) {
            (x, _) =
                block.layer.forward(&cx, &views(uses), x, None).expect("a model on one rank does not fail");
        }
        let [_, _, hidden] = x.dims();
        let last = x.view().range((seq - 1) * hidden..seq * hidden).reshape([1, hidden]);
        let head = &self.network.uses[self.network.head_index()];
        let logits =
            self.network.head.as_ref().expect("a whole model has a head").logits(&cx, &views(head), last);
        let mut out = vec![0f32; self.vocab];
        self.device.download(logits.view(), &mut out).expect("kernels of the processor do not fail");
        out
    }
}

/// The token at position `at` in [0, 1) of the cumulative distribution.
fn draw(logits: &mut [f32], how: Sampling, at: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    if how.temperature <= 0.0 {
        return order[0];
    }
    if how.top_k > 0 {
        order.truncate(how.top_k);
    }
    let max = logits[order[0] as usize];
    let weight = |i: &u32| f64::from((logits[*i as usize] - max) / how.temperature).exp();
    let total: f64 = order.iter().map(weight).sum();
    let mut left = at * total;
    for i in &order {
        left -= weight(i);
        if left < 0.0 {
            return *i;
        }
    }
    order[0]
}
