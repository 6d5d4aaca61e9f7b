//! Checksums of the files that a resumed run reads: `checksums.json` in the run folder.
//!
//! Checkpoints check themselves. The configuration and the tokens are files of their own, and both may be
//! newer than the newest checkpoint (a resume with other data that was killed before it saved), so what they
//! must be is kept beside them. All of these files change together (`staged.rs`).

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// Name of the file.
pub const CHECKSUMS_FILE: &str = "checksums.json";

/// Largest file that is read: three names, and the checksums of thousands of token files.
const MAX_BYTES: u64 = 1 << 20;

/// blake3 in hexadecimal of each file; `None` for one that the run does not have or whose checksum is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checksums {
    /// `config.toml`.
    #[serde(rename = "config.toml")]
    pub config: Option<String>,
    /// `given.toml`.
    #[serde(rename = "given.toml")]
    pub given: Option<String>,
    /// The token files that the configuration names, as [`ScannedTokens`](phalanx_train::token_data::ScannedTokens) joins
    /// their checksums, or `tokens.bin`.
    pub tokens: Option<String>,
}

impl Checksums {
    /// Reads the checksums of a run folder; `None` where there are none (a run of an earlier version).
    ///
    /// # Errors
    /// A damaged file.
    pub fn read(run: &Path) -> Result<Option<Checksums>> {
        let path = run.join(CHECKSUMS_FILE);
        let text = match phalanx_files::read_bounded(&path, MAX_BYTES) {
            Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let entries: BTreeMap<String, Option<String>> = serde_json::from_slice(&text).unwrap_or_default();
        let is_one = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_digest = |text: &String| text.split(['+', '|']).all(is_one);
        match serde_json::from_slice(&text) {
            Ok(checksums) if entries.len() == 3 && entries.values().flatten().all(is_digest) => {
                Ok(Some(checksums))
            }
            _ => bail!(
                "{} is damaged: remove it, and config.toml is compared with the newest checkpoint instead",
                path.display()
            ),
        }
    }

    /// The content of the file.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and texts") + "\n"
    }
}

/// blake3 in hexadecimal.
pub fn digest(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}
