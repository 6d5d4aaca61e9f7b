//! Shared code of tests under mpirun: finding the mpirun of the MPI that is linked, and a bounded run of a command.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::print_stderr, clippy::disallowed_methods, reason = "for who runs the test")]

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum time of a run.
const LIMIT: Duration = Duration::from_secs(120);

/// Program of an mpirun, and whether it is Open MPI's.
#[derive(Clone, Copy, Debug)]
pub struct MpiRun {
    program: &'static str,
    pub is_open_mpi: bool,
}

impl MpiRun {
    /// The one for `library`; None, with a line that says why, if there is none.
    ///
    /// # Panics
    /// If there is none, and the variable PHALANX_TEST_MPI says that there has to be one.
    pub fn of(library: Result<String, impl std::fmt::Display>) -> Option<MpiRun> {
        let skip = |why: String| {
            assert!(std::env::var_os("PHALANX_TEST_MPI").is_none(), "no MPI to test: {why}");
            eprintln!("skipped: {why}");
            None
        };
        let library = match library {
            Ok(library) => library,
            Err(why) => return skip(why.to_string()),
        };
        let is_open_mpi = library.starts_with("Open MPI");
        let (programs, word) = match is_open_mpi {
            true => (["mpirun.openmpi", "mpirun"], "Open MPI"),
            false => (["mpirun.mpich", "mpirun"], "HYDRA"),
        };
        let answers = |program: &&str| {
            let said = Command::new(program).arg("--version").output();
            said.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains(word))
        };
        let Some(program) = programs.into_iter().find(answers) else {
            return skip(format!("no mpirun of {library} is installed"));
        };
        Some(MpiRun { program, is_open_mpi })
    }

    /// A command to which what it starts is added.
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.program);
        if self.is_open_mpi {
            // More ranks than cores, in containers too, and all traffic over sockets or shared memory.
            command.args(["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]);
        }
        command
    }
}

/// Exit code and output of a command.
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Waits for a command that was started with [`start`]; after two minutes it is killed, and the test fails.
pub fn end(mut child: Child) -> Ended {
    let out = child.stdout.take().unwrap();
    let err = child.stderr.take().unwrap();
    let read = |mut from: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = from.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let (out, err) = (read(Box::new(out)), read(Box::new(err)));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > LIMIT {
            // mpirun ends what it has started.
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            std::thread::sleep(Duration::from_secs(2));
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let (stdout, stderr) = (out.join().unwrap(), err.join().unwrap());
    let Some(status) = status else { panic!("no end after {LIMIT:?}\n{stdout}\n{stderr}") };
    Ended { code: status.code(), stdout, stderr }
}

/// Starts a command whose output is gathered.
pub fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}
