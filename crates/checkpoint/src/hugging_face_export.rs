//! Writes a Hugging Face model folder. The same parameters give the same bytes.
//!
//! Both files are complete before the first one gets its final name, so a reader never sees half a model, and a failed
//! export leaves the existing files.

use std::io::Write;
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16, slice::HalfFloatSliceExt};
use phalanx_files::AtomicFile;
use phalanx_trace::DType;
use serde_json::Value;

use crate::hugging_face::{CONFIG, SINGLE};
use crate::tensor_file::{NewEntry, elements, header};
use crate::{CheckpointError, Result};

/// Elements that are requested and written at once.
const WINDOW_ELEMENTS: usize = 1 << 18;

/// Fills numbers with the elements of a range of a tensor: see [`write_hugging_face`].
pub type ReadTensor<'a> = dyn FnMut(usize, Range<u64>, &mut [f32]) -> Result<()> + 'a;

/// Writes `config.json` and `model.safetensors` (in the order of `tensors`: name and shape) to `dir`, which is created.
/// `read(tensor, range, out)` must fill `out` with those elements of the flattened tensor; it is called in order, with
/// at most 262,144 elements at a time. They are stored as `dtype`, F32, BF16 or F16, rounded to nearest even, in F16
/// beyond 65,504 to infinity. The caller sets the matching type in the configuration.
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
    let [model_path, config_path] = [SINGLE, CONFIG].map(|name| dir.join(name));
    let model = write_model(&model_path, tensors, dtype, read)?;
    let mut settings = AtomicFile::create(&config_path).map_err(CheckpointError::writing(&config_path))?;
    writeln!(settings, "{config:#}").map_err(CheckpointError::writing(&config_path))?;
    model.commit().map_err(CheckpointError::writing(&model_path))?;
    settings.commit().map_err(CheckpointError::writing(&config_path))
}

/// Writes the model's file, which is not visible yet.
fn write_model(
    path: &Path,
    tensors: &[(String, Vec<usize>)],
    dtype: DType,
    read: &mut ReadTensor<'_>,
) -> Result<AtomicFile> {
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
    let mut file = AtomicFile::create(path).map_err(CheckpointError::writing(path))?;
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
    Ok(file)
}

/// Rounds the values into `halves` and returns their bytes.
fn rounded<'a, H: bytemuck::Pod>(values: &[f32], halves: &'a mut [u16]) -> &'a [u8]
where
    [H]: HalfFloatSliceExt,
{
    bytemuck::cast_slice_mut::<u16, H>(halves).convert_from_f32_slice(values);
    bytemuck::cast_slice(halves)
}
