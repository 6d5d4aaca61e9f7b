//! Why launchers of several hosts part before their ranks have started.

/// Why a job ends before its ranks have started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parting {
    /// Somebody asked for it: the user of this launcher, or of another one; who.
    Stopped(String),
    /// A host did not come, was lost, or refused; the reason.
    Failed(String),
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
        }
    }
}

impl std::error::Error for Parting {}
