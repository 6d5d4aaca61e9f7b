//! `phalanx completions`: a script that completes the command line in a shell.

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::arguments::args::{Cli, CompletionsArgs};
use crate::host::output;

/// Prints the script.
///
/// # Errors
/// Standard output that cannot be written.
pub fn completions(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "phalanx", &mut script);
    Ok(output::print(&String::from_utf8(script).context("a script that is text")?)?)
}
