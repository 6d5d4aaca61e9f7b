//! A step with numbers that are not finite, as the run's last error describes it.

/// A step that was not applied, or only in part, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct NonFinite {
    /// The step.
    pub step: u64,
    /// The first tensor, on all ranks, that is not finite.
    pub first: Option<Found>,
    /// Loss of the step.
    pub loss: f32,
    /// Gradient norm of the step.
    pub grad_norm: f32,
    /// Loss scale of the step, where there is one.
    pub loss_scale: Option<f32>,
    /// Learning rate of the step.
    pub lr: f64,
    /// True if updates within backward changed parameters before it was found: their state is not saved.
    pub in_part: bool,
    /// Advice for the user.
    pub advice: String,
}

/// A tensor that is not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Description of the tensor, with its block and micro-batch.
    pub tensor: String,
    /// The lowest rank on which it is not finite.
    pub rank: usize,
    /// Number of elements there that are not finite.
    pub count: u64,
    /// Number of elements there.
    pub elements: u64,
    /// True if the gradients of every rank are finite, but their sum is not.
    pub in_sum: bool,
}

impl std::fmt::Display for NonFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let NonFinite { step, first, loss, grad_norm, loss_scale, lr, in_part, advice } = self;
        match first {
            Some(Found { tensor, rank, count, elements, .. }) => write!(
                f,
                "step {step}: {tensor} on rank {rank} is not finite ({} of {} elements), the first {}",
                grouped(*count),
                grouped(*elements),
                if *in_part { "that an update within backward has met" } else { "of the step" }
            )?,
            None if *in_part => write!(
                f,
                "step {step}: every gradient that was updated within backward is finite, but the loss, or the gradient of a table \
                 that stages share, is not, or the gradient norm exceeds f32"
            )?,
            None => write!(f, "step {step}: every tensor is finite, but the gradient norm exceeds f32")?,
        }
        let scale = loss_scale.map_or(String::new(), |scale| format!("loss scale {scale}, "));
        let applied = match in_part {
            false => "no rank applied this step",
            true => {
                "memory.update_in_backward had updated other parameters of this step before, so that nothing is saved, and the \
                 last checkpoint stands"
            }
        };
        write!(
            f,
            "; loss {loss}, gradient norm {grad_norm}, {scale}lr {lr:e}: training diverged, and {applied}; {advice}, then \
             start again or --resume"
        )
    }
}

/// 1048576 -> 1,048,576
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn large_numbers_are_grouped() {
        let numbers = [0, 7, 999, 1000, 1_048_576, 12_345_678].map(grouped);
        assert_eq!(numbers, ["0", "7", "999", "1,000", "1,048,576", "12,345,678"]);
    }
}
