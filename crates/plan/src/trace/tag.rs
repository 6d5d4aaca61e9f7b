//! Tags of messages: what both ends must agree on.

/// A tag of a pipeline's messages, which no number of a user's own below 2^63 is.
const PIPELINE: u64 = 1 << 63;

/// The tag of what stage `stage_to` gets of a micro-batch: activations (`forward`) or their gradients.
pub fn micro_batch_tag(stage_to: usize, micro_batch: usize, forward: bool) -> u64 {
    debug_assert!(stage_to < 1 << 23 && micro_batch < 1 << 39, "stage {stage_to}, micro-batch {micro_batch}");
    PIPELINE | (stage_to as u64) << 40 | (micro_batch as u64) << 1 | u64::from(forward)
}

/// The tag of the same message of a later micro-batch; a number of a user's own stays.
pub fn later_tag(tag: u64, micro_batches: usize) -> u64 {
    if tag & PIPELINE == 0 { tag } else { tag + ((micro_batches as u64) << 1) }
}

/// Describes the content of a message, to follow its size: `, activations of micro-batch 3 for stage 1`, or ` with tag 7`.
pub fn describe_tag(tag: u64) -> String {
    if tag & PIPELINE == 0 {
        return format!(" with tag {tag}");
    }
    let (stage, micro_batch) = (tag >> 40 & 0x7f_ffff, tag >> 1 & 0x7f_ffff_ffff);
    let what = if tag & 1 == 1 { "activations" } else { "gradients" };
    format!(", {what} of micro-batch {micro_batch} for stage {stage}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_say_what_they_carry() {
        assert_eq!(describe_tag(7), " with tag 7");
        for (stage, micro_batch) in [(0, 0), (1, 3), ((1 << 23) - 1, (1 << 39) - 1)] {
            for (forward, what) in [(true, "activations"), (false, "gradients")] {
                assert_eq!(
                    describe_tag(micro_batch_tag(stage, micro_batch, forward)),
                    format!(", {what} of micro-batch {micro_batch} for stage {stage}")
                );
            }
        }
    }
}
