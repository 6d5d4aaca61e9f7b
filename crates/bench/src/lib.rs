//! The benchmarks behind `phalanx bench`.
//!
//! [`steps`] times training steps, [`memory`] compares placements under several budgets, [`collectives`] times collectives,
//! [`kernels`] times kernels one by one, [`disk`] times disk memory, and [`strategies`] compares ways to train one model in
//! parallel. [`baselines`] are older methods of data parallelism. [`kernel_table`] holds measured kernels against what
//! the machine could do. The program `phalanx` reads the arguments, starts the ranks and prints what these modules
//! return.
#![forbid(unsafe_code)]

pub mod baselines;
pub mod collectives;
pub mod disk;
pub mod kernel_table;
pub mod kernels;
pub mod memory;
pub mod steps;
pub mod steps_report;
pub mod strategies;
