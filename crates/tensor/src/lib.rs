//! Tensors, their memory and the devices that compute on them.
//!
//! [`Device`] is what the rest of the engine sees: it allocates from an [`Arena`] for each of its memories, and
//! issues operations and copies to streams. Each operation is described once, in [`operations`]: arguments,
//! checks, price and placement rule. A [`Backend`] executes them: `phalanx_cpu::Cpu` when they are issued, `Meta` never (it
//! records), others later, on streams of their own.

mod access;
pub mod address;
mod allocator;
pub mod arena;
pub mod arguments;
pub mod backend;
pub mod blocks;
pub mod buffer;
pub mod copies;
pub mod device;
pub mod disk;
mod disk_stream;
mod events;
pub mod factory;
mod flights;
mod gaps;
mod host_work;
mod immediate;
mod kind;
pub mod links;
pub mod meta;
pub mod operation;
pub mod operations;
pub mod placement;
pub mod preference;
pub mod profile;
pub mod queues;
pub mod record;
pub mod region;
mod replay;
pub mod rotary;
pub mod shape;
mod stored;
mod threads;
mod tiles;
pub mod view;
mod windows;

pub use access::Access;
pub use allocator::{OrEnd, return_freed_memory};
pub use arena::Arena;
pub use arguments::{
    AdamW, Clip, CrossEntropy, Dropout, Epilogue, Gate, Gelu, Heads, IGNORED, Layout, Lookup, Patches,
    Positions, RowNorm, RowPositions, Sgd, Weight, WholeSums, logits_stride, vocabulary_blocks,
};
pub use backend::{Backend, DeviceError, Kernels};
pub use buffer::Tensor;
pub use copies::{Fetch, PendingCopy};
pub use device::{Device, NORM_BLOCK};
pub use disk::{DiskMemory, DiskOptions};
pub use factory::{DeviceFactory, DeviceRequest, ProductMethod};
pub use flights::InFlight;
pub use host_work::PendingHostWork;
pub use immediate::Immediate;
pub use kind::Kind;
pub use links::Links;
pub use operations::{
    AdamWUpdate, LayerNorm, LayerNormBackward, NormSums, OwnOperation, PreferenceLoss, Rescale,
    RescaleGradient, SgdUpdate, VocabularyLoss, VocabularyStatistics,
};
pub use phalanx_plan::trace::{Category, DType, Memory};
pub use preference::{Preference, PreferenceKind};
pub use region::Region;
pub use rotary::{LongRope, Rotary, RotaryScaling, Yarn};
pub use shape::Shape;
pub use threads::{panic_text, refused_thread};
pub use tiles::PendingTiles;
pub use view::{Element, View, ViewMut};
