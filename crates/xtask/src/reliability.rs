//! `cargo xtask reliability`: builds the release binary and the fault campaign, and starts the campaign on the binary.

use std::process::{Command, ExitCode, ExitStatus};

use crate::release;

/// Builds both, then runs the campaign with `args`; its exit code is this one.
pub fn run(args: &[&str]) -> ExitCode {
    match release::built(&["phalanx-program", "phalanx-reliability"])
        .and_then(|folder| campaign(&folder, args))
    {
        Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(2)),
        Err(cause) => {
            eprintln!("the fault campaign could not run: {cause}");
            ExitCode::from(2)
        }
    }
}

fn campaign(folder: &std::path::Path, args: &[&str]) -> Result<ExitStatus, String> {
    let program = folder.join("phalanx-reliability");
    let mut command = Command::new(&program);
    command.arg("--binary").arg(folder.join("phalanx")).args(args);
    command.status().map_err(|error| format!("{}: {error}", program.display()))
}
