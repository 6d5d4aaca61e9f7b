//! The loss of texts by a whole model, for `phalanx eval`: sequences of one length, so that a plan holds for all of them. Texts lie in them one behind the
//! other and do not see each other.

use std::convert::Infallible;
use std::sync::Arc;

use phalanx_layers::{Call, Context, Inputs, POSITIONS, Parameters, Rows, TARGETS};
use phalanx_models::Model;
use phalanx_plan::trace::{Memory, PhaseName};
use phalanx_plan::{MemoryError, MemoryPlan, plan_memory_of};
use phalanx_tensor::{Category, CrossEntropy, DType, Device, DeviceError, IGNORED};

use crate::jobs::sample::Generator;

/// Texts in a sequence; a number for each of its tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    tokens: Vec<u32>,
    /// The token to predict, or `IGNORED`.
    targets: Vec<u32>,
    /// The position in the text.
    positions: Vec<u32>,
}

impl Sequence {
    /// Puts texts into sequences of one length, in their order: at most `longest` tokens, and no more than all texts need. A text has ids, and which of them
    /// are predicted, each from those before it; at most `longest + 1` of them are used.
    pub fn pack(texts: &[(Vec<u32>, Vec<bool>)], longest: usize) -> Vec<Sequence> {
        let rows = |ids: &[u32]| ids.len().saturating_sub(1).min(longest);
        let length = texts.iter().map(|(ids, _)| rows(ids)).sum::<usize>().min(longest);
        let mut sequences: Vec<Sequence> = Vec::new();
        for (ids, predicted) in texts {
            let rows = rows(ids);
            if sequences.last().is_none_or(|last| last.tokens.len() + rows > length) {
                sequences.push(Sequence::default());
            }
            let last = sequences.last_mut().expect("one was added");
            last.tokens.extend(&ids[..rows]);
            let wanted = ids.iter().zip(predicted).skip(1).take(rows);
            last.targets.extend(wanted.map(|(id, predicted)| if *predicted { *id } else { IGNORED }));
            last.positions.extend(0..rows as u32);
        }
        for sequence in &mut sequences {
            let free = length - sequence.tokens.len();
            sequence.tokens.resize(length, 0);
            sequence.targets.resize(length, IGNORED);
            sequence.positions.extend(0..free as u32);
        }
        sequences
    }

    /// Number of tokens.
    pub fn length(&self) -> usize {
        self.tokens.len()
    }

    /// Number of tokens to predict.
    pub fn targets(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORED).count()
    }
}

impl Generator {
    /// The plans of the memories, in the order of `Memory::ALL`, for a generator that measures sequences like this one on a device of `threads` threads;
    /// `host_addressable` as in [`phalanx_tensor::DeviceFactory`].
    ///
    /// # Errors
    /// Memory that no number of bytes describes.
    pub fn plans(
        model: &dyn Model,
        compute: DType,
        sequence: &Sequence,
        (threads, host_addressable): (usize, bool),
    ) -> Result<[MemoryPlan; 3], MemoryError> {
        let device = Device::meta_of(threads, host_addressable);
        let generator = Generator::new(model, device.clone(), compute, |_, _| Ok::<(), Infallible>(()));
        let generator = generator.expect("nothing is read");
        generator.sum_of_losses(sequence).expect("a dry run does not fail");
        let trace = device.take_trace(0);
        let [device, host, disk] = Memory::ALL.map(|memory| plan_memory_of(&trace, memory));
        Ok([device?, host?, disk?])
    }

    /// The sum of the losses of the targets of a sequence.
    ///
    /// # Errors
    /// When the device failed.
    pub fn sum_of_losses(&self, sequence: &Sequence) -> Result<f32, DeviceError> {
        self.device.try_phase(PhaseName::Evaluate, || {
            let tokens = [1, sequence.length()];
            let upload = |_: usize, name: &str| {
                let numbers = match name {
                    TARGETS => &sequence.targets,
                    POSITIONS => &sequence.positions,
                    other => panic!("texts have no input {other}"),
                };
                let mut input =
                    self.device.alloc(DType::U32, tokens, Category::Activations, "generator.input");
                self.device.upload(numbers, input.view_mut());
                Arc::new(input)
            };
            let inputs = Inputs::new(&upload, 0);
            let whole = Context::new(&self.device, self.compute, tokens);
            let rows = Rows { documents: true, ..whole.rows };
            let cx = Context { keep: false, rows, ..whole }.with(&inputs);
            let x = self.blocks(&cx, &sequence.tokens, self.network.blocks.len());
            let own = self.head_parameters();
            let head = self.network.head.as_ref().expect("a whole model has a head");
            let call = Call { input_wanted: false, ..Call::new(Parameters::new(&own), x) };
            let (loss, _) =
                head.loss(&cx, call, CrossEntropy::scaled(1.0)).expect("a model on one rank does not fail");
            let [sum] = self.device.fetch([loss.view()])?;
            Ok(sum)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_lie_behind_each_other_in_sequences_of_one_length() {
        let text = |ids: &[u32], predicted: &[u32]| {
            (ids.to_vec(), ids.iter().map(|id| predicted.contains(id)).collect::<Vec<bool>>())
        };
        let texts = [text(&[1, 2, 3], &[1, 3]), text(&[4, 5], &[5]), text(&[6, 7, 8, 9, 10], &[9, 10])];
        let packed = Sequence::pack(&texts, 3);
        let sequence = |tokens: [u32; 3], targets: [u32; 3], positions: [u32; 3]| Sequence {
            tokens: tokens.to_vec(),
            targets: targets.to_vec(),
            positions: positions.to_vec(),
        };
        let none = IGNORED;
        let expected =
            [sequence([1, 2, 4], [none, 3, 5], [0, 1, 0]), sequence([6, 7, 8], [none, none, 9], [0, 1, 2])];
        assert_eq!(packed, expected);
        // No more tokens than there are.
        let short = Sequence::pack(&texts[..2], 9);
        assert_eq!(short, expected[..1]);
        assert_eq!(short[0].targets(), 2);
        let padded = Sequence::pack(&texts[1..], 4);
        assert_eq!(padded[0].tokens, [4, 0, 0, 0]);
        assert_eq!(
            (&padded[0].targets[..], &padded[0].positions[..]),
            (&[5, none, none, none][..], &[0, 0, 1, 2][..])
        );
        assert!(Sequence::pack(&[], 3).is_empty());
    }
}
