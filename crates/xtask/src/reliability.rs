//! `cargo xtask reliability`: builds the release binary and the fault campaign, and starts the campaign on the binary.

use std::env;
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};

/// Builds both, then runs the campaign with `args`; its exit code is this one.
pub fn run(args: &[&str]) -> ExitCode {
    match built().and_then(|folder| campaign(&folder, args)) {
        Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(2)),
        Err(cause) => {
            eprintln!("the fault campaign could not run: {cause}");
            ExitCode::from(2)
        }
    }
}

/// Builds the two programs; the folder that they are in.
fn built() -> Result<PathBuf, String> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // One after the other: built together they would share features, and the binary would not be the usual one.
    for package in ["phalanx-program", "phalanx-reliability"] {
        let args = ["build", "--release", "--package", package];
        let status = Command::new(&cargo).args(args).status().map_err(|error| format!("cargo: {error}"))?;
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

fn campaign(folder: &std::path::Path, args: &[&str]) -> Result<ExitStatus, String> {
    let program = folder.join("phalanx-reliability");
    let mut command = Command::new(&program);
    command.arg("--binary").arg(folder.join("phalanx")).args(args);
    command.status().map_err(|error| format!("{}: {error}", program.display()))
}
