//! `cargo xtask hosts`: trains over several hosts, which are network namespaces of this machine, and compares the result
//! with that of one host.
//!
//! The namespaces end with this process, however it ends ([`crate::namespaces`]). The hosts start their ranks with `phalanx launch`
//! (`trial`), by hand or over `ssh`. Slow links are made by a `relay`, which the `network` starts. All of it needs root, and `ip` of
//! iproute2.

mod arguments;
mod network;
mod relay;
mod ssh;
mod trial;

use std::process::ExitCode;

use arguments::Arguments;

/// Runs the trial that `args` describe.
pub fn run(args: &[&str]) -> ExitCode {
    if matches!(args, ["-h" | "--help"]) {
        print!("{}", arguments::HELP);
        return ExitCode::SUCCESS;
    }
    if let ["relay", more @ ..] = args {
        return relay::run(more);
    }
    let arguments = match Arguments::parse(args) {
        Ok(arguments) => arguments,
        Err(cause) => {
            eprintln!("{cause}\n\n{}", arguments::HELP);
            return ExitCode::from(2);
        }
    };
    match trial::run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(cause) => {
            eprintln!("the trial could not run: {cause}");
            ExitCode::from(2)
        }
    }
}
