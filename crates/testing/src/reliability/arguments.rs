//! Command line and output of `cargo xtask reliability`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::{Campaign, Done, Selection, group_names};

const HELP: &str = "\
Tries generated faults against the phalanx binary.

Options:
  --binary FILE     the binary; cargo xtask reliability gives the release build
  --short           a few cases of each group
  --only GROUP      one group alone
  --case K          one case of that group
  --cases N         about N cases in all
  --seed N          seed of all cases (1)
  --jobs N          cases at a time (2)
  --json FILE       write everything for programs
  --markdown FILE   write the table; into its place in docs/reliability.md

Exit code: 0 when every case kept its rule, 1 when one did not, 2 when the campaign could not run.
";

/// The campaign to run, and the files of its reports.
struct Options {
    campaign: Campaign,
    json: Option<PathBuf>,
    markdown: Option<PathBuf>,
}

/// Runs the campaign that `words` describe.
pub fn run(words: &[&str]) -> ExitCode {
    if words.iter().any(|word| matches!(*word, "--help" | "-h")) {
        print!("{HELP}\nGroups: {}\n", group_names().join(", "));
        return ExitCode::SUCCESS;
    }
    match options(words).and_then(|options| campaign(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn options(words: &[&str]) -> Result<Options, String> {
    let mut campaign = Campaign {
        program: PathBuf::new(),
        seed: 1,
        selection: Selection::Whole,
        only: None,
        case: None,
        jobs: 2,
    };
    let (mut json, mut markdown) = (None, None);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value =
            || words.next().copied().ok_or_else(|| format!("{word} needs a value; --help lists the options"));
        let number =
            |text: &str| text.parse::<u64>().map_err(|_| format!("{word} {text}: expected a whole number"));
        match *word {
            "--binary" => campaign.program = value()?.into(),
            "--short" => campaign.selection = Selection::Short,
            "--only" => campaign.only = Some(value()?.to_string()),
            "--case" => campaign.case = Some(number(value()?)? as usize),
            "--cases" => campaign.selection = Selection::Cases(number(value()?)? as usize),
            "--seed" => campaign.seed = number(value()?)?,
            "--jobs" => campaign.jobs = number(value()?)? as usize,
            "--json" => json = Some(value()?.into()),
            "--markdown" => markdown = Some(value()?.into()),
            _ => return Err(format!("unknown option {word}; --help lists the options")),
        }
    }
    if campaign.program.as_os_str().is_empty() {
        return Err("give the binary: --binary FILE, or start with cargo xtask reliability".to_string());
    }
    Ok(Options { campaign, json, markdown })
}

/// Runs it and shows what came of it; true when every case kept its rule.
fn campaign(options: &Options) -> Result<bool, String> {
    let started = Instant::now();
    let shown = Mutex::new(Instant::now());
    let report = super::run(&options.campaign, &|done: Done<'_>| {
        let Done { done, of, group, case, failure } = done;
        if let Some(failure) = failure {
            eprintln!("{group} {case} failed: {failure}");
        }
        let mut shown = shown.lock().expect("showing does not panic");
        if shown.elapsed() > Duration::from_secs(10) || done == of {
            eprintln!("{done} of {of} cases in {:.0} s", started.elapsed().as_secs_f64());
            *shown = Instant::now();
        }
    })?;
    let write = |path: &Option<PathBuf>, text: String| match path {
        Some(path) => std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display())),
        None => Ok(()),
    };
    write(&options.json, format!("{:#}\n", report.json()))?;
    let document = options.markdown.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
    write(&options.markdown, report.written_into(&document.unwrap_or_default()))?;
    if !report.failed.is_empty() {
        println!("{}", report.failures());
    }
    print!("{}\n{}{}", report.markdown(), report.times(), report.late());
    for (group, cause) in &report.skipped {
        println!("{group}: skipped: {cause}");
    }
    let times = report.seconds.iter().map(|(group, seconds)| format!("{group} {seconds:.0} s"));
    println!("\ntime of the cases: {}", times.collect::<Vec<_>>().join(", "));
    println!("{} cases in {:.0} s, seed {}", report.trials(), started.elapsed().as_secs_f64(), report.seed);
    Ok(report.failed.is_empty())
}
