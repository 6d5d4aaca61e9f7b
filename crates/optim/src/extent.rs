//! Extent of an update, the part of a parameter that an optimizer needs at a time; and the states that it keeps of a parameter.

use phalanx_tensor::{Kind, NORM_BLOCK};

/// A parameter, as optimizers see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdatedParameter {
    /// Full name.
    pub name: String,
    /// Its kind in its layer.
    pub kind: Kind,
    /// Its shape: this rank's part, where several tensor-parallel ranks share it.
    pub shape: Vec<usize>,
}

/// Part of a parameter that one update needs at a time. Results do not depend on anything else: stage, world, sizes of chunks and
/// tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Extent {
    /// Element i of parameters and states depends only on element i of all of them and of the gradient.
    #[default]
    Elements,
    /// The same of blocks of this many elements, counted from the parameter's first; the last one may be shorter. A power of two, at
    /// most 4,096.
    Blocks(usize),
    /// All of the parameter, in its shape. It lies on one rank of the data axis, and no tensor-parallel ranks share it.
    Whole,
}

/// A state that an optimizer keeps of a parameter: f32, zeros at first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// Its name in checkpoints.
    pub name: &'static str,
    /// The shape of the parameter; or `[blocks]`, with an extent of blocks; or any, with the whole parameter as extent.
    pub shape: Vec<usize>,
}

impl StateSpec {
    /// A state with a number for each element of the parameter.
    pub fn like(name: &'static str, of: &UpdatedParameter) -> StateSpec {
        StateSpec { name, shape: of.shape.clone() }
    }

    /// A state with a number for each block of `block` elements of the parameter.
    pub fn of_blocks(name: &'static str, of: &UpdatedParameter, block: usize) -> StateSpec {
        StateSpec { name, shape: vec![of.elements().div_ceil(block)] }
    }
}

/// Relation of the numbers of a state to the elements of its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// One for each element.
    Elements,
    /// One for each block of so many.
    Blocks(usize),
    /// So many for all of them.
    Whole(usize),
}

/// A state of a parameter, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptState {
    /// Name and shape.
    pub spec: StateSpec,
    /// Relation of its numbers to the parameter's elements.
    pub spread: Spread,
}

/// A rule of updates that contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// Blocks of an impossible size.
    #[error(
        "the optimizer updates `{parameter}` in blocks of {given} elements: expected a power of two, at most {NORM_BLOCK}, since \
         parameters are cut at multiples of {NORM_BLOCK} elements"
    )]
    Block {
        /// The parameter.
        parameter: String,
        /// Elements given.
        given: usize,
    },
    /// A state of an impossible shape.
    #[error(
        "the optimizer's state `{state}` of `{parameter}` has the shape {given:?}: {}",
        expected_shapes(.extent, .shape)
    )]
    Shape {
        /// The state.
        state: &'static str,
        /// The parameter.
        parameter: String,
        /// The state's shape.
        given: Vec<usize>,
        /// The rule's extent.
        extent: Extent,
        /// The parameter's shape.
        shape: Vec<usize>,
    },
    /// Two states of one name, or one of a name that is taken.
    #[error(
        "the optimizer has a state `{state}` of `{parameter}` {}: give each state a name of its own",
        if *state == PARAMETERS { "as well as the parameter itself" } else { "twice" }
    )]
    Name {
        /// The state.
        state: &'static str,
        /// The parameter.
        parameter: String,
    },
}

/// Name of the parameters among the states of a checkpoint.
pub const PARAMETERS: &str = "parameters";

fn expected_shapes(extent: &Extent, shape: &[usize]) -> String {
    match extent {
        Extent::Elements => format!(
            "expected that of the parameter, {shape:?}, since the rule works on elements; for another shape, say so in its extent"
        ),
        Extent::Blocks(block) => {
            let elements: usize = shape.iter().product();
            format!(
                "expected that of the parameter, {shape:?}, or [{}], a number for each block of {block}",
                elements.div_ceil(*block)
            )
        }
        Extent::Whole => "expected at least one number".to_string(),
    }
}

impl UpdatedParameter {
    /// Number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Checks the states of a rule with this extent.
    pub(crate) fn kept(&self, extent: Extent, states: Vec<StateSpec>) -> Result<Vec<KeptState>, RuleError> {
        let parameter = || self.name.clone();
        if let Extent::Blocks(given) = extent
            && !(given.is_power_of_two() && given <= NORM_BLOCK)
        {
            return Err(RuleError::Block { parameter: parameter(), given });
        }
        let names: Vec<&str> = states.iter().map(|state| state.name).collect();
        let kept = |(index, spec): (usize, StateSpec)| {
            if spec.name == PARAMETERS || names[..index].contains(&spec.name) {
                return Err(RuleError::Name { state: spec.name, parameter: parameter() });
            }
            let numbers = spec.shape.iter().product();
            let spread = match extent {
                _ if spec.shape == self.shape => Spread::Elements,
                Extent::Blocks(block) if spec.shape == [self.elements().div_ceil(block)] => {
                    Spread::Blocks(block)
                }
                Extent::Whole if numbers > 0 => Spread::Whole(numbers),
                _ => {
                    let (state, given, shape) = (spec.name, spec.shape, self.shape.clone());
                    return Err(RuleError::Shape { state, parameter: parameter(), given, extent, shape });
                }
            };
            Ok(KeptState { spec, spread })
        };
        states.into_iter().enumerate().map(kept).collect()
    }
}

impl Spread {
    /// Number of state values for `elements` elements of the parameter, counted from a place at which an update may begin.
    pub fn numbers(self, elements: usize) -> usize {
        match self {
            Spread::Elements => elements,
            Spread::Blocks(block) => elements.div_ceil(block),
            Spread::Whole(numbers) => numbers,
        }
    }
}
