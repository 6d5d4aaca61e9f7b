//! `phalanx man`: the manual pages of the program and of each command.

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::arguments::args::{Cli, ManArgs};
use crate::folders::ownership::{begins_with, check_output};
use crate::host::output;

/// Writes `phalanx.1` and a page for each command.
///
/// # Errors
/// A folder that cannot be made or written.
pub fn man(args: &ManArgs) -> Result<()> {
    let mut root = Cli::command().disable_help_subcommand(true);
    // Gives each command below the name of its page, as `phalanx-bench-step`.
    root.build();
    let mut pages = Vec::new();
    for command in with_commands(&root) {
        let name = format!("{}.1", command.get_display_name().unwrap_or(command.get_name()));
        let mut page = Vec::new();
        Man::new(command).render(&mut page).context("a page in memory")?;
        pages.push((name, page));
    }
    let cannot = || format!("cannot write the manual to {}", args.dir.display());
    for (name, page) in &pages {
        let page = String::from_utf8_lossy(page);
        // Everything before the version.
        let first = page.split(" 1 ").next().unwrap_or_default();
        check_output(&args.dir.join(name), "the page", |path| begins_with(path, first))?;
    }
    phalanx_system::files::create_folders(&args.dir).with_context(cannot)?;
    for (name, page) in &pages {
        phalanx_system::files::write_output(&args.dir.join(name), page).with_context(cannot)?;
    }
    output::print_line(&format!(
        "{} pages in {}; to read the first: man -l {}",
        pages.len(),
        args.dir.display(),
        args.dir.join("phalanx.1").display()
    ))?;
    Ok(())
}

/// The command and all below it that people may use.
fn with_commands(command: &Command) -> Vec<Command> {
    let below = command.get_subcommands().filter(|below| !below.is_hide_set());
    std::iter::once(command.clone()).chain(below.flat_map(with_commands)).collect()
}
