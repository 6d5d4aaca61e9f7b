//! Which kernel computes which operation.

use phalanx_tensor::Kernels;
use phalanx_tensor::operations::{
    Activations, Attentions, Elementwise, Embeddings, Images, Magnitudes, Normalization, Operation,
    Optimizers, Own, Products, Reductions, Vocabulary, VocabularyLoss,
};

use crate::attention_extents::Extents;
use crate::cross_entropy::{LossRows, Targets};
use crate::{
    Cpu, adamw, attention, attention_backward, bias, blocks, cross_entropy, dropout, elementwise, embedding,
    embedding_backward, gated, gelu, images, layer_norm, magnitudes, matmul, non_finite, norm, preference,
    rotary, sgd, tanh,
};

impl Kernels for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn execute(&self, operation: Operation) {
        match operation {
            Operation::Elementwise(operation) => self.elementwise(operation),
            Operation::Products(operation) => self.product(operation),
            Operation::Normalization(operation) => self.normalization(operation),
            Operation::Activations(operation) => self.activation(operation),
            Operation::Attentions(operation) => self.attention(operation),
            Operation::Embeddings(operation) => self.embedding(operation),
            Operation::Images(operation) => self.images(operation),
            Operation::Magnitudes(operation) => self.magnitudes(operation),
            Operation::Vocabulary(operation) => self.vocabulary(operation),
            Operation::Optimizers(operation) => self.optimizer(operation),
            Operation::Reductions(operation) => self.reduction(operation),
            Operation::Own(Own::OwnOperation(operation)) => operation.execute(),
        }
    }
}

impl Cpu {
    fn elementwise(&self, operation: Elementwise) {
        match operation {
            Elementwise::Fill(o) => elementwise::fill(self, o.x, o.value),
            Elementwise::Copy(o) => {
                elementwise::copy(self, elementwise::bytes(&o.from), elementwise::bytes_mut(o.to));
            }
            Elementwise::CopyColumns(o) => elementwise::copy_columns(self, o),
            Elementwise::Convert(o) => elementwise::convert(self, o.from, o.to),
            Elementwise::Dequantise(o) => blocks::dequantise(self, o.from, o.to),
            Elementwise::Add(o) => elementwise::add(self, o.from, o.into),
            Elementwise::Multiply(o) => elementwise::multiply(self, o.x, o.factor),
            Elementwise::Scaled(o) => {
                let product = o.x.as_slice::<f64>()[0] * f64::from(o.scale);
                o.out.into_slice::<f32>()[0] = product as f32;
            }
        }
    }

    fn product(&self, operation: Products) {
        match operation {
            Products::Linear(o) => matmul::linear(self, o.x, o.w, o.epilogue, o.y),
            Products::LinearGelu(o) => matmul::linear_gelu(self, o),
            Products::InputGradient(o) => {
                matmul::linear_input_gradient(self, o.dy, o.w, o.dx, o.accumulate);
            }
            Products::WeightGradient(o) => {
                matmul::linear_weight_gradient(self, o.x, o.dy, o.dw, o.layout, o.accumulate);
            }
            Products::BiasGradient(o) => bias::bias_gradient(self, o.dy, o.db, o.accumulate),
        }
    }

    fn normalization(&self, operation: Normalization) {
        match operation {
            Normalization::LayerNorm(o) => layer_norm::layer_norm(self, o),
            Normalization::LayerNormBackward(o) => layer_norm::layer_norm_backward(self, o),
            Normalization::NormSums(o) => layer_norm::norm_sums(self, o),
        }
    }

    fn activation(&self, operation: Activations) {
        match operation {
            Activations::GeluForward(o) => gelu::gelu(self, o.x, o.gelu, o.y),
            Activations::GeluBackward(o) => gelu::gelu_backward(self, o),
            Activations::TanhForward(o) => tanh::tanh(self, o),
            Activations::TanhBackward(o) => tanh::tanh_backward(self, o),
            Activations::Gated(o) => gated::gated(self, o),
            Activations::GatedBackward(o) => gated::gated_backward(self, o),
            Activations::DropoutForward(o) => dropout::dropout(self, o),
        }
    }

    fn attention(&self, operation: Attentions) {
        match operation {
            Attentions::AttentionForward(o) => {
                let extents = Extents::new(o.qkv.dims(), o.heads, o.positions, o.dropout);
                attention::attention(self, extents, o.qkv, o.dropout, o.out, o.log_sum_exp);
            }
            Attentions::AttentionCached(o) => {
                attention::attention_cached(self, o);
            }
            Attentions::AttentionBackward(o) => {
                let extents = Extents::new(o.qkv.dims(), o.heads, o.positions, o.dropout);
                let [out, log_sum_exp, dout] = o.saved;
                let saved =
                    attention_backward::SavedAttention { qkv: o.qkv, out, log_sum_exp, dropout: o.dropout };
                attention_backward::attention_backward(self, extents, saved, dout, o.dqkv);
            }
            Attentions::RotaryPositions(o) => rotary::rotary(self, o),
        }
    }

    fn embedding(&self, operation: Embeddings) {
        match operation {
            Embeddings::EmbeddingForward(o) => {
                embedding::embedding(self, o.ids, o.lookup, o.table, o.positions, o.accumulate, o.y);
            }
            Embeddings::AddPositions(o) => embedding::add_positions(self, o.positions, o.y),
            Embeddings::EmbeddingBackward(o) => {
                embedding_backward::embedding_backward(self, o.ids, o.lookup, o.dy, o.dtable, o.accumulate);
            }
            Embeddings::PositionGradient(o) => {
                let rows = (o.first_row, o.seq);
                embedding_backward::position_gradient(self, o.dy, rows.0, rows.1, o.dpositions, o.accumulate);
            }
        }
    }

    fn images(&self, operation: Images) {
        match operation {
            Images::Relu(o) => images::relu(self, o.x),
            Images::ReluBackward(o) => images::relu_backward(self, o),
            Images::Unfold(o) => images::unfold(self, o),
            Images::Fold(o) => images::fold(self, o),
            Images::MaxPool(o) => images::max_pool(self, o),
            Images::MaxPoolBackward(o) => images::max_pool_backward(self, o),
        }
    }

    fn magnitudes(&self, operation: Magnitudes) {
        match operation {
            Magnitudes::WeightSquares(o) => magnitudes::weight_squares(self, o),
            Magnitudes::Rescale(o) => magnitudes::rescale(self, o),
            Magnitudes::RescaleGradient(o) => magnitudes::rescale_gradient(self, o),
        }
    }

    fn vocabulary(&self, operation: Vocabulary) {
        match operation {
            Vocabulary::VocabularyStatistics(o) => cross_entropy::statistics(self, o),
            Vocabulary::LogitsStatistics(o) => {
                let targets = Targets { ids: o.targets.as_slice(), first: o.first };
                cross_entropy::statistics_of_stored(self, o.logits, targets, o.blocks, o.statistics);
            }
            Vocabulary::VocabularyLoss(o) => self.vocabulary_loss(o),
            Vocabulary::PreferenceLoss(o) => preference::preference_loss(o),
        }
    }

    fn vocabulary_loss(&self, o: VocabularyLoss) {
        let targets = Targets { ids: o.targets.as_slice(), first: o.first };
        let loss = &mut o.loss.into_slice::<f64>()[0];
        let before = if o.accumulate { *loss } else { 0.0 };
        let rows = LossRows {
            statistics: o.statistics.as_slice(),
            targets,
            classes: o.classes,
            numbers: o.numbers,
            weights: o.weights.map(|weights| weights.as_slice()),
        };
        let of_rows = o.losses.map(|losses| losses.into_slice());
        *loss = cross_entropy::loss(self, rows, o.blocks, (o.columns, o.exponentials), of_rows, before);
    }

    fn optimizer(&self, operation: Optimizers) {
        match operation {
            Optimizers::AdamWUpdate(o) => {
                let scale = o.gradient_scale.as_slice::<f32>()[0];
                adamw::adamw(self, o.step, o.p, o.g, o.moments, scale, o.rounded);
            }
            Optimizers::SgdUpdate(o) => {
                let scale = o.gradient_scale.as_slice::<f32>()[0];
                sgd::sgd(self, o.step, o.p, o.g, o.velocity, scale, o.rounded);
            }
        }
    }

    fn reduction(&self, operation: Reductions) {
        match operation {
            Reductions::BlockSquares(o) => norm::block_squares(self, o.x, o.squares),
            Reductions::TreeSum(o) => o.out.into_slice::<f64>()[0] = norm::tree_sum(o.x.as_slice()),
            Reductions::Norm(o) => {
                let (value, clip) = norm::norm(o.squares.as_slice(), o.clip);
                o.norm.into_slice::<f32>()[0] = value;
                o.factor.into_slice::<f32>()[0] = clip;
            }
            Reductions::CountNonFinite(o) => {
                o.count.into_slice::<f32>()[0] = non_finite::count_non_finite(self, o.x) as f32;
            }
        }
    }
}
