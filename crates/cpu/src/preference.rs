//! The loss of preferences, from the losses of tokens.
//!
//! The numbers of a micro-batch are few beside those of its logits, so one thread computes them, in f64 and in order.

use phalanx_tensor::arguments::IGNORED;
use phalanx_tensor::preference::{Answer, PREFERENCE_SUMS};
use phalanx_tensor::{Preference, PreferenceLoss};

pub(crate) fn preference_loss(o: PreferenceLoss) {
    let [_, seq] = o.targets.dims();
    let targets: &[u32] = o.targets.as_slice();
    let (losses, references): (&[f32], &[f32]) = (o.losses.as_slice(), o.references.as_slice());
    let (weights, sums): (&mut [f32], &mut [f32]) = (o.weights.into_slice(), o.sums.into_slice());
    let (sums, of_sequences) = sums.split_at_mut(PREFERENCE_SUMS);
    let answer = |sequence: usize| {
        let rows = sequence * seq..(sequence + 1) * seq;
        let tokens = targets[rows.clone()].iter().filter(|target| **target != IGNORED).count();
        let loss: f64 = losses[rows].iter().map(|loss| f64::from(*loss)).sum();
        let reference = if o.preference.kind.has_reference() { references[2 * sequence] } else { 0.0 };
        Answer { log_probability: -loss, reference: reference.into(), tokens: tokens as f64 }
    };
    let answers: Vec<Answer> = (0..of_sequences.len()).map(answer).collect();
    of_sequences.iter_mut().zip(&answers).for_each(|(to, answer)| *to = answer.log_probability as f32);
    let mut totals = [0f64; PREFERENCE_SUMS];
    for (group, pairs) in answers.chunks(2 * o.preference.kl_pairs).enumerate() {
        let seconds: Vec<Answer> =
            pairs.chunks(2).filter(|pair| pair[1].tokens > 0.0).map(|pair| pair[1]).collect();
        let kl = Preference::distance(seconds.into_iter());
        for (index, pair) in pairs.chunks(2).enumerate() {
            let first = 2 * (group * o.preference.kl_pairs + index);
            let is_chosen = references[2 * first + 1] > 0.5;
            let loss = match pair[0].tokens > 0.0 {
                true => o.preference.of_pair([pair[0], pair[1]], kl, is_chosen),
                false => Default::default(),
            };
            totals.iter_mut().zip(loss.sums).for_each(|(total, sum)| *total += sum);
            for (sequence, derivative) in (first..).zip(loss.derivatives) {
                // A token's loss is minus the logarithm of its probability.
                weights[sequence * seq..(sequence + 1) * seq].fill(-derivative as f32);
            }
        }
    }
    sums.iter_mut().zip(totals).for_each(|(to, total)| *to = (total * f64::from(o.scale)) as f32);
}
