//! Why launchers of several hosts part before their ranks have started.

/// Why a job ends before its ranks have started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parting {
    /// Somebody asked for it: the user of this launcher, or of another one; who.
    Stopped(String),
    /// A host did not come, or refused; the reason.
    Failed(String),
    /// A host that runs ranks of the job, or leads it, is lost.
    Lost {
        /// The id of the host.
        host: usize,
        /// The host in words.
        name: String,
        /// The reason.
        why: String,
    },
}

impl From<String> for Parting {
    fn from(why: String) -> Parting {
        Parting::Failed(why)
    }
}

impl std::fmt::Display for Parting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Parting::Stopped(who) => write!(f, "{who}, before the ranks had started"),
            Parting::Failed(why) => f.write_str(why),
            Parting::Lost { name, why, .. } => write!(f, "the launcher of {name} is gone: {why}"),
        }
    }
}

impl std::error::Error for Parting {}
