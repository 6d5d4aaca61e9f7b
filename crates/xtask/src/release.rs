//! Builds release binaries of the workspace for the commands that try them.

use std::env;
use std::path::PathBuf;

use crate::test_programs::cargo;

/// Builds the program of a package, alone, so that it has the features of the usual one, and those, separated by commas; the folder
/// that it is in.
///
/// # Errors
/// When the build fails.
pub fn built(package: &str, features: &str) -> Result<PathBuf, String> {
    let args = ["build", "--release", "--package", package, "--features", features];
    let status = cargo().args(args).status().map_err(|error| format!("cargo: {error}"))?;
    if !status.success() {
        return Err(format!("the release build of {package} failed"));
    }
    // This program is in the folder of another profile, beside that of `release`.
    let own = env::current_exe().map_err(|error| error.to_string())?;
    let target = own.parent().and_then(|folder| folder.parent());
    target
        .map(|target| target.join("release"))
        .ok_or_else(|| format!("{} is in no target folder", own.display()))
}
