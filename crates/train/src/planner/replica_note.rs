//! Note for the user about sums by a tree: whether another number of replicas has the same bits.

use phalanx_tensor::DType;

use crate::engine::spec::Spec;

impl Spec {
    /// With sums by a tree: the reasons why another number of replicas changes bits of the result; empty where a power of two of them does
    /// not, with the same global batch, micro-batch, pipeline, tensor axis and kernels. None for running sums.
    pub fn replicas_change_bits(&self) -> Option<Vec<String>> {
        let (batch, replicas) = (&self.batch, self.mesh.axes.data);
        if !batch.sums_by_tree {
            return None;
        }
        let types = self.precision.types;
        let mut reasons = Vec::new();
        if [types.accumulate, types.communicate] != [DType::F32; 2] {
            let names = [types.accumulate, types.communicate].map(DType::name);
            let [accumulate, communicate] = names;
            reasons.push(format!(
                "gradients are added in {accumulate} and sent in {communicate}, so they are rounded once on each replica: set \
                 precision.accumulate and precision.communicate to \"f32\""
            ));
        }
        if batch.micro_batches > 1 && !batch.has_neighbours && !replicas.is_power_of_two() {
            reasons.push(format!("{replicas} replicas are no power of two: set batch.reduce = \"defer\""));
        }
        if batch.has_neighbours && !batch.micro_batches.is_power_of_two() {
            reasons.push(format!(
                "the {} micro-batches of a replica are no power of two: change batch.micro, or set batch.reduce = \"each\"",
                batch.micro_batches
            ));
        }
        Some(reasons)
    }

    /// The same in words.
    pub fn replica_note(&self) -> Option<String> {
        let reasons = self.replicas_change_bits()?;
        Some(match reasons.is_empty() {
            true => {
                "gradients of micro-batches are added by a tree: 1, 2, 4, ... replicas give the same bits"
                    .into()
            }
            false => format!(
                "batch.sum = \"tree\", but the number of replicas changes bits: {}",
                reasons.join("; ")
            ),
        })
    }
}
