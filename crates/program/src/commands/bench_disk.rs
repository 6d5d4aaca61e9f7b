//! `phalanx bench disk`: the rates of disk memory in some folders, beside those of fio where it is installed.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use phalanx_bench::disk::{CHUNK, DiskFigures, DiskTask, FioFigures, Pass, to_text};
use phalanx_tensor::DiskOptions;
use phalanx_tensor::disk::{DEPTH, STRIPE, survey};
use serde_json::{Value, json};

use crate::arguments::bench_args::BenchDiskArgs;
use crate::host::machine;
use crate::host::output::{note, print, print_json};
use phalanx_drawing::report::bytes;

/// Bytes of a pass, if the disks have room.
const DEFAULT_BYTES: u64 = 2 << 30;

/// Measures and prints.
///
/// # Errors
/// Folders that cannot hold the bytes, I/O errors, too little memory.
pub fn bench_disk(args: &BenchDiskArgs) -> Result<()> {
    let mut sets: Vec<Vec<PathBuf>> = args.folders.iter().map(|folder| vec![folder.clone()]).collect();
    if sets.len() > 1 {
        sets.push(args.folders.clone());
    }
    let mut figures = Vec::new();
    for folders in sets {
        let options = DiskOptions { checksums: args.checksums, ..DiskOptions::new(folders) };
        let task = DiskTask { bytes: size(args, &options)?, chunk: CHUNK, rounds: args.rounds, options };
        check_memory(&task)?;
        // Notes come once for each folder: the set of all says them again.
        let notes = survey(&task.options, &[task.bytes])?.notes;
        if task.options.folders.len() == 1 {
            notes.iter().for_each(|line| note(line));
        }
        let mut fio = if args.no_fio { None } else { Fio::new(&task)? };
        let own = measure(&task, &mut || fio.as_mut().map_or(Ok(()), Fio::round))?;
        let fio = fio.map(|fio| fio.best);
        figures.push((own, fio));
    }
    match args.json {
        true => print_json(&figures.iter().map(to_json).collect::<Value>()),
        false => Ok(print(&to_text(&figures))?),
    }
}

/// Bytes of a pass: those that were given, or what the folders have room for.
fn size(args: &BenchDiskArgs, options: &DiskOptions) -> Result<u64> {
    if let Some(size) = args.size {
        return Ok(size);
    }
    let mut size = DEFAULT_BYTES;
    for folder in &options.folders {
        let free =
            phalanx_system::files::free_bytes(folder).with_context(|| format!("{}", folder.display()))?;
        size = size.min(free / 2);
    }
    Ok(size)
}

fn check_memory(task: &DiskTask) -> Result<()> {
    let needed = task.memory_bytes();
    if let Some(available) = machine::available().filter(|available| needed > available.bytes) {
        bail!("this needs {} of memory, and {available}: give a smaller --size", bytes(needed));
    }
    Ok(())
}

/// Measures, with a bar on a terminal.
fn measure(task: &DiskTask, after_round: &mut dyn FnMut() -> Result<()>) -> Result<DiskFigures> {
    let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr_with_hz(5));
    let style = ProgressStyle::with_template("{msg} {wide_bar} {percent}%");
    bar.set_style(style.expect("a template that is well formed"));
    let passes = (1 + 3 * task.rounds) as f64;
    let (mut done, mut last) = (0.0, None);
    let mut show = |pass: Pass, share: f64| {
        if last != Some(pass) {
            done += f64::from(u8::from(last.is_some()));
            last = Some(pass);
            bar.set_message(pass.name());
        }
        bar.set_position((1000.0 * (done + share) / passes) as u64);
    };
    let figures = task.measure(&mut show, after_round);
    bar.finish_and_clear();
    figures
}

/// fio, with requests of the same size and number, in files of the same folders.
struct Fio {
    /// Files without a name, which fio reaches through this process: they go however this ends.
    files: Vec<File>,
    /// Bytes of each.
    bytes: u64,
    best: FioFigures,
}

impl Fio {
    /// None where fio is not installed, or does not measure.
    fn new(task: &DiskTask) -> Result<Option<Fio>> {
        let folders = &task.options.folders;
        let bytes = (task.bytes / folders.len() as u64 / 4096 * 4096).max(4096);
        let file = |folder: &PathBuf| phalanx_system::files::scratch_file(folder, bytes);
        let files = folders.iter().map(file).collect::<std::io::Result<Vec<File>>>()?;
        let fio = Fio { files, bytes, best: FioFigures::default() };
        // As in the engine's own measurement, the first write is not timed.
        Ok(fio.run("write")?.map(|_| fio))
    }

    /// Writes and reads everything once.
    fn round(&mut self) -> Result<()> {
        let (write, read) = (self.run("write")?, self.run("read")?);
        self.best.write_bytes_per_s = self.best.write_bytes_per_s.max(write.unwrap_or(0.0));
        self.best.read_bytes_per_s = self.best.read_bytes_per_s.max(read.unwrap_or(0.0));
        Ok(())
    }

    /// Bytes a second of one pass.
    fn run(&self, direction: &str) -> Result<Option<f64>> {
        let process = std::process::id();
        let names: Vec<String> =
            self.files.iter().map(|file| format!("/proc/{process}/fd/{}", file.as_raw_fd())).collect();
        let words = [
            "--name=phalanx".to_string(),
            format!("--filename={}", names.join(":")),
            format!("--size={}", self.bytes * names.len() as u64),
            format!("--bs={}", STRIPE.min(self.bytes)),
            format!("--iodepth={}", DEPTH * names.len()),
            format!("--rw={direction}"),
            "--direct=1".to_string(),
            "--ioengine=io_uring".to_string(),
            "--output-format=json".to_string(),
        ];
        let command = Command::new("fio").args(&words).stdin(Stdio::null()).stderr(Stdio::null()).output();
        let output = match command {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            output => output.context("fio")?,
        };
        // Notes may come before the figures.
        let text = String::from_utf8_lossy(&output.stdout);
        let json = text.find('{').map_or("", |start| &text[start..]);
        let figures: Value = serde_json::from_str(json).unwrap_or_default();
        match figures["jobs"][0][direction]["bw_bytes"].as_f64() {
            Some(rate) if output.status.success() && rate > 0.0 => Ok(Some(rate)),
            _ => {
                note(&format!("fio {} did not measure ({})", words.join(" "), output.status));
                Ok(None)
            }
        }
    }
}

fn to_json((own, fio): &(DiskFigures, Option<FioFigures>)) -> Value {
    let mut value = json!(own);
    value["fio"] = json!(fio);
    value
}
