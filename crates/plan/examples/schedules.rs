//! Writes the text of every named schedule over a table of sizes, for `tools/check_schedules.py`.
//!
//! ```text
//! cargo run --release -p phalanx-plan --example schedules -- FOLDER
//! ```
//!
//! One file each: `NAME-pP-mM-vV.csv`, with 2 to 16 ranks, one to eight micro-batches a rank and one or two
//! more than that, one to four chunks. Sizes that a schedule does not have are left out.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own, for a terminal")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use phalanx_plan::{Plan, ScheduleError, generate};

fn main() -> ExitCode {
    let Some(folder) = std::env::args().nth(1) else {
        eprintln!("expected a folder to write to");
        return ExitCode::FAILURE;
    };
    match write_all(Path::new(&folder)) {
        Ok(count) => {
            println!("{count} schedules in {folder}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

fn write_all(folder: &Path) -> Result<usize, Box<dyn std::error::Error>> {
    std::fs::create_dir_all(folder)?;
    let mut count = 0;
    for name in Plan::NAMES {
        let named: Plan = name.parse()?;
        for ranks in 2..=16 {
            let multiples = (1..=8).map(|times| times * ranks);
            let sizes: BTreeSet<usize> = multiples.chain([ranks + 1, 2 * (ranks + 1)]).collect();
            for micro_batches in sizes {
                for plan in plans(named) {
                    let schedule = match generate(plan, ranks, micro_batches) {
                        Err(ScheduleError::UnequalRounds { .. }) => continue,
                        other => other?,
                    };
                    let file = format!("{name}-p{ranks}-m{micro_batches}-v{}.csv", plan.chunks());
                    std::fs::write(folder.join(file), schedule.to_string())?;
                    count += 1;
                }
            }
        }
    }
    Ok(count)
}

/// The plan with each number of chunks that it may have.
fn plans(named: Plan) -> Vec<Plan> {
    let mut plans: Vec<Plan> = (1..=4).map(|chunks| named.with_chunks(chunks)).collect();
    plans.dedup();
    plans
}
