//! The values of a warp's access as rows of registers, and back.

use crate::kernel::{Register, Transfer};
use crate::registers::{Class, LANES, store};
use crate::vectors::vectorised;

use super::warp::Warp;

/// The bytes of each lane.
pub(super) type LaneBytes<const N: usize> = [[u8; N]; LANES];

vectorised! {
    /// The value of each lane at an offset, of 1, 2 or 4 bytes.
    fn words[N](lanes: &LaneBytes<N>, offset: usize, bytes: usize) -> [u32; LANES] {
        assert!(offset + bytes <= N);
        let mut row = [0; LANES];
        for lane in 0..LANES {
            row[lane] = match bytes {
                1 => u32::from(lanes[lane][offset]),
                2 => u32::from(u16::from_le_bytes([lanes[lane][offset], lanes[lane][offset + 1]])),
                _ => u32::from_le_bytes(std::array::from_fn(|byte| lanes[lane][offset + byte])),
            };
        }
        row
    }
}

vectorised! {
    /// The value of each lane at an offset, of 8 bytes.
    fn longs[N](lanes: &LaneBytes<N>, offset: usize) -> [u64; LANES] {
        assert!(offset + 8 <= N);
        let mut row = [0; LANES];
        for lane in 0..LANES {
            row[lane] = u64::from_le_bytes(std::array::from_fn(|byte| lanes[lane][offset + byte]));
        }
        row
    }
}

vectorised! {
    /// Puts the low bytes of each lane's value, 1, 2 or 4, at an offset.
    fn put_words[N](row: &[u32; LANES], lanes: &mut LaneBytes<N>, offset: usize, bytes: usize) {
        assert!(offset + bytes <= N);
        for lane in 0..LANES {
            let value = row[lane].to_le_bytes();
            match bytes {
                1 => lanes[lane][offset] = value[0],
                2 => lanes[lane][offset..offset + 2].copy_from_slice(&value[..2]),
                _ => lanes[lane][offset..offset + 4].copy_from_slice(&value),
            }
        }
    }
}

vectorised! {
    /// Puts each lane's value of 8 bytes at an offset.
    fn put_longs[N](row: &[u64; LANES], lanes: &mut LaneBytes<N>, offset: usize) {
        assert!(offset + 8 <= N);
        for lane in 0..LANES {
            lanes[lane][offset..offset + 8].copy_from_slice(&row[lane].to_le_bytes());
        }
    }
}

/// A value of so many bytes, extended by its sign.
fn signed(value: u32, bytes: usize) -> i32 {
    let unused = 32 - 8 * bytes as u32;
    ((value << unused) as i32) >> unused
}

/// Puts what the active lanes have read into the registers of a load.
#[inline]
pub(super) fn to_registers<const N: usize>(
    warp: &mut Warp,
    load: &Transfer,
    lanes: &LaneBytes<N>,
    active: u32,
) {
    for (index, &Register { class, slot }) in load.values.iter().enumerate() {
        let (offset, slot) = (index * load.bytes, usize::from(slot));
        if load.bytes == 8 {
            store(&mut warp.registers.longs[slot].0, &longs(lanes, offset), active);
            continue;
        }
        let mut row = words(lanes, offset, load.bytes);
        if load.signed {
            row = row.map(|value| signed(value, load.bytes) as u32);
        }
        match class {
            Class::Long if load.signed => {
                let wide = row.map(|value| i64::from(value as i32) as u64);
                store(&mut warp.registers.longs[slot].0, &wide, active);
            }
            Class::Long => store(&mut warp.registers.longs[slot].0, &row.map(u64::from), active),
            _ => store(&mut warp.registers.words[slot].0, &row, active),
        }
    }
}

/// What each lane writes.
#[inline]
pub(super) fn of_registers<const N: usize>(warp: &Warp, transfer: &Transfer) -> LaneBytes<N> {
    let mut lanes = [[0u8; N]; LANES];
    for (index, &Register { class, slot }) in transfer.values.iter().enumerate() {
        let (offset, slot) = (index * transfer.bytes, usize::from(slot));
        match class {
            Class::Long if transfer.bytes == 8 => {
                put_longs(&warp.registers.longs[slot].0, &mut lanes, offset)
            }
            Class::Long => {
                let low = warp.registers.longs[slot].0.map(|value| value as u32);
                put_words(&low, &mut lanes, offset, transfer.bytes);
            }
            _ => put_words(&warp.registers.words[slot].0, &mut lanes, offset, transfer.bytes),
        }
    }
    lanes
}
