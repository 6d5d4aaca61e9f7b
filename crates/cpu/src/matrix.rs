//! Operands of matrix products, as they lie in memory.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_plan::trace::DType;
use phalanx_tensor::View;

use crate::packing::MatrixBlock;

/// A read-only matrix of any element type and strides.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: *const u8,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
    life: PhantomData<&'a [u8]>,
}

// SAFETY: a shared borrow of numbers, which are Sync.
unsafe impl Send for Matrix<'_> {}
// SAFETY: as above.
unsafe impl Sync for Matrix<'_> {}

impl<'a> Matrix<'a> {
    /// A whole view; the leading dimensions are rows.
    pub(crate) fn of(x: &View<'a>) -> Matrix<'a> {
        let [rows, columns] = x.shape().rows_cols();
        Matrix {
            data: x.address().as_ptr(),
            dtype: x.dtype(),
            rows,
            columns,
            row_stride: columns,
            column_stride: 1,
            life: PhantomData,
        }
    }

    /// `[rows, columns]`
    pub(crate) fn shape(self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    fn at(&self, row: usize, column: usize) -> *const u8 {
        let elements = row * self.row_stride + column * self.column_stride;
        self.data.wrapping_add(elements * self.dtype.bytes())
    }

    /// Some of the rows.
    pub(crate) fn rows(self, rows: Range<usize>) -> Matrix<'a> {
        assert!(rows.start < rows.end && rows.end <= self.rows);
        Matrix { data: self.at(rows.start, 0), rows: rows.len(), ..self }
    }

    /// The first columns of every row.
    pub(crate) fn first_columns(self, columns: usize) -> Matrix<'a> {
        assert!(columns <= self.columns);
        Matrix { columns, ..self }
    }

    /// Transposed.
    pub(crate) fn t(self) -> Matrix<'a> {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// The block of rows `steps` and columns `lanes` that is to be packed.
    pub(crate) fn block(&self, steps: Range<usize>, lanes: Range<usize>) -> MatrixBlock {
        assert!(steps.start <= steps.end && steps.end <= self.rows);
        assert!(lanes.start < lanes.end && lanes.end <= self.columns);
        MatrixBlock {
            from: self.at(steps.start, lanes.start),
            dtype: self.dtype,
            step_stride: self.row_stride,
            lane_stride: self.column_stride,
            depth: steps.len(),
            lanes: lanes.len(),
        }
    }
}
