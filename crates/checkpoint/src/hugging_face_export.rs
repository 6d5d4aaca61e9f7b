//! A Hugging Face model folder written: the same parameters give the same bytes.
//!
//! Both files are written whole under hidden names, synced, then renamed, so a reader never sees half a
//! model and a failed export leaves what was there.

use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_trace::DType;
use serde_json::Value;

use crate::durable::{rename, sync_folder, write_file};
use crate::hugging_face::{CONFIG, SINGLE};
use crate::tensor_file::{NewEntry, elements, header};
use crate::{CheckpointError, Result};

/// Elements that are asked for and written at a time.
const WINDOW_ELEMENTS: usize = 1 << 18;

/// Fills numbers with the elements of a range of a tensor: see [`write_hugging_face`].
pub type ReadTensor<'a> = dyn FnMut(usize, Range<u64>, &mut [f32]) -> Result<()> + 'a;

/// Writes `config.json` and `model.safetensors` (F32, in the order of `tensors`: name and shape) to `dir`,
/// which is created. `read(tensor, range, out)` must fill `out` with those elements of the flattened
/// tensor; it is called in order, with at most 262,144 elements at a time.
///
/// # Errors
/// [`CheckpointError::Write`], or what `read` returned; files that were there before remain.
///
/// # Panics
/// When a shape has 2^64 elements or more.
pub fn write_hugging_face(
    dir: &Path,
    config: &Value,
    tensors: &[(String, Vec<usize>)],
    read: &mut ReadTensor<'_>,
) -> Result<()> {
    fs::create_dir_all(dir).map_err(CheckpointError::writing(dir))?;
    let model = Hidden::new(dir, SINGLE);
    let settings = Hidden::new(dir, CONFIG);
    write_model(&model.path, tensors, read)?;
    write_file(&settings.path, format!("{config:#}\n").as_bytes())?;
    rename(&model.path, &dir.join(SINGLE))?;
    rename(&settings.path, &dir.join(CONFIG))?;
    sync_folder(dir)
}

fn write_model(path: &Path, tensors: &[(String, Vec<usize>)], read: &mut ReadTensor<'_>) -> Result<()> {
    let entries: Vec<NewEntry> = tensors
        .iter()
        .map(|(name, shape)| NewEntry {
            key: name.clone(),
            dtype: DType::F32,
            shape: shape.clone(),
            bytes: 4 * elements(shape).expect("a tensor has fewer than 2^64 elements"),
        })
        .collect();
    let mut file = File::create(path).map_err(CheckpointError::writing(path))?;
    let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(CheckpointError::writing(path));
    write(&header(&entries, &[("format", "pt")]))?;
    let mut window = vec![0f32; WINDOW_ELEMENTS];
    for (index, entry) in entries.iter().enumerate() {
        let count = entry.bytes / 4;
        let mut done = 0;
        while done < count {
            let next = count.min(done + WINDOW_ELEMENTS as u64);
            let values = &mut window[..(next - done) as usize];
            read(index, done..next, values)?;
            write(bytemuck::cast_slice(values))?;
            done = next;
        }
    }
    file.sync_all().map_err(CheckpointError::writing(path))
}

/// A name to write under, gone when dropped unless the file was renamed.
struct Hidden {
    path: PathBuf,
}

impl Hidden {
    fn new(dir: &Path, name: &str) -> Hidden {
        Hidden { path: dir.join(format!(".{name}.tmp")) }
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // After the rename there is nothing of that name; after an error there is nobody else to tell.
        let _ = fs::remove_file(&self.path);
    }
}
