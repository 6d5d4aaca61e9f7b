//! Checksums of the files that set a run up: `checksums.json` in the run folder.
//!
//! Checkpoints check themselves. The configuration and the tokens are files of their own, and both may be
//! newer than the newest checkpoint (a resume with other data that was killed before it saved), so what they
//! must be is kept beside them. They also tell the run's files from somebody's own (`ownership.rs`). All of these files change
//! together (`staged.rs`).

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail};
use phalanx_data::TOKENIZER_FILE;
use phalanx_system::files::is_named;
use phalanx_train::run_files::CONFIG_FILE;
use phalanx_train::token_data::TOKENS_FILE;
use serde::{Deserialize, Serialize};

use crate::folders::run_names::{CHECKSUMS_FILE, GIVEN_FILE, PLAN_FILE};

/// Largest file that is read: six names, and the checksums of thousands of token files.
const MAX_BYTES: u64 = 1 << 20;

/// Checksums in a file of an earlier version, which has the first three.
const EARLIER: usize = 3;

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
    /// `plan.json`.
    #[serde(rename = "plan.json", default)]
    pub plan: Option<String>,
    /// `tokens.bin`, which may be that of other data than now.
    #[serde(rename = "tokens.bin", default)]
    pub own_tokens: Option<String>,
    /// `tokenizer.json`.
    #[serde(rename = "tokenizer.json", default)]
    pub tokenizer: Option<String>,
    /// True if the file is of an earlier version, which had only the first three checksums.
    #[serde(skip)]
    pub is_earlier: bool,
}

impl Checksums {
    /// Reads the checksums of a run folder; `None` where there are none (a run of an earlier version).
    ///
    /// # Errors
    /// A damaged file.
    pub fn read(run: &Path) -> Result<Option<Checksums>> {
        let path = run.join(CHECKSUMS_FILE);
        let text = match phalanx_system::files::read_bounded(&path, MAX_BYTES) {
            Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let entries: BTreeMap<String, Option<String>> = serde_json::from_slice(&text).unwrap_or_default();
        let is_one = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_digest = |text: &String| text.split(['+', '|']).all(is_one);
        match serde_json::from_slice(&text) {
            Ok(checksums)
                if [EARLIER, 2 * EARLIER].contains(&entries.len())
                    && entries.values().flatten().all(is_digest) =>
            {
                Ok(Some(Checksums { is_earlier: entries.len() == EARLIER, ..checksums }))
            }
            _ => bail!(
                "{} is damaged, or not that of a run: move it away. If this is a run, remove it, {CONFIG_FILE}, {GIVEN_FILE} and \
                 {PLAN_FILE}: --resume then takes the configuration of the newest checkpoint; nothing was changed",
                path.display()
            ),
        }
    }

    /// The checksums of a run folder whose files were checked, for a start that leaves some as they are.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn before(run: &Path) -> Result<Checksums> {
        match Checksums::read(run)? {
            Some(checksums) if !checksums.is_earlier => Ok(checksums),
            _ => {
                let tokenizer = digest_if_there(&run.join(TOKENIZER_FILE))?;
                Ok(Checksums { tokenizer, ..Checksums::default() })
            }
        }
    }

    /// Returns whether the file `name` of the run folder, with checksum `digest`, is the one that the run wrote.
    ///
    /// # Errors
    /// Those of `digest`.
    pub fn confirms(&self, name: &str, digest: impl FnOnce() -> Result<String>) -> Result<bool> {
        match self.recorded(name) {
            Some(recorded) => Ok(digest()? == recorded),
            None => Ok(self.is_earlier || name == CHECKSUMS_FILE),
        }
    }

    /// The checksum of the file `name` of the run folder.
    pub fn recorded(&self, name: &str) -> Option<&str> {
        let recorded = match name {
            CONFIG_FILE => &self.config,
            GIVEN_FILE => &self.given,
            PLAN_FILE => &self.plan,
            TOKENS_FILE if self.is_earlier => &self.tokens,
            TOKENS_FILE => &self.own_tokens,
            TOKENIZER_FILE => &self.tokenizer,
            _ => &None,
        };
        recorded.as_deref()
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

/// The same of a file that may be missing.
///
/// # Errors
/// A file that cannot be read.
pub fn digest_if_there(path: &Path) -> Result<Option<String>> {
    is_named(path).then(|| digest_of_file(path)).transpose()
}

/// The same of a file.
///
/// # Errors
/// A file that cannot be read.
pub fn digest_of_file(path: &Path) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let hashed =
        phalanx_system::files::open_regular(path).and_then(|file| hasher.update_reader(file).map(drop));
    hashed.with_context(|| format!("cannot read {}", path.display()))?;
    Ok(hasher.finalize().to_hex().to_string())
}
