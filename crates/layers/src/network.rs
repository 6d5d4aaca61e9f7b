//! A model as the engine sees it: blocks in sequence, then a head. A block is the unit of gathering, recomputing and
//! cutting; the engine does not know the layers inside.
//!
//! A network may be cut into stages of consecutive blocks; the last stage has the head. A stage is a network, too: it
//! has the parameters that its blocks use, and their numbers in the whole network.

use std::collections::HashMap;
use std::ops::Range;

use phalanx_tensor::DType;

use crate::head::Head;
use crate::inputs::RowShape;
use crate::layer::AnyLayer;
use crate::parameter::ParameterSpec;

/// Role of a block in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockRole {
    /// One of the many blocks of equal shape that make up the depth of the model.
    Transformer,
    /// A block before or after them: an embedding, a last norm, the transform before the head.
    End,
}

/// One block: a layer with a name, and the shape of its output.
pub struct Block {
    /// Name in messages: `embedding`, `h.3`.
    pub name: String,
    /// Role in the model; `parallel.cut = "uniform"` gives every stage the same number of Transformer blocks.
    pub role: BlockRole,
    /// The layer of the block.
    pub layer: Box<dyn AnyLayer>,
    /// The shape of its output, where tensor-parallel ranks share no rows.
    pub output: RowShape,
}

/// Blocks and head, and the parameters that each of them uses.
pub struct Network {
    /// The blocks, in execution order.
    pub blocks: Vec<Block>,
    /// The head, after the last block; None in a stage that is not the last.
    pub head: Option<Box<dyn Head>>,
    /// Each parameter once, those that are joined as one: the trained ones, then the frozen ones, of which those that are kept in a type of
    /// their own come last; each in order of first use.
    pub parameters: Vec<ParameterSpec>,
    /// For each block, and the head last if there is one: indices into `parameters`, in the layer's order.
    pub uses: Vec<Vec<usize>>,
    /// Number of the first block in the whole network.
    pub first_block: usize,
    /// The output of the block before the first, in a stage that is not the first.
    pub input: Option<RowShape>,
    /// For each parameter: its number in the whole network.
    pub numbers: Vec<usize>,
    /// True if a parameter of an earlier stage is trained.
    pub trained_before: bool,
}

impl Network {
    /// Collects the parameters of the blocks. Parameters of equal names are one (tied) and must have equal shapes; those that join are
    /// one, too, where they are alike.
    pub fn new(blocks: Vec<Block>, head: Box<dyn Head>) -> Network {
        Network::with(blocks, head, |_| false)
    }

    /// The same network, whole, of which the parameters for which `is_frozen` are not trained.
    #[must_use]
    pub fn freezing(self, is_frozen: impl Fn(&ParameterSpec) -> bool) -> Network {
        let Network { blocks, head, .. } = self;
        Network::with(blocks, head.expect("a whole network has a head"), is_frozen)
    }

    /// The same network, whole, of which frozen parameters are kept in the type that `kept` gives, if it gives one.
    #[must_use]
    pub fn keeping(mut self, kept: impl Fn(&ParameterSpec) -> Option<DType>) -> Network {
        for spec in self.parameters.iter_mut().filter(|spec| !spec.trained) {
            spec.kept = kept(spec);
        }
        self.in_order()
    }

    /// The same network, whole or the last stage, with another head of the same parameters.
    #[must_use]
    pub fn heading(self, other: impl FnOnce(Box<dyn Head>) -> Box<dyn Head>) -> Network {
        Network { head: self.head.map(other), ..self }
    }

    fn with(blocks: Vec<Block>, head: Box<dyn Head>, is_frozen: impl Fn(&ParameterSpec) -> bool) -> Network {
        let mut specs: Vec<ParameterSpec> = Vec::new();
        let mut known: HashMap<String, usize> = HashMap::new();
        let mut uses: Vec<Vec<usize>> = Vec::new();
        let declared = blocks.iter().map(|b| b.layer.parameters()).chain([head.parameters()]);
        for block in declared {
            let decided =
                |spec: ParameterSpec| ParameterSpec { trained: spec.trained && !is_frozen(&spec), ..spec };
            let mut indices = Vec::new();
            for spec in joined(block.into_iter().map(decided)) {
                let index = *known.entry(spec.name.clone()).or_insert(specs.len());
                match specs.get(index) {
                    Some(tied) => assert_eq!(tied.shape, spec.shape, "tied parameter {}", spec.name),
                    None => specs.push(spec),
                }
                indices.push(index);
            }
            uses.push(indices);
        }
        let (numbers, trained_before) = ((0..specs.len()).collect(), false);
        let (head, parameters) = (Some(head), specs);
        Network { blocks, head, parameters, uses, first_block: 0, input: None, numbers, trained_before }
            .in_order()
    }

    /// The same whole network with its parameters in their order.
    fn in_order(mut self) -> Network {
        let order = by_class(0..self.parameters.len(), &self.parameters);
        let mut place = vec![0; order.len()];
        order.iter().enumerate().for_each(|(at, p)| place[*p] = at);
        self.uses.iter_mut().flatten().for_each(|p| *p = place[*p]);
        self.parameters = order.iter().map(|p| self.parameters[*p].clone()).collect();
        self
    }

    /// The index of the parameter with this name.
    ///
    /// # Panics
    /// When there is none.
    pub fn place_of(&self, name: &str) -> usize {
        self.parameters.iter().position(|spec| spec.name == name).expect("a parameter of this network")
    }

    /// The parameters of files and patterns, those that are joined one by one.
    pub fn members(&self) -> impl Iterator<Item = &ParameterSpec> {
        self.parameters.iter().flat_map(ParameterSpec::members)
    }

    /// Returns whether any block before block `index`, in this stage or an earlier one, has a trained parameter: then backward
    /// must compute the derivative of its input. `index` counts the blocks of this stage.
    pub fn wants_input(&self, index: usize) -> bool {
        self.trained_before || index > self.lowest()
    }

    /// The first block of this stage that backward runs, or one behind the head.
    pub fn lowest(&self) -> usize {
        let is_trained = |p: &usize| self.parameters[*p].trained;
        let trained = |block: &Vec<usize>| self.trained_before || block.iter().any(is_trained);
        self.uses.iter().position(trained).unwrap_or(self.uses.len())
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
        let (mut next, mut trained_before, mut output) = (0, false, None);
        let mut cut = |range: &Range<usize>| {
            assert!(range.start == next && range.end > next, "stages must be consecutive and not empty");
            next = range.end;
            let used = &uses[range.clone()];
            let mut numbers: Vec<usize> = Vec::new();
            used.iter().flatten().for_each(|number| {
                if !numbers.contains(number) {
                    numbers.push(*number);
                }
            });
            let numbers = by_class(numbers, &parameters);
            let place =
                |number: &usize| numbers.iter().position(|other| other == number).expect("it was listed");
            let local = used.iter().map(|block| block.iter().map(place).collect()).collect();
            let earlier = trained_before;
            trained_before |= numbers.iter().any(|number| parameters[*number].trained);
            let with_head = range.end == head_index + 1;
            let blocks: Vec<Block> = blocks.by_ref().take(range.len() - usize::from(with_head)).collect();
            let input = output;
            output = blocks.last().map(|block| block.output).or(input);
            Network {
                blocks,
                input,
                head: head.take_if(|_| with_head),
                parameters: numbers.iter().map(|n| parameters[*n].clone()).collect(),
                uses: local,
                first_block: range.start,
                numbers,
                trained_before: earlier,
            }
        };
        stages.iter().map(&mut cut).collect()
    }

    /// Number of the head in `uses`.
    pub fn head_index(&self) -> usize {
        self.blocks.len()
    }

    /// The shapes of the input and of the output of a stage, which it shares with the stages beside it.
    pub fn shapes(&self) -> [Option<RowShape>; 2] {
        [self.input, self.blocks.last().map(|block| block.output).or(self.input)]
    }

    /// Number of Transformer blocks: the layers of the model.
    pub fn layers(&self) -> usize {
        self.blocks.iter().filter(|block| block.role == BlockRole::Transformer).count()
    }

    /// Elements of a row of the widest output of a block.
    pub fn width(&self) -> usize {
        self.blocks.iter().map(|block| block.output.elements()).max().unwrap_or(1)
    }

    /// Name of block `index`; the head is named `head`.
    pub fn block_name(&self, index: usize) -> &str {
        self.blocks.get(index).map_or("head", |b| b.name.as_str())
    }

    /// Number of elements of all parameters.
    pub fn elements(&self) -> usize {
        self.parameters.iter().map(ParameterSpec::elements).sum()
    }
}

/// Parameters of a block, of which those that join the one before them and are like it are one.
fn joined(specs: impl Iterator<Item = ParameterSpec>) -> Vec<ParameterSpec> {
    let mut groups: Vec<Vec<ParameterSpec>> = Vec::new();
    for spec in specs {
        let like = |other: &ParameterSpec| {
            (other.kind, other.trained, other.terms()) == (spec.kind, spec.trained, spec.terms())
                && other.shape[1..] == spec.shape[1..]
        };
        match groups.last_mut().filter(|group| spec.joins && like(&group[0])) {
            Some(group) => group.push(spec),
            None => groups.push(vec![spec]),
        }
    }
    groups.into_iter().map(ParameterSpec::join).collect()
}

/// The trained ones of some parameters, then the frozen ones, then those that are kept in a type of their own, each in order.
fn by_class(numbers: impl IntoIterator<Item = usize>, of: &[ParameterSpec]) -> Vec<usize> {
    let mut numbers: Vec<usize> = numbers.into_iter().collect();
    numbers.sort_by_key(|number| (!of[*number].trained, of[*number].kept));
    numbers
}
