//! A folder with a small text and a small configuration, and the real program run in it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_testing::process;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Maximum wait for events that take less than a second on an idle machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

const CONFIG: &str = r#"
[model]
layers = 2
hidden = 32
heads = 4
seq = 16

[data]
text = ["text.txt"]
validation = 0.1

[batch]
global = 8

[optimizer]
lr = 1e-2

[schedule]
kind = "constant"

[train]
steps = 8
eval_every = 4
eval_samples = 8
save_every = 4
threads = 1
"#;

/// A temporary folder with a small configuration and a text, in which the program runs.
pub struct Home {
    dir: TempDir,
    /// Process numbers of what [`Home::start`] has started.
    started: Mutex<Vec<i32>>,
}

impl Drop for Home {
    /// A test that fails leaves no process behind.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
            for pid in started.iter().filter_map(|pid| Pid::from_raw(*pid)) {
                // It may have ended.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// Exit code and output of the program.
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Ended {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Ended {
    /// Asserts that the program succeeded.
    #[track_caller]
    pub fn ok(self) -> Ended {
        assert_eq!(self.code, Some(0), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// Asserts that the program refused with exit code 1 and all `words`.
    #[track_caller]
    pub fn refused(self, words: &[&str]) -> Ended {
        assert_eq!(self.code, Some(1), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in: {}", self.stderr);
        }
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

impl Home {
    pub fn new() -> Home {
        let home = Home { dir: TempDir::new().unwrap(), started: Mutex::default() };
        let words = ["chunk", "rank", "shard", "gather", "reduce", "step", "plan", "arena"];
        let mut text = String::new();
        for i in 0..1500usize {
            text.push_str(words[(i * i + i / 7) % words.len()]);
            text.push(if i % 11 == 10 { '\n' } else { ' ' });
        }
        home.write("text.txt", &text);
        home.write("small.toml", CONFIG);
        home
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.read(name)).unwrap()
    }

    /// The program with arguments, to be started in this folder. It sees no GPU of this machine.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = process::command(env!("CARGO_BIN_EXE_phalanx"));
        command.current_dir(self.dir.path()).args(args).stdin(Stdio::null());
        command.env("CUDA_VISIBLE_DEVICES", "");
        command
    }

    /// Runs the program to its end.
    pub fn run(&self, args: &[&str]) -> Ended {
        ended(self.command(args))
    }

    /// The same with an environment variable.
    pub fn run_with(&self, (name, value): (&str, &str), args: &[&str]) -> Ended {
        let mut command = self.command(args);
        command.env(name, value);
        ended(command)
    }

    /// The program started by a shell after `first` (`trap "" HUP`), with redirections behind its arguments.
    pub fn shell(&self, first: &str, args: &[&str], redirections: &str) -> Command {
        let mut command = process::command("sh");
        let line = format!("{first}\nexec \"$@\" {redirections}");
        command.args(["-c", &line, "sh", env!("CARGO_BIN_EXE_phalanx")]).args(args);
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    /// Starts the program, its output gathered.
    pub fn start(&self, args: &[&str]) -> Child {
        self.start_command(self.command(args))
    }

    /// Starts a command, its output gathered.
    pub fn start_command(&self, mut command: Command) -> Child {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        self.started.lock().unwrap().push(child.id() as i32);
        child
    }

    /// The lines of a run's metrics that are whole.
    pub fn metrics(&self, run: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Loss and gradient norm of every step, as bits.
    pub fn losses(&self, run: &str) -> Vec<(u64, String, String)> {
        let steps = self.metrics(run).into_iter().filter(|line| line.get("loss").is_some());
        steps
            .map(|line| {
                (line["step"].as_u64().unwrap(), line["loss"].to_string(), line["grad_norm"].to_string())
            })
            .collect()
    }

    /// Every file of a folder with its content; locks aside.
    pub fn snapshot(&self, name: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        let mut folders = vec![self.path(name)];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if !path.ends_with(".lock") {
                    files.insert(path.clone(), std::fs::read(&path).unwrap());
                }
            }
        }
        files
    }

    /// Copies a folder, replacing an existing one.
    pub fn copy(&self, from: &str, to: &str) {
        let (source, target) = (self.path(from), self.path(to));
        let _ = std::fs::remove_dir_all(&target);
        for (path, content) in self.snapshot(from) {
            let path = target.join(path.strip_prefix(&source).unwrap());
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
    }

    /// Waits until the run has done `step`.
    #[track_caller]
    pub fn wait_for_step(&self, run: &str, step: u64) {
        wait(&format!("step {step} of {run}"), || {
            self.metrics(run).iter().any(|line| line["step"].as_u64() >= Some(step))
        });
    }

    /// Step of the newest checkpoint folder.
    pub fn newest(&self, run: &str) -> u64 {
        self.checkpoints(run).into_iter().max().unwrap_or(0)
    }

    /// Steps of the checkpoint folders.
    pub fn checkpoints(&self, run: &str) -> Vec<u64> {
        let entries = std::fs::read_dir(self.path(run).join("checkpoints")).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect()
    }
}

/// The value of `key`, which must be there: a missing key equals a missing key, and is less than any number.
#[track_caller]
pub fn value<'a>(of: &'a Value, key: &str) -> &'a Value {
    let found = of.get(key).filter(|value| !value.is_null());
    found.unwrap_or_else(|| panic!("no {key} in: {of}"))
}

/// The number at `key`.
#[track_caller]
pub fn number(of: &Value, key: &str) -> f64 {
    value(of, key).as_f64().unwrap_or_else(|| panic!("{key} is not a number in: {of}"))
}

/// The list at `key`, which must not be empty.
#[track_caller]
pub fn list<'a>(of: &'a Value, key: &str) -> &'a [Value] {
    let found = value(of, key).as_array().filter(|list| !list.is_empty());
    found.unwrap_or_else(|| panic!("{key} is not a list, or empty, in: {of}"))
}

/// Pairs two lists, which must have the same length and not be empty: `zip` would stop at the end of the shorter one.
#[track_caller]
pub fn pairs<'a, A, B>(a: &'a [A], b: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    assert_eq!(a.len(), b.len(), "two lists of different lengths are compared");
    assert!(!a.is_empty(), "nothing is compared");
    a.iter().zip(b)
}

/// Asserts that every rank used the planned memory.
#[track_caller]
pub fn assert_as_planned(plan: &Value, memory: &Value) {
    for (planned, measured) in pairs(list(plan, "ranks"), list(memory, "ranks")) {
        for key in ["rank", "device"] {
            assert_eq!(value(planned, key), value(measured, key));
        }
        assert!(number(value(measured, "device"), "peak_bytes") > 0.0, "{measured}");
    }
}

/// Waits for a process to end; returns its exit code and output.
#[track_caller]
pub fn finish(child: Child) -> Ended {
    process::finish(child).into()
}

/// Runs a command to its end, its output gathered.
#[track_caller]
pub fn ended(mut command: Command) -> Ended {
    finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// Waits until another process has done something.
#[track_caller]
pub fn wait(what: &str, mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The ranks that a launcher has started: number and process.
pub fn ranks(launcher: u32) -> Vec<(usize, i32)> {
    let processes =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    processes
        .filter_map(|pid| pid.parse::<i32>().ok())
        .filter(|pid| parent(*pid) == Some(launcher))
        .filter_map(|pid| {
            let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
            let words: Vec<&str> = words.split('\0').collect();
            // `phalanx rank 3 ...`
            let rank = words.get(1).filter(|word| **word == "rank").and(words.get(2))?;
            Some((rank.parse().ok()?, pid))
        })
        .collect()
}

/// State and parent in `/proc/PID/stat`, behind the name in brackets.
fn stat(pid: i32) -> Option<(String, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut words = text.rsplit_once(')')?.1.split_whitespace();
    Some((words.next()?.to_string(), words.next()?.parse().ok()?))
}

fn parent(pid: i32) -> Option<u32> {
    stat(pid).map(|(_, parent)| parent)
}

/// Returns whether a process runs; one that has ended and that nobody has waited for does not.
pub fn lives(pid: i32) -> bool {
    stat(pid).is_some_and(|(state, _)| state != "Z")
}

/// Sends a signal.
pub fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// Asserts that a rank's shared memory has no name in a file system.
#[track_caller]
pub fn shares_without_a_name(pid: i32) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    assert!(maps.contains("/memfd:phalanx-arena") && !maps.contains("/dev/shm/"), "{maps}");
}
