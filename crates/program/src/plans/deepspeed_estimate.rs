//! DeepSpeed's estimate of a run's memory (`estimate_zero2_model_states_mem_needs` and `estimate_zero3_...`, 0.19.6) beside the plan.
//!
//! With P parameters, the largest weight L, N data-parallel ranks on one node, and f = 1.5 for buffers of the host, theirs are, in bytes of
//! a GPU and of the node's processors:
//!
//! | case | GPU | host |
//! |---|---|---|
//! | stage 2 | 2P + 18P/N | 4PNf |
//! | stage 2, optimizer on the host | 2P | P max(4N, 16) f |
//! | stage 3 | 4L + 18P/N | 4LNf |
//! | stage 3, optimizer on the host | 4L + 2P/N | 16Pf |
//! | stage 3, optimizer and parameters on the host | 4L | 18Pf |

use phalanx_plan::trace::{Category, Memory};
use phalanx_train::RankPlan;
use phalanx_train::config::{Float, Tier};
use serde_json::{Value, json};

use crate::plans::planned::Planned;
use phalanx_drawing::report::{Table, bytes, count};

/// Buffers of the host, as a factor.
const BUFFERS: f64 = 1.5;

/// Categories that are states of the model.
const STATES: [Category; 3] = [Category::Parameters, Category::Gradients, Category::Optimizer];

/// Their estimate and the plan.
pub struct Estimate {
    formulas: [&'static str; 2],
    theirs: [f64; 2],
    ours: [u64; 2],
    differences: Vec<String>,
}

impl Estimate {
    /// The estimate for a plan; None for stages 0 and 1, for which there is none.
    pub fn of(planned: &Planned) -> Option<Estimate> {
        let (plan, memory) = (&planned.plan, &planned.config.memory);
        let network = plan.spec.model.whole();
        let largest = network.parameters.iter().map(|of| of.elements()).max().unwrap_or(0) as f64;
        let (p, n) = (plan.parameters() as f64, plan.spec.mesh.axes.data as f64);
        let is_away = [memory.optimizer, memory.parameters].map(|tier| tier != Tier::Device);
        let (formulas, theirs) = match (plan.spec.zero.stage.number(), is_away) {
            (2, [false, _]) => (["2P + 18P/N", "4PN f"], [2.0 * p + 18.0 * p / n, 4.0 * p * n * BUFFERS]),
            (2, [true, _]) => (["2P", "P max(4N, 16) f"], [2.0 * p, p * (4.0 * n).max(16.0) * BUFFERS]),
            (3, [false, _]) => {
                (["4L + 18P/N", "4LN f"], [4.0 * largest + 18.0 * p / n, 4.0 * largest * n * BUFFERS])
            }
            (3, [true, false]) => (["4L + 2P/N", "16P f"], [4.0 * largest + 2.0 * p / n, 16.0 * p * BUFFERS]),
            (3, [true, true]) => (["4L", "18P f"], [4.0 * largest, 18.0 * p * BUFFERS]),
            _ => return None,
        };
        let states = |rank: &RankPlan, memory| {
            let peak = if memory == Memory::Device { rank.peak() } else { rank.peak_of(memory) };
            STATES.iter().map(|category| peak.categories.get(*category)).sum::<u64>()
        };
        let max_over_ranks = |memory| plan.ranks.iter().map(|rank| states(rank, memory)).max().unwrap_or(0);
        // Theirs is of a node, which has all N ranks.
        let ours =
            [max_over_ranks(Memory::Device), max_over_ranks(Memory::Host) * plan.spec.mesh.axes.data as u64];
        let mut estimate = Estimate { formulas, theirs, ours, differences: Vec::new() };
        estimate.explain(planned, [p, n, largest], is_away);
        Some(estimate)
    }

    fn explain(&mut self, planned: &Planned, [p, n, largest]: [f64; 3], is_away: [bool; 2]) {
        let (plan, layout) = (&planned.plan, &planned.plan.spec.mesh.layout);
        let mut said = Vec::new();
        let mut say = |text: String| said.push(text);
        say(format!("P = {}, N = {n}, L = {} (the largest weight), f = {BUFFERS}", count(p), count(largest)));
        if planned.config.precision.compute == Float::F32 {
            say("theirs is for 16-bit parameters with an f32 copy; here they are f32, without a copy".into());
        }
        match is_away[0] {
            true => {
                say("the host has gradients in the type of precision.accumulate here, and optimizer states"
                    .into())
            }
            false => say(format!(
                "18P/N has an f32 copy of the gradients for the update, 4P/N = {}; here the update reads them as they are",
                bytes((4.0 * p / n) as u64)
            )),
        }
        let max_over_ranks = |of: &dyn Fn(&RankPlan) -> u64| plan.ranks.iter().map(of).max().unwrap_or(0);
        if plan.spec.zero.stage.number() == 3 {
            let gathered = bytes(max_over_ranks(&|rank| rank.peak().categories.get(Category::Communication)));
            say(format!(
                "4L is the largest weight, gathered; here chunks are: {gathered} of buffers at the peak"
            ));
        }
        let factor = bytes((self.theirs[1] * (1.0 - 1.0 / BUFFERS)) as u64);
        say(format!("f adds {factor} on the host for buffers; the plan has each buffer that there is"));
        if layout.waste_elements > 0 {
            let share = 100.0 * layout.waste_elements as f64 / layout.padded_elements() as f64;
            say(format!(
                "{share:.2} % of the elements here are padding of chunks, of which small models have most"
            ));
        }
        let all =
            max_over_ranks(&|rank| Category::ALL.iter().map(|of| rank.peak().categories.get(*of)).sum());
        let rest = bytes(all.saturating_sub(self.ours[0]));
        say(format!("not in theirs: activations, buffers and scratch, {rest} of a rank at the peak"));
        if plan.spec.mesh.axes.tensor * plan.spec.mesh.axes.pipeline > 1 {
            say("theirs knows no tensor and pipeline ranks: P is the whole model".into());
        }
        self.differences = said;
    }

    /// A table and the reasons.
    pub fn to_text(&self) -> String {
        let mut table = Table::new(&["DeepSpeed's estimate", "formula", "theirs", "here"]);
        for (at, name) in
            ["states on the device of a rank", "states on the host, all ranks"].iter().enumerate()
        {
            let cells = [
                name.to_string(),
                self.formulas[at].to_string(),
                bytes(self.theirs[at] as u64),
                bytes(self.ours[at]),
            ];
            table.row(cells);
        }
        let lines: Vec<String> = self.differences.iter().map(|line| format!("  - {line}\n")).collect();
        format!("{table}{}", lines.concat())
    }

    /// The same as JSON, in bytes.
    pub fn to_json(&self) -> Value {
        let of = |at: usize| json!({ "formula": self.formulas[at], "theirs_bytes": self.theirs[at], "bytes": self.ours[at] });
        json!({ "device": of(0), "host": of(1), "differences": self.differences })
    }
}
