//! The things that all cases share: the program, prepared runs, and folders to work in.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::namespaces::Network;
use tempfile::TempDir;

use crate::reliability::command::Invocation;
use crate::reliability::folder::{self, Listing};
use crate::reliability::mesh::Mesh;

/// Steps of the run that [`World::run_and_model`] makes.
pub(crate) const PREPARED_STEPS: u64 = 8;

/// A model of a few kilobytes; every run of the campaign begins with it.
const CONFIG: &str = r#"[model]
layers = 2
hidden = 16
heads = 4
seq = 16

[data]
text = ["text.txt"]
tokenizer = "char"
validation = 0.1

[batch]
global = 8

[optimizer]
lr = 1e-2

[schedule]
kind = "constant"

[train]
steps = 40
eval_every = 5
eval_samples = 8
save_every = 5
threads = 1
"#;

/// Words of the text that runs are trained on.
const WORDS: [&str; 8] = ["chunk", "rank", "shard", "gather", "reduce", "step", "plan", "arena"];

/// As many words of as many distinct letters, but not the same letters: the text of another run.
const OTHER_WORDS: [&str; 8] = ["chumk", "vamk", "shavd", "gathev", "veduce", "step", "plam", "avema"];

/// Something that is made once, or why it could not be made.
type Made<T> = Arc<OnceLock<Result<T, String>>>;

/// State that all cases share.
pub(crate) struct World {
    program: PathBuf,
    root: TempDir,
    prepared: Mutex<HashMap<String, Made<PathBuf>>>,
    references: Mutex<HashMap<String, Made<Arc<Reference>>>>,
    namespaces: OnceLock<Result<(), String>>,
}

/// An undisturbed run.
pub(crate) struct Reference {
    pub(crate) losses: Vec<(u64, String)>,
    pub(crate) parameters: Listing,
    pub(crate) listing: Listing,
    /// From the start of the program to its first step.
    pub(crate) first_step: Duration,
    /// From the start of the program to its end.
    pub(crate) whole: Duration,
    pub(crate) bytes: u64,
}

impl World {
    /// # Errors
    /// When no folder can be made.
    pub(crate) fn new(program: &Path) -> Result<World, String> {
        let program = fs::canonicalize(program).map_err(|error| format!("{}: {error}", program.display()))?;
        let root = TempDir::with_prefix("phalanx-reliability-").map_err(|error| error.to_string())?;
        Ok(World {
            program,
            root,
            prepared: Mutex::default(),
            references: Mutex::default(),
            namespaces: OnceLock::new(),
        })
    }

    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    /// Checks that this machine allows network namespaces as hosts.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn namespaces(&self) -> Result<(), &str> {
        let tried = self.namespaces.get_or_init(|| Network::new(2).map(drop));
        tried.as_ref().copied().map_err(String::as_str)
    }

    /// A folder with a text and a configuration, removed after the case.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn case(&self) -> Result<Case<'_>, String> {
        let dir = TempDir::with_prefix_in("case-", self.root.path()).map_err(|error| error.to_string())?;
        furnish(dir.path())?;
        Ok(Case { world: self, dir })
    }

    /// The folder that `make` fills once, under `key`.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn prepared(
        &self,
        key: &str,
        make: impl FnOnce(&Path) -> Result<(), String>,
    ) -> Result<PathBuf, String> {
        let made =
            Arc::clone(self.prepared.lock().expect("no case panics here").entry(key.into()).or_default());
        let prepare = || {
            let folder = self.root.path().join(format!("prepared-{key}"));
            fs::create_dir(&folder).map_err(|error| error.to_string())?;
            furnish(&folder)?;
            make(&folder).map_err(|error| format!("preparing {key}: {error}"))?;
            Ok(folder)
        };
        made.get_or_init(prepare).clone()
    }

    /// A folder with a run `r` of [`PREPARED_STEPS`] steps, with all of its checkpoints, and its model `hf`.
    ///
    /// # Errors
    /// When the run fails.
    pub(crate) fn run_and_model(&self) -> Result<PathBuf, String> {
        self.prepared("run-and-model", |folder| {
            let run = |words: &[&str]| {
                Invocation::new(self.program(), folder, words.iter().copied()).run()?.success()
            };
            let steps = format!("train.steps={PREPARED_STEPS}");
            let sets = ["--set", &steps, "--set", "train.save_every=4", "--set", "train.keep=\"all\""];
            run(&[&["train", "small.toml", "--run", "r", "--quiet"][..], &sets].concat())?;
            run(&["export", "r", "--out", "hf"])
        })
    }

    /// The undisturbed run of a mesh.
    ///
    /// # Errors
    /// When it fails.
    pub(crate) fn reference(&self, mesh: &Mesh) -> Result<Arc<Reference>, String> {
        let mut references = self.references.lock().expect("no case panics here");
        let made = Arc::clone(references.entry(mesh.name.to_string()).or_default());
        drop(references);
        made.get_or_init(|| self.make_reference(mesh).map(Arc::new)).clone()
    }

    fn make_reference(&self, mesh: &Mesh) -> Result<Reference, String> {
        let case = self.case()?;
        let run = case.path("r");
        let mut running = case.phalanx(mesh.train(&["--quiet"])).start()?;
        let metrics = run.join("metrics.jsonl");
        running.wait_for(Duration::from_secs(10), || fs::metadata(&metrics).is_ok_and(|file| file.len() > 0));
        let seen = std::time::Instant::now();
        let ended = running.finish();
        ended.success().map_err(|error| format!("the undisturbed run of {}: {error}", mesh.name))?;
        let sizes = walk(&run).into_iter().filter_map(|path| fs::metadata(path).ok());
        Ok(Reference {
            losses: folder::losses(&run),
            parameters: folder::parameters(&run, crate::reliability::mesh::STEPS),
            listing: folder::listing(&run),
            first_step: seen - ended.started,
            whole: ended.ended_at - ended.started,
            bytes: sizes.map(|file| file.len()).sum(),
        })
    }
}

impl Reference {
    /// Checks that `run` reached the end of this run with the same numbers and files.
    ///
    /// # Errors
    /// The first difference.
    pub(crate) fn is_equal(&self, run: &Path) -> Result<(), String> {
        let losses = folder::losses(run);
        if losses != self.losses {
            let at = losses.iter().zip(&self.losses).position(|(found, expected)| found != expected);
            let at = at.unwrap_or(losses.len().min(self.losses.len()));
            return Err(format!(
                "metrics differ from an undisturbed run: line {} is {:?}, expected {:?}",
                at + 1,
                losses.get(at),
                self.losses.get(at)
            ));
        }
        let parameters = folder::parameters(run, crate::reliability::mesh::STEPS);
        if let Some(difference) = folder::difference(&self.parameters, &parameters) {
            return Err(format!("the last checkpoint differs from an undisturbed run: {difference}"));
        }
        let left = folder::names_differ(&self.listing, &folder::listing(run));
        left.map_or(Ok(()), |name| Err(format!("the run folder differs from an undisturbed run: {name}")))
    }
}

/// A folder of its own for one case.
pub(crate) struct Case<'a> {
    pub(crate) world: &'a World,
    dir: TempDir,
}

impl Case<'_> {
    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// # Errors
    /// The system's.
    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<(), String> {
        fs::write(self.path(name), content).map_err(|error| format!("{name}: {error}"))
    }

    /// The same with permissions.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn write_with(&self, name: &str, content: impl AsRef<[u8]>, mode: u32) -> Result<(), String> {
        self.write(name, content)?;
        let mode = PermissionsExt::from_mode(mode);
        fs::set_permissions(self.path(name), mode).map_err(|error| format!("{name}: {error}"))
    }

    /// `phalanx arguments` in this folder.
    pub(crate) fn phalanx<S: Into<String>>(&self, arguments: impl IntoIterator<Item = S>) -> Invocation {
        Invocation::new(self.world.program(), self.root(), arguments)
    }

    /// Copies a prepared folder's `name` here.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn take(&self, prepared: &Path, name: &str) -> Result<PathBuf, String> {
        let target = self.path(name);
        folder::copy(&prepared.join(name), &target).map_err(|error| format!("copying {name}: {error}"))?;
        Ok(target)
    }
}

/// Text and configuration.
fn furnish(folder: &Path) -> Result<(), String> {
    let write = |name: &str, content: &str| {
        fs::write(folder.join(name), content).map_err(|error| format!("{name}: {error}"))
    };
    write("text.txt", &text(&WORDS))?;
    write("other.txt", &text(&OTHER_WORDS))?;
    write("small.toml", CONFIG)
}

fn text(words: &[&str]) -> String {
    let mut text = String::new();
    for i in 0..900usize {
        text.push_str(words[(i * i + i / 7) % words.len()]);
        text.push(if i % 11 == 10 { '\n' } else { ' ' });
    }
    text
}

/// All files below a folder.
pub(crate) fn walk(root: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => files.extend(walk(&entry.path())),
            Ok(kind) if kind.is_file() => files.push(entry.path()),
            _ => {}
        }
    }
    files.sort();
    files
}
