//! Striping of a disk memory over several folders: stripe s lies in folder s mod n, so that a long transfer keeps all disks busy.

/// Bytes of a stripe, and of a piece of a transfer: large enough that the disk's latency and the costs of a request do not
/// count, small enough that several are in flight for a chunk of a few MiB.
pub const STRIPE: u64 = 1 << 20;

/// A disk memory of `bytes` bytes over some folders.
#[derive(Clone, Copy)]
pub(crate) struct Stripes {
    bytes: u64,
    folders: u64,
}

/// Position of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StripePosition {
    pub(crate) folder: usize,
    /// In the folder's file.
    pub(crate) offset: u64,
    /// Bytes from here to the end of its stripe.
    pub(crate) room: u64,
}

impl Stripes {
    pub(crate) fn new(bytes: u64, folders: usize) -> Stripes {
        assert!(folders > 0, "disk memory lies in at least one folder");
        Stripes { bytes, folders: folders as u64 }
    }

    /// All bytes, of all folders.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes in a folder.
    pub(crate) fn bytes_in(&self, folder: usize) -> u64 {
        let (whole, rest) = (self.bytes / STRIPE, self.bytes % STRIPE);
        let (rounds, last) = (whole / self.folders, whole % self.folders);
        let folder = folder as u64;
        let partial = if folder == last { rest } else { 0 };
        (rounds + u64::from(folder < last)) * STRIPE + partial
    }

    pub(crate) fn place(&self, at: u64) -> StripePosition {
        let (stripe, within) = (at / STRIPE, at % STRIPE);
        StripePosition {
            folder: (stripe % self.folders) as usize,
            offset: stripe / self.folders * STRIPE + within,
            room: STRIPE - within,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_place_inside_its_file() {
        for folders in 1..4 {
            for bytes in [0, 1, STRIPE, 2 * STRIPE + 5, 6 * STRIPE - 1, 7 * STRIPE] {
                let stripes = Stripes::new(bytes, folders);
                assert_eq!((0..folders).map(|folder| stripes.bytes_in(folder)).sum::<u64>(), bytes);
                let mut next = vec![0; folders];
                let mut at = 0;
                while at < bytes {
                    let StripePosition { folder, offset, room } = stripes.place(at);
                    assert_eq!((offset, room), (next[folder], STRIPE), "{folders} folders, byte {at}");
                    next[folder] += room.min(bytes - at);
                    at += room;
                }
                assert!((0..folders).all(|folder| next[folder] == stripes.bytes_in(folder)));
            }
        }
        assert_eq!(
            Stripes::new(4 * STRIPE, 3).place(STRIPE + 7),
            StripePosition { folder: 1, offset: 7, room: STRIPE - 7 }
        );
    }
}
