//! Accuracy and F1 of a model that chooses one of several classes, from counts that ranks add up.

/// Shares of the evaluated samples, as scikit-learn defines them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClassScores {
    /// The share of samples whose largest logit is that of their class.
    pub accuracy: f32,
    /// Mean of the F1 of each class that samples have or are given.
    pub f1_macro: f32,
    /// F1 of the second of two classes.
    pub f1: Option<f32>,
}

/// Counts of each class: samples that have it, samples that were given it, samples of which both are true. In f32, which ranks can
/// add: exact below 2^24.
#[derive(Clone, Debug)]
pub(crate) struct ClassCounts(Vec<[f32; 3]>);

impl ClassCounts {
    /// No sample, of so many classes.
    pub(crate) fn new(classes: usize) -> ClassCounts {
        ClassCounts(vec![[0.0; 3]; classes])
    }

    /// Adds samples with these logits, `[samples, classes]`, and labels; a label beyond the classes does not count.
    pub(crate) fn add(&mut self, logits: &[f32], labels: &[u32]) {
        let classes = self.0.len();
        for (logits, label) in logits.chunks(classes).zip(labels) {
            let label = *label as usize;
            if label >= classes {
                continue;
            }
            // Of equal ones the first, as argmax of PyTorch.
            let larger = |best: usize, class: usize| if logits[class] > logits[best] { class } else { best };
            let given = (1..classes).fold(0, larger);
            self.0[label][0] += 1.0;
            self.0[given][1] += 1.0;
            self.0[label][2] += f32::from(u8::from(label == given));
        }
    }

    /// The counts as one row of numbers.
    pub(crate) fn numbers(&self) -> &[f32] {
        self.0.as_flattened()
    }

    /// The counts of such numbers, summed over ranks.
    pub(crate) fn of(numbers: &[f32]) -> ClassCounts {
        ClassCounts(numbers.as_chunks().0.to_vec())
    }

    /// The scores; None without a sample.
    pub(crate) fn scores(&self) -> Option<ClassScores> {
        let sum = |which: usize| self.0.iter().map(|counts| f64::from(counts[which])).sum::<f64>();
        let f1 = |[label, given, both]: &[f32; 3]| 2.0 * both / (label + given);
        let seen: Vec<f32> = self.0.iter().filter(|counts| counts[0] + counts[1] > 0.0).map(f1).collect();
        let second = match &self.0[..] {
            [_, second] if second[0] + second[1] > 0.0 => Some(f1(second)),
            [_, _] => Some(0.0),
            _ => None,
        };
        let (accuracy, f1_macro) = ((sum(2) / sum(0)) as f32, seen.iter().sum::<f32>() / seen.len() as f32);
        (!seen.is_empty()).then_some(ClassScores { accuracy, f1_macro, f1: second })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(classes: usize, given: &[usize], labels: &[u32]) -> Option<ClassScores> {
        let mut counts = ClassCounts::new(classes);
        for (given, label) in given.iter().zip(labels) {
            let logits: Vec<f32> = (0..classes).map(|class| f32::from(u8::from(class == *given))).collect();
            counts.add(&logits, &[*label]);
        }
        ClassCounts::of(counts.numbers()).scores()
    }

    /// Values of `accuracy_score` and `f1_score` of scikit-learn.
    #[test]
    fn scores_are_those_of_scikit_learn() {
        let near = |got: f32, expected: f32| assert!((got - expected).abs() < 1e-6, "{got} for {expected}");
        let two = scored(2, &[0, 1, 1, 0, 1], &[0, 1, 0, 1, 1]).unwrap();
        near(two.accuracy, 0.6);
        near(two.f1_macro, 0.583_333_3);
        near(two.f1.unwrap(), 0.666_666_7);
        // The fourth class does not occur, and the third is given once, wrongly.
        let four = scored(4, &[0, 1, 2, 1, 0], &[0, 1, 1, 1, 1]).unwrap();
        near(four.accuracy, 0.6);
        near(four.f1_macro, (2.0 / 3.0 + 2.0 / 3.0) / 3.0);
        assert_eq!(four.f1, None);
        assert_eq!(scored(2, &[0], &[u32::MAX]), None);
    }
}
