//! Matrix products: linear layers, their gradients, and what other kernels need.
//!
//! Operands are f32, bf16 or f16, and so are results; sums are f32. The smaller of the two operands (by its free
//! dimension) is packed once, by all threads, into panels that they share; the larger is cut along its free
//! dimension into tasks, each of which packs its own block and runs over the whole of the other (see
//! [`microkernel`](crate::microkernel) for vectors and [`tile_kernel`](crate::tile_kernel) for tile registers). So nothing is packed twice, and a long inner dimension goes in pieces
//! that fit the cache. How an element is summed does not depend on any of this.

use std::ops::Range;

use phalanx_plan::trace::DType;
use phalanx_simd::Isa;
use phalanx_tensor::arguments::{Epilogue, Layout, VOCABULARY_BLOCK, Weight};
use phalanx_tensor::operations::LinearGelu;
use phalanx_tensor::{View, ViewMut};

use crate::Cpu;
use crate::epilogue::{MatrixPointer, Target};
use crate::few_rows;
use crate::format::Format;
use crate::matrix::Matrix;
use crate::microkernel::{self, Packing, PanelsA, PanelsB};
use crate::scratch::with_thread_scratch;
use crate::side::Side;
use crate::tile_kernel::{self, TilePanels, TileProduct};
use crate::tile_packing::Operand;

/// The weight as a matrix `[in, out]`, whatever its layout.
pub(crate) fn weight<'a>(w: &Weight<'a>) -> Matrix<'a> {
    let matrix = Matrix::of(&w.matrix);
    match w.layout {
        Layout::InOut => matrix,
        Layout::OutIn => matrix.t(),
    }
}

/// A result as a matrix with `columns` columns.
fn place(y: &ViewMut, columns: usize) -> MatrixPointer {
    MatrixPointer { at: y.address().as_ptr(), dtype: y.dtype(), stride: columns }
}

fn place_of(x: Option<View>, columns: usize) -> MatrixPointer {
    x.map_or(MatrixPointer::none(), |x| MatrixPointer {
        at: x.address().as_ptr(),
        dtype: x.dtype(),
        stride: columns,
    })
}

/// `y = x · w (+ bias) (+ residual)`.
pub(crate) fn linear(cpu: &Cpu, x: View, w: Weight, epilogue: Epilogue, y: ViewMut) {
    let [_, out] = w.in_out();
    let target = Target {
        bias: place_of(epilogue.bias, out),
        add: place_of(epilogue.residual, out),
        ..Target::new(place(&y, out))
    };
    // SAFETY: y is borrowed uniquely, the others are of its shape (checked by the device).
    unsafe { product_onto(cpu, Matrix::of(&x), weight(&w), target) };
}

/// `pre = x · w (+ bias)`, `y = gelu(pre)`.
pub(crate) fn linear_gelu(cpu: &Cpu, call: LinearGelu) {
    let LinearGelu { x, w, bias, gelu, pre, y } = call;
    let [_, out] = w.in_out();
    let bias = place_of(bias, out);
    let target = Target { bias, pre: place(&pre, out), gelu, ..Target::new(place(&y, out)) };
    // SAFETY: y and pre are borrowed uniquely, and of one shape (checked by the device).
    unsafe { product_onto(cpu, Matrix::of(&x), weight(&w), target) };
}

/// `dx (+)= dy · wᵀ`.
pub(crate) fn linear_input_gradient(cpu: &Cpu, dy: View, w: Weight, dx: ViewMut, accumulate: bool) {
    let [_, out] = w.in_out();
    product(cpu, Matrix::of(&dy).first_columns(out), weight(&w).t(), dx, accumulate);
}

/// `dw (+)= xᵀ · dy`, in the layout given.
pub(crate) fn linear_weight_gradient(
    cpu: &Cpu,
    x: View,
    dy: View,
    dw: ViewMut,
    layout: Layout,
    accumulate: bool,
) {
    let [_, out] = layout.in_out(dw.dims());
    let (x, dy) = (Matrix::of(&x), Matrix::of(&dy).first_columns(out));
    match layout {
        Layout::InOut => product(cpu, x.t(), dy, dw, accumulate),
        Layout::OutIn => product(cpu, dy.t(), x, dw, accumulate),
    }
}

/// `c (+)= a · b`; c row-major.
pub(crate) fn product(cpu: &Cpu, a: Matrix, b: Matrix, c: ViewMut, accumulate: bool) {
    assert_eq!(c.elements(), a.rows * b.columns);
    let to = place(&c, b.columns);
    let add = if accumulate { to } else { MatrixPointer::none() };
    // SAFETY: c is borrowed uniquely and as large as the product (asserted).
    unsafe { product_onto(cpu, a, b, Target { add, ..Target::new(to) }) };
}

/// Packed elements that tasks share at once: 8 MiB, so that they stay in the L3 cache.
const SHARED_ELEMENTS: usize = 2 << 20;

/// Rows shorter than this are slow to read strip by strip.
const NARROW: usize = 96;

/// Data shared by all tasks of a product.
struct Plan<'a> {
    isa: Isa,
    format: Format,
    /// Depth of a block of the inner dimension, in packed steps.
    depth: usize,
    a: Side<'a>,
    b: Side<'a>,
    /// True if tasks divide the rows of `a`; else they divide the columns of `b`.
    cut_rows: bool,
    /// True if each task packs its own part; else both operands are packed before.
    packs_own: bool,
    tasks: usize,
    target: Target,
    /// Holds the sums between blocks if the result cannot.
    partial: MatrixPointer,
    /// Number of neighbouring column panels that stay in one task.
    unit: usize,
    /// Given if few rows multiply `b` as it lies.
    few_rows: Option<Packing>,
}

// SAFETY: the pointers of the targets are borrowed for the whole product (the promise of `product_onto`), and
// tasks touch disjoint blocks of what is written.
unsafe impl Sync for Plan<'_> {}

/// `to = a · b`, finished as the target says; `to`, what is added and `pre` are row-major matrices of the product's
/// shape.
///
/// # Safety
/// The target's pointers are valid for the whole product, and nobody else uses what is written.
pub(crate) unsafe fn product_onto(cpu: &Cpu, a: Matrix, b: Matrix, target: Target) {
    let [m, n, k] = [a.rows, b.columns, a.columns];
    assert_eq!((k, a.dtype), (b.rows, b.dtype));
    if m * n == 0 {
        return;
    }
    let mut plan = Plan::new(cpu, a, b, target, 1);
    let k = plan.format.packed(k);
    let (own, other) = plan.sides();
    let shared = other.packed() + if plan.packs_own { 0 } else { own.packed() };
    let span = (SHARED_ELEMENTS / shared / plan.depth).max(1) * plan.depth;
    let keeps = target.to.dtype != DType::F32 && k > plan.depth;
    let lengths = plan.lengths(span.min(k));
    cpu.scratch.with(|buffer| {
        let length = lengths.iter().sum();
        let (packed, partial) =
            buffer.slice::<f32>(length + if keeps { m * n } else { 0 }).split_at_mut(length);
        if keeps {
            plan.partial = MatrixPointer::of(partial.as_mut_ptr(), n);
        }
        let (own_packed, other_packed) = packed.split_at_mut(lengths[0]);
        for start in (0..k.max(1)).step_by(span) {
            let depth = start..k.min(start + span);
            other.pack_all(cpu, depth.clone(), other_packed);
            if !plan.packs_own {
                own.pack_all(cpu, depth.clone(), own_packed);
            }
            let packed = [&*own_packed, &*other_packed];
            cpu.pool.run(plan.tasks, &|task| {
                // SAFETY: the tasks' rows or columns are disjoint; the rest is the caller's promise.
                unsafe {
                    match plan.few_rows {
                        Some(packing) => plan.run_few_rows(packing, task, depth.clone(), packed[1]),
                        None => plan.run_task(task, depth.clone(), packed),
                    }
                };
            });
        }
    });
}

/// Columns of a product that [`product_into`] keeps together.
pub(crate) const TOGETHER: usize = VOCABULARY_BLOCK;

/// Receives a part of a product: its rows, its columns, its elements in row-major order, and the elements between the
/// starts of two rows.
pub(crate) type Consume<'a> = dyn Fn(Range<usize>, Range<usize>, &[f32], usize) + Sync + 'a;

/// `a · b` in f32 that is never stored: each part goes to `consume` while it is in the cache.
/// Columns come in whole multiples of [`TOGETHER`] but the last.
pub(crate) fn product_into(cpu: &Cpu, a: Matrix, b: Matrix, consume: &Consume) {
    let [m, n, k] = [a.rows, b.columns, a.columns];
    assert_eq!((k, a.dtype), (b.rows, b.dtype));
    if m * n == 0 {
        return;
    }
    let nowhere = Target::new(MatrixPointer { dtype: DType::F16, ..MatrixPointer::none() });
    let plan = Plan::new(cpu, a, b, nowhere, TOGETHER);
    let depth = 0..plan.format.packed(k);
    let (own, other) = plan.sides();
    cpu.scratch.with(|buffer| {
        let lengths = plan.lengths(depth.len());
        let (own_packed, other_packed) = buffer.slice::<f32>(lengths.iter().sum()).split_at_mut(lengths[0]);
        other.pack_all(cpu, depth.clone(), other_packed);
        if !plan.packs_own {
            own.pack_all(cpu, depth.clone(), own_packed);
        }
        let packed = [&*own_packed, &*other_packed];
        cpu.pool.run(plan.tasks, &|task| plan.feed_task(task, depth.clone(), packed, consume));
    });
}

impl<'a> Plan<'a> {
    /// The plan of `a · b`, in which tasks that divide columns keep `together` of them together.
    fn new(cpu: &Cpu, a: Matrix<'a>, b: Matrix<'a>, target: Target, together: usize) -> Plan<'a> {
        let [m, n, k] = [a.rows, b.columns, a.columns];
        let (isa, format) = (cpu.isa, Format::of(cpu, a.dtype));
        let depth = format.depth(target.to.dtype, format.packed(k));
        let a = Side::new(a.t(), Operand::Left, (isa, format), depth);
        let b = Side::new(b, Operand::Right, (isa, format), depth);
        let cut_rows = m >= n;
        let contiguous = b.matrix.column_stride == 1 || b.matrix.row_stride == 1;
        let few_rows = match format {
            Format::Vectors(packing) if together == 1 && !cut_rows && contiguous => {
                (m <= few_rows::ROWS_MAX.min(a.panel)).then_some(packing)
            }
            _ => None,
        };
        let own = if cut_rows { a } else { b };
        // Where tasks keep columns together, the sums are in the cache, too.
        let own_elements = format.own_elements() / if together > 1 && format.is_tiled() { 2 } else { 1 };
        let panels_max = (own_elements / (own.width * depth)).max(1);
        let unit = if cut_rows { 1 } else { (together / b.panel).max(1) };
        let units = own.panels().div_ceil(unit);
        let tasks_min = own.panels().div_ceil(panels_max.max(unit)).min(units);
        let tasks = tasks_min.next_multiple_of(format.even_tasks(units, cpu.pool.threads())).min(units).min(
            match few_rows {
                Some(_) => (n * k * b.matrix.dtype.bytes() / few_rows::TASK_BYTES).max(1),
                None => (2 * m * n * k / format.task_flops()).max(tasks_min),
            },
        );
        let narrow = own.matrix.column_stride == 1 && own.lanes() / tasks < NARROW && own.lanes() > NARROW;
        Plan {
            isa,
            format,
            depth,
            a,
            b,
            cut_rows,
            packs_own: !narrow || few_rows.is_some(),
            tasks,
            target,
            partial: MatrixPointer::none(),
            unit,
            few_rows,
        }
    }

    /// The operand that tasks divide, and the other one.
    fn sides(&self) -> (Side<'a>, Side<'a>) {
        if self.cut_rows { (self.a, self.b) } else { (self.b, self.a) }
    }

    /// Elements of what is packed before the tasks run, for `steps` steps: own and other operand.
    fn lengths(&self, steps: usize) -> [usize; 2] {
        let (own, other) = self.sides();
        let own = if self.packs_own { 0 } else { own.length(own.panels(), steps) };
        [own, other.length(other.panels(), steps)]
    }

    /// The panels of its own operand that a task computes.
    fn panels_of(&self, task: usize) -> Range<usize> {
        let (own, _) = self.sides();
        let units = own.panels().div_ceil(self.unit);
        let edge = |task: usize| own.panels().min(task * units / self.tasks * self.unit);
        edge(task)..edge(task + 1)
    }

    /// Computes one task's rows or columns of the result over the packed steps `depth`. `packed` holds the operands
    /// that were packed before: own and other.
    ///
    /// # Safety
    /// Nobody else uses these rows or columns of the target, which is valid for the whole result.
    unsafe fn run_task(&self, task: usize, depth: Range<usize>, packed: [&[f32]; 2]) {
        let (own, other) = self.sides();
        let panels = self.panels_of(task);
        let lanes = panels.start * own.panel..own.lanes().min(panels.end * own.panel);
        let length = if self.packs_own { own.length(panels.len(), self.depth) } else { 0 };
        with_thread_scratch(length, |scratch| {
            for start in (depth.start..depth.end.max(depth.start + 1)).step_by(self.depth) {
                let steps = start..depth.end.min(start + self.depth);
                let count = steps.len();
                let at = start - depth.start;
                let other_packed = other.slice(packed[1], at, count, 0..other.panels());
                let own_packed = if self.packs_own {
                    let from = own.block(steps.clone(), lanes.clone());
                    // SAFETY: the scratch holds the panels; `Matrix::block` checked what is read.
                    unsafe { own.pack(self.isa, from, count, scratch.as_mut_ptr()) };
                    &*scratch
                } else {
                    own.slice(packed[0], at, count, panels.clone())
                };
                let target = self.block_target(&steps);
                // SAFETY: the panels are packed; the target is the caller's promise.
                unsafe { self.multiply(lanes.clone(), count, [own_packed, other_packed], &target) };
            }
        });
    }

    /// Like [`Plan::run_task`], for few packed rows and columns that are read where they lie.
    ///
    /// # Safety
    /// As [`Plan::run_task`].
    unsafe fn run_few_rows(&self, packing: Packing, task: usize, depth: Range<usize>, packed: &[f32]) {
        let panels = self.panels_of(task);
        let lanes = panels.start * self.b.panel..self.b.lanes().min(panels.end * self.b.panel);
        for start in (depth.start..depth.end.max(depth.start + 1)).step_by(self.depth) {
            let steps = start..depth.end.min(start + self.depth);
            let rows = self.a.slice(packed, start - depth.start, steps.len(), 0..1);
            let a = PanelsA { from: rows.as_ptr(), step: self.a.width, panel: 0 };
            let target = self.block_target(&steps).at(0, lanes.start);
            let from = self.b.block(steps, lanes.clone());
            // SAFETY: the rows are packed, in one panel; `Matrix::block` checked what is read; the target is the caller's
            // promise.
            unsafe { few_rows::block(self.isa, packing, self.a.lanes(), a, from, &target) };
        }
    }

    /// Like [`Plan::run_task`], over the whole inner dimension, for [`product_into`].
    fn feed_task(&self, task: usize, depth: Range<usize>, packed: [&[f32]; 2], consume: &Consume) {
        let (own, other) = self.sides();
        let panels = self.panels_of(task);
        let lanes = panels.start * own.panel..own.lanes().min(panels.end * own.panel);
        let [rows, columns] =
            if self.cut_rows { [lanes.clone(), 0..other.lanes()] } else { [0..other.lanes(), lanes.clone()] };
        // With one block of the inner dimension, rows are processed in pieces that stay in L2 with their results.
        let piece = match depth.len().div_ceil(self.depth) {
            0 | 1 if self.format.is_tiled() => self.a.panel,
            0 | 1 if !self.cut_rows => self.row_piece(self.depth),
            _ => rows.len(),
        };
        let pack_len = if self.packs_own { own.length(panels.len(), self.depth) } else { 0 };
        let stride = columns.len() + self.format.gap(columns.len());
        with_thread_scratch(pack_len + piece.min(rows.len()) * stride, |scratch| {
            let (packing, sums) = scratch.split_at_mut(pack_len);
            let to = MatrixPointer::of(sums.as_mut_ptr(), stride);
            for start in (0..depth.end.max(1)).step_by(self.depth) {
                let steps = start..depth.end.min(start + self.depth);
                let count = steps.len();
                let other_packed = other.slice(packed[1], start, count, 0..other.panels());
                let own_packed = if self.packs_own {
                    let from = own.block(steps, lanes.clone());
                    // SAFETY: the scratch holds the panels; `Matrix::block` checked what is read.
                    unsafe { own.pack(self.isa, from, count, packing.as_mut_ptr()) };
                    &*packing
                } else {
                    own.slice(packed[0], start, count, panels.clone())
                };
                let [a, b] =
                    if self.cut_rows { [own_packed, other_packed] } else { [other_packed, own_packed] };
                let target =
                    Target { add: if start == 0 { MatrixPointer::none() } else { to }, ..Target::new(to) };
                for top in (0..rows.len()).step_by(piece) {
                    let some = top..rows.len().min(top + piece);
                    let a = &a[top / self.a.panel * self.a.stride(count)..];
                    let size = [some.len(), columns.len(), count];
                    // SAFETY: the panels are packed, the sums are this thread's and as large as the piece.
                    unsafe { self.block(size, a, b, &target) };
                    if start + count >= depth.end {
                        let length = some.len() * stride;
                        // SAFETY: written just now, through the pointer that was taken from this slice.
                        let sums = unsafe { std::slice::from_raw_parts(to.at.cast::<f32>(), length) };
                        let some = rows.start + some.start..rows.start + some.end;
                        consume(some, columns.clone(), sums, stride);
                    }
                }
            }
        });
    }

    /// Returns whether `steps` is the last block of the inner dimension.
    fn is_last(&self, steps: &Range<usize>) -> bool {
        steps.end >= self.format.packed(self.a.matrix.rows)
    }

    /// The target of the block `steps`: the first block adds the existing values, the last one applies the rest and
    /// rounds. Between blocks, the result itself holds the sums if it is f32 and no GELU follows.
    fn block_target(&self, steps: &Range<usize>) -> Target {
        let first = steps.start == 0;
        let last = self.is_last(steps);
        let own = |to: MatrixPointer| Target {
            add: if first { MatrixPointer::none() } else { to },
            ..Target::new(to)
        };
        if self.partial.is_some() {
            let partial = if first { MatrixPointer::none() } else { self.partial };
            return if last { Target { partial, ..self.target } } else { own(self.partial) };
        }
        match (first, last) {
            (true, true) => self.target,
            (true, false) => Target { pre: MatrixPointer::none(), ..self.target },
            (false, true) if self.target.pre.is_some() => {
                Target { pre: self.target.pre, gelu: self.target.gelu, ..own(self.target.to) }
            }
            (false, _) => own(self.target.to),
        }
    }

    /// Number of rows that stay in L2, packed, while panels of columns are read.
    fn row_piece(&self, depth: usize) -> usize {
        (self.format.own_elements() / (self.a.width * depth).max(1)).max(1) * self.a.panel
    }

    /// Multiplies one block of the inner dimension for a task.
    ///
    /// # Safety
    /// As [`Plan::run_task`]; the slices hold the packed panels of `depth` steps, own and other.
    unsafe fn multiply(&self, lanes: Range<usize>, depth: usize, [own, other]: [&[f32]; 2], target: &Target) {
        if self.cut_rows {
            let size = [lanes.len(), self.b.lanes(), depth];
            // SAFETY: the caller's promise.
            return unsafe { self.block(size, own, other, &target.at(lanes.start, 0)) };
        }
        let piece = if self.format.is_tiled() { self.a.lanes() } else { self.row_piece(depth) };
        for top in (0..self.a.lanes()).step_by(piece) {
            let a = &other[top / self.a.panel * self.a.stride(depth)..];
            let size = [piece.min(self.a.lanes() - top), lanes.len(), depth];
            // SAFETY: the caller's promise.
            unsafe { self.block(size, a, own, &target.at(top, lanes.start)) };
        }
    }

    /// Multiplies `a` and `b`, packed panels of `depth` steps, onto the target.
    ///
    /// # Safety
    /// The slices hold `rows` and `columns`; the target is valid for them, and nobody else uses it.
    unsafe fn block(&self, [rows, columns, depth]: [usize; 3], a: &[f32], b: &[f32], target: &Target) {
        let strides = [self.a.stride(depth), self.b.stride(depth)];
        let size = [rows, columns, depth];
        match self.format {
            Format::Vectors(packing) => {
                let a = PanelsA { from: a.as_ptr(), step: self.a.width, panel: strides[0] };
                let b = PanelsB { from: b.as_ptr(), panel: strides[1] };
                // SAFETY: the caller's promise.
                unsafe { microkernel::block(self.isa, packing, size, a, b, target) }
            }
            Format::Tiles { unit, cut } => {
                let a = TilePanels { from: a.as_ptr(), panel: strides[0] };
                let b = TilePanels { from: b.as_ptr(), panel: strides[1] };
                // A task's own operand stays in L2; or a right one that fits there, so that results are written row by row.
                let stays = self.b.length(self.b.panels(), depth) <= self.format.own_elements() / 2;
                let outer = if self.cut_rows && !stays { Operand::Right } else { Operand::Left };
                let product = TileProduct { cut, size, a, b, outer };
                // SAFETY: the caller's promise; `Cpu::with_options` has made sure of the unit.
                unsafe { tile_kernel::block((unit, self.isa), product, target) }
            }
        }
    }
}
