//! Messages between the launcher of host 0, which leads a job of several hosts, and those of the other hosts, beside the control plane's
//! own messages. A message is a length, JSON of this length, and bytes behind it.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result};
use phalanx_collectives::Wire;
use phalanx_launch::HostInfo;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Message of the launcher of host 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum FromLeader {
    /// Ranks will start: make their memory and their listeners.
    Prepare(Preparation),
    /// Start the ranks; the task file is behind the message.
    Start {
        /// Addresses at which the world ranks listen.
        addresses: Vec<SocketAddr>,
    },
    /// Progress of host 0 before ranks start, in words that follow its name.
    Progress {
        /// Description of the progress.
        line: String,
    },
    /// The job is over.
    Finish {
        /// Exit code of host 0's launcher.
        code: u8,
    },
}

/// A start of the job's ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preparation {
    /// The hosts, with the ranks that each runs in this start.
    pub hosts: Vec<HostInfo>,
    /// The run folder.
    pub run: PathBuf,
    /// A file in the run folder, which shows whether a host sees the same folder, and its content.
    pub token: (String, String),
    /// The job's random number.
    pub job: [u8; 16],
    /// Which start of the job this is.
    pub epoch: u32,
    /// Seconds for which a rank may be stalled.
    pub stall_timeout_s: u64,
    /// Connections between two ranks.
    pub streams: usize,
    /// Transport between hosts.
    pub wire: Wire,
}

/// Answer of the launcher of another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum FromMember {
    /// The ranks of this host can start.
    Ready {
        /// Which start of the job this is.
        epoch: u32,
        /// Addresses at which they listen.
        addresses: Vec<SocketAddr>,
    },
    /// They cannot.
    Cannot {
        /// Which start of the job this is.
        epoch: u32,
        /// Why not.
        reason: String,
    },
}

/// The bytes of a message, with `blob` behind it.
pub fn encode(message: &impl Serialize, blob: &[u8]) -> Result<Vec<u8>> {
    let head = serde_json::to_vec(message)?;
    Ok([&(head.len() as u32).to_le_bytes()[..], &head, blob].concat())
}

/// The message in `bytes`, and what is behind it.
///
/// # Errors
/// Bytes that are no message of this version.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8])> {
    let wrong = "a message of another launcher that makes no sense";
    let (length, rest) = bytes.split_first_chunk::<4>().context(wrong)?;
    let (head, blob) = rest.split_at_checked(u32::from_le_bytes(*length) as usize).context(wrong)?;
    Ok((serde_json::from_slice(head).context(wrong)?, blob))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written_and_nothing_else_is() {
        let start = FromLeader::Start { addresses: vec!["127.0.0.1:7".parse().unwrap()] };
        let bytes = encode(&start, b"task").unwrap();
        assert_eq!(decode::<FromLeader>(&bytes).unwrap(), (start, &b"task"[..]));
        for wrong in [&bytes[..3], &bytes[..10], &[255; 8][..], &[2, 0, 0, 0, b'{', b'}']] {
            assert!(decode::<FromLeader>(wrong).is_err());
        }
    }
}
