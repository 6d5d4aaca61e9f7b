//! How a parameter is stored in Hugging Face files: mostly as a tensor of the same name, sometimes as several.
//!
//! A parameter is the concatenation along dimension 0 of the tensors that [`Model::stored_as`](crate::Model)
//! lists, so elements of one are consecutive elements of the other. Files that older programs wrote may have
//! a tensor under another name.
//!
//! ```text
//! export: for each parameter, for each stored: write `name`, `shape`, elements from `first` on
//! import: for each piece of a parameter, for each stored: `within` says what to read, and where to
//! ```

use std::ops::Range;

use phalanx_layers::ParameterSpec;

/// A tensor of a Hugging Face file: a parameter, or consecutive rows of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Name under which it is written.
    pub name: String,
    /// Names under which older files have it.
    pub aliases: Vec<String>,
    /// Extents in the file.
    pub shape: Vec<usize>,
    /// Number of its first element in the whole parameter.
    pub first: u64,
}

/// The elements that a tensor of a file and a piece of a parameter have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Elements of the file's tensor. Where the parameter is a part of a whole: elements of the same part
    /// ([`ParameterSpec::stripe`]) of the tensor.
    pub theirs: Range<u64>,
    /// Elements of the piece of the parameter.
    pub ours: Range<usize>,
}

impl Stored {
    /// The whole parameter under its own name.
    pub fn same(parameter: &ParameterSpec) -> Stored {
        let shape = parameter.whole_shape().to_vec();
        Stored { name: parameter.name.clone(), aliases: Vec::new(), shape, first: 0 }
    }

    /// The parameter's rows in equal shares, one per name.
    ///
    /// # Panics
    /// When the number of rows is not a multiple of the number of names.
    pub fn packed(parameter: &ParameterSpec, names: Vec<String>) -> Vec<Stored> {
        let mut shape = parameter.whole_shape().to_vec();
        assert!(shape[0].is_multiple_of(names.len()), "{}: {shape:?} as {names:?}", parameter.name);
        shape[0] /= names.len();
        let each = elements(&shape);
        let share = |(first, name)| Stored { name, aliases: Vec::new(), shape: shape.clone(), first };
        (0u64..).map(|i| i * each).zip(names).map(share).collect()
    }

    /// Number of its elements.
    pub fn elements(&self) -> u64 {
        elements(&self.shape)
    }

    /// The first of its names that a file has; [`Stored::name`] where the file has none of them.
    pub fn name_in(&self, has: impl Fn(&str) -> bool) -> &str {
        let names = || std::iter::once(&self.name).chain(&self.aliases);
        names().find(|name| has(name)).unwrap_or(&self.name)
    }

    /// The elements of this tensor that belong to the elements `piece` of `parameter`. `piece` is counted within this
    /// rank's part. `None` if there are none.
    ///
    /// # Panics
    /// When the parameter is split so that this tensor is not split like it.
    pub fn within(&self, parameter: &ParameterSpec, piece: Range<u64>) -> Option<Overlap> {
        let stripe = parameter.stripe();
        let (start, end) = (self.first, self.first + self.elements());
        let turn = stripe.run * stripe.ranks;
        assert!(
            stripe.is_whole() || start.is_multiple_of(turn),
            "{} begins within a run of {stripe} of {}",
            self.name,
            parameter.name
        );
        let [first, end] = [start, end].map(|at| stripe.locals_before(at));
        let (from, to) = (piece.start.max(first), piece.end.min(end));
        (from < to).then(|| Overlap {
            theirs: from - first..to - first,
            ours: (from - piece.start) as usize..(to - piece.start) as usize,
        })
    }
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().map(|size| *size as u64).product()
}
