//! Requirements of `memory.update_in_backward`.

use super::check::refuse;
use super::{ConfigError, Float, RunConfig, Tier, Updates};

impl RunConfig {
    /// Refuses settings that need a statistic of all gradients before the first update, or gradients after it.
    pub(super) fn check_update_in_backward(&self) -> Result<(), ConfigError> {
        let memory = &self.memory;
        if !memory.update_in_backward {
            return Ok(());
        }
        let refused = |expected: &str| Err(refuse("memory.update_in_backward", true, expected));
        if self.optimizer.clip != 0.0 {
            let expected = format!(
                "needs optimizer.clip = 0 (it is {}): the norm by which gradients are clipped is known behind backward only",
                self.optimizer.clip
            );
            return refused(&expected);
        }
        if self.precision.compute == Float::F16 {
            return refused(
                "needs precision.compute = \"bf16\" or \"f32\": \"f16\" has a loss scale, and whether a step overflows is \
                 known behind backward only",
            );
        }
        let micro_batches = self.micro_batches();
        if micro_batches > 1 {
            let expected = format!(
                "needs one micro-batch per step, but each rank has {micro_batches}, and gradients are complete after the \
                 last one: raise batch.micro, or lower batch.global"
            );
            return refused(&expected);
        }
        if self.parallel.updates == Updates::Asynchronous {
            return refused("works with synchronous updates only: leave out parallel.updates");
        }
        if self.parallel.sequence_parallel {
            return refused(
                "does not work with parallel.sequence_parallel, which sums gradients of norms and biases over \
                 parallel.tensor behind backward: leave one of them out",
            );
        }
        if memory.delayed_update {
            return refused(
                "contradicts memory.delayed_update, which updates in the next step: leave one of them out",
            );
        }
        if memory.gradients_in_place {
            return refused(
                "keeps no gradients that could take the place of parameters: leave out memory.gradients_in_place",
            );
        }
        if memory.gradients != Tier::Device {
            return refused("keeps no gradients that could lie elsewhere: leave out memory.gradients");
        }
        Ok(())
    }
}
