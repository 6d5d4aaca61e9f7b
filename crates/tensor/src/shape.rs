//! Shapes of up to four dimensions, held inline: making a view never allocates.

/// Most dimensions a tensor has.
pub const MAX_RANK: usize = 4;

/// Extents of a tensor, outermost first; memory is contiguous in that order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: usize,
}

impl Shape {
    /// Extents, outermost first.
    pub fn as_slice(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.as_slice().iter().product()
    }

    /// The extents as an array of exactly `N`; anything else is a programmer's error.
    #[track_caller]
    pub fn dims<const N: usize>(&self) -> [usize; N] {
        self.as_slice().try_into().unwrap_or_else(|_| panic!("expected {N} dimensions, got {self:?}"))
    }

    /// Seen as a matrix: all leading dimensions are rows, the last one is columns.
    pub fn rows_cols(&self) -> [usize; 2] {
        let cols = self.as_slice().last().copied().unwrap_or(1);
        [self.elements() / cols.max(1), cols]
    }
}

impl From<&[usize]> for Shape {
    fn from(extents: &[usize]) -> Self {
        assert!(extents.len() <= MAX_RANK, "at most {MAX_RANK} dimensions, got {extents:?}");
        let mut dims = [1; MAX_RANK];
        dims[..extents.len()].copy_from_slice(extents);
        Shape { dims, rank: extents.len() }
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(extents: [usize; N]) -> Self {
        Shape::from(extents.as_slice())
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.as_slice())
    }
}
