//! A model of one's own, from existing layers, on a mesh of eight ranks by changing the configuration alone:
//! `cargo run --release -p phalanx --example own_model`.
//!
//! It is a Transformer whose attention and MLP read the same norm one after the other around one residual path. Nothing
//! below knows a rank: the layers are written with their whole sizes, `TensorParallel` gives what each rank has of
//! them, and backward comes with the layers.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own, for a terminal")]

use std::sync::Arc;

use phalanx::layers::{
    Attention, Block, BlockRole, CannotCut, Checkpointing, Embedding, Fork, Init, LayerNorm, Linear,
    LinearCrossEntropy, LinearGelu, Output, Pieces, PositionTable, RowShape,
};
use phalanx::{
    Batch, CpuFactory, Dropouts, Gelu, Heads, Input, Model, Network, RunConfig, RunPlan, Spec,
    TensorParallel, on_threads,
};

const SEQ: usize = 32;
const VOCAB: usize = 256;

/// Width and depth.
#[derive(Clone, Debug)]
struct Narrow {
    layers: usize,
    hidden: usize,
    heads: usize,
}

impl Model for Narrow {
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        let init = Init::Normal(0.02);
        let tokens = "tokens".to_string();
        let positions = Some(PositionTable { name: "positions".into(), rows: SEQ });
        let (hidden, vocab) = (self.hidden, VOCAB);
        let embedding = Embedding { tokens, positions, types: None, vocab, added: 0, hidden, init };
        let output = RowShape::tokens(hidden);
        let mut blocks = vec![Block {
            name: "embedding".into(),
            role: BlockRole::End,
            layer: tensor.embedding(embedding),
            output,
        }];
        for i in 0..self.layers {
            let layer = checkpointing.block(i, self.block(i, tensor, checkpointing)?);
            blocks.push(Block { name: format!("block.{i}"), role: BlockRole::Transformer, layer, output });
        }
        let norm = LayerNorm {
            prefix: "last".into(),
            hidden,
            eps: 1e-5,
            centred: true,
            bias: true,
            from_one: false,
        };
        let layer = tensor.rows(norm);
        blocks.push(Block { name: "last".into(), role: BlockRole::End, layer, output });
        // The output projection is the token table: tied, wherever the two are.
        let head = LinearCrossEntropy { weight: "tokens".into(), bias: None, vocab, added: 0, hidden, init };
        Ok(Network::new(blocks, tensor.head(head)))
    }

    fn inputs(&self) -> Vec<Input> {
        Input::of_language_model(VOCAB)
    }

    fn longest(&self) -> Option<usize> {
        Some(SEQ)
    }

    fn attention(&self) -> Option<Heads> {
        Some(Heads::equal(self.heads, self.hidden / self.heads, true))
    }

    fn dropping(&self, _: Dropouts) -> Arc<dyn Model> {
        Arc::new(self.clone())
    }
}

impl Narrow {
    fn block(
        &self,
        index: usize,
        tensor: &TensorParallel,
        checkpointing: Checkpointing,
    ) -> Result<Fork, CannotCut> {
        let name = |part: &str| format!("block.{index}.{part}");
        let linear = |part: &str, inputs, outputs| {
            Linear::new([Output::new(name(part), outputs)], inputs, Init::Normal(0.02))
        };
        let (hidden, heads) = (self.hidden, self.heads);
        let result = |part| Output { name: name(part), width: hidden, pieces: Pieces::of(heads) };
        let qkv = Linear::new(["q", "k", "v"].map(result), hidden, Init::Normal(0.02));
        let attention = Attention {
            heads: Heads::equal(heads, hidden / heads, true),
            dropout: 0.0,
            name: name("attention"),
            first_head: 0,
            all_heads: heads,
        };
        let wide = LinearGelu { linear: linear("wide", hidden, 2 * hidden), gelu: Gelu::Tanh };
        Ok(Fork::residual(checkpointing.sequence(vec![
            tensor.rows(LayerNorm {
                prefix: name("norm"),
                hidden,
                eps: 1e-5,
                centred: true,
                bias: true,
                from_one: false,
            }),
            tensor.column(qkv)?,
            Box::new(tensor.attention(attention)?),
            tensor.row(linear("mix", hidden, hidden))?,
            tensor.column(wide)?,
            tensor.row(linear("narrow", 2 * hidden, hidden))?,
        ])))
    }
}

/// Trains and prints the losses.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let meshes = [
        "",
        "tensor = 2",
        "pipeline = 2\nschedule = \"1f1b\"",
        "pipeline = 2\ndata = 2\ntensor = 2\nzero = 2\nschedule = \"zb-h1\"\nsequence_parallel = true",
    ];
    for mesh in meshes {
        let text = format!("[model]\nseq = {SEQ}\n[batch]\nglobal = 8\nmicro = 1\n[parallel]\n{mesh}");
        let config: RunConfig = toml::from_str(&text)?;
        let model: Arc<dyn Model> = Arc::new(Narrow { layers: 4, hidden: 64, heads: 4 });
        let plan = RunPlan::new(Spec::new(&config, model, 0, 1)?)?;
        let ranks = on_threads(&CpuFactory::new(), &plan, |rank| {
            rank.initialise(1).expect("initial values need nothing");
            let step = |number| {
                rank.step(number, &batch(&plan.spec, rank.at().data), false).expect("no rank dies").loss
            };
            (1..=5).map(step).collect::<Vec<f32>>()
        })?;
        println!("{} rank(s), {:?}: losses {:?}", ranks.len(), mesh.replace('\n', ", "), ranks[0]);
    }
    Ok(())
}

/// Sequences to learn, this data-parallel rank's of each micro-batch.
fn batch(spec: &Spec, data: usize) -> Batch {
    let token = |sample: usize, t: usize| ((sample * 31 + t * (sample % 3 + 1)) % VOCAB) as u32;
    let mut batch = Batch::default();
    let first = |m| spec.batch.first_sample(spec.mesh.axes, m, data);
    for sample in (0..spec.batch.micro_batches).map(first) {
        batch.tokens.extend((0..SEQ).map(|t| token(sample, t)));
        batch.targets.extend((0..SEQ).map(|t| token(sample, t + 1)));
    }
    batch
}
