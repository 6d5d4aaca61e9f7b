//! The programs of one rank without the repetitions of their steady states, for a dry run.

use phalanx_plan::pipeline::Abridged;
use phalanx_plan::trace::{PhaseName, Trace};
use phalanx_plan::{AbridgedPhase, expand};

/// The programs of one rank without repetitions, as far as they have some.
#[derive(Clone, Debug)]
pub struct AbridgedPrograms {
    pub(crate) step: Option<Abridged>,
    pub(crate) evaluation: Option<Abridged>,
}

impl AbridgedPrograms {
    /// The trace of whole programs from one of these programs, over channels of the given depths (in a step and in an
    /// evaluation); `None` where it does not repeat itself.
    pub(crate) fn expand(&self, trace: &Trace, depths: [usize; 2]) -> Option<Trace> {
        let [in_step, in_evaluation] = depths;
        let phase = |name, program, depth| AbridgedPhase { name, program, depth };
        let steps = [PhaseName::Step, PhaseName::Diagnose];
        let step = self.step.iter().flat_map(|step| steps.map(|name| phase(name, step, in_step)));
        let evaluation =
            self.evaluation.iter().map(|program| phase(PhaseName::Evaluate, program, in_evaluation));
        expand(trace, &step.chain(evaluation).collect::<Vec<_>>())
    }
}
