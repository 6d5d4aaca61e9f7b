//! Output of the ranks: threads of the launcher show it, or gather it.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use anyhow::Result;
use phalanx_tensor::refused_thread;

use crate::folders::run_names::LOGS;
use crate::host::output::{TrainOutput, note};

/// Destination of what the ranks write.
#[derive(Clone)]
pub enum Output {
    /// Rank 0's output unchanged; that of others on standard error, with the rank number before each line.
    Shown(Shown),
    /// To the caller of [`RankProcesses::wait`](crate::jobs::launch::RankProcesses::wait).
    Gathered,
}

/// Destination of output that is shown.
#[derive(Clone)]
pub struct Shown {
    output: TrainOutput,
    /// The host, if there are several.
    host: Option<String>,
    /// Folder of the logs.
    logs: Option<PathBuf>,
}

impl Output {
    /// Shown: that of rank 0 on `output`.
    pub fn shown(output: TrainOutput) -> Output {
        Output::Shown(Shown { output, host: None, logs: None })
    }

    /// The same with the name of the host behind the numbers of ranks.
    #[must_use]
    pub fn on_host(self, host: Option<String>) -> Output {
        match self {
            Output::Shown(shown) => Output::Shown(Shown { host, ..shown }),
            Output::Gathered => Output::Gathered,
        }
    }

    /// The same, and what each rank writes also in a file of the run folder, `logs/rank-N.log`.
    #[must_use]
    pub fn with_logs(self, run: &Path) -> Output {
        match self {
            Output::Shown(shown) => Output::Shown(Shown { logs: Some(run.join(LOGS)), ..shown }),
            Output::Gathered => Output::Gathered,
        }
    }
}

/// The threads that read what one rank writes. Standard error of rank 0 is that of this process.
#[derive(Default)]
pub struct RankOutput {
    /// The thread that gathers its standard output, if that is gathered.
    gathered: Option<JoinHandle<String>>,
    /// Threads that show its output.
    shown: Vec<JoinHandle<()>>,
}

/// Returns whether `rank` writes to the standard error of this process directly.
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
                Output::Shown(shown) if rank == 0 => {
                    let output = shown.output.clone();
                    let forward = move || each_line(stdout, |line| output.write(line));
                    threads.shown.push(reader(rank, forward)?);
                }
                Output::Shown(shown) => {
                    let lines = Lines::new(rank, shown);
                    threads.shown.push(reader(rank, move || lines.show(stdout))?);
                }
            }
        }
        if let Some(stderr) = child.stderr.take() {
            let lines = match output {
                Output::Shown(shown) => Lines::new(rank, shown),
                Output::Gathered => Lines { prefix: format!("[rank {rank}]"), log: None },
            };
            threads.shown.push(reader(rank, move || lines.show(stderr))?);
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

/// Destination of a rank's lines.
struct Lines {
    prefix: String,
    /// The rank's log, made with its first line.
    log: Option<PathBuf>,
}

impl Lines {
    fn new(rank: usize, shown: &Shown) -> Lines {
        let prefix = match &shown.host {
            None => format!("[rank {rank}]"),
            Some(host) => format!("[rank {rank} on {host}]"),
        };
        let log = shown.logs.as_ref().map(|logs| logs.join(format!("rank-{rank}.log")));
        Lines { prefix, log }
    }

    /// Shows lines on standard error with the number of their rank, and writes them into its log.
    fn show(mut self, from: impl Read) {
        each_line(from, |line| {
            let text = String::from_utf8_lossy(line);
            self.write_log(line);
            note(&format!("{} {}", self.prefix, text.trim_end()));
        });
    }

    fn write_log(&mut self, line: &[u8]) {
        let Some(path) = &self.log else { return };
        if let Err(error) = append_line(path, line) {
            note(&format!("{} cannot be written, and nothing more goes there: {error}", path.display()));
            self.log = None;
        }
    }
}

fn append_line(path: &Path, line: &[u8]) -> std::io::Result<()> {
    phalanx_system::files::create_folders(phalanx_system::files::parent_of(path))?;
    phalanx_system::files::append(path)?.write_all(line)
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
