//! Notes about the learning rate: how it continues in a resumed run, and how a finished run may be continued.

use phalanx_checkpoint::Checkpoint;
use phalanx_train::RunConfig;
use phalanx_train::config::ScheduleKind;

/// A note about the learning rate of a resumed run, if a key on which it depends was changed.
pub fn note(before: &RunConfig, now: &RunConfig, checkpoint: &Checkpoint) -> Option<String> {
    let changed = before.train.steps != now.train.steps || before.learning_rate() != now.learning_rate();
    let step = checkpoint.step();
    if !changed || step >= now.train.steps {
        return None;
    }
    // Steps that overflowed were not applied, and do not count.
    let applied = checkpoint.state()["updates"]["applied"].as_u64().unwrap_or(step);
    Some(describe(before, now, step, applied))
}

fn describe(before: &RunConfig, now: &RunConfig, step: u64, applied: u64) -> String {
    let (was, is) = (before.learning_rate(), now.learning_rate());
    let last = now.train.steps;
    let done = match applied.checked_sub(1) {
        Some(update) => format!("{:.1e} in step {step}, ", was.lr(update)),
        None => String::new(),
    };
    let (next, end) = (is.lr(applied), is.lr(applied + (last - step - 1)));
    let mut text =
        format!("learning rate: {done}{next:.1e} in step {}, {end:.1e} in step {last}, the last", step + 1);
    let end_of_decay = is.decay_steps.saturating_add(is.restart_step.unwrap_or(0));
    if now.schedule.kind != ScheduleKind::Constant && end_of_decay < last {
        let stretched = decaying_over(now, last).learning_rate().lr(applied);
        text += &format!(
            "; it stays at schedule.min_lr from step {end_of_decay} on. For another: \
             --set schedule.restart_step={step} (a warm restart: warm-up and decay once more, {:.1e} in step {}), or \
             --set schedule.decay_steps={last} (one decay over all steps, {stretched:.1e} in step {})",
            restarted(now, step).learning_rate().lr(applied.max(step)),
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
    let decays = config.schedule.kind != ScheduleKind::Constant;
    if decays && config.schedule.min_lr == 0.0 {
        return format!("{more} --set schedule.min_lr={:e}", config.optimizer.lr / 100.0);
    }
    more
}

/// Arguments that continue a finished run with a warm restart; `None` for a rate that does not decay.
pub fn more_steps_with_restart(config: &RunConfig) -> Option<String> {
    let decays = config.schedule.kind != ScheduleKind::Constant;
    let steps = config.train.steps;
    decays
        .then(|| format!("--set train.steps={} --set schedule.restart_step={steps}", steps.saturating_mul(2)))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let text = describe(&before, &now, 100, 100);
        for words in [
            "1.0e-4 in step 100, 1.0e-4 in step 101, 1.0e-4 in step 200, the last",
            "min_lr from step 100 on",
            "schedule.restart_step=100 (a warm restart: warm-up and decay once more, 9.1e-5 in step 101)",
            "schedule.decay_steps=200 (one decay over all steps, 5.9e-4 in step 101)",
        ] {
            assert!(text.contains(words), "no {words:?} in: {text}");
        }
        now.schedule.restart_step = Some(100);
        let text = describe(&before, &now, 100, 100);
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
