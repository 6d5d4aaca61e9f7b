//! One process that starts the launchers of all hosts: over ssh (`--hostfile`), or here, to try it (`--hosts`).
//!
//! A launcher gets the secret on its standard input, in one line, and ends when its standard input does: when this process has
//! ended, or the ssh connection is lost. A line `stop` asks it to finish the step and save; a line `lost WHY` tells that of host 0
//! that another one has ended, for which it waits no longer.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use phalanx_collectives::secure::Secret;
use phalanx_launch::{
    HostSlots, Parting, filter_hosts, from_digits, own_program, parse_hostfile, tell_while, to_digits,
};
use phalanx_tensor::refused_thread;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Deserialize;

use crate::arguments::launch_args::LaunchArgs;
use crate::folders::resume::shell_word;
use crate::host::output::{TrainOutput, note};
use crate::host::signals::{Farewell, Signals};
use crate::jobs::hosts::shares::ranks_of_a_host;

/// The line that asks a launcher to stop.
const STOP: &str = "stop";

/// Beginning of the line about a launcher that has ended.
const LOST: &str = "lost ";

/// Longest line that is sent.
const LINE_BYTES: usize = 4096;

/// Largest hostfile.
const HOSTFILE_BYTES: u64 = 16 << 20;

/// Time that the other launchers have to end after that of host 0 has: their ranks have a second, and five after SIGKILL.
const LEAVE: Duration = Duration::from_secs(8);

/// The same after a launcher was killed or was asked to stop: launchers that still wait for it have this long to end.
const LEAVE_SOON: Duration = Duration::from_secs(2);

/// Time for what a launcher has written last; another process that it has started may hold its output open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Time between two looks at the launchers.
const LOOK: Duration = Duration::from_millis(10);

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

/// First line that host 0's launcher prints.
#[derive(Deserialize)]
struct Announced {
    rendezvous_port: u16,
}

/// A launcher that this process has started.
struct Launcher {
    name: String,
    /// True if ssh has started it.
    is_remote: bool,
    child: Child,
    /// Kills it when a signal ends this process at once.
    _farewell: Arc<Farewell>,
    /// Its standard input; dropping it ends the launcher.
    stdin: Option<ChildStdin>,
    shown: Vec<JoinHandle<()>>,
}

/// Starts the launchers of all hosts and waits for them; returns the exit code of host 0's, which leads the job: it ends well also
/// without a host that was lost (`--max-restarts`).
///
/// # Errors
/// A hostfile with mistakes, a launcher that does not start in time, and a [`Parting`] if this process is asked to stop before.
pub fn supervise(args: &LaunchArgs) -> Result<ExitCode> {
    let hosts = hosts(args)?;
    let signals = Signals::take_over()?;
    // The first signal is passed on to the launchers, which say so; the second ends this process, and so all of them.
    signals.others_are_told();
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
        let mut launcher = start(args, host, &words, &secret, &signals)?;
        launcher.show_errors(number == 0)?;
        let stdout = launcher.child.stdout.take().context("the output of a launcher")?;
        let mut stdout = BufReader::new(stdout);
        if number == 0 {
            let limit = Duration::from_secs(args.train.network.join_timeout);
            let waits = |waited: Duration| {
                let (waited, limit) = (waited.as_secs(), limit.as_secs());
                format!(
                    "waiting for ssh and the launcher of {} ({waited} s of {limit} s, --join-timeout)",
                    host.host
                )
            };
            let wait = || announced(stdout, &mut launcher, limit, &signals);
            (port, stdout) = tell_while(&note, &waits, wait)?;
        }
        launcher.show_output(number == 0, stdout, &output)?;
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
        let ranks = ranks_of_a_host(&args.train, hosts)?;
        let host = |number| HostSlots { host: format!("host {number}"), slots: (0..ranks).collect() };
        return Ok((0..hosts).map(host).collect());
    };
    let text = phalanx_system::files::read_text(path, HOSTFILE_BYTES)
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
    train.overrides.unset.iter().for_each(|unset| add("--unset", unset));
    let path = |path: &std::path::Path| {
        let path = std::path::absolute(path)?;
        path.to_str()
            .map(String::from)
            .with_context(|| format!("{}: a path that is not UTF-8", path.display()))
    };
    if let Some(run) = &train.run {
        add("--run", &path(run)?);
    }
    if let Some(theirs) = &train.overrides.deepspeed {
        add("--deepspeed", &path(theirs)?);
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
fn start(
    args: &LaunchArgs,
    host: &HostSlots,
    words: &[String],
    secret: &Secret,
    signals: &Signals,
) -> Result<Launcher> {
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
    let what = if args.hostfile.is_some() { "ssh" } else { "a launcher" };
    let (mut child, _farewell) = signals.before_leaving(|| {
        let started = command.spawn();
        let child = started.with_context(|| format!("{what} for {} could not be started", host.host))?;
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let process = process.context("a launcher's descriptor")?;
        Ok((child, move || _ = pidfd_send_signal(&process, Signal::KILL)))
    })?;
    let mut stdin = child.stdin.take().context("the input of a launcher")?;
    // A launcher that has ended already is reported by its exit.
    let _ = stdin.write_all(format!("{}\n", to_digits(secret)).as_bytes());
    let (name, is_remote) = (host.host.clone(), args.hostfile.is_some());
    Ok(Launcher { name, is_remote, child, _farewell, stdin: Some(stdin), shown: Vec::new() })
}

/// Command line for a shell on another host: it runs this program, in the same folder.
fn remote_line(words: &[String]) -> Result<String> {
    let utf8 = |path: std::path::PathBuf| {
        path.to_str()
            .map(String::from)
            .with_context(|| format!("{}: a path that is not UTF-8", path.display()))
    };
    let folder = utf8(std::env::current_dir().context("the current folder")?)?;
    let program = utf8(std::fs::read_link("/proc/self/exe").context("the path of this program")?)?;
    let mut line = format!("cd {} && exec env", shell_word(&folder));
    for (name, value) in crate::host::environment::for_other_hosts() {
        line.push_str(&format!(" {name}={}", shell_word(&value)));
    }
    line.push_str(&format!(" {}", shell_word(&program)));
    words.iter().for_each(|word| line.push_str(&format!(" {}", shell_word(word))));
    Ok(line)
}

/// The port at which host 0's launcher listens, from the first line that it prints; and the rest of what it prints.
fn announced<R: BufRead + Send + 'static>(
    mut stdout: R,
    launcher: &mut Launcher,
    limit: Duration,
    signals: &Signals,
) -> Result<(u16, R)> {
    let (sender, read) = channel();
    let read_line = move || {
        let mut line = String::new();
        let bytes = stdout.by_ref().take(4096).read_line(&mut line);
        // Fails when nobody waits any more.
        let _ = sender.send((bytes.map(|_| line), stdout));
    };
    let thread = std::thread::Builder::new().name("first-line".into()).spawn(read_line);
    thread.map_err(|error| refused_thread("the thread that waits for the first launcher", &error))?;
    let until = Instant::now() + limit;
    let (line, stdout) = loop {
        if let Ok(read) = read.recv_timeout(LOOK) {
            break read;
        }
        if signals.came() {
            return Err(Parting::Stopped("this process was asked to stop".to_string()).into());
        }
        if Instant::now() >= until {
            bail!(
                "the launcher of {} has said nothing within {} s (--join-timeout): ssh hangs, or the program there",
                launcher.name,
                limit.as_secs()
            );
        }
    };
    let line = line.context("the output of the first launcher")?;
    let said: Result<Announced, _> = serde_json::from_str(&line);
    if let Ok(said) = said {
        return Ok((said.rendezvous_port, stdout));
    }
    let status = launcher.end().context("the end of a launcher")?;
    let how = launcher.why_ended(status).unwrap_or_else(|| format!("it ended with {status}"));
    // What it said of the reason is shown before.
    launcher.await_last_words();
    bail!("the launcher of {} did not start: {}", launcher.name, format!("{how}\n{line}").trim())
}

impl Launcher {
    /// Ends it, if it runs: ssh passes the end of the input on. What does not end within a second is killed.
    fn end(&mut self) -> std::io::Result<ExitStatus> {
        self.stdin = None;
        let until = Instant::now() + Duration::from_secs(1);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        self.child.wait()
    }

    /// Waits until what it has written is shown.
    fn await_last_words(&self) {
        let until = Instant::now() + LAST_WORDS;
        while self.shown.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends a line, if the launcher still reads.
    fn tell(&mut self, line: &str) {
        let line: String = line.chars().filter(|c| !c.is_control()).take(LINE_BYTES).collect();
        if let Some(stdin) = &mut self.stdin {
            // A launcher that has ended already is reported by its exit.
            let _ = stdin.write_all(format!("{line}\n").as_bytes());
        }
    }

    /// Describes its end, if that has kept it from doing so itself.
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

    /// Shows its errors.
    fn show_errors(&mut self, leads: bool) -> Result<()> {
        let stderr = self.child.stderr.take().context("the errors of a launcher")?;
        let name = if leads { None } else { Some(self.name.clone()) };
        self.show(move || {
            each_line(BufReader::new(stderr), |line| match &name {
                // Lines of ranks have their host already.
                Some(name) if !line.starts_with("[rank ") => note(&format!("[{name}] {line}")),
                _ => note(line),
            });
        })
    }

    /// Shows what else it writes; host 0's standard output is that of the run.
    fn show_output(
        &mut self,
        leads: bool,
        stdout: impl BufRead + Send + 'static,
        output: &TrainOutput,
    ) -> Result<()> {
        let (output, name) = (output.clone(), self.name.clone());
        self.show(move || match leads {
            true => each_line(stdout, |line| output.write(format!("{line}\n").as_bytes())),
            false => each_line(stdout, |line| note(&format!("[{name}] {line}"))),
        })
    }

    fn show(&mut self, read: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name("launcher".into()).spawn(read);
        self.shown.push(
            thread.map_err(|error| refused_thread("the thread that reads what a launcher writes", &error))?,
        );
        Ok(())
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // One that cannot be waited for is not there.
        let _ = self.end();
        self.await_last_words();
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
    let (mut asked, mut killed, mut deadline) = (false, false, None);
    while codes.contains(&None) {
        if signals.came() && !asked {
            asked = true;
            launchers.iter_mut().for_each(|launcher| launcher.tell(STOP));
        }
        for number in (0..launchers.len()).filter(|number| codes[*number].is_none()).collect::<Vec<_>>() {
            let Ok(Some(status)) = launchers[number].child.try_wait() else { continue };
            codes[number] = Some(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
            killed |= status.signal().is_some();
            if number == 0 {
                let soon = asked || killed;
                deadline = Some(Instant::now() + if soon { LEAVE_SOON } else { LEAVE });
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
        std::thread::sleep(LOOK);
    }
    launchers.clear();
    codes[0].unwrap_or(1)
}
