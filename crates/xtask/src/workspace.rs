//! The files to check: the folders of `crates/`, their manifests, every Rust file, and the other text.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::source::SourceFile;

/// Folders in which nothing is ours, wherever they are.
const SKIPPED: [&str; 5] = ["target", "runs", "node_modules", "__pycache__", "golden"];

/// The workspace as read.
pub struct Workspace {
    /// Names of the folders in `crates/` that hold a crate, in order.
    pub crates: Vec<String>,
    pub sources: Vec<SourceFile>,
    /// Everything else that a person wrote: path and text.
    pub texts: Vec<(String, String)>,
}

impl Workspace {
    /// # Errors
    /// When a folder or file cannot be read.
    pub fn read(root: &Path) -> io::Result<Workspace> {
        let mut crates = Vec::new();
        for entry in fs::read_dir(root.join("crates"))? {
            let path = entry?.path();
            if path.join("Cargo.toml").is_file() {
                crates.extend(path.file_name().and_then(|name| name.to_str()).map(str::to_string));
            }
        }
        crates.sort();
        let mut workspace = Workspace { crates, sources: Vec::new(), texts: Vec::new() };
        workspace.add_folder(root, root)?;
        workspace.sources.sort_by(|a, b| a.path.cmp(&b.path));
        workspace.texts.sort();
        Ok(workspace)
    }

    /// A text that was read along the way.
    pub fn text(&self, path: &str) -> Option<&str> {
        self.texts.iter().find(|(known, _)| known == path).map(|(_, text)| text.as_str())
    }

    fn add_folder(&mut self, root: &Path, folder: &Path) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type()?;
            if kind.is_dir() {
                let hidden = name.starts_with('.') && !matches!(name.as_str(), ".ci" | ".cargo");
                if !hidden && !SKIPPED.contains(&name.as_str()) {
                    self.add_folder(root, &path)?;
                }
            } else if kind.is_file() && is_text(&name) {
                let text = fs::read_to_string(&path)
                    .map_err(|cause| io::Error::new(cause.kind(), format!("{}: {cause}", path.display())))?;
                let relative = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
                if name.ends_with(".rs") {
                    self.sources.push(SourceFile::new(&relative, &text));
                } else {
                    self.texts.push((relative, text));
                }
            }
        }
        Ok(())
    }
}

/// Files that people write, by their names.
fn is_text(name: &str) -> bool {
    match name.rsplit_once('.') {
        Some((_, ending)) => {
            matches!(ending, "rs" | "toml" | "md" | "py" | "sh" | "cu" | "html" | "js" | "css")
        }
        None => matches!(name, "run" | "Makefile" | "Dockerfile"),
    }
}

/// The folder of the workspace's `Cargo.toml`, here or above.
///
/// # Errors
/// When there is none.
pub fn root(from: &Path) -> io::Result<PathBuf> {
    let is_root = |folder: &&Path| {
        fs::read_to_string(folder.join("Cargo.toml")).is_ok_and(|toml| toml.contains("[workspace]"))
    };
    from.ancestors().find(is_root).map(Path::to_path_buf).ok_or_else(|| {
        io::Error::other(format!("no Cargo.toml with a [workspace] in {} or above", from.display()))
    })
}
