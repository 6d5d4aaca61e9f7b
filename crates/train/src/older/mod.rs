//! Older ways of data parallelism, for comparison and for teaching.
//!
//! [`data_parallel`] is what `torch.nn.DataParallel` does: one process, parameters copied to all devices in every
//! step, logits gathered on the first, which therefore needs most memory. [`asynchronous`] is the parameter server,
//! sharded over the workers themselves: no worker waits for a sum, and gradients are of parameters that are some
//! updates old. Both compute with the same layers and plan their memory by the same dry run as everything here;
//! what they have in common, a model that one device holds whole, is in `whole`.

pub mod asynchronous;
pub mod data_parallel;
mod whole;
