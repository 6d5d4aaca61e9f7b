//! Cuts a model into pipeline stages, by the cost of each block in a dry run.

use std::ops::Range;
use std::sync::Arc;

use phalanx_layers::{
    Activation, BlockRole, Call, Context, Input, Inputs, Network, Parameter, ParameterSpec, Parameters,
};
use phalanx_plan::trace::PhaseName;
use phalanx_plan::{BlockCost, Cost, Cut, CutError, Precision, StageCost, cut};
use phalanx_tensor::{Category, CrossEntropy, Device, Shape, Tensor};

use crate::config::CutBy;

/// The micro-batch whose cost is counted.
pub struct MicroBatch {
    /// `[batch, seq]`.
    pub tokens: [usize; 2],
    /// The inputs of the model.
    pub inputs: Vec<Input>,
    /// Element types.
    pub precision: Precision,
}

/// The blocks of each stage of `network`, the head counting as the last block.
///
/// # Errors
/// When there are fewer blocks than stages, or they cannot be shared equally.
pub fn stages(
    micro_batch: &MicroBatch,
    network: &Network,
    stages: usize,
    by: CutBy,
) -> Result<Vec<Range<usize>>, CutError> {
    let blocks = network.blocks.len() + 1;
    if stages == 1 {
        return Ok(std::iter::once(0..blocks).collect());
    }
    let is_inner = |i: &usize| network.blocks[*i].role == BlockRole::Transformer;
    let inner: Vec<usize> = (0..network.blocks.len()).filter(is_inner).collect();
    let by = match (by, inner.first().zip(inner.last())) {
        (CutBy::Balanced, _) => Cut::Balanced,
        (CutBy::Uniform, Some((first, last))) => Cut::Uniform { inner: *first..last + 1 },
        (CutBy::Parameters, _) | (CutBy::Uniform, None) => Cut::Parameters,
    };
    cut(&costs(micro_batch, network), stages, &by, None)
}

/// Operations of a micro-batch in each stage, summed over the tensor ranks: forward, the gradient of the input (in the
/// last stage including the whole head), and the gradient of the weights.
pub fn stage_costs(micro_batch: &MicroBatch, network: &Network, stages: &[Range<usize>]) -> Vec<StageCost> {
    let blocks = works(micro_batch, network);
    let sum = |range: &Range<usize>, of: fn(&Work) -> u64| {
        blocks[range.clone()].iter().map(|work| of(work) as f64).sum::<f64>()
    };
    let of_stage = |range: &Range<usize>| StageCost {
        forward: sum(range, |work| work.forward),
        input: sum(range, |work| work.input),
        weight: sum(range, |work| work.weight),
    };
    stages.iter().map(of_stage).collect()
}

/// Operations of one block and micro-batch.
#[derive(Clone, Copy)]
struct Work {
    forward: u64,
    /// The first part of backward; of the head, everything.
    input: u64,
    weight: u64,
}

/// Cost of forward and backward of a micro-batch in each block, the head last.
fn costs(micro_batch: &MicroBatch, network: &Network) -> Vec<BlockCost> {
    let cost = |(index, work): (usize, Work)| BlockCost {
        flops: work.forward + work.input + work.weight,
        parameters: network.uses[index].iter().map(|p| network.parameters[*p].elements() as u64).sum(),
        bytes: 0,
    };
    works(micro_batch, network).into_iter().enumerate().map(cost).collect()
}

/// The operations of each block, the head last.
fn works(micro_batch: &MicroBatch, network: &Network) -> Vec<Work> {
    let mut works: Vec<Work> = Vec::new();
    let mut known: Vec<(Vec<Vec<usize>>, Work)> = Vec::new();
    for index in 0..=network.blocks.len() {
        let shapes: Vec<Vec<usize>> =
            network.uses[index].iter().map(|p| network.parameters[*p].shape.clone()).collect();
        // Transformer blocks are equal, so only one of them is run.
        let like =
            known.iter().find(|(other, _)| *other == shapes && index > 0 && index < network.blocks.len());
        let work = like.map_or_else(|| work_of(micro_batch, network, index), |(_, work)| *work);
        known.push((shapes, work));
        works.push(work);
    }
    works
}

fn work_of(micro_batch: &MicroBatch, network: &Network, index: usize) -> Work {
    let MicroBatch { tokens, ref inputs, precision } = *micro_batch;
    let device = Device::meta(1);
    let compute = precision.compute;
    let specs: Vec<&ParameterSpec> = network.uses[index].iter().map(|p| &network.parameters[*p]).collect();
    let tensor = |dtype, shape: Shape| -> Tensor { device.alloc(dtype, shape, Category::Activations, "cut") };
    let upload = |_: usize, name: &str| {
        let input = inputs.iter().find(|input| input.name == name).expect("an input of the model");
        Arc::new(tensor(input.dtype(compute), input.shape.of(tokens)))
    };
    let given = Inputs::new(&upload, 0);
    let cx = Context::new(&device, compute, tokens).with(&given);
    let all = |dtype| -> Vec<Tensor> {
        specs.iter().map(|spec| tensor(dtype, spec.shape.as_slice().into())).collect()
    };
    let (parameters, mut gradients, x) = device.phase(PhaseName::Init, || {
        let x: Activation = match index {
            0 => given.lend(inputs[0].name),
            _ => Arc::new(tensor(compute, network.blocks[index - 1].output.of(tokens))),
        };
        (all(compute), all(precision.accumulate), x)
    });
    let mut written = vec![false; specs.len()];
    let own = Parameter::with_gradients(&parameters, &mut gradients, &mut written).into_iter().zip(&specs);
    let own: Vec<Parameter> = own.map(|(own, spec)| own.joining(spec.members().len())).collect();
    let call = |x| Call::new(Parameters::new(&own), x);
    let alone = "a layer of one rank does not fail";
    match (network.blocks.get(index), &network.head) {
        (Some(block), _) => {
            let forward = || block.layer.forward(&cx, call(x)).expect(alone);
            let (y, saved) = device.phase(PhaseName::Forward, forward);
            let input = || block.layer.backward_input(&cx, saved, call(y)).expect(alone);
            let (_, later) = device.phase(PhaseName::BackwardInput, input);
            device.phase(PhaseName::BackwardWeight, || {
                block.layer.backward_weight(&cx, Parameters::new(&own), later).expect(alone)
            });
        }
        (None, Some(head)) => device.phase(PhaseName::BackwardInput, || {
            head.loss(&cx, call(x), CrossEntropy::scaled(1.0)).expect(alone);
        }),
        (None, None) => {}
    }
    let trace = device.take_trace(0);
    let flops = |phase| trace.phase(phase).map_or(0, |phase| Cost::of(phase).flops);
    Work {
        forward: flops(PhaseName::Forward),
        input: flops(PhaseName::BackwardInput),
        weight: flops(PhaseName::BackwardWeight),
    }
}
