//! Damage in a run folder beside its checkpoints: everything that a resume would refuse, make again or leave out.

use anyhow::Result;
use phalanx_checkpoint::Checkpoint;
use phalanx_data::TOKENIZER_FILE;
use phalanx_system::files::is_named;
use phalanx_train::run_files::CONFIG_FILE;
use phalanx_train::token_data::TokenData;

use crate::configuration::user_config::UserConfig;
use crate::folders::checksums::Checksums;
use crate::folders::ownership::is_own;
use crate::folders::run_folder::RunFolder;
use crate::folders::run_names::{CHECKSUMS_FILE, SETUP_FILES};
use crate::folders::stored::metrics_warnings;

/// A line for each file that is missing, damaged or was changed; `checkpoint` is the newest one. Reads every file whole.
pub fn of_files(folder: &RunFolder, checkpoint: Option<&Checkpoint>) -> Vec<String> {
    let mut found = Vec::new();
    match Checksums::read(folder.path()) {
        Err(error) => found.push(format!("{error:#}")),
        Ok(None) => found.push(format!(
            "{} is missing: nothing says which files are those of the run",
            folder.file(CHECKSUMS_FILE).display()
        )),
        Ok(Some(checksums)) => {
            let of_name =
                |name| of_file(folder, &checksums, name).unwrap_or_else(|error| Some(format!("{error:#}")));
            found.extend(SETUP_FILES.into_iter().filter_map(of_name));
            if found.is_empty() {
                found.extend(check_tokens(folder, &checksums).err().map(|error| format!("{error:#}")));
            }
        }
    }
    let says_tokenizer = found.iter().any(|line| line.contains(TOKENIZER_FILE));
    if let Some(checkpoint) = checkpoint.filter(|_| !says_tokenizer) {
        found.extend(folder.tokenizer_of(checkpoint).err().map(|error| format!("{error:#}")));
    }
    found.extend(metrics_warnings(folder, checkpoint).unwrap_or_else(|error| vec![format!("{error:#}")]));
    found
}

/// Describes the damage of a file that sets a run up; `None` if it is intact.
fn of_file(folder: &RunFolder, checksums: &Checksums, name: &str) -> Result<Option<String>> {
    let path = folder.file(name);
    let shown = path.display();
    if !is_named(&path) {
        return Ok(checksums.recorded(name).map(|_| format!("{shown} is missing")));
    }
    let differs = || format!("{shown} is damaged or was changed: {CHECKSUMS_FILE} has not its checksum");
    Ok((!is_own(&path, name, checksums)?).then(differs))
}

/// Compares token files outside of the run folder with their checksums.
fn check_tokens(folder: &RunFolder, checksums: &Checksums) -> Result<()> {
    let Some(text) = folder.text(CONFIG_FILE)? else { return Ok(()) };
    let (stored, _) = UserConfig::parse_stored(text, &folder.file(CONFIG_FILE).display().to_string())?;
    let config = stored.config()?;
    if let (Some(_), Some(expected)) = (&config.data.tokens, &checksums.tokens) {
        TokenData::open(&config.data, folder.path())?.scan(usize::MAX, Some(expected))?;
    }
    Ok(())
}
