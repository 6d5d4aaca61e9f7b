//! Rules of updates and schedules against those of other programs: `tools/golden_optimizers.py`.

use phalanx_optim::rules::{Adafactor, Lion};
use phalanx_optim::schedule::{Decay, Fall, Warmup};
use phalanx_optim::{Schedule, UpdateRule, UpdateStep, UpdatedParameter};
use phalanx_tensor::Kind;
use safetensors::SafeTensors;

const STEPS: usize = 20;

/// Differences of single steps are those of a few additions of f32; a sign that differs would show as 2e-2.
const TOLERANCE: f32 = 2e-6;

fn floats(file: &SafeTensors, name: &str) -> (Vec<usize>, Vec<f32>) {
    let tensor = file.tensor(name).unwrap();
    let numbers = tensor.data().chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    (tensor.shape().to_vec(), numbers.collect())
}

#[test]
fn twenty_steps_are_those_of_other_programs() {
    let file = SafeTensors::deserialize(include_bytes!("golden/optimizers.safetensors")).unwrap();
    let rules: [(&str, &dyn UpdateRule); 2] = [
        ("lion", &Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 }),
        ("adafactor", &Adafactor { weight_decay: 0.1 }),
    ];
    for (kind, rule) in rules {
        for name in ["wide", "tall", "vector"] {
            let (shape, mut parameters) = floats(&file, &format!("initial/{name}"));
            let gradients = floats(&file, &format!("gradient/{name}")).1;
            let of = UpdatedParameter { name: name.into(), kind: Kind::Matrix, shape };
            let mut states: Vec<Vec<f32>> =
                rule.states(&of).iter().map(|state| vec![0.0; state.shape.iter().product()]).collect();
            for (at, gradient) in gradients.chunks(parameters.len()).enumerate() {
                let number = at as u64 + 1;
                let step = UpdateStep { number, lr: 1e-2, weight_decay: None, of: &of };
                let mut states: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
                rule.update(&step, &mut parameters, gradient, &mut states);
                if [1, 2, 3, STEPS as u64].contains(&number) {
                    let expected = floats(&file, &format!("{kind}/{number}/{name}")).1;
                    let apart =
                        |(is, expected): (&f32, &f32)| (is - expected).abs() / expected.abs().max(1.0);
                    let apart = parameters.iter().zip(&expected).map(apart).fold(0.0, f32::max);
                    assert!(apart <= TOLERANCE, "{kind}, {name}, step {number}: {apart:e}");
                }
            }
        }
    }
}

#[test]
fn schedules_are_those_of_transformers() {
    let file: serde_json::Value = serde_json::from_str(include_str!("golden/schedules.json")).unwrap();
    for (name, decay, min_lr) in [
        ("cosine", Decay::Cosine, 0.0),
        ("linear", Decay::Linear, 0.0),
        ("cosine_with_restarts", Decay::Restarts(3), 0.0),
        ("polynomial", Decay::Polynomial(2.0), 0.1),
        ("inverse_sqrt", Decay::InverseSqrt(5), 0.0),
        ("inverse_sqrt_timescale", Decay::InverseSqrt(20), 0.0),
        ("wsd_cosine", Decay::Last(10, Fall::Cosine), 0.1),
        ("wsd_linear", Decay::Last(10, Fall::Linear), 0.1),
        ("wsd_1-sqrt", Decay::Last(10, Fall::Sqrt), 0.1),
    ] {
        let warmup_shape = Warmup::FromZero;
        let schedule =
            Schedule { decay, lr: 1.0, min_lr, warmup: 5, warmup_shape, decay_steps: 30, restart_step: None };
        // Their WSD warms up from the lowest rate, ours from 0; their cosine rises again behind its end.
        let from = if name.starts_with("wsd") { 5 } else { 0 };
        for step in from..=30 {
            let (is, expected) = (schedule.lr(step), file[name][step as usize].as_f64().unwrap());
            assert!((is - expected).abs() < 1e-12, "{name}, step {step}: {is}, expected {expected}");
        }
    }
}
