//! What the ranks write: threads of the launcher show it, or gather it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use anyhow::Result;
use phalanx_tensor::refused_thread;

use crate::output::{TrainOutput, note};

/// Destination of the ranks' standard output.
#[derive(Clone)]
pub enum Output {
    /// Rank 0's output unchanged; that of others on standard error, with the rank number before each line.
    Shown(TrainOutput),
    /// To the caller of [`RankProcesses::wait`](crate::launch::RankProcesses::wait).
    Gathered,
}

/// The threads that read what one rank writes. Standard error of rank 0 is that of this process.
#[derive(Default)]
pub struct RankOutput {
    /// The thread that gathers its standard output, if that is gathered.
    gathered: Option<JoinHandle<String>>,
    /// Threads that show its output.
    shown: Vec<JoinHandle<()>>,
}

/// Whether `rank` writes to the standard error of this process directly.
pub fn shares_stderr(rank: usize) -> bool {
    rank == 0
}

/// Connects the standard streams of a rank that `command` will start.
pub fn connect(rank: usize, command: &mut Command) {
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped());
    if !shares_stderr(rank) {
        command.stderr(Stdio::piped());
    }
}

impl RankOutput {
    /// Reads what a rank writes that was started with the streams of [`connect`].
    ///
    /// # Errors
    /// When the system starts no further thread.
    pub fn read(rank: usize, child: &mut Child, output: &Output) -> Result<RankOutput> {
        let mut threads = RankOutput::default();
        if let Some(stdout) = child.stdout.take() {
            match output {
                Output::Gathered => threads.gathered = Some(reader(rank, move || gather(stdout))?),
                Output::Shown(output) if rank == 0 => {
                    let output = output.clone();
                    let forward = move || each_line(stdout, |line| output.write(line));
                    threads.shown.push(reader(rank, forward)?);
                }
                Output::Shown(_) => threads.shown.push(reader(rank, move || show(rank, stdout))?),
            }
        }
        if let Some(stderr) = child.stderr.take() {
            threads.shown.push(reader(rank, move || show(rank, stderr))?);
        }
        Ok(threads)
    }

    /// Waits until everything that the rank wrote is read, after its process has ended. Returns what was gathered.
    pub fn finish(self) -> String {
        for thread in self.shown {
            let _ = thread.join();
        }
        self.gathered.and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

/// Starts a thread that reads the output of a rank.
fn reader<T: Send + 'static>(
    rank: usize,
    read: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let builder = std::thread::Builder::new().name(format!("rank-{rank}"));
    Ok(builder.spawn(read).map_err(|error| refused_thread("the thread that reads what it writes", &error))?)
}

/// Shows lines on standard error with the number of their rank.
fn show(rank: usize, from: impl Read) {
    each_line(from, |line| note(&format!("[rank {rank}] {}", String::from_utf8_lossy(line).trim_end())));
}

/// Reads to the end, line by line (with line ends), so that a rank is never blocked by a full pipe.
fn each_line(from: impl Read, mut take: impl FnMut(&[u8])) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        take(&line);
        line.clear();
    }
}

fn gather(mut from: impl Read) -> String {
    let mut text = String::new();
    // Text that was read before an error is kept.
    let _ = from.read_to_string(&mut text);
    text
}
