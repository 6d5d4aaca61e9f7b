//! Every operation of the contract on a card, compared with the processor's: the one list, which tests and `phalanx doctor` run.

mod attention;
pub mod bench;
mod elementwise;
pub mod graphs;
mod images;
mod links;
mod products;
pub mod programs;
pub mod rates;
mod rows;

pub use bench::{Bench, Case};
pub use links::link_of_one_rank;

/// One group of comparisons.
pub struct Group {
    /// The operations that it compares.
    pub name: &'static str,
    run: fn(&Bench),
}

impl Group {
    /// Runs it.
    pub fn run(&self, bench: &Bench) -> Vec<Case> {
        (self.run)(bench);
        bench.take_cases()
    }
}

/// All groups.
pub const GROUPS: [Group; 22] = [
    Group { name: "convert, add", run: elementwise::conversions_and_sums },
    Group { name: "dequantise", run: elementwise::blocks },
    Group { name: "fill, copy, scaled", run: elementwise::fill_copy_and_f64 },
    Group { name: "gelu and its gradient", run: elementwise::gelu_forward_and_backward },
    Group { name: "tanh and its gradient", run: elementwise::tanh_forward_and_backward },
    Group { name: "gates and their gradient", run: elementwise::gates_forward_and_backward },
    Group { name: "dropout", run: elementwise::dropout_drops_the_processors_elements },
    Group { name: "adamw, sgd", run: elementwise::optimizer_steps },
    Group { name: "norm, sums", run: elementwise::norms_have_the_processors_bits },
    Group { name: "steps and sums in a row", run: elementwise::calls_in_a_row },
    Group { name: "linear with epilogues", run: products::linear_with_epilogues },
    Group { name: "gradients of linear", run: products::gradients_of_linear },
    Group { name: "layer norm and its gradients", run: rows::layer_norm_and_its_gradients },
    Group { name: "RMS norms among columns", run: rows::norms_among_columns },
    Group { name: "magnitudes", run: rows::magnitudes },
    Group { name: "embeddings and their gradients", run: rows::embeddings_and_their_gradients },
    Group { name: "cross entropy of a vocabulary", run: rows::cross_entropy_of_a_vocabulary_in_parts },
    Group { name: "losses of preferences", run: rows::losses_of_preferences },
    Group { name: "rotary positions", run: attention::rotary_positions_have_the_processors_bits },
    Group { name: "attention and its gradient", run: attention::attention_and_its_gradient },
    Group {
        name: "attention over a cache",
        run: attention::cached_attention_has_the_bits_of_the_whole_sequence,
    },
    Group { name: "ReLU, patches of images, max pooling", run: images::images_have_the_processors_bits },
];
