//! BERT (Devlin et al., arXiv 1810.04805), as `BertForMaskedLM` and `BertForSequenceClassification` of transformers have it.
//!
//! Embedding of tokens, positions and token types with a norm, and `layers` blocks of attention in both directions and an MLP, each
//! with its norm behind the sum with the residual path. Without labels: a transform before an output projection tied to the token
//! table. With labels: a pooler of the first token before a head of one logit for each class, of rows of unequal length, whose padding
//! is a document of its own. Weights are `[out, in]`. Names, `config.json` and initial values follow transformers.

use phalanx_layers::{
    Attention, Block, BlockRole, CannotCut, Checkpointing, Dropped, Embedding, Fork, Init, LayerNorm, Linear,
    LinearCrossEntropy, LinearGelu, Network, Output, POSITIONS, ParameterSpec, Pieces, Pooler, PositionTable,
    RowShape, Sequence, TARGETS, TOKENS,
};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::Heads;
use serde_json::{Value, json};

use crate::config::{decimal, epsilon, expect_architecture, expect_computed, heads, number, probability};
use crate::keys::{Key, Keys};
use crate::labels;
use crate::limits::{MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB};
use crate::{
    Activation, Arch, Architecture, Dropouts, Input, Model, ModelError, NumberedLayers, Objective, RowsOf,
};

/// Prefix of the names of all tensors outside the heads; files of `BertModel` alone leave it out.
const PREFIX: &str = "bert.";

/// The token table, which the output projection shares.
const WORDS: &str = "bert.embeddings.word_embeddings.weight";

/// Initial values of all weights and tables (`initializer_range`).
const NORMAL: Init = Init::Normal(0.02);

/// Epsilon of the norms, unless a file or a configuration gives another value.
const EPS: f32 = 1e-12;

/// The entry in the registry.
pub(crate) const ARCHITECTURE: Architecture = Architecture {
    name: "bert",
    title: "BERT",
    objective: Objective::Masked,
    keys: &[
        Key::layers("num_hidden_layers", Some(12)),
        Key::hidden("hidden_size", Some(768)),
        Key::heads("num_attention_heads", Some(12)),
        Key::positions("max_position_embeddings"),
        Key::intermediate("intermediate_size"),
        Key::norm_eps("layer_norm_eps", Some(EPS)),
        Key::labels(),
    ],
    build: |_, keys, vocab, seq| {
        let hidden = keys.count("hidden");
        let model = Bert {
            layers: keys.count("layers"),
            hidden,
            heads: keys.divisor("heads", "hidden")?,
            intermediate: keys.given_count("intermediate").unwrap_or(4 * hidden),
            vocab,
            positions: keys.positions(seq)?,
            eps: keys.number("norm_eps"),
            labels: keys.labels(),
            ..Bert::default()
        };
        Ok(model.into())
    },
    vocab: |_, _| None,
    from_config: |_, config| Bert::from_config(config).map(Into::into),
};

/// Sizes of a BERT, and its dropout in training.
#[derive(Clone, Debug, PartialEq)]
pub struct Bert {
    /// Transformer blocks (`num_hidden_layers`).
    pub layers: usize,
    /// Width (`hidden_size`).
    pub hidden: usize,
    /// Attention heads (`num_attention_heads`).
    pub heads: usize,
    /// Width within the MLP (`intermediate_size`).
    pub intermediate: usize,
    /// Rows of the token table (`vocab_size`).
    pub vocab: usize,
    /// Rows of the position table (`max_position_embeddings`): the longest sequence.
    pub positions: usize,
    /// Added to the variance of a norm (`layer_norm_eps`).
    pub eps: f32,
    /// Within the MLP and the head (`hidden_act`).
    pub activation: Activation,
    /// Dropout in training. That of the pooler is the one of the residual path.
    pub dropout: Dropouts,
    /// Names of the classes of whole sequences (`id2label`); none for a masked language model.
    pub labels: Vec<String>,
}

/// The sizes of the smaller published model, its values for everything else, no classes, and no dropout.
impl Default for Bert {
    fn default() -> Bert {
        Bert {
            layers: 12,
            hidden: 768,
            heads: 12,
            intermediate: 3072,
            vocab: 30_522,
            positions: 512,
            eps: EPS,
            activation: Activation::GELU,
            dropout: Dropouts::default(),
            labels: Vec::new(),
        }
    }
}

impl Bert {
    fn build(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        let output = RowShape::tokens(self.hidden);
        let mut blocks = vec![Block {
            name: "embedding".into(),
            role: BlockRole::End,
            layer: Box::new(self.embedding(tensor)),
            output,
        }];
        for i in 0..self.layers {
            let layer = checkpointing.block(i, self.block(i, tensor, checkpointing)?);
            blocks.push(Block { name: format!("layer.{i}"), role: BlockRole::Transformer, layer, output });
        }
        if !self.labels.is_empty() {
            return Ok(self.classes(tensor, blocks));
        }
        blocks.push(Block {
            name: "mlm".into(),
            role: BlockRole::End,
            layer: Box::new(self.transform(tensor, checkpointing)),
            output,
        });
        let head = LinearCrossEntropy {
            weight: WORDS.into(),
            bias: Some("cls.predictions.bias".into()),
            vocab: self.vocab,
            added: 0,
            hidden: self.hidden,
            init: NORMAL,
        };
        Ok(Network::new(blocks, tensor.head(head)))
    }

    /// The blocks, then the pooler and the class head, which every rank has whole.
    fn classes(&self, tensor: &TensorParallel, mut blocks: Vec<Block>) -> Network {
        assert!(!tensor.sequence(), "the configuration refuses it: the pooler reads whole samples");
        let (prefix, p) = ("bert.pooler", self.dropout.residual);
        let linear = linear(format!("{prefix}.dense"), self.hidden, self.hidden);
        blocks.push(Block {
            name: "pooler".into(),
            role: BlockRole::End,
            layer: Box::new(Pooler { linear, p, name: format!("{prefix}.dropout") }),
            output: RowShape::samples(self.hidden).with_row(&[1, self.hidden]),
        });
        let head = LinearCrossEntropy {
            weight: "classifier.weight".into(),
            bias: Some("classifier.bias".into()),
            vocab: self.labels.len(),
            added: 0,
            hidden: self.hidden,
            init: NORMAL,
        };
        Network::new(blocks, Box::new(head))
    }

    /// `dropout(norm(tokens + positions + types))`
    fn embedding(&self, tensor: &TensorParallel) -> Sequence {
        let name = |part: &str| format!("bert.embeddings.{part}");
        let tables = Embedding {
            tokens: WORDS.into(),
            positions: Some(PositionTable { name: name("position_embeddings.weight"), rows: self.positions }),
            types: Some(name("token_type_embeddings.weight")),
            vocab: self.vocab,
            added: 0,
            hidden: self.hidden,
            init: NORMAL,
        };
        let norm = tensor.rows(self.norm(name("LayerNorm")));
        let norm = Dropped { layer: norm, p: self.dropout.embedding, name: name("dropout") };
        Sequence::new(vec![tensor.embedding(tables), Box::new(norm)])
    }

    /// `x = norm(x + attention(x))`, then `norm(x + mlp(x))`.
    fn block(
        &self,
        index: usize,
        tensor: &TensorParallel,
        checkpointing: Checkpointing,
    ) -> Result<Sequence, CannotCut> {
        let name = |part: &str| format!("bert.encoder.layer.{index}.{part}");
        let hidden = self.hidden;
        let linear = |part: &str, inputs, outputs| linear(name(part), inputs, outputs);
        let dropped = |layer, part: &str| Dropped { layer, p: self.dropout.residual, name: name(part) };
        let attention = Attention {
            heads: Heads::equal(self.heads, hidden / self.heads, false),
            dropout: self.dropout.attention,
            name: name("attention.self.dropout"),
            first_head: 0,
            all_heads: self.heads,
        };
        let projection = tensor.row(linear("attention.output.dense", hidden, hidden))?;
        let result = |part: &str| {
            let name = name(&format!("attention.self.{part}"));
            Output { name, width: hidden, pieces: Pieces::of(self.heads) }
        };
        let qkv = Linear::new(["query", "key", "value"].map(result), hidden, NORMAL);
        let attention = vec![
            tensor.column(qkv)?,
            Box::new(tensor.attention(attention)?),
            Box::new(dropped(projection, "attention.output.dropout")),
        ];
        let dense = linear("intermediate.dense", hidden, self.intermediate);
        let mlp = vec![
            tensor.column(LinearGelu { linear: dense, gelu: self.activation.gelu })?,
            Box::new(dropped(
                tensor.row(linear("output.dense", self.intermediate, hidden))?,
                "output.dropout",
            )),
        ];
        Ok(Sequence::new(vec![
            Box::new(Fork::residual(checkpointing.sequence(attention))),
            tensor.rows(self.norm(name("attention.output.LayerNorm"))),
            Box::new(Fork::residual(checkpointing.sequence(mlp))),
            tensor.rows(self.norm(name("output.LayerNorm"))),
        ]))
    }

    /// `norm(gelu(dense(x)))`, which every rank has whole.
    fn transform(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Sequence {
        let name = |part: &str| format!("cls.predictions.transform.{part}");
        let dense = linear(name("dense"), self.hidden, self.hidden);
        let layers = vec![
            tensor.rows(LinearGelu { linear: dense, gelu: self.activation.gelu }),
            tensor.rows(self.norm(name("LayerNorm"))),
        ];
        checkpointing.sequence(layers)
    }

    fn norm(&self, prefix: String) -> LayerNorm {
        LayerNorm { prefix, hidden: self.hidden, eps: self.eps, centred: true, bias: true, from_one: false }
    }

    /// Reads a `config.json` of transformers. Its dropout is that of the training which made the file; a run uses the
    /// dropout of its own configuration.
    ///
    /// # Errors
    /// When the file describes another architecture, or a variant that is not computed here.
    pub fn from_config(config: &Value) -> Result<Bert, ModelError> {
        expect_architecture(config, ARCHITECTURE.name)?;
        expect_computed(
            config,
            &[
                ("position_embedding_type", json!("absolute")),
                ("type_vocab_size", json!(2)),
                ("tie_word_embeddings", json!(true)),
                ("is_decoder", json!(false)),
                ("add_cross_attention", json!(false)),
                ("quantization_config", json!(null)),
            ],
        )?;
        let hidden = number(config, "hidden_size", MAX_HIDDEN)?;
        let residual = probability(config, "hidden_dropout_prob")?;
        let attention = probability(config, "attention_probs_dropout_prob")?;
        Ok(Bert {
            layers: number(config, "num_hidden_layers", MAX_LAYERS)?,
            hidden,
            heads: heads(config, "num_attention_heads", hidden, "hidden_size")?,
            intermediate: number(config, "intermediate_size", MAX_INTERMEDIATE)?,
            vocab: number(config, "vocab_size", MAX_VOCAB)?,
            positions: number(config, "max_position_embeddings", MAX_POSITIONS)?,
            eps: epsilon(config, "layer_norm_eps", EPS)?,
            activation: Activation::read(config, "hidden_act", Activation::GELU)?,
            dropout: Dropouts { embedding: residual, attention, residual },
            labels: labels::read(config)?,
        })
    }
}

/// A `torch.nn.Linear`.
fn linear(prefix: String, inputs: usize, outputs: usize) -> Linear {
    Linear::new([Output::new(prefix, outputs)], inputs, NORMAL)
}

impl Model for Bert {
    fn network(&self, tensor: &TensorParallel, checkpointing: Checkpointing) -> Result<Network, CannotCut> {
        self.build(tensor, checkpointing)
    }

    /// With labels, a target for each sample, and the positions of tokens in their row.
    fn inputs(&self) -> Vec<Input> {
        match self.labels.len() {
            0 => Input::of_language_model(self.vocab),
            classes => vec![
                Input::ids(TOKENS, self.vocab),
                Input { shape: RowShape::samples(1).with_row(&[]), ..Input::ids(TARGETS, classes) },
                Input::ids(POSITIONS, self.positions),
            ],
        }
    }

    fn longest(&self) -> Option<usize> {
        Some(self.positions)
    }

    fn attention(&self) -> Option<Heads> {
        Some(Heads::equal(self.heads, self.hidden / self.heads, false))
    }

    fn keys(&self) -> Keys {
        let mut keys = Keys::from([
            ("layers", self.layers.into()),
            ("hidden", self.hidden.into()),
            ("heads", self.heads.into()),
            ("positions", self.positions.into()),
            ("intermediate", self.intermediate.into()),
            ("norm_eps", decimal(self.eps).into()),
        ]);
        if !self.labels.is_empty() {
            keys.set("labels", self.labels.clone());
        }
        keys
    }

    fn objective(&self) -> Objective {
        if self.labels.is_empty() { ARCHITECTURE.objective } else { Objective::Classes }
    }

    fn labels(&self) -> &[String] {
        &self.labels
    }

    fn classifying(&self, labels: &[String]) -> Option<std::sync::Arc<dyn Model>> {
        Some(Bert { labels: labels.to_vec(), ..self.clone() }.into())
    }

    fn architecture(&self) -> Option<Arch> {
        Some(Arch::of(&ARCHITECTURE))
    }

    /// The `config.json` of transformers. It has one dropout probability for embedding and residual path; this writes
    /// that of the residual path. No id is used as padding.
    fn to_config(&self) -> Value {
        let mut config = json!({
            "architectures": ["BertForMaskedLM"],
            "attention_probs_dropout_prob": decimal(self.dropout.attention),
            "hidden_act": self.activation.word(),
            "hidden_dropout_prob": decimal(self.dropout.residual),
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "layer_norm_eps": decimal(self.eps),
            "max_position_embeddings": self.positions,
            "model_type": ARCHITECTURE.name,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "pad_token_id": null,
            "position_embedding_type": "absolute",
            "tie_word_embeddings": true,
            "torch_dtype": "float32",
            "type_vocab_size": 2,
            "vocab_size": self.vocab,
        });
        if !self.labels.is_empty() {
            labels::write(&mut config, "Bert", &self.labels);
        }
        config
    }

    /// Files of `BertModel` alone leave out `bert.`, and files converted from the first BERT, TensorFlow's, call a norm's parameters
    /// gamma and beta.
    fn aliases(&self, name: &str) -> Vec<String> {
        let gamma_or_beta = |name: &str| {
            let old = |(suffix, old)| name.strip_suffix(suffix).map(|prefix| format!("{prefix}{old}"));
            [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")].map(old)
        };
        let bare = name.strip_prefix(PREFIX);
        let old = gamma_or_beta(name).into_iter().chain(bare.into_iter().flat_map(gamma_or_beta)).flatten();
        bare.map(str::to_string).into_iter().chain(old).collect()
    }

    /// Query, key and value were one parameter.
    fn earlier(&self, parameter: &ParameterSpec) -> Option<RowsOf> {
        let (layer, part) = parameter.name.split_once("self.")?;
        let (which, part) = part.split_once('.')?;
        let index = ["query", "key", "value"].iter().position(|name| *name == which)?;
        let mut shape = parameter.whole_shape().to_vec();
        let first = index as u64 * shape.iter().product::<usize>() as u64;
        shape[0] *= 3;
        Some(RowsOf { name: format!("{layer}self.qkv.{part}"), shape, first })
    }

    fn copies_of(&self, stored: &str) -> &'static [&'static str] {
        match stored {
            WORDS => &["cls.predictions.decoder.weight"],
            "cls.predictions.bias" => &["cls.predictions.decoder.bias"],
            _ => &[],
        }
    }

    fn numbered_layers(&self) -> Option<NumberedLayers> {
        Some(NumberedLayers {
            count: self.layers,
            key: "num_hidden_layers",
            prefixes: &["bert.encoder.layer.", "encoder.layer."],
        })
    }

    /// The next-sentence head, of pooler and the head of masked tokens what the model does not use, and the constant table of position
    /// ids 0, 1, 2 ...
    fn is_ignored(&self, name: &str) -> bool {
        let bare = name.strip_prefix(PREFIX).unwrap_or(name);
        let other =
            if self.labels.is_empty() { bare.starts_with("pooler.") } else { bare.starts_with("cls.") };
        other || bare == "embeddings.position_ids" || name.starts_with("cls.seq_relationship.")
    }

    /// `BertModel` has no head, and `BertForMaskedLM` no pooler.
    fn head_prefixes(&self) -> &'static [&'static str] {
        if self.labels.is_empty() { &["cls.predictions."] } else { &["bert.pooler.", "classifier."] }
    }

    fn dropping(&self, dropout: Dropouts) -> std::sync::Arc<dyn Model> {
        Bert { dropout, ..self.clone() }.into()
    }
}
