//! Runs on several hosts: one launcher per host, of which that of host 0 leads. It prepares and plans the run, sends the task
//! and the plans of all ranks to the others ([`protocol`]), writes the run folder and reports the end ([`team`]). Each
//! launcher starts the ranks of its own host and watches them; the others follow what the leader says ([`member`]).
//!
//! How launchers find and trust each other, and how they tell each other of failures, is [`phalanx_launch`]'s.

mod meet;
mod member;
mod protocol;
mod supervise;
mod team;

pub use meet::{Place, SecretSource, meet};
pub use member::follow;
pub use supervise::{lead_from_stdin, supervise};
pub use team::Team;
