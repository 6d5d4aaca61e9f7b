//! Lowers a phase to its program: the passes of parameters and gradients put actions between the block runs of the demand; a step ends
//! with the norm, its decision and the updates.

use crate::trace::PhaseName;

use super::action::{Decision, Op, SumGroup, Token};
use super::builder::Builder;
use super::chunks::{GradientPlace, RankChunks, StageChunks};
use super::delayed::{finish as finish_delayed, update as update_delayed};
use super::demand::BlockRun;
use super::gradients::GradientPass;
use super::list::{Program, Role};
use super::parameters::ParameterPass;
use super::stored::show;
use super::sums::{sum_over, sum_terms};
use super::ties::sum_tied;
use super::updates::Updates;

/// The phases that have a program.
pub const PHASES: [PhaseName; 4] =
    [PhaseName::Step, PhaseName::Diagnose, PhaseName::Evaluate, PhaseName::Save];

/// The passes of a stage.
struct Passes<'a> {
    stage: &'a StageChunks,
    parameters: ParameterPass<'a>,
    gradients: GradientPass<'a>,
    /// Updates within backward.
    updates: Option<Updates>,
}

impl RankChunks {
    /// The program of one of the [`PHASES`].
    ///
    /// - *step*: forward and backward of all micro-batches, the norm, and the updates, which a skipped step leaves out;
    /// - *diagnose*: the step up to the summed gradients, which are looked at;
    /// - *evaluate*: forward and losses;
    /// - *save*: waits for what earlier phases have left in flight. Which numbers are written is a table, and no program.
    ///
    /// # Panics
    /// For another phase.
    pub fn lower(&self, phase: PhaseName) -> Program {
        assert!(PHASES.contains(&phase), "phase {phase} has no program");
        let demand = self.demand(phase);
        let mut list = Builder::new(self, phase);
        let mut stages: Vec<Passes> =
            self.stages.iter().map(|stage| Passes::new(self, stage, (&list, &demand))).collect();
        if phase == PhaseName::Step && self.policies.in_backward {
            for passes in &mut stages {
                passes.updates = Some(Updates::begin(&mut list, &passes.gradients));
            }
        }
        for run in &demand {
            let own = stages.iter_mut().find(|passes| passes.stage.index == run.stage);
            own.expect("the stage of a run").run(&mut list, *run);
        }
        match phase {
            PhaseName::Step => self.end_step(&mut list, stages),
            PhaseName::Diagnose => self.look(&mut list, &mut stages),
            PhaseName::Save => {
                for Passes { gradients, .. } in stages.iter().filter(|_| self.policies.delayed) {
                    self.land(&mut list, gradients.stage);
                    finish_delayed(&mut list, gradients);
                    self.land(&mut list, gradients.stage);
                }
                if self.policies.host_addressable && !self.policies.delayed {
                    self.stages.iter().for_each(|stage| self.land(&mut list, stage));
                }
            }
            _ => {}
        }
        list.finish()
    }

    /// Behind the backward of a step: the norm, which decides, and the updates.
    fn end_step(&self, list: &mut Builder, mut stages: Vec<Passes>) {
        self.finish_gradients(list, &mut stages);
        self.norm(list, &stages);
        list.emit(Op::Pause);
        list.emit(Op::Fetch);
        if self.policies.in_backward {
            for Passes { gradients, updates, .. } in stages {
                updates.expect("it began before forward").finish(list, &gradients);
            }
        } else {
            list.only_if(Decision::Apply, true, |list| {
                for Passes { gradients, .. } in &stages {
                    if self.policies.delayed {
                        update_delayed(list, gradients);
                    } else {
                        let mut updates = Updates::begin(list, gradients);
                        updates.read_first(list, gradients);
                        updates.finish(list, gradients);
                    }
                }
            });
            list.only_if(Decision::Apply, false, |list| self.restore(list));
        }
        if !self.policies.host_addressable {
            self.stages.iter().for_each(|stage| self.land(list, stage));
        }
    }

    /// Looks at all summed gradients; within backward, updates have used them up.
    fn look(&self, list: &mut Builder, stages: &mut [Passes]) {
        if self.policies.in_backward {
            return;
        }
        self.finish_gradients(list, stages);
        for Passes { stage, gradients, .. } in stages.iter() {
            for c in 0..stage.trained {
                match gradients.is_stored(c) {
                    true => show(list, &self.policies, (stage, &[c]), |list, _, here| {
                        list.emit(Op::Look(here));
                    }),
                    false => list.emit(Op::Look(gradients.sum(list, c))),
                }
            }
        }
        self.restore(list);
    }

    /// Waits for the publications of a stage that may be in flight.
    fn land(&self, list: &mut Builder, stage: &StageChunks) {
        if self.policies.overlap {
            let published = (0..stage.trained).filter(|c| stage.is_published(self.policies.stage, *c));
            published.for_each(|c| list.emit(Op::Land(Token::published(stage.first_chunk + c))));
        }
    }

    /// Writes the parameters back that gradients have overwritten: where a step is not applied.
    fn restore(&self, list: &mut Builder) {
        for stage in &self.stages {
            let is_over = |c: &usize| stage.place(&self.policies, *c) == GradientPlace::Parameters;
            for of in (0..stage.trained).filter(is_over).map(|c| stage.first_chunk + c) {
                let (from, into) = (list.buffer(Role::Master, of), list.buffer(Role::Parameters, of));
                list.emit(Op::Restore { from, into });
            }
        }
    }

    /// Waits for reductions, and sums over other axes than data.
    fn finish_gradients(&self, list: &mut Builder, stages: &mut [Passes]) {
        for Passes { gradients, updates, .. } in stages.iter_mut() {
            if let Some(updates) = updates {
                updates.rest(list, gradients);
            }
            gradients.finish(list);
            sum_terms(list, gradients);
        }
        let of_chunk = |chunk: usize| {
            let own = stages.iter().rfind(|passes| passes.stage.first_chunk <= chunk);
            &own.expect("a chunk of the rank").gradients
        };
        self.ties.iter().for_each(|tied| sum_tied(list, &self.policies, tied, of_chunk));
        list.emit(Op::Pause);
    }

    /// The norm of all gradients, which decides whether the step is applied.
    fn norm(&self, list: &mut Builder, stages: &[Passes]) {
        let norms = list.buffer(Role::Norms, 0);
        for Passes { stage, gradients, .. } in stages.iter().filter(|passes| passes.stage.trained > 0) {
            let squares = list.buffer(Role::Squares, stage.index);
            let rest = (0..stage.trained).filter(|c| !gradients.chunks[*c].is_counted);
            let (stored, here): (Vec<_>, Vec<_>) = rest.partition(|c| gradients.is_stored(*c));
            for c in here {
                list.count(gradients.sum(list, c), squares);
            }
            show(list, &self.policies, (stage, &stored), |list, _, from| list.count(from, squares));
            sum_over(list, SumGroup::Data, squares);
            list.emit(Op::Total { from: squares, into: norms });
        }
        sum_over(list, SumGroup::World, norms);
        list.emit(Op::Norm(norms));
    }
}

impl<'a> Passes<'a> {
    fn new(
        rank: &'a RankChunks,
        stage: &'a StageChunks,
        (list, demand): (&Builder, &[BlockRun]),
    ) -> Passes<'a> {
        let runs = demand.iter().copied().filter(|run| run.stage == stage.index);
        Passes {
            stage,
            parameters: ParameterPass::new(stage, &rank.policies, runs),
            gradients: GradientPass::new(list, stage, &rank.policies),
            updates: None,
        }
    }

    /// A block run, with what the passes put before and behind it.
    fn run(&mut self, list: &mut Builder, run: BlockRun) {
        self.parameters.before(list, run);
        if let Some(updates) = self.updates.as_mut().filter(|_| run.pass.writes_gradients()) {
            updates.read_first(list, &self.gradients);
        }
        self.gradients.before(list, run);
        let read = self.stage.uses[run.block].iter().filter(|_| run.pass.reads_parameters());
        let reads = read.map(|c| self.parameters.read(list, *c)).collect();
        let written = self.stage.written(run.block).filter(|_| run.pass.writes_gradients());
        let writes = written.map(|c| self.gradients.written(c)).collect();
        list.run(run, reads, writes);
        self.parameters.behind(list, run);
        self.gradients.behind(list, run);
        if let Some(updates) = self.updates.as_mut().filter(|_| run.pass.writes_gradients()) {
            updates.reduced(list, &mut self.gradients, false);
        }
        list.emit(Op::Pause);
    }
}
