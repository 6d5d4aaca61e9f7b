//! `cargo xtask tidy`: the checks of the source that a program can make; `cargo xtask reliability`: the fault campaign;
//! `cargo xtask simulated`: the engine's tests on the simulated accelerator; `cargo xtask hosts`: training over hosts that
//! network namespaces play; `cargo xtask cuda-kernels`: the kernels of GPUs, compiled and measured without one;
//! `cargo xtask nightly`: all that takes long, one after the other.
//!
//! `tidy` reads the workspace as text, with the standard library alone, so it builds and runs in a moment.
//! Each rule is a file under `rules/`; [`source`] tells code from comments, literals and tests. What tries the whole
//! program is a program of its own (crates/testing), which [`trials`] builds and starts.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own, for a terminal")]
#![forbid(unsafe_code)]

mod cuda_emulator;
mod cuda_kernels;
mod finding;
mod manifest;
mod nightly;
mod release;
mod rules;
mod simulated;
mod source;
mod test_programs;
mod trials;
mod words;
mod workspace;

use std::process::ExitCode;
use std::{env, io};

use finding::Finding;
use workspace::Workspace;

const HELP: &str = "\
Checks of the source that a program can make, and the fault campaign.

Usage: cargo xtask tidy
       cargo xtask reliability [--short] [--only GROUP] [--case K] [--cases N] [--seed N] [--jobs N]
                               [--json FILE] [--markdown FILE]
       cargo xtask simulated [--seeds N] [--short]
       cargo xtask hosts [OPTIONS] CONFIG [-- OPTIONS OF TRAIN]
       cargo xtask cuda-kernels [--nvrtc FOLDER] [--short] [--or-skip]
       cargo xtask cuda-emulator [--nvrtc FOLDER] [--or-skip] [--seeds N]
       cargo xtask nightly [STEP]...

reliability builds the release binary and tries generated faults against it; --help lists its options.
simulated runs the engine's tests (goldens, bits, meshes, resume, faults) on the simulated accelerator, with
20 seeds or N; --short runs goldens and faults alone.
hosts trains over network namespaces that play several hosts (needs root); --help lists its options.
cuda-kernels compiles the kernels of GPUs for sm_80, sm_90 and sm_100 and compares their registers, spills, shared memory
and tensor-core instructions with crates/cuda/kernels/table, then to PTX with older NVRTCs unless --short says not to; it
installs NVRTC with pip unless its folder is given; with --or-skip it says so and succeeds where pip cannot.
cuda-emulator builds and tests the emulator of the CUDA driver and runs the operations of the CUDA device and small training runs on it;
--seeds runs one of them with N orders of streams.
nightly runs all that is too long for each submission (docs, MPI, whole sweeps, the program's tests with other kernels, all seeds,
all kernels, the whole fault campaign), or the steps that are named, and prints which passed; run it before a release, and note the commit in
docs/testing.md.

Rules of tidy, each with the place, what is wrong and what to do:
  circles    no circles of imports between the files of a crate
  floors     rooms within a crate import only those before them
  imports    which crate may import which, and what no crate may know or touch
  sizes      files have at most 500 lines (tests aside), test files 700
  wording    doc comments name their thing, no riddles that have a plain word, no names
             that readers must guess
  names      no module, file, type or function named after nothing in particular
  rooms      the map of rooms in ARCHITECTURE.md names exactly the folders of crates/
  layers     the drawing in ARCHITECTURE.md has every crate once, above all that it imports
  story      a source file opens with its story; unsafe code says why it is safe;
             nothing unfinished is left behind
  start      `cargo run` means the program alone, as the README's first command needs
  paths      no path of one machine

Options:
  -h, --help

Examples:
  cargo xtask tidy
  cargo xtask reliability --only damage --case 17 --seed 1
  cargo xtask simulated --seeds 3

Exit code: 0 when all is well, 1 with findings or failed cases, 2 when the check itself could not run.
";

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["tidy"] => {}
        [trial @ ("reliability" | "hosts"), ref more @ ..] => return trials::run(trial, more),
        ["simulated", ref more @ ..] => return simulated::run(more),
        ["cuda-kernels", ref more @ ..] => return cuda_kernels::run(more),
        ["cuda-emulator", ref more @ ..] => return cuda_emulator::run(more),
        ["nightly", ref more @ ..] => return nightly::run(more),
        ["-h" | "--help" | "help"] | ["tidy", "-h" | "--help"] => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("unknown arguments {args:?}\n\n{HELP}");
            return ExitCode::from(2);
        }
    }
    match tidy() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(cause) => {
            eprintln!("tidy could not run: {cause}");
            ExitCode::from(2)
        }
    }
}

/// Runs all rules and prints what they found; true when that is nothing.
fn tidy() -> io::Result<bool> {
    let root = workspace::root(&env::current_dir()?)?;
    let workspace = Workspace::read(&root)?;
    let architecture = std::fs::read_to_string(root.join(rules::rooms::MAP)).ok();
    let mut findings = Vec::new();
    findings.extend(rules::circles::check(&workspace));
    findings.extend(rules::floors::check(&workspace));
    findings.extend(rules::files::check(&workspace));
    findings.extend(rules::imports::check(&workspace));
    findings.extend(rules::layers::check(&workspace));
    findings.extend(rules::sizes::check(&workspace));
    findings.extend(rules::names::check(&workspace));
    findings.extend(rules::rooms::check(&workspace.crates, architecture.as_deref()));
    findings.extend(rules::story::check(&workspace));
    findings.extend(rules::start::check(&workspace));
    findings.extend(rules::test_files::check(&workspace));
    findings.extend(rules::paths::check(&workspace));
    findings.extend(rules::reads::check(&workspace));
    findings.extend(rules::waits::check(&workspace));
    findings.extend(rules::wording::check(&workspace));
    findings.sort_by(|a, b| (&a.path, a.line, a.rule).cmp(&(&b.path, b.line, b.rule)));
    for Finding { path, line, rule, what } in &findings {
        println!("{path}:{line}: {rule}: {what}");
    }
    let files = workspace.sources.len();
    match findings.len() {
        0 => println!("tidy: {files} Rust files, nothing to say"),
        1 => println!("tidy: {files} Rust files, 1 finding"),
        many => println!("tidy: {files} Rust files, {many} findings"),
    }
    Ok(findings.is_empty())
}
