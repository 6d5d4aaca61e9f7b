//! Earlier methods of data parallelism, for comparison and for teaching.
//!
//! [`data_parallel`] does what `torch.nn.DataParallel` does: one process drives all devices, copies the parameters to
//! each of them in every step, and gathers the logits on the first, which therefore needs the most memory.
//! [`asynchronous`] is a parameter server that is sharded over the workers themselves: no worker waits for the sum of
//! all gradients, so a gradient may belong to parameters that have been updated since. Both use the layers, the dry
//! run and the checkpoints of the synchronous engine in `train`: a replica of its `Rank` computes gradients, and a method moves
//! them and the parameters its own way.

pub mod asynchronous;
pub mod data_parallel;
