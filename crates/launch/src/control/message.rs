//! Messages between launchers: one byte for the kind, and the content.

use phalanx_collectives::Blame;
use serde::{Deserialize, Serialize};

/// Maximum number of bytes of a message: a task with the plans of a large world.
pub(crate) const MESSAGE_MAX: usize = 1 << 30;

/// Why a rank failed, as its launcher or another one says it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureReport {
    /// The id of the host whose launcher says it.
    pub reporter: usize,
    /// The rank that was the cause.
    pub rank: usize,
    /// Its error, or how its process ended.
    pub reason: String,
    /// Its last activity.
    pub activity: String,
    /// True if the whole host of the rank was lost.
    pub host_lost: bool,
    /// Cause of the failure beside the rank.
    pub blame: Blame,
}

/// Message between launchers.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The sender lives, and has nothing else to say.
    Alive,
    /// States of ranks that have changed, by world rank.
    Activity(Vec<(usize, Vec<u8>)>),
    /// The job ends for this reason.
    Failed(FailureReport),
    /// The ranks shall finish their step and end.
    Stop,
    /// The ranks of the host with this id have ended; whether well.
    RanksEnded(usize, bool),
    /// The launcher of host 0 does not take this host into the job; the reason.
    Refused(String),
    /// The launcher of host 0 has given the job up; the reason.
    GivenUp(String),
    /// The launcher of host 0 ends the job before its ranks have started, because somebody asked for it; who.
    Stopped(String),
    /// A message of the launchers' program: bytes that mean nothing here.
    Program(Vec<u8>),
}

const ALIVE: u8 = 0;
const ACTIVITY: u8 = 1;
const FAILED: u8 = 2;
const STOP: u8 = 3;
const RANKS_ENDED: u8 = 4;
const PROGRAM: u8 = 5;
const REFUSED: u8 = 6;
const GIVEN_UP: u8 = 7;
const STOPPED: u8 = 8;

impl Message {
    /// The bytes of the message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Message::Alive => vec![ALIVE],
            Message::Stop => vec![STOP],
            Message::RanksEnded(host, well) => {
                [&[RANKS_ENDED, u8::from(*well)][..], &(*host as u32).to_le_bytes()].concat()
            }
            Message::Refused(reason) => [&[REFUSED][..], reason.as_bytes()].concat(),
            Message::GivenUp(reason) => [&[GIVEN_UP][..], reason.as_bytes()].concat(),
            Message::Stopped(who) => [&[STOPPED][..], who.as_bytes()].concat(),
            Message::Program(bytes) => [&[PROGRAM][..], bytes].concat(),
            Message::Failed(report) => {
                let text = serde_json::to_vec(report).expect("a report is plain data");
                [&[FAILED][..], &text].concat()
            }
            Message::Activity(states) => {
                let mut bytes = vec![ACTIVITY];
                for (rank, state) in states {
                    bytes.extend((*rank as u32).to_le_bytes());
                    bytes.extend((state.len() as u32).to_le_bytes());
                    bytes.extend(state);
                }
                bytes
            }
        }
    }

    /// The message in `bytes`; `None` if they are none.
    pub fn decode(bytes: &[u8]) -> Option<Message> {
        let (kind, content) = bytes.split_first()?;
        match (*kind, content) {
            (ALIVE, []) => Some(Message::Alive),
            (STOP, []) => Some(Message::Stop),
            (RANKS_ENDED, [well @ (0 | 1), host @ ..]) => {
                let host = u32::from_le_bytes(host.try_into().ok()?);
                Some(Message::RanksEnded(host as usize, *well == 1))
            }
            (PROGRAM, bytes) => Some(Message::Program(bytes.to_vec())),
            (REFUSED, text) => Some(Message::Refused(String::from_utf8_lossy(text).into_owned())),
            (GIVEN_UP, text) => Some(Message::GivenUp(String::from_utf8_lossy(text).into_owned())),
            (STOPPED, text) => Some(Message::Stopped(String::from_utf8_lossy(text).into_owned())),
            (FAILED, text) => serde_json::from_slice(text).ok().map(Message::Failed),
            (ACTIVITY, mut rest) => {
                let mut states = Vec::new();
                while !rest.is_empty() {
                    let (rank, behind) = number(rest)?;
                    let (length, behind) = number(behind)?;
                    let (state, behind) = behind.split_at_checked(length)?;
                    states.push((rank, state.to_vec()));
                    rest = behind;
                }
                Some(Message::Activity(states))
            }
            _ => None,
        }
    }
}

/// The number in the first four bytes, and what is behind them.
fn number(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (number, behind) = bytes.split_first_chunk::<4>()?;
    Some((u32::from_le_bytes(*number) as usize, behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written_and_nothing_else_is() {
        let report = FailureReport {
            reporter: 1,
            rank: 3,
            reason: "process 7 was killed".into(),
            activity: "step 5".into(),
            host_lost: false,
            blame: Blame::Link { peer: 1 },
        };
        let messages = [
            Message::Alive,
            Message::Stop,
            Message::RanksEnded(3, true),
            Message::RanksEnded(0, false),
            Message::Failed(report),
            Message::Activity(vec![(0, vec![1, 2, 3]), (70_000, vec![])]),
            Message::Program(b"anything".to_vec()),
            Message::Refused("no".into()),
            Message::GivenUp("host 2 did not come".into()),
            Message::Stopped("host 1 was asked to stop".into()),
        ];
        for message in &messages {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes).as_ref(), Some(message));
            let cut = &bytes[..bytes.len() - 1];
            assert_ne!(Message::decode(cut).as_ref(), Some(message));
        }
        for wrong in [
            &[][..],
            &[9],
            &[ALIVE, 1],
            &[ACTIVITY, 1, 0, 0, 0, 255, 255, 255, 255],
            &[RANKS_ENDED, 2, 0, 0, 0, 0],
        ] {
            assert_eq!(Message::decode(wrong), None, "{wrong:?}");
        }
    }
}
