//! Standard output and error that are closed, full, or not read, for every command.
//!
//! `train` does its work to the end without standard output, and says so once; every other command ends with a code that is
//! not 0 when its output is lost. No command panics or hangs.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use crate::hostile::Random;
use crate::reliability::command::{Ended, Invocation};
use crate::reliability::folder;
use crate::reliability::mesh::{ALONE, MESHES, Mesh, PAIR};
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Commands that read the prepared run `r` or the text, and write to standard output.
const COMMANDS: [&[&str]; 14] = [
    &["plan", "small.toml"],
    &["plan", "small.toml", "--json"],
    &["plan", "--schedule", "zb-v"],
    &["sample", "r", "--prompt", "rank", "--tokens", "8"],
    &["sample", "r", "--prompt", "rank", "--tokens", "8", "--json"],
    &["inspect", "r"],
    &["inspect", "r", "--verify", "--json"],
    &["inspect", "r/tokens.bin"],
    &["export", "r", "--out", "hf"],
    &["export", "r", "--out", "hf", "--json"],
    &["tokenize", "--out", "t.bin", "text.txt"],
    &["tokenize", "--out", "t.bin", "text.txt", "--json"],
    &["import", "hf-made", "--run", "i"],
    &["import", "hf-made", "--run", "i", "--json"],
];

/// Condition of a standard stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    Closed,
    /// The reading end of its pipe is closed.
    Gone,
    /// The reader takes one line and leaves.
    OneLine,
    /// `/dev/full`.
    Full,
    /// The reader waits two seconds before it reads.
    Slow,
}

const STREAMS: [Stream; 4] = [Stream::Closed, Stream::Gone, Stream::OneLine, Stream::Full];

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let training = number.is_multiple_of(3);
    let on_error = random.chance(0.3);
    let stream = match training && !on_error && random.chance(0.1) {
        true => Stream::Slow,
        false => *random.pick(&STREAMS),
    };
    let which = if on_error { "standard error" } else { "standard output" };
    let (who, detail, result) = if training {
        let mesh = *random.pick(&[&ALONE, &PAIR, &MESHES[13]]);
        let shown: [&[&str]; 3] = [&["--json"], &[], &["--quiet"]];
        let show = *random.pick(&shown);
        let detail = format!("train {} on {}: {which} {stream:?}", show.join(" "), mesh.name);
        ("train", detail, world.case().and_then(|case| train(&case, mesh, show, stream, on_error)))
    } else {
        let words = random.pick(&COMMANDS);
        let detail = format!("{}: {which} {stream:?}", words.join(" "));
        ("other commands", detail, world.case().and_then(|case| other(&case, words, stream, on_error)))
    };
    Trial::new(format!("{which} lost: {who}"), detail, result)
}

fn train(case: &Case<'_>, mesh: &Mesh, show: &[&str], stream: Stream, on_error: bool) -> Result<(), String> {
    let reference = case.world.reference(mesh)?;
    let ended = run_with(case, case.phalanx(mesh.train(show)), stream, on_error)?;
    ended.success()?;
    reference.is_equal(&case.path("r"))
}

fn other(case: &Case<'_>, words: &[&str], stream: Stream, on_error: bool) -> Result<(), String> {
    let prepared = prepared(case.world)?;
    case.take(&prepared, "r")?;
    folder::copy(&prepared.join("hf"), &case.path("hf-made")).map_err(|error| error.to_string())?;
    let ended = run_with(case, case.phalanx(words.iter().copied()), stream, on_error)?;
    ended.bounded()?;
    let lost = !on_error && matches!(stream, Stream::Gone | Stream::Full);
    match (ended.code, lost) {
        // 141 is what a shell shows for SIGPIPE: the reader has left, and there is nobody to tell. A reader that takes
        // one line may have had all of them; a closed descriptor is opened on /dev/null.
        (Some(1 | 141), _) | (Some(0), false) => Ok(()),
        (Some(0), true) => ended.wrong("ended with 0 although its output was lost"),
        _ => ended.wrong(&format!("ended with {:?}, signal {:?}", ended.code, ended.signal)),
    }
}

/// Starts a command with one stream as `stream` says.
fn run_with(case: &Case<'_>, command: Invocation, stream: Stream, on_error: bool) -> Result<Ended, String> {
    let system = |error: std::io::Error| error.to_string();
    let attach = |command: Invocation, to: Stdio| match on_error {
        true => command.stderr(to),
        false => command.stdout(to),
    };
    match stream {
        Stream::Closed => command.in_shell("exec", if on_error { "2>&-" } else { ">&-" }).run(),
        Stream::Full => {
            let full = OpenOptions::new().write(true).open("/dev/full").map_err(system)?;
            attach(command, full.into()).run()
        }
        Stream::Gone => {
            let (_, writer) = std::io::pipe().map_err(system)?;
            attach(command, writer.into()).run()
        }
        Stream::OneLine | Stream::Slow => {
            let path = case.path("pipe");
            make_fifo(&path)?;
            let both = OpenOptions::new().read(true).write(true).open(&path).map_err(system)?;
            let reader = File::open(&path).map_err(system)?;
            let writer = OpenOptions::new().write(true).open(&path).map_err(system)?;
            drop(both);
            // A pipe of one page is full after a few lines.
            rustix::pipe::fcntl_setpipe_size(&writer, 4096).map_err(|error| error.to_string())?;
            let running = attach(command, writer.into()).start()?;
            let thread = std::thread::spawn(move || read(reader, stream));
            let ended = running.finish();
            let _ = thread.join();
            Ok(ended)
        }
    }
}

fn read(mut from: File, stream: Stream) {
    if stream == Stream::Slow {
        std::thread::sleep(Duration::from_secs(2));
        let _ = from.read_to_end(&mut Vec::new());
        return;
    }
    let mut byte = [0u8];
    while from.read(&mut byte).is_ok_and(|count| count == 1) && byte[0] != b'\n' {}
}

fn make_fifo(path: &std::path::Path) -> Result<(), String> {
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0)
        .map_err(|error| error.to_string())
}

/// A run with its export.
pub(crate) fn prepared(world: &World) -> Result<PathBuf, String> {
    world.prepared("exported", |folder| {
        let train = ["train", "small.toml", "--run", "r", "--quiet", "--set", "train.steps=4"];
        Invocation::new(world.program(), folder, train).run()?.success()?;
        Invocation::new(world.program(), folder, ["export", "r", "--out", "hf"]).run()?.success()
    })
}
