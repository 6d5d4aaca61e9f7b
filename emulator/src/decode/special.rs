//! Special registers by name.

use super::Decoder;
use crate::kernel::{MaskOf, Register, Special};
use crate::ptx::PtxError;

impl Decoder<'_> {
    /// The register that holds a special register.
    pub(super) fn special_register(&mut self, name: &str) -> Result<Register, PtxError> {
        match special(name) {
            Some(special) => Ok(self.special(special)),
            None if name.starts_with("%cluster") || name.contains("_ctaid") || name.contains("_nctaid") => {
                Err(self.error(format!("`{name}`: clusters are not supported")))
            }
            None => Err(self.error(format!("`{name}` is not declared"))),
        }
    }
}

/// The clock registers and whether they have 64 bits.
pub(super) fn clock(name: &str) -> Option<bool> {
    match name {
        "%clock" | "%clock_hi" | "%globaltimer_lo" | "%globaltimer_hi" => Some(false),
        "%clock64" | "%globaltimer" => Some(true),
        _ => None,
    }
}

fn special(name: &str) -> Option<Special> {
    let (base, axis) = match name.rsplit_once('.') {
        Some((base, "x")) => (base, Some(0)),
        Some((base, "y")) => (base, Some(1)),
        Some((base, "z")) => (base, Some(2)),
        _ => (name, None),
    };
    Some(match (base, axis) {
        ("%tid", Some(axis)) => Special::Thread(axis),
        ("%ntid", Some(axis)) => Special::BlockSize(axis),
        ("%ctaid", Some(axis)) => Special::Block(axis),
        ("%nctaid", Some(axis)) => Special::GridSize(axis),
        ("%laneid", None) => Special::Lane,
        ("%warpid", None) => Special::Warp,
        ("%nwarpid", None) => Special::WarpCount,
        ("%smid", None) => Special::Multiprocessor,
        ("%lanemask_eq", None) => Special::LaneMask(MaskOf::Equal),
        ("%lanemask_lt", None) => Special::LaneMask(MaskOf::Below),
        ("%lanemask_le", None) => Special::LaneMask(MaskOf::UpTo),
        ("%lanemask_gt", None) => Special::LaneMask(MaskOf::Above),
        ("%lanemask_ge", None) => Special::LaneMask(MaskOf::From),
        ("%dynamic_smem_size", None) => Special::DynamicShared,
        _ => return None,
    })
}
