//! Why classes of candidates lost: of each value of a key that the winner does not have, the best with this value.

use std::collections::BTreeMap;

use phalanx_plan::PhaseTime;

use super::candidate::{Candidate, Placed};
use super::estimate::{Estimate, Parts};
use super::{Found, Outcome, Search};
use phalanx_drawing::report::bytes;

/// All candidates with one value of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    Global(usize),
    Tensor(usize),
    Pipeline(usize),
    Data(usize),
    Zero(u8),
    Schedule(usize),
    Micro(usize),
    Checkpointing(usize),
    Placed(Placed),
    SendsHalf(bool),
    Defers(bool),
}

impl Class {
    /// The classes of a candidate.
    pub(super) fn all_of(of: &Candidate) -> Vec<Class> {
        let mut all = vec![
            Class::Global(of.global),
            Class::Tensor(of.tensor),
            Class::Pipeline(of.pipeline),
            Class::Data(of.data),
            Class::Zero(of.zero),
            Class::Micro(of.micro),
            Class::Checkpointing(of.checkpointing),
            Class::Placed(of.placed),
        ];
        if of.pipeline > 1 {
            all.push(Class::Schedule(of.schedule));
        }
        if of.data > 1 {
            all.push(Class::SendsHalf(of.sends_half));
            if of.micro_batches() > 1 {
                all.push(Class::Defers(of.defers));
            }
        }
        all
    }
}

/// What is known of a class from estimates.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ClassOf {
    /// The fastest that may fit, with its seconds for a sequence.
    pub best: Option<(f64, Candidate)>,
    /// The fewest bytes by which one does not fit.
    pub min_excess: Option<u64>,
}

/// Values of a key that lost, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Lost {
    /// The key.
    pub key: &'static str,
    /// Its values.
    pub values: Vec<String>,
    /// The reason.
    pub why: String,
}

impl Search<'_> {
    /// The classes that lost, in the order of their keys.
    pub fn lost(&self) -> Vec<Lost> {
        let winner = &self.found[0];
        let own = Class::all_of(&winner.candidate);
        let mut all: Vec<Lost> = Vec::new();
        let mut add = |key: &'static str, value: String, why: String| match all
            .iter_mut()
            .find(|lost| lost.key == key && lost.why == why)
        {
            Some(same) => same.values.push(value),
            None => all.push(Lost { key, values: vec![value], why }),
        };
        for (of, why) in &self.impossible {
            add("parallel.tensor", of.tensor.to_string(), why.clone());
        }
        let mut too_large: BTreeMap<&'static str, (Vec<String>, u64, Option<usize>)> = BTreeMap::new();
        for (class, of) in self.classes.iter().filter(|(class, _)| !own.contains(class)) {
            let (key, value) = self.words(*class);
            match self.why(*class, of, winner) {
                Why::TooLarge(missing, stage) => {
                    let entry = too_large.entry(key).or_insert((Vec::new(), u64::MAX, None));
                    entry.0.push(value);
                    if missing < entry.1 {
                        (entry.1, entry.2) = (missing, stage);
                    }
                }
                Why::Other(why) => add(key, value, why),
            }
        }
        for (key, (values, missing, stage)) in too_large {
            let bound = if values.len() > 1 { "at least " } else { "" };
            let stage = match stage {
                Some(stage) if self.found.iter().any(|found| found.candidate.pipeline > 1) => {
                    format!(" on stage {stage}")
                }
                Some(_) => String::new(),
                None => ", by states and activations alone".to_string(),
            };
            all.push(Lost { key, values, why: format!("does not fit by {bound}{}{stage}", bytes(missing)) });
        }
        all.sort_by_key(|lost| super::limits::SEARCHED.iter().position(|key| *key == lost.key));
        all
    }

    fn why(&self, class: Class, of: &ClassOf, winner: &Found) -> Why {
        let slowness = |found: &Found| found.seconds() / found.candidate.global as f64;
        let is_of = |candidate: &Candidate| Class::all_of(candidate).contains(&class);
        let found = self.found.iter().filter(|found| is_of(&found.candidate));
        if let Some(best) = found.min_by(|a, b| slowness(a).total_cmp(&slowness(b))) {
            let percent = 100.0 * (slowness(best) / slowness(winner) - 1.0);
            let cause = best.time.time().zip(winner.time.time()).map(|(best, winner)| cause(best, winner));
            let cause = cause.map_or(String::new(), |cause| format!(": {cause}"));
            return Why::Other(match percent {
                percent if percent < 0.05 => "as fast".to_string(),
                percent => format!("{percent:.1} % slower{cause}"),
            });
        }
        let outcomes = || self.outcomes.iter().filter(|(candidate, _)| is_of(candidate));
        let missing = outcomes().filter_map(|(_, outcome)| match outcome {
            Outcome::TooLarge(missing, stage) => Some((*missing, Some(*stage))),
            _ => None,
        });
        if let Some((missing, stage)) = missing.min() {
            return Why::TooLarge(missing, stage);
        }
        let impossible = outcomes().find_map(|(_, outcome)| match outcome {
            Outcome::Impossible(why) => Some(why.clone()),
            _ => None,
        });
        match (of.best, of.min_excess, impossible) {
            (_, _, Some(why)) => Why::Other(why),
            (Some((best, candidate)), _, None) => {
                let of_winner = self.estimate_of(&winner.candidate);
                let percent = of_winner.map_or(0.0, |of| {
                    100.0 * (best / (of.parts.seconds() / winner.candidate.global as f64) - 1.0)
                });
                let parts = self.estimate_of(&candidate).zip(of_winner);
                let cause = parts.map_or(String::new(), |(own, winner)| {
                    format!(": {}", cause_of_parts(&own.parts, &winner.parts))
                });
                Why::Other(format!("about {:.0} % slower, estimated{cause}", percent.max(0.0)))
            }
            (None, Some(missing), None) => Why::TooLarge(missing, None),
            (None, None, None) => Why::Other("was not tried".to_string()),
        }
    }

    pub(super) fn estimate_of(&self, candidate: &Candidate) -> Option<Estimate> {
        self.candidates.iter().find(|(other, _)| other == candidate).map(|(_, estimate)| *estimate)
    }

    /// Key and value of a class.
    fn words(&self, class: Class) -> (&'static str, String) {
        match class {
            Class::Global(size) => ("batch.global", size.to_string()),
            Class::Tensor(ranks) => ("parallel.tensor", ranks.to_string()),
            Class::Pipeline(ranks) => ("parallel.pipeline", ranks.to_string()),
            Class::Data(ranks) => ("parallel.data", ranks.to_string()),
            Class::Zero(stage) => ("parallel.zero", stage.to_string()),
            Class::Schedule(number) => ("parallel.schedule", self.axes.schedules[number].word()),
            Class::Micro(size) => ("batch.micro", size.to_string()),
            Class::Checkpointing(number) => ("memory.checkpointing", self.axes.checkpointing[number].clone()),
            Class::Placed(placed) => ("memory.optimizer", placed.words().to_string()),
            Class::SendsHalf(half) => ("precision.communicate", self.axes.on_the_wire(half)),
            Class::Defers(defers) => ("batch.reduce", if defers { "defer" } else { "each" }.to_string()),
        }
    }
}

enum Why {
    /// Bytes that are missing, and the stage, if it was planned.
    TooLarge(u64, Option<usize>),
    Other(String),
}

/// What takes most of the time by which a step is longer than another.
fn cause(own: &PhaseTime, winner: &PhaseTime) -> String {
    largest([
        ("kernels", own.compute_s - winner.compute_s),
        ("exposed copies", own.exposed_copy_s - winner.exposed_copy_s),
        ("updates on the host", own.exposed_host_s - winner.exposed_host_s),
        ("exposed collectives", own.exposed_collective_s - winner.exposed_collective_s),
        ("waits for other stages", own.exposed_message_s - winner.exposed_message_s),
    ])
}

fn cause_of_parts(own: &Parts, winner: &Parts) -> String {
    largest([
        ("kernels", own.kernels - winner.kernels),
        ("collectives of the tensor axis", own.tensor - winner.tensor),
        ("waits for other stages", own.bubble - winner.bubble),
        ("exposed gathers and reductions", own.data - winner.data),
        ("copies and updates of host memory", own.host - winner.host),
    ])
}

fn largest(parts: [(&str, f64); 5]) -> String {
    let largest = parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    largest.map_or(String::new(), |(name, _)| name.to_string())
}
