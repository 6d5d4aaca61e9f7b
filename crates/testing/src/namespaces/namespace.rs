//! A network namespace without a name: it exists as long as a process that holds it, which ends with this process.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

/// A network namespace, and the process that holds it. Dropping it ends the process, and with it the namespace and its
/// interfaces.
pub struct Namespace {
    /// Ends when its standard input is closed, as it is when this process ends in any way.
    holder: Child,
}

impl Namespace {
    /// A new namespace, in which only the loopback interface is up.
    ///
    /// # Errors
    /// When the system refuses it, which it does without root.
    pub fn new() -> Result<Namespace, String> {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut holder = command.spawn().map_err(|error| format!("unshare (util-linux): {error}"))?;
        let mut line = String::new();
        if let Some(stdout) = holder.stdout.as_mut() {
            let _ = BufReader::new(stdout).read_line(&mut line);
        }
        let mut namespace = Namespace { holder };
        if line.trim() == "ready" { Ok(namespace) } else { Err(namespace.refusal()) }
    }

    /// Why the namespace was not made.
    fn refusal(&mut self) -> String {
        let _ = self.holder.kill();
        let mut said = String::new();
        if let Some(stderr) = self.holder.stderr.as_mut() {
            let _ = stderr.read_to_string(&mut said);
        }
        format!("no network namespace could be made: {} (this needs root and iproute2)", said.trim())
    }

    /// The process that holds it.
    pub fn pid(&self) -> String {
        self.holder.id().to_string()
    }

    /// The words before a program and its arguments that run it in the namespace. It is killed when the thread ends that has
    /// started it.
    pub fn enter(&self) -> Vec<String> {
        let words = ["setpriv", "--pdeathsig", "KILL", "nsenter", "--net", "--target", &self.pid(), "--"];
        words.map(str::to_string).into()
    }

    /// A command that runs `program` in the namespace.
    pub fn command(&self, program: &str) -> Command {
        let enter = self.enter();
        let mut command = Command::new(&enter[0]);
        command.args(&enter[1..]).arg(program);
        command
    }

    /// Runs `line`, words separated by spaces, in the namespace.
    ///
    /// # Errors
    /// The output of the command on standard error, if it failed.
    pub fn run(&self, line: &str) -> Result<(), String> {
        let mut words = line.split(' ');
        let program = words.next().unwrap_or_default();
        let output = self.command(program).args(words).output();
        let output = output.map_err(|error| format!("setpriv (util-linux): {error}"))?;
        if output.status.success() {
            return Ok(());
        }
        Err(format!("`{line}`: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
