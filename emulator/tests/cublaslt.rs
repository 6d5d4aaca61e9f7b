//! The double of cuBLASLt: epilogues against f64, refusals of what the library refuses, and planted faults.

use std::ffi::c_void;

use crate::driver::{Session, ok, reports, result as driver_result};
use crate::support::numbers;
use phalanx_cuda_emulator::cublaslt::*;
use phalanx_cuda_emulator::driver::*;
use phalanx_cuda_emulator::numbers::{Bfloat16, Narrow};

const F32: i32 = 0;
const BF16: i32 = 14;
/// Attributes of operations.
const TRANSPOSE_A: u32 = 3;
const TRANSPOSE_B: u32 = 4;
const EPILOGUE: u32 = 7;
const BIAS: u32 = 8;
const AUX: u32 = 11;
const AUX_LEADING: u32 = 12;

/// Rows, columns, depth of a product: rows are a multiple of 8, as auxiliary matrices ask.
const SIZE: [usize; 3] = [24, 9, 17];

#[track_caller]
fn made<T: Default>(call: impl FnOnce(*mut T) -> BlasStatus) -> T {
    let mut out = T::default();
    assert_eq!(call(&mut out), BlasStatus::SUCCESS);
    out
}

/// Calls functions of the library.
macro_rules! blas {
    ($calls:expr) => {{
        // SAFETY: pointers are to values that live as long as the call.
        unsafe { $calls }
    }};
}

/// A product that is about to be described: D = A * B with everything else as the library has it.
struct Case {
    library: usize,
    operation: usize,
    layouts: [usize; 4],
    addresses: [u64; 4],
    factors: [f32; 2],
}

impl Case {
    /// A and B hold numbers, C and D are one matrix.
    fn new(session: &Session, [factor, sum]: [i32; 2], transposed: [bool; 2]) -> Self {
        let [m, n, k] = SIZE;
        let library = blas!(made(|out| cublasLtCreate(out)));
        let operation = blas!(made(|out| cublasLtMatmulDescCreate(out, 68, F32)));
        let turned = |rows, columns, turn: bool| if turn { (columns, rows) } else { (rows, columns) };
        let sizes = [turned(m, k, transposed[0]), turned(k, n, transposed[1]), (m, n), (m, n)];
        let layout = |index: usize, (rows, columns): (usize, usize)| {
            let kind = if index < 2 { factor } else { sum };
            blas!(made(|out| cublasLtMatrixLayoutCreate(out, kind, rows as u64, columns as u64, rows as i64)))
        };
        let layouts = std::array::from_fn(|index| layout(index, sizes[index]));
        let [a, b] =
            [(m * k, 1), (k * n, 2)].map(|(count, seed)| upload(session, &numbers(count, seed), factor));
        let d = upload(session, &numbers(m * n, 3), sum);
        let case = Self { library, operation, layouts, addresses: [a, b, d, d], factors: [1.0, 0.0] };
        for (attribute, turn) in [(TRANSPOSE_A, transposed[0]), (TRANSPOSE_B, transposed[1])] {
            assert_eq!(case.set(attribute, i32::from(turn)), BlasStatus::SUCCESS);
        }
        case
    }

    fn set<T>(&self, attribute: u32, value: T) -> BlasStatus {
        let value = &raw const value;
        blas!(cublasLtMatmulDescSetAttribute(self.operation, attribute, value.cast(), size_of::<T>()))
    }

    fn find(&self, workspace: u64, alignment: Option<u32>) -> Result<Found, BlasStatus> {
        let preference = blas!(made(|out| cublasLtMatmulPreferenceCreate(out)));
        let set = |attribute, value: *const c_void, bytes| {
            blas!(cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes))
        };
        assert_eq!(set(1, (&raw const workspace).cast(), 8), BlasStatus::SUCCESS);
        if let Some(alignment) = alignment {
            (5..=8).for_each(|matrix| {
                assert_eq!(set(matrix, (&raw const alignment).cast(), 4), BlasStatus::SUCCESS);
            });
        }
        let mut found = std::mem::MaybeUninit::<Found>::uninit();
        let [a, b, c, d] = self.layouts;
        let (operation, mut count) = (self.operation, 0);
        // SAFETY: there is room for one result, which is read only if there is one.
        unsafe {
            match cublasLtMatmulAlgoGetHeuristic(
                self.library,
                operation,
                a,
                b,
                c,
                d,
                preference,
                1,
                found.as_mut_ptr(),
                &mut count,
            ) {
                BlasStatus::SUCCESS => Ok(found.assume_init()),
                status => Err(status),
            }
        }
    }

    fn multiply(&self, algorithm: Option<&Algorithm>, workspace: (u64, usize), stream: usize) -> BlasStatus {
        let ([a, b, c, d], [la, lb, lc, ld]) = (self.addresses, self.layouts);
        let [alpha, beta] = &self.factors;
        let algorithm = algorithm.map_or(std::ptr::null(), |algorithm| algorithm as *const Algorithm);
        blas!(cublasLtMatmul(
            self.library,
            self.operation,
            alpha,
            a,
            la,
            b,
            lb,
            beta,
            c,
            lc,
            d,
            ld,
            algorithm,
            workspace.0,
            workspace.1,
            stream,
        ))
    }
}

/// Device memory with numbers of a type.
fn upload(session: &Session, values: &[f32], kind: i32) -> u64 {
    let bytes: Vec<u8> = match kind {
        F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&value| Bfloat16::nearest(value).0.to_le_bytes()).collect(),
    };
    let address = session.allocate(bytes.len().div_ceil(4));
    blas!(ok(cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len())));
    address
}

/// The numbers of device memory.
fn read(session: &Session, address: u64, count: usize, kind: i32) -> Vec<f64> {
    ok(session.synchronize());
    let mut bytes = vec![0u8; count * if kind == F32 { 4 } else { 2 }];
    blas!(ok(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, bytes.len())));
    match kind {
        F32 => bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect(),
        _ => bytes
            .chunks_exact(2)
            .map(|b| f64::from(Bfloat16(u16::from_le_bytes(b.try_into().unwrap())).wide()))
            .collect(),
    }
}

/// Numbers as they are stored in a type.
fn stored(count: usize, seed: u32, kind: i32) -> Vec<f64> {
    let store = |value: f32| if kind == F32 { value } else { Bfloat16::nearest(value).wide() };
    numbers(count, seed).into_iter().map(|value| f64::from(store(value))).collect()
}

/// A * B by columns, in f64.
fn product(factor: i32, transposed: [bool; 2]) -> Vec<f64> {
    let [m, n, k] = SIZE;
    let (a, b) = (stored(m * k, 1, factor), stored(k * n, 2, factor));
    let a = |row: usize, step: usize| if transposed[0] { a[row * k + step] } else { a[step * m + row] };
    let b =
        |step: usize, column: usize| if transposed[1] { b[step * n + column] } else { b[column * k + step] };
    (0..m * n).map(|at| (0..k).map(|step| a(at % m, step) * b(step, at / m)).sum()).collect()
}

/// Compares with one rounding to the type of the result.
#[track_caller]
fn close(found: &[f64], expected: &[f64], kind: i32) {
    let relative = if kind == F32 { 1e-6 } else { 1.0 / 256.0 };
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() <= relative * expected.abs() + 1e-6,
            "{found} instead of {expected}"
        );
    }
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

#[test]
fn products_in_all_layouts_and_types() {
    let [m, n, _] = SIZE;
    for types in [[F32, F32], [BF16, BF16], [BF16, F32]] {
        for transposed in [[false, false], [true, false], [false, true], [true, true]] {
            let session = Session::new(2);
            let mut case = Case::new(&session, types, transposed);
            assert_eq!(case.multiply(None, (0, 0), 0), BlasStatus::SUCCESS);
            let expected = product(types[0], transposed);
            let once = read(&session, case.addresses[3], m * n, types[1]);
            close(&once, &expected, types[1]);
            // Twice the product, added to what is there: a gradient that accumulates.
            case.factors = [2.0, 1.0];
            assert_eq!(case.multiply(None, (0, 0), 0), BlasStatus::SUCCESS);
            let thrice: Vec<f64> = once.iter().zip(&expected).map(|(c, value)| c + 2.0 * value).collect();
            close(&read(&session, case.addresses[3], m * n, types[1]), &thrice, types[1]);
        }
    }
}

#[test]
fn bias_and_gelu_with_their_gradients() {
    let [m, n, _] = SIZE;
    for kind in [F32, BF16] {
        let session = Session::new(1);
        let case = Case::new(&session, [kind; 2], [false; 2]);
        let bias = upload(&session, &numbers(m, 4), kind);
        // The auxiliary matrix has room between its columns.
        let leading = m + 8;
        let aux = session.allocate(leading * n);
        for (attribute, value) in [(BIAS, bias), (AUX, aux), (AUX_LEADING, leading as u64)] {
            assert_eq!(case.set(attribute, value), BlasStatus::SUCCESS);
        }
        let sums = product(kind, [false; 2]);
        let biases = stored(m, 4, kind);
        let before: Vec<f64> = sums.iter().enumerate().map(|(at, sum)| sum + biases[at % m]).collect();
        let run = |epilogue: i32| {
            assert_eq!(case.set(EPILOGUE, epilogue), BlasStatus::SUCCESS);
            assert_eq!(case.multiply(None, (0, 0), 0), BlasStatus::SUCCESS);
            read(&session, case.addresses[3], m * n, kind)
        };
        close(&run(4), &before, kind);
        close(&run(164), &before.iter().map(|&x| gelu(x)).collect::<Vec<_>>(), kind);
        let size = if kind == F32 { 4 } else { 2 };
        let column = |column: usize| read(&session, aux + (column * leading * size) as u64, m, kind);
        let kept: Vec<f64> = (0..n).flat_map(column).collect();
        close(&kept, &before, kind);
        // The gradient of GELU, and of the bias, which takes the place of the bias.
        let slope = |x: f64| (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5;
        let gradient: Vec<f64> = sums.iter().zip(&kept).map(|(sum, &x)| sum * slope(x)).collect();
        close(&run(208), &gradient, kind);
        let of_row = |row: usize| gradient.iter().skip(row).step_by(m).sum();
        close(&read(&session, bias, m, kind), &(0..m).map(of_row).collect::<Vec<f64>>(), kind);
        assert_eq!(reports(), Vec::<String>::new());
    }
}

#[test]
fn what_the_library_refuses() {
    let session = Session::new(0);
    let case = Case::new(&session, [F32; 2], [false; 2]);
    let (invalid, unsupported) = (BlasStatus::INVALID_VALUE, BlasStatus::NOT_SUPPORTED);
    let mut out = 0;
    assert_eq!(blas!(cublasLtMatmulDescCreate(&mut out, 68, BF16)), unsupported);
    assert_eq!(blas!(cublasLtMatmulDescCreate(&mut out, 1000, F32)), invalid);
    assert_eq!(blas!(cublasLtMatrixLayoutCreate(&mut out, F32, 8, 8, 7)), invalid, "columns overlap");
    assert_eq!(case.set(EPILOGUE, 3), invalid, "no epilogue");
    assert_eq!(case.set(EPILOGUE, 4u64), invalid, "a size that the attribute does not have");
    assert_eq!(case.set(2, 1), unsupported, "factors in device memory");
    assert_eq!(case.set(EPILOGUE, 4), BlasStatus::SUCCESS);
    assert_eq!(case.multiply(None, (0, 0), 0), invalid, "a bias without its address");
    assert_eq!(case.set(EPILOGUE, 160), BlasStatus::SUCCESS);
    assert_eq!(case.set(AUX, case.addresses[2]), BlasStatus::SUCCESS);
    for leading in [23i64, 28] {
        assert_eq!(case.set(AUX_LEADING, leading), BlasStatus::SUCCESS);
        assert_eq!(case.multiply(None, (0, 0), 0), invalid, "auxiliary columns {leading} apart");
    }
    let mixed = Case::new(&session, [F32, BF16], [false; 2]);
    assert_eq!(mixed.find(0, None).err(), Some(unsupported), "f32 to bf16");
    let mut turned = Case::new(&session, [F32; 2], [false; 2]);
    turned.layouts.swap(0, 1);
    assert_eq!(turned.find(0, None).err(), Some(invalid), "sizes that do not fit");
    assert_eq!(blas!(cublasLtDestroy(case.operation)), BlasStatus::NOT_INITIALIZED, "another handle");
    assert_eq!(blas!(cublasLtMatmulDescDestroy(case.operation)), BlasStatus::SUCCESS);
    assert_eq!(case.find(0, None).err(), Some(invalid), "a description that was destroyed");
    assert_eq!(reports(), Vec::<String>::new());
}

#[test]
fn algorithms_are_for_their_problem() {
    let session = Session::new(0);
    let mut case = Case::new(&session, [F32; 2], [false; 2]);
    let plenty = 1 << 20;
    let found = case.find(plenty, Some(16)).unwrap();
    assert!(found.workspace > 0 && found.state == BlasStatus::SUCCESS);
    assert_eq!(case.find(8, Some(16)).unwrap().workspace, 0, "one that fits");
    let algorithm = &found.algorithm;
    let workspace = session.allocate(plenty as usize / 4);
    let whole = (workspace, found.workspace);
    assert_eq!(
        case.multiply(Some(algorithm), (workspace, found.workspace - 1), 0),
        BlasStatus::INVALID_VALUE
    );
    assert_eq!(
        case.multiply(Some(algorithm), (workspace + 4, plenty as usize - 4), 0),
        BlasStatus::INVALID_VALUE
    );
    assert_eq!(case.multiply(Some(algorithm), whole, 0), BlasStatus::SUCCESS);
    case.addresses[2] += 4;
    case.addresses[3] += 4;
    assert_eq!(case.multiply(Some(algorithm), whole, 0), BlasStatus::NOT_SUPPORTED, "addresses as promised");
    let other = Case::new(&session, [F32; 2], [true, false]);
    assert_eq!(other.multiply(Some(algorithm), whole, 0), BlasStatus::NOT_SUPPORTED, "another problem");
    // Nobody said that addresses are aligned less than those of allocations.
    case.addresses = other.addresses.map(|address| address + 16);
    let careless = case.find(0, None).unwrap();
    assert_eq!(case.multiply(Some(&careless.algorithm), (0, 0), 0), BlasStatus::NOT_SUPPORTED);
}

/// A fault in the use of the library: what the report begins with.
type Fault = (&'static str, fn(&Session, bool));

const FAULTS: [Fault; 6] = [
    ("operations without an order in ", |session, fault| {
        let case = Case::new(session, [F32; 2], [false; 2]);
        let (first, second) = (session.stream(), session.stream());
        session.fill(case.addresses[0], 24, 1.0, first);
        if !fault {
            session.order(first, second);
        }
        case.multiply(None, (0, 0), second);
    }),
    ("operations without an order in ", |session, fault| {
        // Two streams with one workspace.
        let workspace = session.allocate(1 << 12);
        let cases = [(), ()].map(|()| (Case::new(session, [F32; 2], [false; 2]), session.stream()));
        for (case, stream) in &cases {
            let found = case.find(1 << 14, None).unwrap();
            // Where the first has failed already, the second is refused.
            case.multiply(Some(&found.algorithm), (workspace, 1 << 14), *stream);
            if !fault {
                session.order(*stream, cases[1].1);
            }
        }
    }),
    ("read of memory that was never written in a product of cuBLASLt", |session, fault| {
        let mut case = Case::new(session, [F32; 2], [false; 2]);
        case.addresses[2] = session.allocate(24 * 9);
        case.addresses[3] = case.addresses[2];
        case.factors[1] = if fault { 1.0 } else { 0.0 };
        case.multiply(None, (0, 0), 0);
    }),
    ("access out of bounds in a product of cuBLASLt", |session, fault| {
        let mut case = Case::new(session, [F32; 2], [false; 2]);
        case.addresses[1] += if fault { 4 } else { 0 };
        case.multiply(None, (0, 0), 0);
    }),
    ("use after free in a product of cuBLASLt", |session, fault| {
        let case = Case::new(session, [F32; 2], [false; 2]);
        if fault {
            blas!(ok(cuMemFree_v2(case.addresses[0])));
        }
        case.multiply(None, (0, 0), 0);
    }),
    ("access out of bounds in a product of cuBLASLt", |session, fault| {
        // A bias gradient has an element for each row, not for each column.
        let case = Case::new(session, [F32; 2], [false; 2]);
        let gradient = session.allocate(if fault { 9 } else { 24 });
        let aux = session.zeros(24 * 9);
        for (attribute, value) in [(BIAS, gradient), (AUX, aux), (AUX_LEADING, 24)] {
            assert_eq!(case.set(attribute, value), BlasStatus::SUCCESS);
        }
        assert_eq!(case.set(EPILOGUE, 208), BlasStatus::SUCCESS);
        case.multiply(None, (0, 0), 0);
    }),
];

#[test]
fn planted_faults_are_reported_under_every_seed() {
    for (index, (expected, run)) in FAULTS.into_iter().enumerate() {
        for (seed, fault) in (0..8).flat_map(|seed| [(seed, false), (seed, true)]) {
            let session = Session::new(seed);
            run(&session, fault);
            let status = session.synchronize();
            let found = reports();
            if fault {
                let is_found = found.iter().any(|report| report.starts_with(expected));
                assert!(is_found && status != Status::SUCCESS, "{index}, seed {seed}: {found:?}");
            } else {
                assert_eq!((found, status), (Vec::new(), Status::SUCCESS), "{index}, seed {seed}");
            }
        }
    }
}

#[test]
fn products_are_captured_in_graphs() {
    let session = Session::new(0);
    let mut case = Case::new(&session, [F32; 2], [false; 2]);
    case.factors[1] = 1.0;
    let stream = session.stream();
    blas!(ok(cuMemsetD32Async(case.addresses[3], 0, 24 * 9, stream)));
    blas!(ok(cuStreamBeginCapture_v2(stream, 0)));
    assert_eq!(case.multiply(None, (0, 0), stream), BlasStatus::SUCCESS);
    let graph = blas!(driver_result(|out| cuStreamEndCapture(stream, out)));
    let ready = blas!(driver_result(|out| cuGraphInstantiateWithFlags(out, graph, 0)));
    (0..2).for_each(|_| blas!(ok(cuGraphLaunch(ready, stream))));
    let twice: Vec<f64> = product(F32, [false; 2]).into_iter().map(|value| 2.0 * value).collect();
    close(&read(&session, case.addresses[3], 24 * 9, F32), &twice, F32);
}
