//! Reading PTX: text to tokens, tokens to a module of functions with their statements.
//!
//! Nothing here knows what an instruction does. An opcode is a name and its operands; `decode` gives it a meaning or
//! refuses it. The grammar follows the PTX ISA manual, sections 4 and 5.

mod parse;
mod statements;
mod token;
mod types;

use std::collections::HashMap;

pub use parse::parse;
pub use types::{ScalarType, StateSpace};

/// A PTX text that was refused: where and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {what}")]
pub struct PtxError {
    /// The line of the PTX text, from 1.
    pub line: u32,
    /// What is wrong or not supported.
    pub what: String,
}

impl PtxError {
    /// An error at a line.
    pub fn new(line: u32, what: impl Into<String>) -> Self {
        Self { line, what: what.into() }
    }
}

/// A module: everything in one PTX text.
#[derive(Debug, Default)]
pub struct Module {
    /// The target architecture, such as `sm_80`.
    pub target: String,
    /// Source files by the number that `.loc` uses.
    pub files: HashMap<u32, String>,
    /// Variables of the module: global, constant and shared memory.
    pub variables: Vec<Variable>,
    /// Kernels and device functions.
    pub functions: Vec<Function>,
}

/// A variable in a state space.
#[derive(Clone, Debug)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Where it lies.
    pub space: StateSpace,
    /// Alignment in bytes.
    pub align: usize,
    /// Size in bytes; 0 for `.extern .shared name[]`.
    pub bytes: usize,
    /// Initial bytes; empty where the text gives none.
    pub initial: Vec<u8>,
    /// The line of its declaration.
    pub line: u32,
}

/// A kernel or a device function.
#[derive(Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Whether it is a kernel (`.entry`).
    pub is_entry: bool,
    /// What it returns, in parameter space.
    pub returns: Vec<Variable>,
    /// Its parameters.
    pub parameters: Vec<Variable>,
    /// The most threads in a block (`.maxntid`, `.reqntid`), 0 if the text does not say.
    pub max_threads: u32,
    /// Its statements; `None` for a declaration without a body.
    pub body: Option<Vec<Statement>>,
    /// The line of its name.
    pub line: u32,
}

/// One statement of a body.
#[derive(Clone, Debug)]
pub enum Statement {
    /// `{`: names that follow end with the scope.
    Open,
    /// `}`
    Close,
    /// `name:`
    Label(String),
    /// `.reg .type name<count>`, or without a count a single register.
    Registers {
        /// Type of the registers.
        kind: ScalarType,
        /// Name, or its beginning before the number.
        name: String,
        /// How many, if numbered.
        count: Option<u32>,
    },
    /// A variable in shared, local or parameter space.
    Variable(Variable),
    /// An instruction.
    Instruction(Instruction),
}

/// A place in the program's source: number of the file and line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceLine {
    /// Number of the file in `Module::files`; 0 if unknown.
    pub file: u32,
    /// Line, from 1; 0 if unknown.
    pub line: u32,
}

/// One instruction as written.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// The line of the PTX text.
    pub line: u32,
    /// The source line of the last `.loc`.
    pub source: SourceLine,
    /// `@p` or `@!p`: name and whether negated.
    pub guard: Option<(String, bool)>,
    /// Opcode with all modifiers, such as `ld.global.v2.f32`.
    pub opcode: String,
    /// Operands in the order of the text.
    pub operands: Vec<Operand>,
}

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A register, special register, variable, label or function.
    Name(String),
    /// `!p`
    Not(String),
    /// An integer literal, in two's complement.
    Integer(u64),
    /// `0f...`: the bits of an f32.
    Float32(u32),
    /// `0d...`: the bits of an f64.
    Float64(u64),
    /// `[base + offset]`
    Address(Box<Operand>, i64),
    /// `{a, b, ...}`, or `(a, b)` of a call
    Vector(Vec<Operand>),
    /// `p|q`
    Pair(Box<Operand>, Box<Operand>),
}
