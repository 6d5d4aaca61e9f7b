//! Compiles every kernel for three architectures, without a card, and compares registers, spills, shared memory and tensor-core
//! instructions with the tables in `kernels/table`.
//!
//! `PHALANX_NVRTC` is the folder of NVRTC's library (`cargo xtask cuda-kernels` installs the right one and runs these tests).
//! Without it the tests say so and check nothing. With another version than the tables', all programs are compiled to PTX, no more.
#![allow(clippy::print_stderr, reason = "a test that checks nothing says so")]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use phalanx_cuda::Folders;
use phalanx_cuda::cache::Cache;
use phalanx_cuda::checks::programs::{of_tables, on_all_cores};
use phalanx_cuda::compiler::{Code, Compiler};
use phalanx_cuda::programs::{Program, Source};
use phalanx_plan::trace::DType;

/// The version of NVRTC whose figures are in the tables.
const TABLE_VERSION: (i32, i32) = (13, 5);

/// The architecture of the emulator of the driver.
const EMULATED: &str = "sm_80";

/// Resources that a kernel uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Usage {
    registers: u32,
    spill_bytes: u32,
    /// Static shared memory.
    shared_bytes: u32,
    /// Tensor-core instructions in the program's text.
    products: u32,
}

/// The number before `word` in a line such as "Used 40 registers, used 1 barriers, 512 bytes smem".
fn number_before(line: &str, word: &str) -> u32 {
    let before = line.split(word).next().filter(|before| before.len() < line.len()).unwrap_or_default();
    let digits = before.trim_end().rsplit(|letter: char| !letter.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().unwrap_or(0)
}

/// The kernels of a program: from what the assembler says, and from the PTX.
fn usages(log: &str, ptx: &str) -> BTreeMap<String, Usage> {
    let mut found: BTreeMap<String, Usage> = BTreeMap::new();
    let mut name = String::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            name = rest.split('\'').next().unwrap_or_default().to_string();
            found.insert(name.clone(), Usage::default());
        }
        let Some(usage) = found.get_mut(&name) else { continue };
        if line.contains("spill stores") {
            usage.spill_bytes = number_before(line, "bytes spill stores");
        }
        if line.contains("registers") {
            usage.registers = number_before(line, "registers");
            usage.shared_bytes = number_before(line, "bytes smem");
        }
    }
    for entry in ptx.split(".entry ").skip(1) {
        let name = entry.split(['(', '\n']).next().unwrap_or_default().trim();
        if let Some(usage) = found.get_mut(name) {
            usage.products = entry.matches("mma.sync").count() as u32;
        }
    }
    found
}

fn compiler(test: &str) -> Option<Compiler> {
    let Some(folder) = std::env::var_os("PHALANX_NVRTC") else {
        eprintln!(
            "{test}: skipped, because PHALANX_NVRTC names no folder of NVRTC (`cargo xtask cuda-kernels` installs one)"
        );
        return None;
    };
    Some(Compiler::load(Some(Path::new(&folder)), &Folders::default()).unwrap())
}

/// The architectures of the tables.
const ARCHITECTURES: [&str; 3] = [EMULATED, "sm_90", "sm_100"];

/// Resources that the kernels of a program use on an architecture: lines of its table, and those that spill.
#[derive(Default)]
struct Rows {
    table: String,
    spills: Vec<String>,
}

fn rows(compiler: &Compiler, program: &Program, architecture: &str) -> Rows {
    let compiled = compiler.compile(program, architecture, Code::Ptx).unwrap();
    if architecture == EMULATED {
        // The tests on the emulator need not compile it again.
        let cache = Cache::new(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("phalanx/cuda"));
        cache.keep(compiler.version(), program, architecture, (Code::Ptx, &compiled.image)).unwrap();
    }
    let (ptx, program) = (String::from_utf8_lossy(&compiled.image), program.describe());
    let kernels = usages(&compiled.log, &ptx);
    assert!(!kernels.is_empty(), "the log of {program} names no kernel:\n{}", compiled.log);
    let mut rows = Rows::default();
    for (kernel, usage) in kernels {
        let Usage { registers, spill_bytes, shared_bytes, products } = usage;
        assert!(registers > 0, "{kernel} of {program}: {}", compiled.log);
        if spill_bytes > 0 {
            rows.spills.push(format!("{kernel} of {program} for {architecture}: {spill_bytes} bytes"));
        }
        writeln!(rows.table, "{program},{kernel},{registers},{spill_bytes},{shared_bytes},{products}")
            .unwrap();
    }
    rows
}

fn compare(architecture: &str, table: &str) {
    let name = format!("{architecture}.csv");
    let committed = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels/table").join(&name);
    let expected = std::fs::read_to_string(&committed).unwrap_or_default();
    if expected == table {
        return;
    }
    let new = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(&name);
    std::fs::write(&new, table).unwrap();
    let different: Vec<String> = table
        .lines()
        .filter(|line| !expected.lines().any(|other| other == *line))
        .map(|line| format!("now      {line}"))
        .chain(
            expected
                .lines()
                .filter(|line| !table.lines().any(|other| other == *line))
                .map(|line| format!("expected {line}")),
        )
        .collect();
    panic!(
        "{} kernels differ from {}; if that is meant, copy {} there:\n{}",
        different.len(),
        committed.display(),
        new.display(),
        different.join("\n")
    );
}

#[test]
fn kernels_use_what_the_tables_say() {
    let Some(compiler) = compiler("kernels") else { return };
    let programs = of_tables();
    if compiler.version() != TABLE_VERSION {
        // The first half of the compiler alone, which is what differs in the language that it takes.
        let refused = |program: &Program| compiler.compile(program, "compute_90", Code::Ptx).err();
        let refused: Vec<_> = on_all_cores(&programs, refused).into_iter().flatten().collect();
        assert!(refused.is_empty(), "{} of {} programs: {}", refused.len(), programs.len(), refused[0]);
        let (major, minor) = compiler.version();
        eprintln!("all programs compile with NVRTC {major}.{minor}; the tables are those of another version");
        return;
    }
    let jobs: Vec<_> = ARCHITECTURES.iter().flat_map(|of| programs.iter().map(move |p| (*of, p))).collect();
    let all = on_all_cores(&jobs, |(architecture, program)| rows(&compiler, program, architecture));
    let spills: Vec<_> = all.iter().flat_map(|rows| rows.spills.iter().map(String::as_str)).collect();
    assert!(spills.is_empty(), "kernels that spill registers:\n{}", spills.join("\n"));
    for (architecture, rows) in ARCHITECTURES.iter().zip(all.chunks(programs.len())) {
        let rows: String = rows.iter().map(|rows| rows.table.as_str()).collect();
        compare(architecture, &format!("program,kernel,registers,spill_bytes,shared_bytes,mma\n{rows}"));
    }
}

#[test]
fn a_wrong_program_is_an_error_with_the_compilers_words() {
    let Some(compiler) = compiler("a wrong program") else { return };
    // No head: attention cannot be compiled.
    let program = Program::of(Source::Attention, DType::BF16);
    let error = compiler.compile(&program, "sm_80", Code::Ptx).unwrap_err().to_string();
    assert!(error.starts_with("attention.cu ELEMENT=bf16 does not compile for sm_80 with NVRTC "), "{error}");
    assert!(error.contains("\"HEAD\" is undefined"), "{error}");
}

#[test]
fn no_compiler_is_an_error_that_names_the_package() {
    let error =
        Compiler::load(Some(Path::new("/nonexistent")), &Folders::default()).err().unwrap().to_string();
    assert!(error.contains("pip install nvidia-cuda-nvrtc"), "{error}");
    assert!(error.contains("/nonexistent/libnvrtc.so"), "{error}");
}

#[test]
fn what_the_assembler_says_is_read() {
    let log = "ptxas info    : Compiling entry function 'a' for 'sm_80'\n\
               ptxas         .     8 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads\n\
               ptxas info    : Used 168 registers, used 1 barriers, 512 bytes smem, 480 bytes cmem[0]\n\
               ptxas info    : Compiling entry function 'b' for 'sm_80'\n\
               ptxas info    : Used 17 registers, used 0 barriers\n";
    let ptx = ".visible .entry b(\n)\n{ add; }\n.visible .entry a(\n)\n{ mma.sync; mma.sync; }\n";
    let expected = [
        ("a".to_string(), Usage { registers: 168, spill_bytes: 24, shared_bytes: 512, products: 2 }),
        ("b".to_string(), Usage { registers: 17, ..Usage::default() }),
    ];
    assert_eq!(usages(log, ptx), BTreeMap::from(expected));
}
