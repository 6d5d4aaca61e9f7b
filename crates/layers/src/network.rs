//! A model as the engine sees it: blocks in sequence, then a head. A block is the unit of gathering, recomputing and
//! cutting; the engine does not know the layers inside.
//!
//! A network may be cut into stages of consecutive blocks; the last stage has the head. A stage is a network, too: it
//! has the parameters that its blocks use, and their numbers in the whole network.

use std::collections::HashMap;
use std::ops::Range;

use crate::head::Head;
use crate::layer::{AnyLayer, ParameterSpec};

/// What a block is in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockRole {
    /// One of the many blocks of equal shape that make up the depth of the model.
    Transformer,
    /// What comes before or after them: an embedding, a last norm, the transform before the head.
    End,
}

/// One block: a layer with a name.
pub struct Block {
    /// Name in messages: `embedding`, `h.3`.
    pub name: String,
    /// What the block is in the model; `parallel.cut = "uniform"` gives every stage as many Transformer blocks.
    pub role: BlockRole,
    /// The layer of the block.
    pub layer: Box<dyn AnyLayer>,
}

/// Blocks and head, and the parameters that each of them uses.
pub struct Network {
    /// The blocks, in execution order.
    pub blocks: Vec<Block>,
    /// The head, after the last block; None in a stage that is not the last.
    pub head: Option<Box<dyn Head>>,
    /// Each parameter once, in order of first use.
    pub parameters: Vec<ParameterSpec>,
    /// For each block, and the head last if there is one: indices into `parameters`, in the layer's order.
    pub uses: Vec<Vec<usize>>,
    /// Number of the first block in the whole network.
    pub first_block: usize,
    /// For each parameter: its number in the whole network.
    pub numbers: Vec<usize>,
}

impl Network {
    /// Collects the parameters of the blocks. Parameters of equal names are one (tied) and must have equal shapes.
    pub fn new(blocks: Vec<Block>, head: Box<dyn Head>) -> Network {
        let mut parameters: Vec<ParameterSpec> = Vec::new();
        let mut known: HashMap<String, usize> = HashMap::new();
        let mut uses = Vec::new();
        let declared = blocks.iter().map(|b| b.layer.parameters()).chain([head.parameters()]);
        for block in declared {
            let mut indices = Vec::new();
            for spec in block {
                let index = *known.entry(spec.name.clone()).or_insert(parameters.len());
                match parameters.get(index) {
                    Some(tied) => assert_eq!(tied.shape, spec.shape, "tied parameter {}", spec.name),
                    None => parameters.push(spec),
                }
                indices.push(index);
            }
            uses.push(indices);
        }
        let numbers = (0..parameters.len()).collect();
        Network { blocks, head: Some(head), parameters, uses, first_block: 0, numbers }
    }

    /// Cuts a whole network into stages, consecutive ranges of blocks; the head counts as the last block. A parameter
    /// that several stages use is in each of them.
    pub fn into_stages(self, stages: &[Range<usize>]) -> Vec<Network> {
        let Network { blocks, head, parameters, uses, first_block, .. } = self;
        let head_index = blocks.len();
        assert_eq!(first_block, 0, "only a whole network can be cut into stages");
        assert_eq!(
            stages.last().map(|s| s.end),
            Some(head_index + 1),
            "the last stage must end with the head"
        );
        let (mut blocks, mut head) = (blocks.into_iter(), head);
        let mut next = 0;
        let mut cut = |range: &Range<usize>| {
            assert!(range.start == next && range.end > next, "stages must be consecutive and not empty");
            next = range.end;
            let mut numbers: Vec<usize> = Vec::new();
            let mut local = Vec::new();
            for block in &uses[range.clone()] {
                let index = |number: &usize| {
                    let known = numbers.iter().position(|n| n == number);
                    known.unwrap_or_else(|| {
                        numbers.push(*number);
                        numbers.len() - 1
                    })
                };
                local.push(block.iter().map(index).collect());
            }
            let with_head = range.end == head_index + 1;
            Network {
                blocks: blocks.by_ref().take(range.len() - usize::from(with_head)).collect(),
                head: head.take_if(|_| with_head),
                parameters: numbers.iter().map(|n| parameters[*n].clone()).collect(),
                uses: local,
                first_block: range.start,
                numbers,
            }
        };
        stages.iter().map(&mut cut).collect()
    }

    /// Number of the head in `uses`.
    pub fn head_index(&self) -> usize {
        self.blocks.len()
    }

    /// Name of block `index`; the head is named `head`.
    pub fn block_name(&self, index: usize) -> &str {
        self.blocks.get(index).map_or("head", |b| b.name.as_str())
    }

    /// Number of trainable elements.
    pub fn elements(&self) -> usize {
        self.parameters.iter().map(ParameterSpec::elements).sum()
    }
}
