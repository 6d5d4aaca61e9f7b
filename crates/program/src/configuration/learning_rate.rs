//! Notes about the learning rate: how it continues in a resumed run, and how a finished run may be continued.

use anyhow::{Result, bail};
use phalanx_checkpoint::Checkpoint;
use phalanx_optim::CountedSteps;
use phalanx_train::RunConfig;
use phalanx_train::state::{Updates, updates};

/// The steps that a run has left.
#[derive(Clone, Copy)]
pub struct Ahead<'a> {
    config: &'a RunConfig,
    /// Number of steps that are done.
    step: u64,
    /// The same as the rate counts them.
    counted: CountedSteps,
}

impl<'a> Ahead<'a> {
    /// All steps of a run.
    pub fn of_start(config: &'a RunConfig) -> Ahead<'a> {
        Ahead { config, step: 0, counted: CountedSteps::default() }
    }

    /// The steps behind a checkpoint.
    ///
    /// # Errors
    /// A checkpoint whose counts are invalid.
    pub fn of(config: &'a RunConfig, checkpoint: &Checkpoint) -> Result<Ahead<'a>> {
        let Updates { applied, skipped, restarted, .. } = updates(checkpoint)?;
        Ok(Ahead { config, step: checkpoint.step(), counted: CountedSteps { applied, skipped, restarted } })
    }

    /// The rate of step `number` of the run, from 1, if no further step is skipped.
    fn lr(&self, number: u64) -> f64 {
        let schedule = self.config.learning_rate();
        let applied = self.counted.applied + (number - 1).saturating_sub(self.step);
        schedule.lr(CountedSteps { applied, ..self.counted }.next(&schedule))
    }

    /// The rate of the last step that was applied.
    fn lr_of_last(&self) -> f64 {
        let schedule = self.config.learning_rate();
        let CountedSteps { applied, skipped, restarted } = self.counted;
        let offset = restarted.map_or(0, |restarted| restarted.skipped.min(skipped));
        schedule.lr((applied + offset).saturating_sub(1))
    }

    /// The steps of the run behind which the rate is at its minimum, each with the step at which that ends.
    fn decayed(&self) -> Vec<(u64, u64)> {
        let schedule = self.config.learning_rate();
        let (last, skipped) = (self.config.train.steps, self.counted.skipped);
        let (length, restart_step) = (schedule.steps_to_min(), schedule.restart_step);
        let first = length.saturating_add(skipped);
        match restart_step {
            None => vec![(first, last)],
            Some(restart) if restart > self.step => {
                vec![(first, restart), (restart.saturating_add(length), last)]
            }
            Some(restart) => {
                let restarted = self.counted.restarted.filter(|restarted| restarted.step == restart);
                let before = restarted.map_or(skipped, |restarted| restarted.skipped);
                vec![(restart.saturating_add(length).saturating_add(skipped - before), last)]
            }
        }
    }

    /// The steps that are left whose rate is 0, which change nothing: the first and the last of each part.
    fn zeros(&self) -> Vec<(u64, u64)> {
        let (config, last) = (self.config, self.config.train.steps);
        let parts = match (config.optimizer.lr == 0.0, config.schedule.min_lr == 0.0) {
            (true, _) => vec![(0, last)],
            (false, true) if config.schedule.kind.ends() => self.decayed(),
            _ => Vec::new(),
        };
        let left = parts.into_iter().map(|(from, to)| (from.max(self.step) + 1, to.min(last)));
        left.filter(|(first, last)| first <= last).collect()
    }

    /// Note on steps whose rate is 0; `None` if there are none. An error if a resumed run learns in no step that is left.
    ///
    /// # Errors
    /// Keys that mend it.
    pub fn refuse_zeros(&self) -> Result<Option<String>> {
        let (zeros, last) = (self.zeros(), self.config.train.steps);
        let Some(&[(first, _)]) = zeros.first_chunk::<1>() else { return Ok(None) };
        let parts: Vec<String> = zeros.iter().map(|(first, last)| format!("{first} to {last}")).collect();
        let parts = parts.join(" and ");
        let learned = zeros.iter().map(|(first, last)| last - first + 1).sum::<u64>() < last - self.step;
        let keys = self.keys_for_a_rate();
        if !learned && self.step > 0 {
            bail!(
                "the learning rate is 0 in every step that is left ({parts}), so none would change the model: {keys}; \
                 nothing was changed"
            );
        }
        let all = if first == 1 && !learned { ", which are all" } else { "" };
        Ok(Some(format!("the learning rate is 0 in steps {parts}{all}: they change nothing; {keys}")))
    }

    /// The keys that give the steps that are left a rate.
    fn keys_for_a_rate(&self) -> String {
        let RunConfig { optimizer, schedule, train, .. } = self.config;
        if optimizer.lr == 0.0 {
            return "optimizer.lr is 0: set it, as --set optimizer.lr=6e-4".to_string();
        }
        let low = format!("for a low rate that stays, --set schedule.min_lr={}", low_rate(optimizer.lr));
        let end = schedule.decay_steps.unwrap_or(train.steps);
        match self.step {
            0 => format!("{low}, or leave out schedule.decay_steps = {end} for a decay over all steps"),
            step => format!(
                "{low}; for a warm restart (warm-up and decay once more), --set schedule.restart_step={step}"
            ),
        }
    }
}

/// A hundredth of a rate with two digits, as text for a command.
fn low_rate(lr: f64) -> String {
    let rounded: f64 = format!("{:.1e}", lr / 100.0).parse().unwrap_or(lr / 100.0);
    format!("{rounded:e}")
}

/// A note about the learning rate of a resumed run, if a key on which it depends was changed.
pub fn note(before: &RunConfig, ahead: Ahead) -> Option<String> {
    let now = ahead.config;
    let changed = before.train.steps != now.train.steps || before.learning_rate() != now.learning_rate();
    (changed && ahead.step < now.train.steps).then(|| describe(before, ahead))
}

fn describe(before: &RunConfig, ahead: Ahead) -> String {
    let Ahead { config: now, step, .. } = ahead;
    let (was, last) = (Ahead { config: before, ..ahead }, now.train.steps);
    let done = if step > 0 { format!("{:.1e} in step {step}, ", was.lr_of_last()) } else { String::new() };
    let (next, end) = (ahead.lr(step + 1), ahead.lr(last));
    let mut text =
        format!("learning rate: {done}{next:.1e} in step {}, {end:.1e} in step {last}, the last", step + 1);
    let end_of_decay = ahead.decayed().last().map_or(last, |(end, _)| *end);
    if now.schedule.kind.ends() && end_of_decay < last {
        let stretched = Ahead { config: &decaying_over(now, last), ..ahead }.lr(step + 1);
        let restarted = Ahead { config: &restarted(now, step), ..ahead }.lr(step + 1);
        text += &format!(
            "; it stays at schedule.min_lr from step {end_of_decay} on. For another: \
             --set schedule.restart_step={step} (a warm restart: warm-up and decay once more, {restarted:.1e} in step {}), or \
             --set schedule.decay_steps={last} (one decay over all steps, {stretched:.1e} in step {})",
            step + 1,
            step + 1
        );
    }
    text
}

fn decaying_over(config: &RunConfig, steps: u64) -> RunConfig {
    let mut config = config.clone();
    (config.schedule.decay_steps, config.schedule.restart_step) = (Some(steps), None);
    config
}

fn restarted(config: &RunConfig, step: u64) -> RunConfig {
    let mut config = config.clone();
    config.schedule.restart_step = Some(step);
    config
}

/// Arguments that continue a finished run to twice as many steps. The rate stays at its minimum, so the loss does not
/// rise; a minimum of 0, at which nothing is learned, becomes a hundredth of the peak.
pub fn more_steps(config: &RunConfig) -> String {
    let more = format!("--set train.steps={}", config.train.steps.saturating_mul(2));
    let decays = config.schedule.kind.ends();
    if decays && config.schedule.min_lr == 0.0 {
        return format!("{more} --set schedule.min_lr={}", low_rate(config.optimizer.lr));
    }
    more
}

/// Arguments that continue a finished run with a warm restart; `None` for a rate that does not decay.
pub fn more_steps_with_restart(config: &RunConfig) -> Option<String> {
    let decays = config.schedule.kind.ends();
    let steps = config.train.steps;
    decays
        .then(|| format!("--set train.steps={} --set schedule.restart_step={steps}", steps.saturating_mul(2)))
}

#[cfg(test)]
mod tests {
    use phalanx_train::config::ScheduleKind;

    use super::*;

    /// At step 100.
    fn at(config: &RunConfig) -> Ahead<'_> {
        Ahead { config, step: 100, counted: CountedSteps { applied: 100, ..CountedSteps::default() } }
    }

    /// The steps whose rate is 0, of which the schedule tells each: with and without steps that were skipped.
    #[test]
    fn steps_without_a_rate_are_known_and_refused_where_no_other_is_left() {
        use ScheduleKind::{Constant, Cosine, Linear};
        for (kind, min_lr, decay, restart) in [
            (Cosine, 0.0, 100, None),
            (Linear, 0.0, 130, None),
            (Cosine, 0.0, 60, Some(150)),
            (Cosine, 0.0, 100, Some(100)),
            (Cosine, 0.0, 30, Some(90)),
            (Cosine, 0.0, 10, Some(120)),
            (Linear, 1e-4, 100, None),
            (Constant, 0.0, 100, None),
        ] {
            let mut config = config(200);
            (config.schedule.kind, config.schedule.min_lr) = (kind, min_lr);
            (config.schedule.decay_steps, config.schedule.restart_step) = (Some(decay), restart);
            for skipped in [0, 7] {
                let counted = CountedSteps { applied: 100 - skipped, skipped, restarted: None };
                let ahead = Ahead { config: &config, step: 100, counted };
                let zeros: Vec<u64> = (101..=200).filter(|number| ahead.lr(*number) == 0.0).collect();
                let parts = ahead.zeros().into_iter().flat_map(|(first, last)| first..=last);
                assert_eq!(parts.collect::<Vec<_>>(), zeros, "{kind:?} {decay} {restart:?} {skipped}");
                let said = ahead.refuse_zeros();
                match zeros.len() {
                    0 => assert_eq!(said.unwrap(), None),
                    100 => {
                        let refusal = said.unwrap_err().to_string();
                        let keys = ["101 to 200", "schedule.min_lr=1e-5", "schedule.restart_step=100"];
                        assert!(keys.iter().all(|key| refusal.contains(key)), "{refusal}");
                    }
                    _ => assert!(said.unwrap().is_some_and(|line| line.contains("rate is 0 in steps"))),
                }
            }
        }
        let mut still = config(200);
        (still.optimizer.lr, still.schedule.min_lr) = (0.0, 0.0);
        let line = Ahead::of_start(&still).refuse_zeros().unwrap().unwrap();
        assert!(line.contains("steps 1 to 200, which are all") && line.contains("optimizer.lr"), "{line}");
    }

    fn config(steps: u64) -> RunConfig {
        let mut config = RunConfig::default();
        (config.optimizer.lr, config.schedule.min_lr, config.schedule.warmup) = (1e-3, 1e-4, 10);
        config.train.steps = steps;
        config.schedule.decay_steps = config.decay_end();
        config
    }

    #[test]
    fn the_note_says_what_the_rate_was_is_and_will_be() {
        let before = config(100);
        let mut now = before.clone();
        now.train.steps = 200;
        let text = describe(&before, at(&now));
        for words in [
            "1.0e-4 in step 100, 1.0e-4 in step 101, 1.0e-4 in step 200, the last",
            "min_lr from step 100 on",
            "schedule.restart_step=100 (a warm restart: warm-up and decay once more, 9.1e-5 in step 101)",
            "schedule.decay_steps=200 (one decay over all steps, 5.9e-4 in step 101)",
        ] {
            assert!(text.contains(words), "no {words:?} in: {text}");
        }
        now.schedule.restart_step = Some(100);
        let text = describe(&before, at(&now));
        assert!(text.ends_with("9.1e-5 in step 101, 1.0e-4 in step 200, the last"), "{text}");
    }

    #[test]
    fn more_steps_never_raise_the_rate_above_its_minimum() {
        let mut finished = config(100);
        assert_eq!(more_steps(&finished), "--set train.steps=200");
        finished.schedule.min_lr = 0.0;
        assert_eq!(more_steps(&finished), "--set train.steps=200 --set schedule.min_lr=1e-5");
        let restart = "--set train.steps=200 --set schedule.restart_step=100";
        assert_eq!(more_steps_with_restart(&finished).as_deref(), Some(restart));
        finished.schedule.kind = ScheduleKind::Constant;
        assert_eq!(more_steps_with_restart(&finished), None);
        assert_eq!(more_steps(&finished), "--set train.steps=200");
    }
}
