//! Sampling with a key/value cache against computing the whole context for every token.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_layers::ParameterSpec;
use phalanx_models::{Gpt2, Model};
use phalanx_system::random::SplitMix64;
use phalanx_tensor::{Arena, DType, Device};
use phalanx_train::sample::{Generator, Sampling};

/// A GPT-2 whose logits differ clearly from token to token.
fn generator(positions: usize, heads: usize, hidden: usize, compute: DType) -> Generator {
    let model = Gpt2 { layers: 2, hidden, heads, vocab: 61, positions, ..Gpt2::default() };
    let model: Arc<dyn Model> = model.into();
    let device = Device::new(Cpu::new(2), Arena::heap());
    let mut random = SplitMix64::new(9);
    // Small embeddings and no biases: the next token follows from the context, and is not the same all the time.
    let fill = |spec: &ParameterSpec, values: &mut [f32]| {
        let name = &spec.name;
        let (mean, width) = match () {
            _ if name.ends_with(".bias") => (0.0, 0.02),
            _ if name.contains(".ln_") => (1.0, 0.2),
            _ if name.contains(".wte.") || name.contains(".wpe.") => (0.0, 0.2),
            _ => (0.0, 2.0),
        };
        values.iter_mut().for_each(|x| *x = mean + width * (random.next_fraction() as f32 - 0.5));
        Ok::<(), Infallible>(())
    };
    Generator::new(&*model, device, compute, fill).unwrap()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// Greedy tokens, computed as the definition says: the last `positions` tokens, whole, for every token.
fn whole(generator: &Generator, prompt: &[u32], count: usize, positions: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let logits = generator.logits(&tokens[tokens.len().saturating_sub(positions)..]);
        let first_max = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
        tokens.push((0..logits.len()).fold(0, first_max) as u32);
    }
    tokens
}

fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..Sampling::default() }
}

fn extended(generator: &Generator, prompt: &[u32], count: usize, how: Sampling) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    generator.extend(&mut tokens, count, how, |_| Ok::<(), Infallible>(())).unwrap();
    tokens
}

#[test]
fn cached_logits_are_those_of_the_whole_context_bit_for_bit() {
    // Beyond one tile of keys (128) and one panel of queries (16 or 32); heads of an odd size.
    let shapes = [(2, 32, 1), (3, 27, 40), (1, 16, 131)];
    let types = [DType::F32, DType::BF16, DType::F16];
    for ((heads, hidden, prompt), compute) in shapes.into_iter().zip(types) {
        let (positions, length) = (160, 170);
        let generator = generator(positions, heads, hidden, compute);
        let tokens: Vec<u32> = (0..length as u32).map(|i| (i * i + 7 * i) % 61).collect();
        let mut growing = generator.growing(length, 1);
        for end in prompt..length {
            let context = &tokens[end.saturating_sub(positions)..end];
            let (cached, whole) = (growing.logits(&tokens[..end]), generator.logits(context));
            assert_eq!(
                bits(&cached),
                bits(&whole),
                "{heads} heads of {hidden}, {compute:?}: after {end} tokens"
            );
        }
    }
}

/// A chat goes on in its cache as far as its text begins as before; another begins in it, too.
#[test]
fn texts_that_begin_alike_share_a_cache() {
    let generator = generator(40, 2, 32, DType::F32);
    let text =
        |seed: u32, length: u32| (0..length).map(|i| (i * i + seed * i + 3) % 61).collect::<Vec<u32>>();
    let mut growing = generator.growing(12, 3);
    let first = text(5, 9);
    let turn = [&first[..], &text(2, 7)].concat();
    let other = [&turn[..11], &text(4, 20)].concat();
    for prompt in [&first, &turn, &other, &text(7, 50), &first, &text(1, 3)] {
        let (mut shared, mut alone) = (prompt.clone(), prompt.clone());
        let how = Sampling { shift: 3, ..greedy() };
        growing.extend(&mut shared, 8, how, |_| Ok::<(), Infallible>(())).unwrap();
        generator.extend(&mut alone, 8, how, |_| Ok::<(), Infallible>(())).unwrap();
        assert_eq!(shared, alone, "after {} tokens", prompt.len());
    }
}

#[test]
fn greedy_tokens_do_not_depend_on_the_cache() {
    let positions = 24;
    let generator = generator(positions, 2, 32, DType::F32);
    let mut distinct: BTreeSet<u32> = BTreeSet::new();
    // Prompts that are short, of the context's length, and longer; texts that grow beyond it.
    for length in [1, 5, 23, 24, 25, 60] {
        let prompt: Vec<u32> = (0..length).map(|i| (i * 17 + 3) % 61).collect();
        let expected = whole(&generator, &prompt, 40, positions);
        distinct.extend(&expected[length as usize..]);
        assert_eq!(extended(&generator, &prompt, 40, greedy()), expected, "prompt of {length}");
    }
    assert!(distinct.len() >= 5, "{distinct:?}");
}

#[test]
fn a_larger_shift_drops_that_many_tokens_at_once() {
    let (positions, shift) = (24, 10);
    let generator = generator(positions, 2, 32, DType::F32);
    let prompt = [3, 20, 37];
    let mut expected = prompt.to_vec();
    let mut start = 0;
    for _ in 0..60 {
        if expected.len() - start > positions {
            start += shift;
        }
        expected.extend(whole(&generator, &expected[start..], 1, positions).pop());
    }
    assert_eq!(extended(&generator, &prompt, 60, Sampling { shift, ..greedy() }), expected);
    // A shift beyond the context leaves one token.
    assert_eq!(extended(&generator, &prompt, 60, Sampling { shift: 1000, ..greedy() }).len(), 63);
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let generator = generator(24, 2, 32, DType::F32);
    let how = Sampling { temperature: 1.5, top_p: 0.9, seed: 4, ..Sampling::default() };
    let tokens = extended(&generator, &[1], 40, how);
    assert_eq!(extended(&generator, &[1], 40, how), tokens);
    assert_ne!(extended(&generator, &[1], 40, Sampling { seed: 5, ..how }), tokens);
}

/// Rows that pad the table, and holes between the ids: whatever the choices, with the cache, beyond it and with a shift.
#[test]
fn rows_without_an_id_are_never_drawn() {
    let is_id = |id: u32| id < 40 && id != 7;
    let all = generator(24, 2, 32, DType::F32);
    let some = generator(24, 2, 32, DType::F32).drawing_only(is_id);
    let flat = Sampling { temperature: 50.0, ..Sampling::default() };
    let mut others = 0;
    for how in [
        greedy(),
        Sampling::default(),
        flat,
        Sampling { top_k: 50, ..flat },
        Sampling { top_p: 0.99, ..flat },
        Sampling { shift: 10, ..flat },
    ] {
        for seed in 1..4 {
            let how = Sampling { seed, ..how };
            let drawn = extended(&some, &[1, 60], 100, how);
            assert!(drawn[2..].iter().all(|id| is_id(*id)), "{how:?}: {drawn:?}");
            others += extended(&all, &[1, 60], 100, how)[2..].iter().filter(|id| !is_id(**id)).count();
        }
    }
    assert!(others > 100, "without the restriction, {others} of 1800 tokens are others");
}
