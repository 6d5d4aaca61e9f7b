//! Attention whose heads of keys and values are fewer than the ranks of the tensor axis: several ranks have the same ones, and each a
//! term of their gradients. And query, key and value as parameters of their own, of which a run trains some.

use std::sync::Arc;

use phalanx_layers::{
    Attention, Block, BlockRole, CannotCut, Checkpointing, Embedding, Fork, Init, LayerNorm, Linear,
    LinearCrossEntropy, LinearGelu, Network, Output, Pieces, PositionTable, RowShape, Sequence,
};
use phalanx_models::{Dropouts, Input, Model};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{Device, Gelu, Heads};
use phalanx_testing::planted::{FaultKind, Planted, PlantedFault, sites};
use phalanx_testing::sweeps;
use phalanx_train::config::{Checkpointing as Recomputed, CheckpointingWord, Chunk, Float};
use phalanx_train::planning::Orders;
use phalanx_train::{Groups, Rank, RunConfig, RunPlan, Spec};

use crate::mesh::F32;
use crate::rig::{self, Checkpoints, Ran, assert_same_state, same_bits};

const HIDDEN: usize = 32;
const HEADS: usize = 4;
const SEQ: usize = 16;
const VOCAB: usize = 67;
const INIT: Init = Init::Normal(0.2);

/// A decoder of two blocks.
#[derive(Clone, Debug)]
struct Grouped {
    kv_heads: usize,
}

impl From<Grouped> for Arc<dyn Model> {
    fn from(model: Grouped) -> Arc<dyn Model> {
        Arc::new(model)
    }
}

impl Grouped {
    fn block(
        &self,
        index: usize,
        tensor: &TensorParallel,
        checkpointing: Checkpointing,
    ) -> Result<Sequence, CannotCut> {
        let name = |part: &str| format!("layers.{index}.{part}");
        let (size, kv_heads) = (HIDDEN / HEADS, self.kv_heads);
        let result = |part: &str, heads| {
            let pieces = Pieces { repeat: true, ..Pieces::of(heads) };
            Output { name: name(part), width: heads * size, pieces }
        };
        let qkv = [result("q_proj", HEADS), result("k_proj", kv_heads), result("v_proj", kv_heads)];
        let qkv = Linear { bias: index == 0, ..Linear::new(qkv, HIDDEN, INIT) };
        let linear =
            |part: &str, inputs, outputs| Linear::new([Output::new(name(part), outputs)], inputs, INIT);
        let attention = Attention {
            heads: Heads { kv_heads, ..Heads::equal(HEADS, size, true) },
            dropout: 0.0,
            name: name("attention"),
            first_head: 0,
            all_heads: HEADS,
        };
        let norm = |part: &str| {
            tensor.rows(LayerNorm {
                prefix: name(part),
                hidden: HIDDEN,
                eps: 1e-5,
                centred: true,
                bias: true,
            })
        };
        let up = LinearGelu { linear: linear("up_proj", HIDDEN, 2 * HIDDEN), gelu: Gelu::Tanh };
        let attend = vec![
            norm("norm_1"),
            tensor.column(qkv)?,
            Box::new(tensor.attention(attention)?),
            tensor.row(linear("o_proj", HIDDEN, HIDDEN))?,
        ];
        let mlp =
            vec![norm("norm_2"), tensor.column(up)?, tensor.row(linear("down_proj", 2 * HIDDEN, HIDDEN))?];
        Ok(Sequence::new(vec![
            Box::new(Fork::residual(checkpointing.sequence(attend))),
            Box::new(Fork::residual(checkpointing.sequence(mlp))),
        ]))
    }
}

impl Model for Grouped {
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        let tokens = "tokens".to_string();
        let positions = Some(PositionTable { name: "positions".into(), rows: SEQ });
        let embedding =
            Embedding { tokens, positions, types: None, vocab: VOCAB, hidden: HIDDEN, init: INIT };
        let output = RowShape::tokens(HIDDEN);
        let block = |name: String, role, layer| Block { name, role, layer, output };
        let mut blocks = vec![block("embedding".into(), BlockRole::End, tensor.embedding(embedding))];
        for i in 0..2 {
            let layer = self.block(i, tensor, checkpointing)?;
            blocks.push(block(format!("layer.{i}"), BlockRole::Transformer, checkpointing.block(i, layer)));
        }
        let norm = LayerNorm { prefix: "norm".into(), hidden: HIDDEN, eps: 1e-5, centred: true, bias: true };
        blocks.push(block("norm".into(), BlockRole::End, tensor.rows(norm)));
        let head = LinearCrossEntropy {
            weight: "head".into(),
            bias: None,
            vocab: VOCAB,
            hidden: HIDDEN,
            init: INIT,
        };
        Ok(Network::new(blocks, tensor.head(head)))
    }

    fn inputs(&self) -> Vec<Input> {
        Input::of_language_model(VOCAB)
    }

    fn dropping(&self, _: Dropouts) -> Arc<dyn Model> {
        Arc::new(self.clone())
    }
}

fn config([pipeline, data, tensor]: [usize; 3], zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    parallel.zero = zero;
    config.batch.micro = Some(1);
    config.memory.chunk = Chunk::Mebibytes(0.05);
    config
}

fn run(kv_heads: usize, config: &RunConfig) -> Ran {
    rig::run_fresh(&Grouped { kv_heads }, config, &rig::golden_steps()[..4])
}

#[test]
fn every_mesh_follows_one_rank_and_no_stage_changes_a_bit() {
    let meshes =
        [([1, 1, 2], false), ([1, 1, 4], false), ([1, 1, 4], true), ([1, 2, 2], true), ([2, 1, 4], false)];
    for kv_heads in [2, 1] {
        let one = run(kv_heads, &config([1, 1, 1], 0));
        for (number, (mesh, sequence)) in (kv_heads..).zip(meshes) {
            let mut first: Option<Ran> = None;
            // Stage 0 and one of the others, in turn.
            let others = sweeps::share(&[1, 2, 3], number, 3);
            for &zero in [&0].into_iter().chain(others) {
                let mut config = config(mesh, zero);
                config.parallel.sequence_parallel = sequence;
                let what = format!("{kv_heads} heads of keys, {mesh:?}, sequence {sequence}, stage {zero}");
                let ran = run(kv_heads, &config);
                assert_eq!((&ran.peaks, &ran.step_peaks), (&ran.planned, &ran.step_planned), "{what}");
                let apart = |of: fn(&Ran) -> &Vec<f32>| rig::relative_difference(of(&ran), of(&one));
                assert!(apart(|ran| &ran.losses) < F32, "{what}: {:?} for {:?}", ran.losses, one.losses);
                assert!(apart(|ran| &ran.grad_norms) < F32, "{what}: norms");
                let first = first.get_or_insert_with(|| ran.clone());
                assert_same_state(&what, &first.state, &ran.state);
                assert!(same_bits(&first.grad_norms, &ran.grad_norms), "{what}: norms");
            }
        }
    }
}

#[test]
fn with_copies_types_recomputing_and_chunks_change_what_they_change_elsewhere() {
    let base = || config([1, 2, 4], 3);
    let plain = run(2, &base());
    let mut recomputed = base();
    recomputed.memory.checkpointing = Recomputed::Word(CheckpointingWord::Block);
    recomputed.memory.chunk = Chunk::Mebibytes(0.2);
    let same = run(2, &recomputed);
    assert_same_state("computed again, in larger chunks", &plain.state, &same.state);
    let mut bf16 = base();
    bf16.precision.compute = Float::Bf16;
    let stages = [0, 2, 3].map(|zero| {
        bf16.parallel.zero = zero;
        run(2, &bf16)
    });
    assert_eq!(stages[2].peaks, stages[2].planned);
    stages.iter().for_each(|ran| assert_same_state("bf16", &stages[0].state, &ran.state));
}

/// A checkpoint has whole parameters, of which copies are written once.
#[test]
fn a_checkpoint_of_ranks_with_copies_loads_on_any_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let (model, steps) = (Grouped { kv_heads: 2 }, rig::golden_steps());
    let save = Checkpoints { fresh: true, save: Some(folder.path().to_path_buf()), ..Checkpoints::default() };
    let saved = rig::run_between(&model, &config([1, 1, 4], 2), &steps[..2], &save);
    let newest = phalanx_checkpoint::newest(folder.path()).unwrap();
    let checkpoint = newest.checkpoint.unwrap();
    let shape = |name: &str| checkpoint.tensor("exp_avg", name).unwrap().shape.clone();
    assert_eq!(shape("layers.1.k_proj.weight"), [16, 32]);
    assert_eq!([shape("layers.0.q_proj.bias"), shape("layers.0.v_proj.bias")], [[32], [16]]);
    for mesh in [[1, 1, 1], [1, 2, 2], [2, 1, 4]] {
        let restore = Checkpoints { restore: Some(checkpoint.dir().to_path_buf()), ..Checkpoints::default() };
        let loaded = rig::run_between(&model, &config(mesh, 3), &[], &restore);
        assert_same_state(&format!("{mesh:?}"), &saved.state, &loaded.state);
    }
}

/// Keys that are frozen lie apart from queries and values; those of the last block are trained.
#[test]
fn one_of_the_joined_is_frozen() {
    let frozen = |mesh, zero| {
        let mut config = config(mesh, zero);
        config.model.frozen = vec!["layers.0.k_proj.*".into()];
        config
    };
    let before = rig::run_fresh(&Grouped { kv_heads: 4 }, &frozen([1, 1, 1], 0), &[]);
    let one = run(4, &frozen([1, 1, 1], 0));
    let key = |name: &str| format!("parameters/layers.{name}");
    for (name, is_frozen) in [("0.k_proj.weight", true), ("0.v_proj.bias", false), ("1.k_proj.weight", false)]
    {
        let (was, is) = (&before.state[&key(name)], &one.state[&key(name)]);
        assert_eq!(same_bits(was, is), is_frozen, "{name}");
        assert_eq!(one.state.contains_key(&format!("exp_avg/layers.{name}")), !is_frozen, "{name}");
    }
    for zero in 0..=3 {
        let two = run(4, &frozen([1, 2, 1], zero));
        assert_eq!(two.peaks, two.planned);
        let first = run(4, &frozen([1, 2, 1], 0));
        assert_same_state(&format!("stage {zero}"), &first.state, &two.state);
    }
}

/// The gradients of keys and values are terms, which a plan does not let anything read before they are summed.
#[test]
fn a_sum_of_copies_that_is_left_out_is_named() {
    for (frozen, named) in [("k_proj", "v_proj"), ("v_proj", "k_proj")] {
        let mut config = config([1, 1, 4], 1);
        config.model.frozen = vec![format!("*.{frozen}.*")];
        let make = |device: Device, groups: Groups, spec: &Spec, orders: &Orders| {
            let fault = PlantedFault { site: sites::PARTIAL_SUM, kind: FaultKind::Dropped };
            let tensor = Planted::around(Arc::clone(&groups.tensor), fault, &device, &groups.data);
            let groups = Groups { tensor, ..groups };
            let network = spec.network(&groups.tensor);
            Rank::with_network(device, groups, spec, network, orders)
        };
        let error = RunPlan::with_ranks(rig::spec(&Grouped { kv_heads: 2 }, &config), &make).map(drop);
        let error = error.unwrap_err().to_string();
        let words = ["`tensor`", "partial sum", named];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}
