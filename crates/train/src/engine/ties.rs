//! Parameters that several pipeline stages use.

use std::ops::Range;

use phalanx_layers::Network;

/// A parameter of which several stages have a copy (a token table that is also the output projection).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie {
    /// Its name.
    pub name: String,
    /// The stages that have a copy, ascending.
    pub stages: Vec<usize>,
}

/// The parameters that blocks of several stages use.
pub(crate) fn ties(network: &Network, stages: &[Range<usize>]) -> Vec<Tie> {
    let tie = |number: usize| {
        let uses =
            |range: &Range<usize>| network.uses[range.clone()].iter().any(|block| block.contains(&number));
        let stages: Vec<usize> = (0..stages.len()).filter(|stage| uses(&stages[*stage])).collect();
        (stages.len() > 1).then(|| Tie { name: network.parameters[number].name.clone(), stages })
    };
    (0..network.parameters.len()).filter_map(tie).collect()
}
