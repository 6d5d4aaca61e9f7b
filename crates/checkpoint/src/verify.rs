//! Compares every byte of a checkpoint with its checksum, and computes statistics of each tensor.
//!
//! Both happen in one pass through one window, so the hashed bytes are the summed ones. Sums are in f64.

use half::{bf16, f16};
use phalanx_plan::trace::DType;
use serde::Serialize;

use crate::read::Checkpoint;
use crate::stored_tensor::{StoredPiece, StoredTensor};
use crate::stream::Stream;
use crate::{CheckpointError, Result};

/// Report of [`Checkpoint::verify_all`] on one tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorReport {
    /// `parameters`, `exp_avg` ...
    pub state: String,
    /// Name of the parameter.
    pub name: String,
    /// Type of an element: `f32` ...
    pub dtype: DType,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Number of pieces in which it is stored.
    pub pieces: usize,
    /// One message per damaged piece; empty when all is well.
    pub damage: Vec<String>,
    /// Statistics over all elements; `None` when a piece is damaged.
    pub statistics: Option<Statistics>,
}

/// Numbers about the finite elements of a tensor; NaN (null in JSON) when it has none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Statistics {
    /// Smallest element.
    pub min: f64,
    /// Largest element.
    pub max: f64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Root of the mean square.
    pub rms: f64,
    /// Number of elements that are NaN or infinite.
    pub non_finite: u64,
}

impl Checkpoint {
    /// Reads everything. `progress` is called with the bytes of each piece when it is done.
    ///
    /// # Errors
    /// None for damage, which is in the reports; [`CheckpointError::Read`] when the disk fails.
    pub fn verify_all(&self, progress: &mut dyn FnMut(u64)) -> Result<Vec<TensorReport>> {
        self.tensors().iter().map(|tensor| self.verify(tensor, progress)).collect()
    }

    fn verify(&self, tensor: &StoredTensor, progress: &mut dyn FnMut(u64)) -> Result<TensorReport> {
        let mut damage = Vec::new();
        let mut sums = RunningStatistics::default();
        for piece in &tensor.pieces {
            match self.verify_piece(tensor, piece, &mut sums) {
                Ok(()) => {}
                Err(error @ (CheckpointError::Damaged { .. } | CheckpointError::WrongSize { .. })) => {
                    damage.push(error.to_string());
                }
                Err(error) => return Err(error),
            }
            let bytes = piece.bytes(tensor.dtype);
            progress(bytes.end - bytes.start);
        }
        Ok(TensorReport {
            state: tensor.state.clone(),
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            pieces: tensor.pieces.len(),
            statistics: damage.is_empty().then(|| sums.statistics()),
            damage,
        })
    }

    fn verify_piece(
        &self,
        tensor: &StoredTensor,
        piece: &StoredPiece,
        sums: &mut RunningStatistics,
    ) -> Result<()> {
        let file = self.open_file(tensor, piece)?;
        let path = self.dir().join(&piece.file);
        let bytes = piece.bytes(tensor.dtype);
        let mut stream = Stream::new(&file, bytes.start, true);
        while let Some(window) = stream.window_before(bytes.end).map_err(CheckpointError::reading(&path))? {
            sums.add_all(tensor.dtype, window);
        }
        self.compare(tensor, piece, &stream.into_hasher().expect("asked for"))
    }
}

/// Running sums for the statistics.
struct RunningStatistics {
    finite: u64,
    non_finite: u64,
    min: f64,
    max: f64,
    sum: f64,
    squares: f64,
}

impl Default for RunningStatistics {
    fn default() -> RunningStatistics {
        let (min, max) = (f64::INFINITY, f64::NEG_INFINITY);
        RunningStatistics { finite: 0, non_finite: 0, min, max, sum: 0.0, squares: 0.0 }
    }
}

impl RunningStatistics {
    /// Adds whole elements of `dtype`. Windows are a multiple of 8 bytes from the start of a piece, so no
    /// element is cut.
    fn add_all(&mut self, dtype: DType, bytes: &[u8]) {
        match dtype {
            DType::F64 => self.each(bytes, f64::from_le_bytes),
            DType::F32 => self.each(bytes, |b| f64::from(f32::from_le_bytes(b))),
            DType::U32 => self.each(bytes, |b| f64::from(u32::from_le_bytes(b))),
            DType::BF16 => self.each(bytes, |b| bf16::from_le_bytes(b).to_f64()),
            DType::F16 => self.each(bytes, |b| f16::from_le_bytes(b).to_f64()),
            DType::Q8_0 | DType::Nf4 => unreachable!("files have no {}", dtype.name()),
        }
    }

    fn each<const BYTES: usize>(&mut self, bytes: &[u8], value: impl Fn([u8; BYTES]) -> f64) {
        let (elements, cut) = bytes.as_chunks::<BYTES>();
        assert!(cut.is_empty(), "windows must not split elements");
        for &element in elements {
            self.add(value(element));
        }
    }

    fn add(&mut self, value: f64) {
        if !value.is_finite() {
            self.non_finite += 1;
            return;
        }
        self.finite += 1;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
        self.sum += value;
        self.squares += value * value;
    }

    fn statistics(&self) -> Statistics {
        let count = self.finite as f64;
        let or_nan = |value: f64| if self.finite == 0 { f64::NAN } else { value };
        Statistics {
            min: or_nan(self.min),
            max: or_nan(self.max),
            mean: self.sum / count,
            rms: (self.squares / count).sqrt(),
            non_finite: self.non_finite,
        }
    }
}
