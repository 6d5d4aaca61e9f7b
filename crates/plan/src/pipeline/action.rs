//! One action of a rank: a part of a micro-batch's forward or backward through one stage.
//!
//! Backward splits where that helps: the gradient of the input, which the stage below waits for, and the
//! gradient of the weights, which nobody waits for and which may therefore fill a bubble (Qi et al.,
//! arXiv 2401.10241). Letters and order of an action's text are those of PyTorch's
//! `torch.distributed.pipelining`.

use std::fmt;

/// Computation of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `F`: forward; its activations are kept for backward.
    Forward,
    /// `B`: the whole backward, [`Kind::Input`] and [`Kind::Weight`] in one.
    Backward,
    /// `I`: the gradient of the stage's input.
    Input,
    /// `W`: the gradient of the stage's weights, some time after `I`.
    Weight,
}

impl Kind {
    /// Every kind, in the order of legends.
    pub const ALL: [Kind; 4] = [Kind::Forward, Kind::Backward, Kind::Input, Kind::Weight];

    /// Its letter in the text format.
    pub fn letter(self) -> char {
        match self {
            Kind::Forward => 'F',
            Kind::Backward => 'B',
            Kind::Input => 'I',
            Kind::Weight => 'W',
        }
    }

    /// The kind of a letter.
    pub fn of_letter(letter: char) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.letter() == letter)
    }

    /// The parts that it consists of: itself, or input and weight.
    pub fn parts(self) -> &'static [Kind] {
        match self {
            Kind::Forward => &[Kind::Forward],
            Kind::Backward => &[Kind::Input, Kind::Weight],
            Kind::Input => &[Kind::Input],
            Kind::Weight => &[Kind::Weight],
        }
    }
}

/// One cell of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// Number of the stage; a micro-batch passes stage 0 first.
    pub stage: usize,
    /// The computation.
    pub kind: Kind,
    /// Number of the micro-batch in its step.
    pub micro_batch: usize,
}

impl Action {
    /// The label in a drawing; the stage is left out if each rank has only one.
    pub fn label(self, with_stage: bool) -> String {
        if with_stage { self.to_string() } else { format!("{}{}", self.kind.letter(), self.micro_batch) }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letter(), self.micro_batch)
    }
}
