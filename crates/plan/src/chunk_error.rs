//! Why a model has no chunk layout, with the bounds of the sizes that are laid out.

/// Maximum number of ranks of a layout; keeps every sum far from overflow.
pub(crate) const MAX_WORLD: u64 = 1 << 20;

/// Maximum number of elements of a model.
pub(crate) const MAX_ELEMENTS: u64 = 1 << 50;

/// An error of the layout.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ChunkError {
    /// There is nothing to lay out.
    #[error("the model has no parameters: a chunk layout needs at least one")]
    NoParameters,
    /// A parameter without elements.
    #[error("parameter `{name}` has no elements: check the sizes in the model's configuration")]
    EmptyParameter {
        /// Its name.
        name: String,
    },
    /// Too few or too many ranks.
    #[error("a chunk cannot be shared by {world} ranks: expected 1 to {MAX_WORLD}")]
    World {
        /// Ranks asked for.
        world: u64,
    },
    /// More elements than are counted safely.
    #[error("the model exceeds {MAX_ELEMENTS} elements at parameter `{name}`: check its shape")]
    TooLarge {
        /// The parameter at which the limit is exceeded.
        name: String,
    },
    /// A chunk for each parameter, where parameters lie in one shard each.
    #[error(
        "a chunk for each tensor would give all of those that the optimizer updates as a whole to the first of {world} data-parallel \
         ranks: choose \"auto\" or a size"
    )]
    Whole {
        /// Ranks that share a chunk.
        world: u64,
    },
    /// A knob with an invalid value.
    #[error("`{knob}` is {given}: expected {expected}")]
    Knob {
        /// Name in the configuration.
        knob: &'static str,
        /// Value given.
        given: f64,
        /// The valid values.
        expected: &'static str,
    },
}
