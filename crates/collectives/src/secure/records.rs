//! Records: the bytes after a handshake, encrypted. A record is its length (u16, little endian) and so many bytes of
//! ciphertext, of which the last 16 authenticate it. Records are numbered; the number is the nonce, so a record that is
//! repeated, lost or moved cannot be opened.
//!
//! With AES-GCM and at most 64 KiB a record, an attacker who has seen 2^46 blocks (a petabyte) of one connection
//! distinguishes it from noise with a probability below 2^-36; a connection lasts as long as its job.

use std::io::{Error, ErrorKind, Result};
use std::sync::Arc;

use snow::StatelessTransportState;

/// Maximum number of bytes of a record after its length.
pub(crate) const RECORD_MAX: usize = 65_535;
/// Bytes that authenticate a record.
const TAG: usize = 16;

/// Encrypts what this side sends.
pub(crate) struct Sealer {
    keys: Arc<StatelessTransportState>,
    number: u64,
}

/// Decrypts what the peer sends.
pub(crate) struct Opener {
    keys: Arc<StatelessTransportState>,
    number: u64,
}

/// Both directions of a connection.
pub(super) fn both(keys: StatelessTransportState) -> (Sealer, Opener) {
    let keys = Arc::new(keys);
    (Sealer { keys: Arc::clone(&keys), number: 0 }, Opener { keys, number: 0 })
}

impl Sealer {
    /// Maximum number of bytes that go into one record.
    pub(crate) const PAYLOAD_MAX: usize = RECORD_MAX - TAG;

    /// Writes the record of `payload` to the start of `record`; returns its bytes, length included.
    pub(crate) fn seal(&mut self, payload: &[u8], record: &mut [u8]) -> Result<usize> {
        let bytes = self.keys.write_message(self.number, payload, &mut record[2..]).map_err(refused)?;
        self.number += 1;
        record[..2].copy_from_slice(&(bytes as u16).to_le_bytes());
        Ok(2 + bytes)
    }
}

impl Opener {
    /// Decrypts the ciphertext of a record into `payload`, which must have room for the ciphertext. Returns the bytes of
    /// the payload.
    pub(crate) fn open(&mut self, ciphertext: &[u8], payload: &mut [u8]) -> Result<usize> {
        if ciphertext.len() < TAG {
            return Err(refused(snow::Error::Input));
        }
        let bytes = self.keys.read_message(self.number, ciphertext, payload).map_err(refused)?;
        self.number += 1;
        Ok(bytes)
    }
}

fn refused(error: snow::Error) -> Error {
    Error::new(ErrorKind::InvalidData, format!("a record that the peer did not send: {error}"))
}
