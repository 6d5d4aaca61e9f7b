//! `cargo xtask reliability` and `cargo xtask hosts`: build the release binary and the program of crates/testing that tries it, and start
//! that.

use std::process::{Command, ExitCode, ExitStatus};

use crate::release;

/// Builds both, then runs the part of the program that `name` says with `args`; its exit code is this one.
pub fn run(name: &str, args: &[&str]) -> ExitCode {
    match trial(name, args) {
        Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(2)),
        Err(cause) => {
            eprintln!("{name} could not run: {cause}");
            ExitCode::from(2)
        }
    }
}

fn trial(name: &str, args: &[&str]) -> Result<ExitStatus, String> {
    let mut command = Command::new(release::built("phalanx-testing", "")?.join("phalanx-testing"));
    command.arg(name);
    let is_help = args.iter().any(|arg| matches!(*arg, "-h" | "--help"));
    if !is_help && !args.contains(&"--binary") {
        let features = if args.contains(&"--mpirun") { "mpi" } else { "" };
        command.arg("--binary").arg(release::built("phalanx-program", features)?.join("phalanx"));
    }
    let program = command.get_program().to_string_lossy().into_owned();
    command.args(args).status().map_err(|error| format!("{program}: {error}"))
}
