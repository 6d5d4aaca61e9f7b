//! A model with one more block: for a layer of the caller's own in a model that is here.

use std::fmt;
use std::sync::Arc;

use phalanx_layers::{AnyLayer, Block, BlockRole, CannotCut, Checkpointing, Network, ParameterSpec};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{Heads, Layout};
use serde_json::Value;

use crate::{Arch, Dropouts, Input, Model, NumberedLayers, Objective, RowsOf};

type MakeLayer = dyn Fn(&TensorParallel) -> Box<dyn AnyLayer> + Send + Sync;

/// A model with one more block between its last and its head.
#[derive(Clone)]
pub struct WithBlock {
    model: Arc<dyn Model>,
    name: String,
    make: Arc<MakeLayer>,
}

impl WithBlock {
    /// `model` with a block `name`, whose layer `make` makes for a rank: `tensor` gives the rank's part of it. Its output has the shape
    /// of its input.
    pub fn new(
        model: impl Into<Arc<dyn Model>>,
        name: impl Into<String>,
        make: impl Fn(&TensorParallel) -> Box<dyn AnyLayer> + Send + Sync + 'static,
    ) -> WithBlock {
        WithBlock { model: model.into(), name: name.into(), make: Arc::new(make) }
    }
}

impl fmt::Debug for WithBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} with block {:?}", self.model, self.name)
    }
}

impl From<WithBlock> for Arc<dyn Model> {
    fn from(model: WithBlock) -> Arc<dyn Model> {
        Arc::new(model)
    }
}

impl Model for WithBlock {
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        let Network { mut blocks, head, .. } = self.model.network(tensor, checkpointing)?;
        let (layer, output) = ((self.make)(tensor), blocks.last().expect("a model has blocks").output);
        blocks.push(Block { name: self.name.clone(), role: BlockRole::End, layer, output });
        Ok(Network::new(blocks, head.expect("a whole network has a head")))
    }

    fn inputs(&self) -> Vec<Input> {
        self.model.inputs()
    }

    fn longest(&self) -> Option<usize> {
        self.model.longest()
    }

    fn attention(&self) -> Option<Heads> {
        self.model.attention()
    }

    /// None: files of the model's architecture do not have the block.
    fn architecture(&self) -> Option<Arch> {
        None
    }

    fn objective(&self) -> Objective {
        self.model.objective()
    }

    fn labels(&self) -> &[String] {
        self.model.labels()
    }

    fn to_config(&self) -> Value {
        Value::Null
    }

    fn aliases(&self, name: &str) -> Vec<String> {
        self.model.aliases(name)
    }

    fn earlier(&self, parameter: &ParameterSpec) -> Option<RowsOf> {
        self.model.earlier(parameter)
    }

    fn source(&self, parameter: &ParameterSpec) -> Option<RowsOf> {
        self.model.source(parameter)
    }

    fn linear_layout(&self) -> Layout {
        self.model.linear_layout()
    }

    fn copies_of(&self, name: &str) -> &'static [&'static str] {
        self.model.copies_of(name)
    }

    fn numbered_layers(&self) -> Option<NumberedLayers> {
        self.model.numbered_layers()
    }

    fn head_prefixes(&self) -> &'static [&'static str] {
        self.model.head_prefixes()
    }

    fn is_ignored(&self, name: &str) -> bool {
        self.model.is_ignored(name)
    }

    fn dropping(&self, dropout: Dropouts) -> Arc<dyn Model> {
        Arc::new(WithBlock { model: self.model.dropping(dropout), ..self.clone() })
    }
}
