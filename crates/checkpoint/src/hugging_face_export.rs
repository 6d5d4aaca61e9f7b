//! A Hugging Face model folder written: the same parameters give the same bytes.
//!
//! Both files are written whole under hidden names, synced, then renamed, so a reader never sees half a
//! model and a failed export leaves what was there.

use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16, slice::HalfFloatSliceExt};
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

/// Writes `config.json` and `model.safetensors` (in the order of `tensors`: name and shape) to `dir`, which is
/// created. `read(tensor, range, out)` must fill `out` with those elements of the flattened tensor; it is
/// called in order, with at most 262,144 elements at a time. They are stored as `dtype`, F32, BF16 or F16,
/// rounded to nearest even, in F16 beyond 65,504 to infinity; that the configuration says so is the caller's
/// part.
///
/// # Errors
/// [`CheckpointError::Write`], or what `read` returned; files that were there before remain.
///
/// # Panics
/// When a shape has 2^64 elements or more, or for another type.
pub fn write_hugging_face(
    dir: &Path,
    config: &Value,
    tensors: &[(String, Vec<usize>)],
    dtype: DType,
    read: &mut ReadTensor<'_>,
) -> Result<()> {
    fs::create_dir_all(dir).map_err(CheckpointError::writing(dir))?;
    let model = Hidden::new(dir, SINGLE);
    let settings = Hidden::new(dir, CONFIG);
    write_model(&model.path, tensors, dtype, read)?;
    write_file(&settings.path, format!("{config:#}\n").as_bytes())?;
    rename(&model.path, &dir.join(SINGLE))?;
    rename(&settings.path, &dir.join(CONFIG))?;
    sync_folder(dir)
}

fn write_model(
    path: &Path,
    tensors: &[(String, Vec<usize>)],
    dtype: DType,
    read: &mut ReadTensor<'_>,
) -> Result<()> {
    let width = dtype.bytes() as u64;
    let entries: Vec<NewEntry> = tensors
        .iter()
        .map(|(name, shape)| NewEntry {
            key: name.clone(),
            dtype,
            shape: shape.clone(),
            bytes: width * elements(shape).expect("a tensor has fewer than 2^64 elements"),
        })
        .collect();
    let mut file = File::create(path).map_err(CheckpointError::writing(path))?;
    let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(CheckpointError::writing(path));
    write(&header(&entries, &[("format", "pt")]))?;
    let mut window = vec![0f32; WINDOW_ELEMENTS];
    let mut halves = vec![0u16; WINDOW_ELEMENTS];
    for (index, entry) in entries.iter().enumerate() {
        let count = entry.bytes / width;
        let mut done = 0;
        while done < count {
            let next = count.min(done + WINDOW_ELEMENTS as u64);
            let values = &mut window[..(next - done) as usize];
            read(index, done..next, values)?;
            let halves = &mut halves[..values.len()];
            write(match dtype {
                DType::F32 => bytemuck::cast_slice(values),
                DType::BF16 => rounded::<bf16>(values, halves),
                DType::F16 => rounded::<f16>(values, halves),
                DType::F64 | DType::U32 => panic!("a model is not written as {}", dtype.name()),
            })?;
            done = next;
        }
    }
    file.sync_all().map_err(CheckpointError::writing(path))
}

/// The bytes of the values rounded, in `halves`.
fn rounded<'a, H: bytemuck::Pod>(values: &[f32], halves: &'a mut [u16]) -> &'a [u8]
where
    [H]: HalfFloatSliceExt,
{
    bytemuck::cast_slice_mut::<u16, H>(halves).convert_from_f32_slice(values);
    bytemuck::cast_slice(halves)
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
