//! Inputs of a model in a micro-batch, and the shapes of tensors that have a row for each of its tokens or samples.

use std::cell::RefCell;
use std::sync::Arc;

use phalanx_tensor::{DType, Shape};

use crate::activation::Activation;

/// Name of the input with the token ids of a model.
pub const TOKENS: &str = "tokens";

/// Name of the input with a target for each token: a class, or [`IGNORED`](phalanx_tensor::IGNORED).
pub const TARGETS: &str = "targets";

/// Name of the input with the position of each token in its document, from 0: a token at position 0 begins one. What there is of a
/// document that began in an earlier sequence counts as one.
pub const POSITIONS: &str = "positions";

/// Name of the input with two numbers of each sequence that is an answer: its log-probability under the reference model, and 1 for a
/// chosen answer or 0.
pub const REFERENCES: &str = "references";

/// Most dimensions of a row.
const DIMS: usize = 3;

/// The shape of a tensor that has a row for each token, or for each sample, of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// True if it has a row for each token: `[batch, seq, ..]`; otherwise it has one for each sample: `[batch, ..]`.
    pub of_tokens: bool,
    dims: [usize; DIMS],
    count: usize,
}

impl RowShape {
    /// `[batch, seq, width]`
    pub fn tokens(width: usize) -> RowShape {
        RowShape { of_tokens: true, dims: [width, 1, 1], count: 1 }
    }

    /// `[batch, width]`
    pub fn samples(width: usize) -> RowShape {
        RowShape { of_tokens: false, ..RowShape::tokens(width) }
    }

    /// Extents of a row, at most three.
    pub fn row(&self) -> &[usize] {
        &self.dims[..self.count]
    }

    /// The same rows with these extents.
    ///
    /// # Panics
    /// When there are more than three.
    #[must_use]
    pub fn with_row(self, row: &[usize]) -> RowShape {
        let mut dims = [1; DIMS];
        dims[..row.len()].copy_from_slice(row);
        RowShape { dims, count: row.len(), ..self }
    }

    /// Elements of a row.
    pub fn elements(&self) -> usize {
        self.row().iter().product()
    }

    /// The shape for a micro-batch of `tokens` `[batch, seq]`.
    pub fn of(&self, tokens: [usize; 2]) -> Shape {
        let before = if self.of_tokens { &tokens[..] } else { &tokens[..1] };
        Shape::from([before, self.row()].concat().as_slice())
    }

    /// The shape of one of `parts` equal shares of the rows of a micro-batch of `tokens` `[batch, seq]`: `[1, rows, ..]`.
    pub fn shared(&self, tokens: [usize; 2], parts: usize) -> Shape {
        match parts {
            1 => self.of(tokens),
            _ => self.of([1, tokens[0] * tokens[1] / parts]),
        }
    }
}

/// Tensor that a model reads in each micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input {
    /// Its name.
    pub name: &'static str,
    /// Number of ids, which count from 0, for ids (u32). None for floats.
    pub bound: Option<usize>,
    /// True for floats that stay f32; others have the type of activations.
    pub is_exact: bool,
    /// Its shape.
    pub shape: RowShape,
}

impl Input {
    /// Ids from 0 to below `bound`, `[batch, seq]` u32.
    pub fn ids(name: &'static str, bound: usize) -> Input {
        Input { name, bound: Some(bound), is_exact: true, shape: RowShape::tokens(1).with_row(&[]) }
    }

    /// Floats of this shape.
    pub fn floats(name: &'static str, shape: RowShape) -> Input {
        Input { name, bound: None, is_exact: false, shape }
    }

    /// The numbers of [`REFERENCES`].
    pub fn references() -> Input {
        Input { is_exact: true, ..Input::floats(REFERENCES, RowShape::samples(2)) }
    }

    /// Inputs of a language model with `vocab` token ids: tokens, and a target for each of them.
    pub fn of_language_model(vocab: usize) -> Vec<Input> {
        vec![Input::ids(TOKENS, vocab), Input::ids(TARGETS, vocab)]
    }

    /// The element type, if activations have type `compute`.
    pub fn dtype(&self, compute: DType) -> DType {
        match (self.bound, self.is_exact) {
            (Some(_), _) => DType::U32,
            (None, true) => DType::F32,
            (None, false) => compute,
        }
    }
}

/// Uploads the input of this name of a micro-batch to the device.
pub type Upload<'a> = dyn Fn(usize, &str) -> Activation + 'a;

/// The inputs of a micro-batch on a device, by name. Each is uploaded when a layer first asks for it, and is there until backward of the
/// stage has run: micro-batches in flight have theirs at once.
pub struct Inputs<'a> {
    upload: &'a Upload<'a>,
    micro_batch: usize,
    kept: RefCell<Vec<(String, Activation)>>,
}

impl<'a> Inputs<'a> {
    /// The inputs of a micro-batch, of which none is uploaded yet.
    pub fn new(upload: &'a Upload<'a>, micro_batch: usize) -> Inputs<'a> {
        Inputs { upload, micro_batch, kept: RefCell::default() }
    }

    /// One input and no other.
    pub fn only(name: &str, input: Activation) -> Inputs<'static> {
        let kept = RefCell::new(vec![(name.to_string(), input)]);
        Inputs { upload: &|_, name| panic!("there is no input {name}"), micro_batch: 0, kept }
    }

    /// The same with one more.
    #[must_use]
    pub fn and(mut self, name: &str, input: Activation) -> Inputs<'a> {
        self.kept.get_mut().push((name.to_string(), input));
        self
    }

    /// The input of this name, which stays.
    pub fn get(&self, name: &str) -> Activation {
        if let Some(kept) = self.kept(name) {
            return kept;
        }
        let input = (self.upload)(self.micro_batch, name);
        self.kept.borrow_mut().push((name.to_string(), Arc::clone(&input)));
        input
    }

    /// The input of this name, for a caller that keeps it as long as it is needed.
    pub fn lend(&self, name: &str) -> Activation {
        self.kept(name).unwrap_or_else(|| (self.upload)(self.micro_batch, name))
    }

    /// Frees the input of this name, unless somebody else holds it.
    pub fn free(&self, name: &str) {
        self.kept.borrow_mut().retain(|(kept, _)| kept != name);
    }

    fn kept(&self, name: &str) -> Option<Activation> {
        self.kept.borrow().iter().find(|(kept, _)| kept == name).map(|(_, input)| Arc::clone(input))
    }
}
