//! Builds release binaries of the workspace for the commands that try them.

use std::env;
use std::path::PathBuf;

use crate::test_programs::cargo;

/// Builds the programs of `packages`; the folder that they are in.
///
/// # Errors
/// When a build fails.
pub fn built(packages: &[&str]) -> Result<PathBuf, String> {
    built_with(packages, "")
}

/// The same with features, separated by commas, of each package.
///
/// # Errors
/// When a build fails.
pub fn built_with(packages: &[&str], features: &str) -> Result<PathBuf, String> {
    // One after the other: built together they would share features, and the binary would not be the usual one.
    for package in packages {
        let args = ["build", "--release", "--package", package, "--features", features];
        let status = cargo().args(args).status().map_err(|error| format!("cargo: {error}"))?;
        if !status.success() {
            return Err(format!("the release build of {package} failed"));
        }
    }
    // This program is in the folder of another profile, beside that of `release`.
    let own = env::current_exe().map_err(|error| error.to_string())?;
    let target = own.parent().and_then(|folder| folder.parent());
    target
        .map(|target| target.join("release"))
        .ok_or_else(|| format!("{} is in no target folder", own.display()))
}
