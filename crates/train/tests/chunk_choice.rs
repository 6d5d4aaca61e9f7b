//! `memory.chunk = "auto"` has the smallest planned peak of the sizes that are tried.

use phalanx_models::{Dropouts, Gpt2};
use phalanx_plan::ChunkSize;
use phalanx_train::config::{Chunk, ChunkWord, Float};
use phalanx_train::{RunConfig, RunPlan, Spec};

const SEQ: usize = 64;

/// Layers, hidden, vocabulary, mesh (pipeline, data, tensor), ZeRO stage.
type Shape = (usize, usize, usize, [usize; 3], u8);

const SHAPES: [Shape; 12] = [
    (3, 9216, 51200, [1, 32, 1], 3),
    (3, 9728, 51200, [1, 32, 1], 3),
    (3, 10240, 51200, [1, 32, 1], 3),
    (3, 10752, 51200, [1, 32, 1], 3),
    (3, 11264, 51200, [1, 32, 1], 3),
    (4, 10240, 51200, [2, 16, 1], 2),
    (6, 768, 50304, [1, 8, 1], 0),
    (6, 768, 50304, [1, 8, 1], 1),
    (8, 1024, 50304, [2, 4, 2], 3),
    (4, 64, 256, [1, 16, 1], 3),
    (2, 48, 96, [1, 64, 1], 2),
    (4, 128, 300, [1, 1, 1], 0),
];

fn spec((layers, hidden, vocab, [pipeline, data, tensor], zero): Shape) -> Spec {
    let mut config = RunConfig::default();
    let heads = hidden / 16;
    (config.model.layers, config.model.hidden, config.model.heads, config.model.seq) =
        (layers, hidden, heads, SEQ);
    (config.batch.global, config.batch.micro) = (data * pipeline * 2, Some(1));
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor, parallel.zero) = (pipeline, Some(data), tensor, zero);
    config.precision.compute = Float::Bf16;
    config.memory.chunk = Chunk::Word(ChunkWord::Auto);
    config.train.threads = Some(1);
    config.check().expect("a configuration");
    let dropout = Dropouts::default();
    let model = Gpt2 { layers, hidden, heads, vocab, positions: SEQ, eps: 1e-5, dropout };
    Spec::new(&config, model, 0, 1).expect("a specification")
}

fn arena_bytes(spec: Spec) -> u64 {
    RunPlan::without_offsets(spec).expect("a plan").arena_bytes_max()
}

#[test]
fn the_peak_of_auto_is_the_smallest() {
    for shape in SHAPES {
        let auto = RunPlan::without_offsets(spec(shape)).expect("a plan");
        let tried = &auto.spec.tried_chunks;
        assert!(tried.iter().any(|tried| tried.size == ChunkSize::None), "{shape:?}: {tried:?}");
        for other in tried {
            let peak = arena_bytes(spec(shape).with_chunks(other.size.clone()).expect("a layout"));
            let own = auto.arena_bytes_max();
            assert!(own <= peak, "{shape:?}: auto needs {own} bytes, {:?} needs {peak}", other.size);
        }
    }
}

/// The token table is not an ordinary tensor: a chunk size that suits it would pad every layer.
#[test]
fn auto_is_not_led_by_the_token_table() {
    let auto = arena_bytes(spec(SHAPES[0]));
    let padded = spec(SHAPES[0]);
    let tightest =
        padded.layout.searched.iter().min_by_key(|candidate| candidate.waste_elements).expect("sizes");
    let padded =
        arena_bytes(padded.with_chunks(ChunkSize::Elements(tightest.chunk_elements)).expect("a layout"));
    assert!(auto * 20 < padded * 19, "auto needs {auto} bytes, the size with the least padding {padded}");
}
