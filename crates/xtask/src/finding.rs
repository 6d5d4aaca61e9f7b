//! One thing that is not as it should be.

/// Place of a breach, its rule, and what is wrong and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// From the root of the workspace.
    pub path: String,
    /// From 1.
    pub line: usize,
    pub rule: &'static str,
    pub what: String,
}
