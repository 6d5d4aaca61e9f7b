//! Runs the program once, in its own process group, with limits on time and memory, and ends the whole group.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::process;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::reliability::processes;

/// Longest that a command of a case may take; the longest undisturbed one takes a tenth of this.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// Most memory of all processes of a command together. The models of the campaign hold less than a megabyte.
const MEMORY_LIMIT: u64 = 1 << 30;

/// Polling interval for time and memory. Peak memory between two polls is read from the kernel's high-water mark,
/// except for what a process allocates in the last milliseconds of its life.
const LOOK: Duration = Duration::from_millis(2);

/// Most that one interval between two looks counts: when the whole machine stood still, so did the command.
const COUNTED: Duration = Duration::from_millis(100);

/// Most bytes of standard output or error that are kept.
const KEPT: usize = 4 << 20;

/// A command to start: program, arguments, environment and standard streams.
pub(crate) struct Invocation {
    program: PathBuf,
    folder: PathBuf,
    arguments: Vec<String>,
    /// Shell words before the program and redirections behind it.
    shell: Option<(String, String)>,
    environment: Vec<(String, Option<String>)>,
    stdout: Option<Stdio>,
    stderr: Option<Stdio>,
}

impl Invocation {
    /// `program arguments` in `folder`.
    pub(crate) fn new<S: Into<String>>(
        program: &Path,
        folder: &Path,
        arguments: impl IntoIterator<Item = S>,
    ) -> Invocation {
        Invocation {
            program: program.to_path_buf(),
            folder: folder.to_path_buf(),
            arguments: arguments.into_iter().map(Into::into).collect(),
            shell: None,
            environment: Vec::new(),
            stdout: None,
            stderr: None,
        }
    }

    /// Starts through `sh -c 'before program arguments after'`; `before` ends in `exec`, so that the shell becomes the
    /// program.
    pub(crate) fn in_shell(mut self, before: &str, after: &str) -> Invocation {
        self.shell = Some((before.to_string(), after.to_string()));
        self
    }

    /// Sets a variable, or removes it.
    pub(crate) fn environment(mut self, name: &str, value: Option<&str>) -> Invocation {
        self.environment.push((name.to_string(), value.map(str::to_string)));
        self
    }

    /// Standard output goes to `to`, and is not gathered.
    pub(crate) fn stdout(mut self, to: Stdio) -> Invocation {
        self.stdout = Some(to);
        self
    }

    /// Standard error goes to `to`, and is not gathered.
    pub(crate) fn stderr(mut self, to: Stdio) -> Invocation {
        self.stderr = Some(to);
        self
    }

    /// Shell line with which a person can repeat the command.
    pub(crate) fn shown(&self) -> String {
        let words: Vec<String> = self.arguments.iter().map(|word| shell_word(word)).collect();
        let variables = self.environment.iter().map(|(name, value)| match value {
            Some(value) => format!("{name}={} ", shell_word(value)),
            None => format!("env -u {name} "),
        });
        let variables: String = variables.collect();
        let plain = format!("{variables}phalanx {}", words.join(" "));
        match &self.shell {
            None => plain,
            Some((before, after)) => {
                let before = before.strip_suffix("exec").unwrap_or(before);
                format!("{} {plain} {after}", before.trim_end()).trim().to_string()
            }
        }
    }

    /// Starts it.
    ///
    /// # Errors
    /// When the system cannot start a process.
    pub(crate) fn start(self) -> Result<Running, String> {
        let shown = self.shown();
        let mut command = match &self.shell {
            None => {
                let mut command = process::command(&self.program);
                command.args(&self.arguments);
                command
            }
            Some((before, after)) => {
                let mut command = process::command("/bin/sh");
                let line = format!("{before} \"$0\" \"$@\" {after}");
                command.arg("-c").arg(line).arg(&self.program).args(&self.arguments);
                command
            }
        };
        // What a run does does not depend on the GPUs of the machine.
        command.env("CUDA_VISIBLE_DEVICES", "");
        for (name, value) in &self.environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.current_dir(&self.folder).process_group(0).stdin(Stdio::null());
        command.stdout(self.stdout.unwrap_or_else(Stdio::piped));
        command.stderr(self.stderr.unwrap_or_else(Stdio::piped));
        let mut child = command.spawn().map_err(|error| format!("cannot start `{shown}`: {error}"))?;
        let stdout = child.stdout.take().map(|from| std::thread::spawn(move || gather(from)));
        let stderr = child.stderr.take().map(|from| std::thread::spawn(move || gather(from)));
        Ok(Running { shown, child, started: Instant::now(), stdout, stderr })
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// As [`Invocation::start`].
    pub(crate) fn run(self) -> Result<Ended, String> {
        self.start().map(Running::finish)
    }
}

/// A command under way; ended with its whole group when it is dropped.
pub(crate) struct Running {
    shown: String,
    child: Child,
    started: Instant,
    stdout: Option<JoinHandle<Gathered>>,
    stderr: Option<JoinHandle<Gathered>>,
}

impl Running {
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Returns whether the command has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Waits for something that the command does; false when the command ends or `limit` passes before.
    pub(crate) fn wait_for(&mut self, limit: Duration, mut happened: impl FnMut() -> bool) -> bool {
        let start = Instant::now();
        loop {
            if happened() {
                return true;
            }
            if self.has_ended() || start.elapsed() > limit {
                return happened();
            }
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    /// Waits until it ends; ends it when it takes too long or too much memory.
    pub(crate) fn finish(self) -> Ended {
        self.finish_within(Duration::ZERO)
    }

    /// The same, with `more` time than other commands have.
    pub(crate) fn finish_within(mut self, more: Duration) -> Ended {
        let mut breach = None;
        let (mut counted, mut looked) = (Duration::ZERO, self.started);
        let status = loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                break Some(status);
            }
            let pid = self.pid();
            let together = processes::tree_peak_bytes(pid);
            if together > MEMORY_LIMIT {
                breach = Some(format!("took {} MiB of memory", together >> 20));
            } else if counted > TIME_LIMIT + more {
                breach = Some(format!("did not end within {} s", (TIME_LIMIT + more).as_secs()));
            }
            if breach.is_some() {
                self.end_group();
                break self.child.wait().ok();
            }
            std::thread::sleep(LOOK);
            counted += looked.elapsed().min(COUNTED);
            looked = Instant::now();
        };
        self.gathered(status, breach)
    }

    fn gathered(mut self, status: Option<ExitStatus>, breach: Option<String>) -> Ended {
        let ended_at = Instant::now();
        let left = self.left_behind();
        self.end_group();
        let text =
            |thread: Option<JoinHandle<Gathered>>| thread.and_then(|it| it.join().ok()).unwrap_or_default();
        let stderr = text(self.stderr.take());
        Ended {
            shown: self.shown.clone(),
            code: status.and_then(|status| status.code()),
            signal: status.and_then(|status| status.signal()),
            stdout: text(self.stdout.take()).text,
            stderr: stderr.text,
            arrivals: stderr.arrivals,
            started: self.started,
            ended_at,
            breach,
            left,
        }
    }

    /// Processes of the group that live on after the launcher; ranks are given a moment to leave.
    fn left_behind(&self) -> usize {
        let start = Instant::now();
        loop {
            let left = processes::group_members(self.pid()).len();
            if left == 0 || start.elapsed() > Duration::from_millis(1500) {
                return left;
            }
            std::thread::sleep(LOOK);
        }
    }

    fn end_group(&self) {
        if let Some(group) = Pid::from_raw(self.pid()) {
            // A group that has ended needs no signal.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end_group();
        let _ = self.child.wait();
    }
}

/// Result of a command that has ended.
pub(crate) struct Ended {
    pub(crate) shown: String,
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// Bytes of standard error that had come at a moment.
    arrivals: Vec<(usize, Instant)>,
    pub(crate) started: Instant,
    pub(crate) ended_at: Instant,
    /// The limit that it broke.
    pub(crate) breach: Option<String>,
    /// Processes that lived on.
    pub(crate) left: usize,
}

impl Ended {
    /// The rule for every command: it ends by itself, in time, in little memory, without a panic or a signal, leaves
    /// no process behind, and an exit code that is not 0 comes with a message.
    ///
    /// # Errors
    /// A message that says which part of the rule was broken.
    pub(crate) fn orderly(&self) -> Result<(), String> {
        self.bounded()?;
        if let Some(signal) = self.signal {
            return self.wrong(&format!("was ended by signal {signal}"));
        }
        match self.code {
            Some(0 | 130) => Ok(()),
            Some(1 | 2) if self.stderr.contains("error") => Ok(()),
            Some(1 | 2) => self.wrong("failed without an error message"),
            code => self.wrong(&format!("ended with exit code {code:?}")),
        }
    }

    /// As [`Ended::orderly`], for a command whose own end was caused by a signal of the case.
    ///
    /// # Errors
    /// A message that says which part of the rule was broken.
    pub(crate) fn bounded(&self) -> Result<(), String> {
        if let Some(breach) = &self.breach {
            return self.wrong(breach);
        }
        if self.stderr.contains("panicked at") || self.code == Some(101) {
            return self.wrong("panicked");
        }
        if self.left > 0 {
            return self.wrong(&format!("left {} process(es) behind", self.left));
        }
        Ok(())
    }

    /// # Errors
    /// When it did not succeed.
    pub(crate) fn success(&self) -> Result<(), String> {
        self.orderly()?;
        if self.code == Some(0) { Ok(()) } else { self.wrong(&format!("ended with {:?}, not 0", self.code)) }
    }

    /// # Errors
    /// When it did not refuse, or its message lacks one of `words`.
    pub(crate) fn refusal(&self, words: &[&str]) -> Result<(), String> {
        self.orderly()?;
        if self.code == Some(0) {
            return self.wrong("was accepted in silence");
        }
        match words.iter().find(|word| !self.stderr.contains(*word)) {
            Some(word) => self.wrong(&format!("refused without naming {word:?}")),
            None => Ok(()),
        }
    }

    /// When the last line of standard error had come that `is` picks.
    pub(crate) fn said_at(&self, is: impl Fn(&str) -> bool) -> Option<Instant> {
        let mut end = 0;
        let ends = self.stderr.split_inclusive('\n').filter_map(|line| {
            end += line.len();
            is(line).then_some(end)
        });
        let end = ends.last()?;
        self.arrivals.iter().find(|(bytes, _)| *bytes >= end).map(|(_, at)| *at)
    }

    /// An error about this command: what it did, the command, and the end of its standard error.
    pub(crate) fn wrong<T>(&self, what: &str) -> Result<T, String> {
        let tail: String = {
            let text = self.stderr.trim();
            let skip = text.chars().count().saturating_sub(1200);
            text.chars().skip(skip).collect()
        };
        Err(format!("`{}` {what}; stderr: {tail}", shortened(&self.shown)))
    }
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= 300 {
        text.to_string()
    } else {
        text.chars().take(300).collect::<String>() + " ..."
    }
}

/// A word as a shell takes it.
fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:,".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_string(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

/// Output of a command on one stream.
#[derive(Default)]
struct Gathered {
    text: String,
    /// Bytes that had come at a moment.
    arrivals: Vec<(usize, Instant)>,
}

/// Reads everything, and keeps its first part.
fn gather(mut from: impl Read) -> Gathered {
    let (mut kept, mut buffer, mut arrivals) = (Vec::new(), [0u8; 1 << 16], Vec::new());
    while let Ok(count) = from.read(&mut buffer) {
        if count == 0 {
            break;
        }
        let room = KEPT.saturating_sub(kept.len()).min(count);
        kept.extend_from_slice(&buffer[..room]);
        if room > 0 {
            arrivals.push((kept.len(), Instant::now()));
        }
    }
    Gathered { text: String::from_utf8_lossy(&kept).into_owned(), arrivals }
}
