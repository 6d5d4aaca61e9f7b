//! One process that starts the launchers of all hosts: over ssh (`--hostfile`), or here, to try it (`--hosts`).
//!
//! A launcher gets the secret on its standard input, in one line, and ends when its standard input does: when this process has
//! ended, or the ssh connection is lost. A line `stop` asks it to finish the step and save; a line `lost WHY` tells that of host 0
//! that another one has ended, for which it waits no longer.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use phalanx_collectives::secure::Secret;
use phalanx_launch::{
    HostSlots, filter_hosts, from_digits, own_program, parse_hostfile, tell_while, to_digits,
};
use phalanx_tensor::refused_thread;
use serde::Deserialize;

use crate::hosts::shares::ranks_of_a_host;
use crate::launch_args::LaunchArgs;
use crate::output::{TrainOutput, note};
use crate::resume::shell_word;
use crate::signals::Signals;

/// The line that asks a launcher to stop.
const STOP: &str = "stop";

/// What begins the line about a launcher that has ended.
const LOST: &str = "lost ";

/// Longest line that is sent.
const LINE_BYTES: usize = 4096;

/// Largest hostfile.
const HOSTFILE_BYTES: u64 = 16 << 20;

/// Time that the other launchers have to end after that of host 0 has.
const LEAVE: Duration = Duration::from_secs(15);

/// The same after it was killed: those that knew it end at once, those that still wait for it would wait in vain.
const LEAVE_KILLED: Duration = Duration::from_secs(2);

/// Exit code of ssh when it could not connect, or its connection was lost.
const SSH_FAILED: i32 = 255;

/// A host of which this launcher was told that it will not come.
#[derive(Clone, Default)]
pub struct LostHost(Arc<Mutex<Option<String>>>);

impl LostHost {
    /// Which host, and why; None while all may come.
    pub fn reason(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, why: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| why.to_string());
    }
}

/// Reads the secret from standard input, and from then on does what comes there: a line `stop` is a signal, one that begins with
/// `lost` says what to put into `lost`, and the end of it is the end of this process. Ranks end with their launcher.
///
/// # Errors
/// A first line that is no secret.
pub fn lead_from_stdin(signals: &Signals, lost: &LostHost) -> Result<Secret> {
    let mut line = String::new();
    let mut stdin = BufReader::new(std::io::stdin());
    // The digits and the end of the line; nothing longer is read.
    stdin.by_ref().take(65).read_line(&mut line).context("standard input")?;
    let secret = from_digits(&line).context("--from-stdin: standard input does not begin with a secret")?;
    let (ask, lost) = (signals.ask(), lost.clone());
    let obey = move || {
        for line in stdin.lines().map_while(Result::ok) {
            match line.strip_prefix(LOST) {
                Some(why) => lost.set(why),
                None if line == STOP => ask(),
                None => {}
            }
        }
        std::process::exit(1);
    };
    let thread = std::thread::Builder::new().name("stdin".into()).spawn(obey);
    thread.map_err(|error| refused_thread("the thread that reads standard input", &error))?;
    Ok(secret)
}

/// What host 0's launcher prints first.
#[derive(Deserialize)]
struct Announced {
    rendezvous_port: u16,
}

/// A launcher that this process has started.
struct Launcher {
    name: String,
    /// Whether ssh has started it.
    is_remote: bool,
    child: Child,
    /// Its standard input; dropping it ends the launcher.
    stdin: Option<ChildStdin>,
    shown: Vec<JoinHandle<()>>,
}

/// Starts the launchers of all hosts and waits for them; returns the exit code of host 0's, or 1 if another has failed.
///
/// # Errors
/// A hostfile with mistakes, a launcher that does not start.
pub fn supervise(args: &LaunchArgs) -> Result<ExitCode> {
    let hosts = hosts(args)?;
    let signals = Signals::take_over()?;
    // The first signal is passed on; the second ends this process, and so all launchers.
    signals.training_starts();
    let secret = Secret::generate().context("a secret")?;
    let output = TrainOutput::default();
    let address = match args.hostfile {
        None => "127.0.0.1".to_string(),
        Some(_) => address_of(&hosts[0].host),
    };
    if args.hostfile.is_some() && !args.train.quiet {
        let numbered = hosts.iter().enumerate().map(|(number, host)| format!("{number}: {}", host.host));
        note(&format!("hosts {}", numbered.collect::<Vec<_>>().join(", ")));
    }
    let mut launchers = Vec::new();
    let mut port = 0;
    for (number, host) in hosts.iter().enumerate() {
        let rendezvous =
            if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") };
        let words = launcher_words(args, (number, hosts.len()), host.slots.len(), &rendezvous)?;
        let mut launcher = start(args, host, &words, &secret)?;
        let stdout = launcher.child.stdout.take().context("the output of a launcher")?;
        let mut stdout = BufReader::new(stdout);
        if number == 0 {
            let waits = |waited: Duration| {
                format!("waiting for ssh and the launcher of {} ({} s)", host.host, waited.as_secs())
            };
            port = tell_while(&note, &waits, || announced(&mut stdout, &mut launcher))?;
        }
        launcher.show(number == 0, stdout, &output)?;
        launchers.push(launcher);
    }
    let code = wait(&mut launchers, &signals);
    output.finish();
    Ok(ExitCode::from(code))
}

/// The hosts that the user has named, or those that this machine plays.
fn hosts(args: &LaunchArgs) -> Result<Vec<HostSlots>> {
    let Some(path) = &args.hostfile else {
        let hosts = args.hosts.unwrap_or(1);
        if hosts == 0 {
            bail!("--hosts 0: there is at least one host");
        }
        let ranks = ranks_of_a_host(&args.train, hosts)?;
        let host = |number| HostSlots { host: format!("host {number}"), slots: (0..ranks).collect() };
        return Ok((0..hosts).map(host).collect());
    };
    let text = phalanx_files::read_text(path, HOSTFILE_BYTES)
        .with_context(|| format!("cannot read the hostfile {}", path.display()))?;
    let hosts = parse_hostfile(&text).and_then(|hosts| filter_hosts(hosts, &args.include, &args.exclude));
    let mut hosts = hosts.map_err(|why| anyhow!("the hostfile {}: {why}", path.display()))?;
    if let Some(ranks) = args.train.overrides.nproc {
        if let Some(host) = hosts.iter().find(|host| host.slots.len() < ranks) {
            bail!("--nproc {ranks}: {} has {} slots in the hostfile", host.host, host.slots.len());
        }
        hosts.iter_mut().for_each(|host| host.slots.truncate(ranks));
    }
    Ok(hosts)
}

/// The address of a host of a hostfile, without the user.
fn address_of(host: &str) -> String {
    let address = host.rsplit_once('@').map_or(host, |(_, address)| address);
    address.trim_start_matches('[').trim_end_matches(']').to_string()
}

/// The arguments of a launcher: those of this process, with the host's place in the place of the hosts.
fn launcher_words(
    args: &LaunchArgs,
    (number, hosts): (usize, usize),
    ranks: usize,
    rendezvous: &str,
) -> Result<Vec<String>> {
    let mut words: Vec<String> = vec!["launch".into(), "--from-stdin".into()];
    let mut add = |name: &str, value: &str| words.extend([name.to_string(), value.to_string()]);
    add("--nnodes", &hosts.to_string());
    add("--node-rank", &number.to_string());
    add("--rendezvous", rendezvous);
    add("--nproc", &ranks.to_string());
    add("--streams", &args.train.network.streams().to_string());
    add("--transport", args.train.network.transport.name());
    add("--join-timeout", &args.train.network.join_timeout.to_string());
    let train = &args.train;
    train.overrides.set.iter().for_each(|set| add("--set", set));
    let path = |path: &std::path::Path| {
        let path = std::path::absolute(path)?;
        path.to_str()
            .map(String::from)
            .with_context(|| format!("{}: a path that is not UTF-8", path.display()))
    };
    if let Some(run) = &train.run {
        add("--run", &path(run)?);
    }
    if train.max_restarts > 0 {
        add("--max-restarts", &train.max_restarts.to_string());
    }
    if let Some(min) = train.min_nproc {
        add("--min-nproc", &min.to_string());
    }
    let flags = [
        ("--resume", train.resume),
        ("--quiet", train.quiet),
        ("--json", train.json),
        ("--no-pin", train.no_pin),
        ("--plaintext", args.train.network.plaintext),
    ];
    words.extend(flags.iter().filter(|(_, given)| *given).map(|(name, _)| name.to_string()));
    if !train.data.is_empty() {
        words.push("--data".into());
        for data in &train.data {
            words.push(path(data)?);
        }
    }
    if let Some(config) = &train.config {
        words.push("--".into());
        words.push(config.to_str().context("the path of the configuration is not UTF-8")?.to_string());
    }
    Ok(words)
}

/// Starts a launcher, here or over ssh, and hands it the secret.
fn start(args: &LaunchArgs, host: &HostSlots, words: &[String], secret: &Secret) -> Result<Launcher> {
    let mut command = match args.hostfile {
        None => {
            let mut command = own_program();
            command.arg0("phalanx").args(words);
            command
        }
        Some(_) => {
            let mut command = Command::new("ssh");
            // No terminal, no questions; a connection that is cut ends within 30 s.
            command.args(["-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "--"]);
            // ssh takes an address of IPv6 without brackets only.
            command.arg(host.host.replace(['[', ']'], ""));
            command.arg(remote_line(words)?);
            command
        }
    };
    // Ctrl-C in a terminal goes to the whole group; this process passes it on, so that the launchers can save.
    command.process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = command.spawn();
    let what = if args.hostfile.is_some() { "ssh" } else { "a launcher" };
    let mut child = started.with_context(|| format!("{what} for {} could not be started", host.host))?;
    let mut stdin = child.stdin.take().context("the input of a launcher")?;
    // A launcher that has ended already is reported by its exit.
    let _ = stdin.write_all(format!("{}\n", to_digits(secret)).as_bytes());
    let (name, is_remote) = (host.host.clone(), args.hostfile.is_some());
    Ok(Launcher { name, is_remote, child, stdin: Some(stdin), shown: Vec::new() })
}

/// What a shell on another host runs: this program, in the same folder.
fn remote_line(words: &[String]) -> Result<String> {
    let utf8 = |path: std::path::PathBuf| {
        path.to_str()
            .map(String::from)
            .with_context(|| format!("{}: a path that is not UTF-8", path.display()))
    };
    let folder = utf8(std::env::current_dir().context("the current folder")?)?;
    let program = utf8(std::fs::read_link("/proc/self/exe").context("the path of this program")?)?;
    let mut line = format!("cd {} && exec env", shell_word(&folder));
    for (name, value) in crate::environment::for_other_hosts() {
        line.push_str(&format!(" {name}={}", shell_word(&value)));
    }
    line.push_str(&format!(" {}", shell_word(&program)));
    words.iter().for_each(|word| line.push_str(&format!(" {}", shell_word(word))));
    Ok(line)
}

/// The port at which host 0's launcher listens, from the first line that it prints.
fn announced(stdout: &mut impl BufRead, launcher: &mut Launcher) -> Result<u16> {
    let mut line = String::new();
    stdout.by_ref().take(4096).read_line(&mut line).context("the output of the first launcher")?;
    let said: Result<Announced, _> = serde_json::from_str(&line);
    said.map(|announced| announced.rendezvous_port).map_err(|_| {
        let mut stderr = String::new();
        launcher.stdin = None;
        if let Some(from) = &mut launcher.child.stderr {
            let _ = from.take(64 << 10).read_to_string(&mut stderr);
        }
        let name = &launcher.name;
        anyhow!("the launcher of {name} did not start: {}", format!("{line}{stderr}").trim())
    })
}

impl Launcher {
    /// Sends a line, if the launcher still reads.
    fn tell(&mut self, line: &str) {
        let line: String = line.chars().filter(|c| !c.is_control()).take(LINE_BYTES).collect();
        if let Some(stdin) = &mut self.stdin {
            // A launcher that has ended already is reported by its exit.
            let _ = stdin.write_all(format!("{line}\n").as_bytes());
        }
    }

    /// How it ended, if that has kept it from saying so itself.
    fn why_ended(&self, status: ExitStatus) -> Option<String> {
        let Launcher { name, is_remote, .. } = self;
        match (status.signal(), status.code()) {
            (Some(signal), _) => Some(format!("the launcher of {name} was killed by signal {signal}")),
            (None, Some(SSH_FAILED)) if *is_remote => Some(format!(
                "{name} cannot be reached, or the connection with it was lost: ssh ended with exit code {SSH_FAILED}"
            )),
            // Of the shell on the host.
            (None, Some(code @ (126 | 127))) if *is_remote => Some(format!(
                "the launcher of {name} could not be started: the shell there ended with exit code {code}; phalanx must lie at the same \
                 path on all hosts"
            )),
            _ => None,
        }
    }

    /// Shows what the launcher writes; host 0's standard output is that of the run.
    fn show(
        &mut self,
        leads: bool,
        stdout: impl BufRead + Send + 'static,
        output: &TrainOutput,
    ) -> Result<()> {
        let stderr = self.child.stderr.take().context("the errors of a launcher")?;
        let name = if leads { None } else { Some(self.name.clone()) };
        let output = output.clone();
        let prefix = name.clone();
        let show_stdout = move || match prefix {
            None => each_line(stdout, |line| output.write(format!("{line}\n").as_bytes())),
            Some(name) => each_line(stdout, |line| note(&format!("[{name}] {line}"))),
        };
        let show_stderr = move || {
            each_line(BufReader::new(stderr), |line| match &name {
                // Lines of ranks have their host already.
                Some(name) if !line.starts_with("[rank ") => note(&format!("[{name}] {line}")),
                _ => note(line),
            });
        };
        let spawn = |run: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name("launcher".into()).spawn(run);
            thread.map_err(|error| refused_thread("the thread that reads what a launcher writes", &error))
        };
        self.shown = vec![spawn(Box::new(show_stdout))?, spawn(Box::new(show_stderr))?];
        Ok(())
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // Ends it, if it runs: ssh passes the end of the input on.
        self.stdin = None;
        let until = Instant::now() + Duration::from_secs(1);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.shown.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn each_line(mut from: impl BufRead, mut take: impl FnMut(&str)) {
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        take(String::from_utf8_lossy(&line).trim_end_matches('\n'));
        line.clear();
    }
}

/// Waits for all launchers, and passes a signal on. That of host 0 is told of others that have failed, in case it waits for them at
/// the rendezvous. Those that do not end soon after it are ended.
fn wait(launchers: &mut Vec<Launcher>, signals: &Signals) -> u8 {
    let mut codes: Vec<Option<u8>> = vec![None; launchers.len()];
    let (mut asked, mut deadline) = (false, None);
    while codes.contains(&None) {
        if signals.came() && !asked {
            asked = true;
            launchers.iter_mut().for_each(|launcher| launcher.tell(STOP));
        }
        for number in (0..launchers.len()).filter(|number| codes[*number].is_none()).collect::<Vec<_>>() {
            let Ok(Some(status)) = launchers[number].child.try_wait() else { continue };
            codes[number] = Some(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
            if number == 0 {
                deadline =
                    Some(Instant::now() + if status.signal().is_some() { LEAVE_KILLED } else { LEAVE });
            }
            let said_nothing = launchers[number].why_ended(status);
            said_nothing.iter().for_each(|why| note(&format!("error: {why}")));
            if !status.success() {
                let name = &launchers[number].name;
                let why =
                    said_nothing.unwrap_or_else(|| format!("the launcher of {name} ended with {status}"));
                launchers[0].tell(&format!("{LOST}{why}"));
            }
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            for (code, launcher) in
                codes.iter_mut().zip(launchers.iter_mut()).filter(|(code, _)| code.is_none())
            {
                note(&format!("the launcher of {} did not end by itself", launcher.name));
                launcher.stdin = None;
                let _ = launcher.child.kill();
                *code = Some(1);
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    launchers.clear();
    let failed = codes.iter().flatten().find(|code| **code != 0);
    codes[0].filter(|code| *code != 0).or(failed.copied()).unwrap_or(0)
}
