//! Kinds of parameters, for layers that declare them and optimizers that update them.

/// Role of a parameter in its layer. Optimizers treat kinds differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The weight of a linear layer.
    Matrix,
    /// Rows that are looked up.
    Table,
    /// The weight of an output projection, which has a table's rows where the two are tied.
    Head,
    /// A gain or shift of a norm.
    Norm,
    /// A bias.
    Bias,
    /// Any other vector.
    Vector,
}

impl Kind {
    /// Returns whether weight decay acts on parameters of this kind: on matrices, tables and heads, as nanoGPT has it.
    pub fn decays(self) -> bool {
        matches!(self, Kind::Matrix | Kind::Table | Kind::Head)
    }
}
