//! A model as the engine sees it: blocks in sequence, then a head. The block is the unit of gathering,
//! recomputing and cutting; who the layers inside are, the engine does not know.

use crate::head::Head;
use crate::layer::{Layer, ParameterSpec};

/// One block: a layer with a name.
pub struct Block {
    /// For people: `embedding`, `h.3`.
    pub name: String,
    /// What it computes.
    pub layer: Box<dyn Layer>,
}

/// Blocks and head, and which parameters each of them uses.
pub struct Network {
    /// In execution order.
    pub blocks: Vec<Block>,
    /// After the last block.
    pub head: Box<dyn Head>,
    /// Each parameter once, in order of first use.
    pub parameters: Vec<ParameterSpec>,
    /// By block, the head last: indices into `parameters`, in the order which the layer declares.
    pub uses: Vec<Vec<usize>>,
}

impl Network {
    /// Collects parameters; those of equal name are one (tied) and must have equal shape.
    pub fn new(blocks: Vec<Block>, head: Box<dyn Head>) -> Network {
        let mut parameters: Vec<ParameterSpec> = Vec::new();
        let mut uses = Vec::new();
        let declared = blocks.iter().map(|b| b.layer.parameters()).chain([head.parameters()]);
        for block in declared {
            let mut indices = Vec::new();
            for spec in block {
                let known = parameters.iter().position(|p| p.name == spec.name);
                let index = known.unwrap_or(parameters.len());
                match known {
                    Some(i) => assert_eq!(parameters[i].shape, spec.shape, "tied parameter {}", spec.name),
                    None => parameters.push(spec),
                }
                indices.push(index);
            }
            uses.push(indices);
        }
        Network { blocks, head, parameters, uses }
    }

    /// Number of the head in `uses`.
    pub fn head_index(&self) -> usize {
        self.blocks.len()
    }

    /// Name of block `index`, the head included.
    pub fn block_name(&self, index: usize) -> &str {
        self.blocks.get(index).map_or("head", |b| b.name.as_str())
    }

    /// Number of trained numbers.
    pub fn elements(&self) -> usize {
        self.parameters.iter().map(ParameterSpec::elements).sum()
    }
}
