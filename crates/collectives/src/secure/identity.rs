//! Who may connect to whom: the secret of a job, and what a connection is for.

use std::io::{Error, ErrorKind};

use serde::{Deserialize, Serialize};

/// The secret that all ranks and launchers of a job share. It is handed over in sealed memory files, files of mode 0600
/// or pipes: never in an argument, an environment variable or a log.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new secret from the system's random numbers.
    ///
    /// # Errors
    /// When the system has none to give.
    pub fn generate() -> std::io::Result<Secret> {
        let mut bytes = [0; 32];
        let filled = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
        if filled != bytes.len() {
            return Err(Error::new(ErrorKind::UnexpectedEof, "the system gave too few random bytes"));
        }
        Ok(Secret(bytes))
    }

    /// The secret with these bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Secret {
        Secret(bytes)
    }

    /// The bytes, to hand them over.
    pub fn to_bytes(&self) -> [u8; 32] {
        self.0
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Identity of a connection: build, job, start and purpose. Both sides must have the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The build of the program.
    pub build: &'static str,
    /// The job, a random number of its launcher.
    pub job: [u8; 16],
    /// Which start of the job this is: restarts count it up.
    pub epoch: u32,
    /// Purpose of the connection: `control` or `data`.
    pub purpose: &'static str,
}

/// The purpose of connections between launchers.
const CONTROL: &str = "control";

/// Protection of the data that ranks send each other after the handshake. Launchers' messages are always encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Encrypted and authenticated: AES-256-GCM.
    Encrypted,
    /// Neither: who is on the way reads it, and changes it unnoticed. The peers have authenticated each other all the same.
    Plaintext,
}

impl Identity {
    /// Returns whether the data after the handshake is encrypted and authenticated.
    pub(super) fn encrypts(&self, protection: Protection) -> bool {
        protection == Protection::Encrypted || self.purpose == CONTROL
    }

    /// Bytes that both sides put into the handshake's hash.
    pub(super) fn prologue(&self, protection: Protection) -> Vec<u8> {
        let mut bytes = b"phalanx connection 1".to_vec();
        // Lengths go before what varies, so that no two identities give the same bytes.
        for text in [self.build, self.purpose] {
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes.extend(self.job);
        bytes.extend(self.epoch.to_le_bytes());
        bytes.push(match protection {
            Protection::Encrypted => 1,
            Protection::Plaintext => 0,
        });
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The handshake of two sides fails unless both prologues are the same.
    #[test]
    fn every_part_of_an_identity_changes_the_prologue() {
        let identity = Identity { build: "0.1.0 (a)", job: [1; 16], epoch: 2, purpose: "data" };
        let mut prologues = vec![
            identity.prologue(Protection::Encrypted),
            identity.prologue(Protection::Plaintext),
            Identity { build: "0.1.0 (b)", ..identity.clone() }.prologue(Protection::Encrypted),
            Identity { job: [2; 16], ..identity.clone() }.prologue(Protection::Encrypted),
            Identity { epoch: 3, ..identity.clone() }.prologue(Protection::Encrypted),
            Identity { purpose: "control", ..identity }.prologue(Protection::Encrypted),
        ];
        prologues.sort();
        prologues.dedup();
        assert_eq!(prologues.len(), 6);
    }
}
