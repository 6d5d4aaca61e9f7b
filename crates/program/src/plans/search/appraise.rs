//! The plans of a search: candidates are appraised in the order of their estimates, and what is proposed is planned as `train` plans it.

use std::collections::HashSet;

use anyhow::{Context, Result, bail};
use phalanx_train::RunPlan;
use phalanx_train::appraisal::StepTimes;

use super::candidate::Candidate;
use super::estimate::Estimate;
use super::lost::Class;
use super::queue::Queue;
use super::work::{in_parallel, spec_of};
use super::{Found, Outcome, SHOWN, Search, Settings, Subject};
use crate::plans::budgets::{self, Budget};
use crate::plans::planned::{self, Planned};
use crate::plans::step_time::StepTime;
use phalanx_drawing::report::{bytes, plural};

/// Candidates that are appraised at once. The number decides which are, so it does not depend on the machine.
pub(super) const WAVE: usize = 4;

/// Candidates that are appraised for the winner and the next, and for those that lose, at most.
const APPRAISED: usize = 48;
const APPRAISED_LOST: usize = 16;

/// The same, in multiples, where none was found.
const LONGEST_WITHOUT: f64 = 3.0;

/// Times that another candidate of a class that lost is appraised, where the first does not fit.
const TRIES_LOST: usize = 3;

/// Share of its memory that must be left where not all ranks have been planned.
const SLACK: f64 = 0.03;

impl Search<'_> {
    /// Appraises candidates in the order of their estimates, until what is left is slower than what was found.
    pub(super) fn appraise(&mut self, subject: &dyn Subject, is_late: &dyn Fn(f64) -> bool) -> Result<()> {
        let mut queue = Queue::of(&self.candidates);
        let mut is_over = false;
        while !is_over && self.outcomes.len() < APPRAISED {
            if is_late(if self.found.is_empty() { LONGEST_WITHOUT } else { 1.0 }) {
                self.is_cut = true;
                break;
            }
            let mut wave = Vec::new();
            let slowest = self.slowest_shown();
            while wave.len() < WAVE {
                let next = queue.next(&self.candidates, &self.step_times);
                let Some((number, _)) =
                    next.filter(|(_, expected)| slowest.is_none_or(|slowest| *expected <= slowest))
                else {
                    is_over = true;
                    break;
                };
                let (candidate, estimate) = &self.candidates[number];
                if !self.is_too_large(candidate, estimate) {
                    wave.push(*candidate);
                }
            }
            self.appraise_all(subject, &wave);
        }
        if self.found.is_empty() {
            bail!("{}", self.nothing_fits());
        }
        self.sort_found();
        Ok(())
    }

    fn sort_found(&mut self) {
        let slowness = |found: &Found| found.seconds() / found.candidate.global as f64;
        self.found.sort_by(|a, b| slowness(a).total_cmp(&slowness(b)).then(a.candidate.cmp(&b.candidate)));
        self.leave_out_equal();
    }

    /// Seconds of the slowest that would be shown for a sequence, if there are as many as are shown.
    fn slowest_shown(&self) -> Option<f64> {
        let mut times: Vec<f64> =
            self.found.iter().map(|found| found.seconds() / found.candidate.global as f64).collect();
        times.sort_by(f64::total_cmp);
        times.get(SHOWN - 1).copied()
    }

    /// Returns whether a candidate needs as much as one that did not fit, or more than there is if its estimate falls as short as those of
    /// candidates like it did.
    fn is_too_large(&self, candidate: &Candidate, estimate: &Estimate) -> bool {
        let short = self.bytes_needed.min_expected(candidate);
        estimate.bytes as f64 * short > self.device_bytes as f64
            || self.failed.iter().any(|other| candidate.needs_as_much_as(other))
    }

    /// Notes how the memory and the step of a plan compare with their estimates.
    fn note_multiples(&mut self, candidate: &Candidate, planned: &Planned, times: &StepTimes) {
        let Some(estimate) = self.estimate_of(candidate) else { return };
        let needed = planned.needed_by_one(planned::needed_on_device) as f64 / estimate.bytes.max(1) as f64;
        self.bytes_needed.note(candidate, needed);
        let longest = times.iter().flatten().map(|time| time.seconds).fold(0.0, f64::max);
        if longest > 0.0 {
            self.step_times.note(candidate, longest / estimate.parts.seconds());
        }
    }

    /// Plans candidates, one rank of each stage.
    pub(super) fn appraise_all(&mut self, subject: &dyn Subject, wave: &[Candidate]) {
        let mut specs = Vec::new();
        for candidate in wave {
            let settings = self.axes.settings(candidate, self.block);
            let made = subject.resolved(&settings).and_then(|(resolved, evaluated)| {
                let spec = spec_of(&resolved, evaluated)?;
                Ok((resolved.config, spec))
            });
            match made {
                Ok((config, spec)) => specs.push((*candidate, settings, config, spec)),
                Err(error) => {
                    self.outcomes.insert(*candidate, Outcome::Impossible(format!("{error:#}")));
                }
            }
        }
        let machine = self.machine;
        let appraised = in_parallel(&specs, |(_, _, _, spec)| RunPlan::appraised(spec.clone(), machine));
        for ((candidate, settings, config, _), appraised) in specs.into_iter().zip(appraised) {
            let outcome = match appraised {
                Err(error) => Outcome::Impossible(error.to_string()),
                Ok((plan, times)) => {
                    let planned = Planned::of_one_rank(config, plan);
                    self.note_multiples(&candidate, &planned, &times);
                    self.judge(subject, (candidate, settings), planned, times)
                }
            };
            match outcome {
                Outcome::Fits(found) => {
                    self.outcomes.insert(candidate, Outcome::Found);
                    self.found.push(*found);
                }
                other => {
                    if let Outcome::TooLarge(..) = other {
                        self.failed.push(candidate);
                    }
                    self.outcomes.insert(candidate, other);
                }
            }
        }
    }

    fn judge(
        &self,
        subject: &dyn Subject,
        (candidate, settings): (Candidate, Settings),
        planned: Planned,
        times: StepTimes,
    ) -> Outcome {
        let limits = subject.budgets(&planned);
        if let Some(too_large) = too_large(&planned, &limits) {
            return too_large;
        }
        let time = StepTime::of_times(&planned, self.machine, times);
        if time.seconds().is_none() {
            return Outcome::Impossible("the profile of the machine lacks a rate that it needs".to_string());
        }
        let share = |need: &(u64, u64)| need.0 as f64 / need.1.max(1) as f64;
        let needs = limits.iter().map(|budget| (budget.needed(&planned), budget.bytes()));
        let need = needs.max_by(|a, b| share(a).total_cmp(&share(b))).unwrap_or((0, u64::MAX));
        Outcome::Fits(Box::new(Found { candidate, settings, planned, time, need }))
    }

    /// Plans what is proposed from the text of its configuration, and leaves out what does not fit: the first as `train` plans it, and others
    /// where little is left.
    pub(super) fn propose(&mut self, subject: &dyn Subject) -> Result<()> {
        let mut at = 0;
        while at < self.found.len().min(SHOWN) {
            let found = &self.found[at];
            let (needed, bytes) = found.need;
            let is_close = needed as f64 > (1.0 - SLACK) * bytes as f64;
            if at > 0 && (!is_close || found.planned.each_stands_for() == 1) {
                at += 1;
                continue;
            }
            let text = subject.text(&found.settings)?;
            let outcome = match subject.planned(&text) {
                Err(error) => Outcome::Impossible(format!("{error:#}")),
                Ok(planned) => match too_large(&planned, &subject.budgets(&planned)) {
                    Some(too_large) => too_large,
                    None => {
                        self.found[at].planned = planned;
                        if at == 0 {
                            self.text = text;
                        }
                        at += 1;
                        continue;
                    }
                },
            };
            let found = self.found.remove(at);
            self.outcomes.insert(found.candidate, outcome);
        }
        if self.found.is_empty() {
            bail!("{}", self.nothing_fits());
        }
        Ok(())
    }

    /// Appraises the best of each class that lost and is not known yet.
    pub(super) fn appraise_lost(&mut self, subject: &dyn Subject, is_late: &dyn Fn() -> bool) -> Result<()> {
        let winner = self.found.first().context("something was found")?.candidate;
        let until = self.outcomes.len() + APPRAISED_LOST;
        // The best of a class may not fit, and then another.
        for _ in 0..TRIES_LOST {
            let known: HashSet<Class> =
                self.found.iter().flat_map(|found| Class::all_of(&found.candidate)).collect();
            let mut wanted: HashSet<Class> =
                self.classes.keys().filter(|class| !known.contains(class)).copied().collect();
            let mut unknown = Vec::new();
            for (candidate, estimate) in self.step_times.in_expected_order(&self.candidates) {
                if wanted.is_empty() {
                    break;
                }
                let of = Class::all_of(candidate);
                let is_new = of.iter().any(|class| wanted.contains(class))
                    && !self.outcomes.contains_key(candidate)
                    && !self.is_too_large(candidate, estimate);
                if is_new {
                    wanted.retain(|class| !of.contains(class));
                    unknown.push(*candidate);
                }
            }
            for wave in unknown.chunks(WAVE) {
                if is_late() || self.outcomes.len() >= until {
                    break;
                }
                self.appraise_all(subject, wave);
            }
        }
        // The estimates of some were wrong.
        self.sort_found();
        if self.found[0].candidate != winner {
            self.propose(subject)?;
        }
        Ok(())
    }

    /// Why no candidate fits.
    pub(super) fn nothing_fits(&self) -> String {
        let planned = self.outcomes.values().filter_map(|outcome| match outcome {
            Outcome::TooLarge(missing, stage) => Some((*missing, *stage)),
            _ => None,
        });
        let estimated = self.classes.values().filter_map(|of| of.min_excess).min();
        let impossible = self.outcomes.values().find_map(|outcome| match outcome {
            Outcome::Impossible(why) => Some(why.as_str()),
            _ => None,
        });
        let why = match (planned.min(), estimated, impossible) {
            (Some((missing, stage)), _, _) => {
                format!("the smallest is {} too large on stage {stage}", bytes(missing))
            }
            (None, _, Some(why)) => why.to_string(),
            (None, Some(missing), None) => {
                format!("states and activations alone are {} too large", bytes(missing))
            }
            (None, None, None) => "nothing was tried".to_string(),
        };
        format!(
            "nothing that was tried fits {} with {} each: {why}; use more devices or hosts, or a smaller model, model.seq or batch.global",
            plural(self.ranks, "device"),
            bytes(self.device_bytes)
        )
    }
}

/// The bytes by which a plan exceeds a memory, and the stage with most.
fn too_large(planned: &Planned, limits: &[Budget]) -> Option<Outcome> {
    let exceeded = budgets::exceeded(planned, limits)?;
    let need = exceeded.need().unwrap_or(planned::needed_by);
    let spec = &planned.plan.spec;
    let largest = planned.plan.ranks.iter().max_by_key(|rank| need(spec, rank))?;
    let stage = spec.mesh.axes.coordinates(largest.rank).pipeline;
    Some(Outcome::TooLarge(exceeded.needed(planned) - exceeded.bytes(), stage))
}
