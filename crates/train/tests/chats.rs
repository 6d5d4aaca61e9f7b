//! Runs on chats: the loss is the mean over the tokens of answers, each predicted from its own chat, however chats lie in sequences.

use std::convert::Infallible;
use std::sync::Arc;

use phalanx_cpu::{Cpu, CpuFactory};
use phalanx_data::{ChatExample, ChatFiles, Tokenizer};
use phalanx_layers::ParameterSpec;
use phalanx_models::{Arch, Keys, Model};
use phalanx_tensor::{Arena, DType, Device};
use phalanx_train::chats::{self, Chats};
use phalanx_train::config::{Order, Pack};
use phalanx_train::learned::Learned;
use phalanx_train::measured::Sequence;
use phalanx_train::sample::Generator;
use phalanx_train::{Dataset, RunConfig, Spec, Training};

const SEQ: usize = 224;

/// Sums of at most 256 terms (tokens of a row, trained tokens of all) in another order, in f32.
const TOLERANCE: f64 = 256.0 / 16_777_216.0;

fn decoder() -> Arc<dyn Model> {
    let sizes = [("layers", 2), ("hidden", 32), ("heads", 4), ("kv_heads", 2), ("intermediate", 64)];
    let mut keys = Keys::default();
    sizes.into_iter().for_each(|(key, count)| keys.set(key, count));
    Arch::named("llama").unwrap().model(&keys, 256, SEQ).unwrap()
}

/// Chats of one and two answers, some of which share a sequence; the last is cut.
fn records(count: usize) -> String {
    let one = |number: usize| {
        let (question, answer) =
            ("why ".repeat(1 + number % 3), "so ".repeat(if number == 8 { 60 } else { 1 + number * 3 % 4 }));
        let more = match number % 2 {
            0 => String::new(),
            _ => r#", {"role": "user", "content": "?"}, {"role": "assistant", "content": "!!"}"#.to_string(),
        };
        format!(
            r#"{{"messages": [{{"role": "user", "content": "{question}"}}, {{"role": "assistant", "content": "{answer}"}}{more}]}}"#
        )
    };
    (0..count).map(one).collect::<Vec<_>>().join("\n")
}

fn config(path: &str, pack: Pack) -> RunConfig {
    let mut config = RunConfig::default();
    (config.model.arch, config.model.seq, config.data.pack) = (Arch::named("llama").unwrap(), SEQ, pack);
    (config.data.chat, config.data.template) = (Some(vec![path.into()].into()), Some("chatml".to_string()));
    (config.data.order, config.data.validation) = (Order::Sequential, 0.0);
    config.train.threads = Some(1);
    config
}

/// The mean loss over trained tokens, each predicted from the tokens of its chat before it, by the initial parameters.
fn by_definition(model: &dyn Model, seed: u64, examples: &[ChatExample]) -> f64 {
    let fill = |spec: &ParameterSpec, values: &mut [f32]| {
        spec.init.fill(seed, &spec.name, 0, values);
        Ok::<(), Infallible>(())
    };
    let device = Device::new(Cpu::new(1), Arena::heap());
    let generator = Generator::new(model, device, DType::F32, fill).unwrap();
    let (mut sum, mut count) = (0.0, 0);
    for ChatExample { ids, trained, .. } in examples {
        for at in (1..ids.len().min(SEQ)).filter(|at| trained[*at]) {
            let logits = generator.logits(&ids[..at]);
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let total: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
            sum += total.ln() - f64::from(logits[ids[at] as usize] - max);
            count += 1;
        }
    }
    let cut = |ChatExample { ids, trained, .. }: &ChatExample| {
        let kept = ids.len().min(SEQ);
        (ids[..kept].to_vec(), trained[..kept].to_vec())
    };
    let packed = Sequence::pack(&examples.iter().map(cut).collect::<Vec<_>>(), SEQ);
    let counted: usize = packed.iter().map(Sequence::targets).sum();
    let of_all: f64 = packed.iter().map(|one| f64::from(generator.sum_of_losses(one).unwrap())).sum();
    assert!(counted == count as usize && (of_all - sum).abs() < TOLERANCE * sum, "{of_all} for {sum}");
    sum / f64::from(count)
}

#[test]
fn the_loss_is_that_of_answers_alone_packed_or_not_on_every_mesh() {
    let model = decoder();
    for count in [2, 9] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chats.jsonl");
        std::fs::write(&path, records(count)).unwrap();
        let given = path.display().to_string();
        let first = config(&given, Pack::Documents);
        let (encoder, _) = chats::encoder(&first.data, Tokenizer::byte()).unwrap();
        let examples = encoder.examples(&ChatFiles::read(&[path], None).unwrap(), count).unwrap();
        let expected = by_definition(&*model, first.train.seed, &examples);
        for pack in [Pack::Documents, Pack::Off] {
            let folder = tempfile::tempdir().unwrap();
            let chats = Chats::encode(&config(&given, pack), &Learned::default(), 2, &mut |_| {}).unwrap();
            let rows = chats.counts().0;
            assert!(if pack == Pack::Off { rows == count } else { rows < count }, "{rows} rows");
            chats.prepare(folder.path()).unwrap();
            for mesh @ [pipeline, tensor] in [[1, 1], [2, 1], [1, 2]] {
                if rows < pipeline {
                    continue;
                }
                let mut config = config(&given, pack);
                (config.batch.global, config.batch.micro) = (rows, Some(1));
                (config.parallel.pipeline, config.parallel.tensor) = (pipeline, tensor);
                let spec = Spec::new(&config, Arc::clone(&model), 0, 1).unwrap();
                let data = Dataset::open(&config, folder.path()).unwrap();
                let training = Training::new(spec, data, 1).unwrap();
                let losses = training.on_threads(&CpuFactory::new()).unwrap().swap_remove(0).unwrap();
                let apart = (f64::from(losses[0]) - expected).abs() / expected;
                assert!(apart < TOLERANCE, "{count} chats, {pack:?}, {mesh:?}: {losses:?} for {expected}");
            }
        }
    }
}
