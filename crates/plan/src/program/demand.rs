//! Demand of a phase, without any movement: which block runs which pass of which micro-batch.

use crate::pipeline::{Action, Kind, Step};

/// A pass of a block over a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Forward.
    Forward,
    /// The whole backward; of the head, with the loss.
    Backward,
    /// The first part of backward: the derivative of the input.
    Input,
    /// The second part of backward: the parameter gradients. It reads no parameters.
    Weight,
    /// The loss alone, of the head, where no backward follows.
    Loss,
}

impl Pass {
    /// Its letter in texts, that of a pipeline schedule where it has one.
    pub const fn letter(self) -> char {
        match self {
            Pass::Forward => 'F',
            Pass::Backward => 'B',
            Pass::Input => 'I',
            Pass::Weight => 'W',
            Pass::Loss => 'L',
        }
    }

    /// Returns whether the pass reads the parameters of its block.
    pub fn reads_parameters(self) -> bool {
        self != Pass::Weight
    }

    /// Returns whether the pass writes the gradients of its block.
    pub fn writes_gradients(self) -> bool {
        matches!(self, Pass::Backward | Pass::Weight)
    }
}

/// A pass of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockRun {
    /// Number of the pipeline stage.
    pub stage: usize,
    /// Number of the block in its stage; the head is the last.
    pub block: usize,
    /// The pass.
    pub pass: Pass,
    /// Number of the micro-batch.
    pub micro_batch: usize,
}

/// The blocks of a stage, as a schedule runs them.
#[derive(Clone, Copy, Debug)]
pub struct StageBlocks {
    /// Number of the stage.
    pub index: usize,
    /// Number of its blocks, without the head.
    pub blocks: usize,
    /// True if it has the head, which is then the last block.
    pub has_head: bool,
    /// The first block that backward runs, or the number of all.
    pub lowest: usize,
}

/// The block runs of a rank's steps of a schedule, in order; `keeps`: whether backward may follow forward.
///
/// # Panics
/// For an action of a stage that is not among `stages`.
pub fn block_runs(steps: &[Step], stages: &[StageBlocks], keeps: bool) -> Vec<BlockRun> {
    let mut runs = Vec::new();
    for step in steps {
        let Step::Compute(action) = step else { continue };
        let stage = stages.iter().find(|stage| stage.index == action.stage);
        runs.extend(stage.expect("every action belongs to a stage of its rank").runs(*action, keeps));
    }
    runs
}

impl StageBlocks {
    /// The block runs of an action of the schedule; `keeps`: whether backward may follow.
    fn runs(self, action: Action, keeps: bool) -> Vec<BlockRun> {
        let StageBlocks { index: stage, blocks, has_head, lowest } = self;
        let run = |block, pass| BlockRun { stage, block, pass, micro_batch: action.micro_batch };
        let head = has_head.then_some(blocks);
        let is_differentiated = lowest < blocks + usize::from(has_head);
        let down = |pass| (lowest..blocks).rev().map(move |block| run(block, pass));
        // The head has no second part of backward.
        let first = head.map(|head| run(head, Pass::Backward)).into_iter();
        match action.kind {
            Kind::Forward => {
                let loss = head.filter(|_| !(keeps && is_differentiated));
                let forward = (0..blocks).map(|block| run(block, Pass::Forward));
                forward.chain(loss.map(|head| run(head, Pass::Loss))).collect()
            }
            Kind::Backward => first.chain(down(Pass::Backward)).collect(),
            Kind::Input => first.chain(down(Pass::Input)).collect(),
            Kind::Weight => down(Pass::Weight).collect(),
        }
    }
}
