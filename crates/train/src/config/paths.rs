//! The value of a key that names one path or several.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// One path or several, as written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Paths {
    /// One.
    One(String),
    /// Several.
    Several(Vec<String>),
}

impl Paths {
    /// The paths.
    pub fn paths(&self) -> Vec<PathBuf> {
        match self {
            Paths::One(path) => vec![PathBuf::from(path)],
            Paths::Several(paths) => paths.iter().map(PathBuf::from).collect(),
        }
    }

    /// As written, with commas between several.
    pub fn shown(&self) -> String {
        match self {
            Paths::One(path) => path.clone(),
            Paths::Several(paths) => paths.join(", "),
        }
    }
}

impl From<&Path> for Paths {
    fn from(path: &Path) -> Paths {
        Paths::One(path.display().to_string())
    }
}

impl From<Vec<PathBuf>> for Paths {
    fn from(paths: Vec<PathBuf>) -> Paths {
        match &paths[..] {
            [one] => one.as_path().into(),
            _ => Paths::Several(paths.iter().map(|path| path.display().to_string()).collect()),
        }
    }
}
