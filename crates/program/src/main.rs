//! The program `phalanx`: reads the command line, runs the command, reports errors on standard error.
//!
//! Exit codes: 0 success, 1 an error (reported in one message), 2 an invalid command line, 130 a training run that was
//! stopped by Ctrl-C or a signal after it had saved, 141 the reader of standard output has closed it.
#![forbid(unsafe_code)]

mod arguments;
mod commands;
mod configuration;
mod folders;
mod host;
mod jobs;
mod plans;
mod reports;
#[cfg(test)]
mod tests;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use arguments::args::{Cli, Command};
use arguments::bench_args::BenchCommand;
use host::environment;
use host::environment::Environment;
use host::output;
use host::output::OutputError;
use host::signals;
use host::system_limits;
use jobs::rank_process;
use phalanx_launch::{Foreign, Parting};

// Unit tests may use another allocator.
#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: phalanx_tensor::OrEnd = phalanx_tensor::OrEnd;

fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => run(cli.command).unwrap_or_else(|error| explain(&error)),
        // The version, help, or an error of the command line.
        Err(said) => match output::print_usage(&said) {
            Ok(()) => ExitCode::from(u8::try_from(said.exit_code()).unwrap_or(1)),
            Err(error) => explain(&error.into()),
        },
    }
}

/// Reports an error; returns its exit code.
fn explain(error: &anyhow::Error) -> ExitCode {
    if error.downcast_ref().is_some_and(OutputError::reader_is_gone) {
        return ExitCode::from(output::READER_GONE);
    }
    if let Some(parting @ Parting::Stopped(_)) = error.downcast_ref() {
        output::note(&format!("stopped: {parting}"));
        return ExitCode::from(signals::STOPPED);
    }
    output::note_error(&format!("error: {}", system_limits::explain(error)));
    ExitCode::FAILURE
}

fn run(command: Command) -> Result<ExitCode> {
    let environment = Environment::read()?;
    system_limits::fail_beyond_limit()?;
    match command {
        Command::Train(args) if args.threads_as_ranks => return commands::train::train(&args, environment),
        Command::Train(args) => {
            let Foreign { rank, notes } = environment::foreign()?;
            notes.iter().for_each(|line| output::note(line));
            return match rank {
                Some(rank) => commands::train_joined::train(&args, environment, &rank),
                None => commands::train::train(&args, environment),
            };
        }
        Command::Launch(args) => {
            if !args.from_stdin {
                environment::unfollowed().iter().for_each(|line| output::note(line));
            }
            return commands::launch::launch(&args, environment);
        }
        Command::Rank(args) => return rank_process::rank(&args, environment),
        Command::Plan(args) if args.draw.schedule.is_some() => commands::plan_schedule::draw(&args),
        Command::Plan(args) => commands::plan::plan(&args, environment),
        Command::Sample(args) => commands::sample::sample(&args, environment),
        Command::Chat(args) => commands::chat::chat(&args, environment),
        Command::Eval(args) => commands::eval::eval(&args, environment),
        Command::Tokenize(args) => commands::tokenize::tokenize(&args),
        Command::Import(args) => commands::import::import(&args),
        Command::ImportConfig(args) => commands::import_config::import_config(&args),
        Command::Export(args) => commands::export::export(&args),
        Command::Inspect(args) => commands::inspect::inspect(&args),
        Command::Report(args) => commands::report::report(&args),
        Command::Keys(args) => commands::keys::keys(&args),
        Command::Doctor(args) => commands::doctor::doctor(&args, environment),
        Command::Completions(args) => commands::completions::completions(&args),
        Command::Man(args) => commands::man::man(&args),
        Command::Bench(args) => match args.what {
            BenchCommand::Step(args) => commands::bench_step::bench_step(&args, environment),
            BenchCommand::Memory(args) => commands::bench_memory::bench_memory(&args, environment),
            BenchCommand::Kernels(args) => commands::bench_kernels::bench_kernels(&args, environment),
            BenchCommand::Collectives(args) => commands::bench_collectives::bench_collectives(&args),
            BenchCommand::Disk(args) => commands::bench_disk::bench_disk(&args),
            BenchCommand::Strategies(args) => {
                commands::bench_strategies::bench_strategies(&args, environment)
            }
        },
    }?;
    Ok(ExitCode::SUCCESS)
}
