//! From the statements of a function to a `Kernel`: names become register slots, calls are inlined, opcodes are looked
//! up. An opcode that has no meaning here is an error that names the line.

mod body;
mod exchange;
mod matrix;
mod memory;
mod opcode;
mod special;

use std::collections::HashMap;
use std::sync::Arc;

use crate::alu::{Alu, Slots};
use crate::kernel::{Guard, Instruction, Kernel, Operation, Register, RegisterCounts, Special};
use crate::ptx::{self, Function, Module, Operand, PtxError, ScalarType, SourceLine, StateSpace, Variable};
use crate::registers::Class;

/// The most bytes of parameters that a kernel may have.
const MAX_PARAMETER_BYTES: usize = 4096;

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
enum Binding {
    Register(Register),
    /// A constant address in a state space.
    Variable(StateSpace, u64),
    /// The shared memory behind that of the variables.
    DynamicShared,
}

/// Decodes a kernel. `variables` has the device addresses of the module's global variables.
///
/// # Errors
/// The line of what is not supported.
pub fn kernel(
    module: &Module,
    function: &Function,
    variables: &HashMap<String, u64>,
    files: &Arc<HashMap<u32, String>>,
) -> Result<Kernel, PtxError> {
    let mut decoder = Decoder::new(module, function, files.clone());
    decoder.bind_module(variables)?;
    decoder.bind_parameters(function)?;
    decoder.function(function)?;
    decoder.emit(Operation::Exit);
    decoder.patch_dynamic_shared();
    decoder.check_size(function.line)?;
    Ok(decoder.kernel)
}

/// A function that is being decoded: the kernel, or one that it calls.
struct Frame {
    /// Names by scope, the innermost last.
    scopes: Vec<HashMap<String, Binding>>,
    labels: HashMap<String, u32>,
    /// Branches whose label may come later: instruction, label, line.
    branches: Vec<(usize, String, u32)>,
    /// Branches to the end of the function.
    returns: Vec<usize>,
}

struct Decoder<'a> {
    module: &'a Module,
    kernel: Kernel,
    /// Names of the module.
    globals: HashMap<String, Binding>,
    frames: Vec<Frame>,
    word_constants: HashMap<u32, u16>,
    long_constants: HashMap<u64, u16>,
    specials: HashMap<Special, u16>,
    /// Slots that get the address of dynamic shared memory.
    dynamic_shared: Vec<Register>,
    guard: Option<Guard>,
    line: u32,
    source: SourceLine,
}

impl<'a> Decoder<'a> {
    fn new(module: &'a Module, function: &Function, files: Arc<HashMap<u32, String>>) -> Self {
        let kernel = Kernel {
            name: function.name.clone(),
            parameters: Vec::new(),
            parameter_bytes: 0,
            static_shared: 0,
            local_bytes: 0,
            max_threads: function.max_threads,
            code: Vec::new(),
            lines: Vec::new(),
            files,
            registers: RegisterCounts::default(),
            words: Vec::new(),
            longs: Vec::new(),
            set_predicates: Vec::new(),
            specials: Vec::new(),
        };
        Self {
            module,
            kernel,
            globals: HashMap::new(),
            frames: Vec::new(),
            word_constants: HashMap::new(),
            long_constants: HashMap::new(),
            specials: HashMap::new(),
            dynamic_shared: Vec::new(),
            guard: None,
            line: function.line,
            source: SourceLine::default(),
        }
    }

    fn error(&self, what: impl Into<String>) -> PtxError {
        PtxError::new(self.line, what)
    }

    fn bind_module(&mut self, variables: &HashMap<String, u64>) -> Result<(), PtxError> {
        for variable in &self.module.variables {
            let binding = match variable.space {
                StateSpace::Shared => self.shared(variable),
                space => match variables.get(&variable.name) {
                    Some(&address) => Binding::Variable(space, address),
                    None => continue,
                },
            };
            self.globals.insert(variable.name.clone(), binding);
        }
        Ok(())
    }

    /// Places a variable in shared memory.
    fn shared(&mut self, variable: &Variable) -> Binding {
        if variable.bytes == 0 {
            return Binding::DynamicShared;
        }
        let offset = self.kernel.static_shared.next_multiple_of(variable.align.max(1));
        self.kernel.static_shared = offset + variable.bytes;
        Binding::Variable(StateSpace::Shared, offset as u64)
    }

    /// Places a variable in the local memory of a thread.
    fn local(&mut self, variable: &Variable) -> Binding {
        let offset = self.kernel.local_bytes.next_multiple_of(variable.align.max(1));
        self.kernel.local_bytes = offset + variable.bytes;
        Binding::Variable(StateSpace::Local, offset as u64)
    }

    fn bind_parameters(&mut self, function: &Function) -> Result<(), PtxError> {
        let mut offset = 0usize;
        for parameter in &function.parameters {
            offset = offset.next_multiple_of(parameter.align.max(1));
            self.kernel.parameters.push((offset, parameter.bytes));
            let binding = Binding::Variable(StateSpace::Param, offset as u64);
            self.globals.insert(parameter.name.clone(), binding);
            offset += parameter.bytes;
        }
        if offset > MAX_PARAMETER_BYTES {
            return Err(self.error(format!("kernel `{}` has {offset} bytes of parameters", function.name)));
        }
        self.kernel.parameter_bytes = offset;
        Ok(())
    }

    /// Dynamic shared memory begins behind the variables, which are all known now.
    fn patch_dynamic_shared(&mut self) {
        self.kernel.static_shared = self.kernel.static_shared.next_multiple_of(16);
        let address = self.kernel.static_shared as u64;
        for register in &self.dynamic_shared {
            match register.class {
                Class::Word => self.kernel.words.push((register.slot, address as u32)),
                _ => self.kernel.longs.push((register.slot, address)),
            }
        }
    }

    fn check_size(&self, line: u32) -> Result<(), PtxError> {
        let counts = self.kernel.registers;
        let largest = counts.words.max(counts.longs).max(counts.predicates);
        match largest > usize::from(u16::MAX) {
            true => Err(PtxError::new(line, format!("kernel `{}` has too many registers", self.kernel.name))),
            false => Ok(()),
        }
    }

    /// Adds an instruction under the guard of the statement.
    fn emit(&mut self, operation: Operation) {
        self.kernel.code.push(Instruction { guard: self.guard, operation });
        self.kernel.lines.push((self.line, self.source));
    }

    /// Adds an instruction that computes.
    fn emit_alu(&mut self, alu: Alu, result: u16, operands: &[u16]) {
        let mut slots: Slots = [0; 5];
        slots[0] = result;
        slots[1..=operands.len()].copy_from_slice(operands);
        self.emit(Operation::Alu(alu.run, slots));
    }

    /// A new register.
    fn register(&mut self, class: Class) -> Register {
        let counts = &mut self.kernel.registers;
        let count = match class {
            Class::Word => &mut counts.words,
            Class::Long => &mut counts.longs,
            Class::Predicate => &mut counts.predicates,
        };
        *count += 1;
        Register { class, slot: (*count - 1) as u16 }
    }

    fn word(&mut self, value: u32) -> u16 {
        if let Some(&slot) = self.word_constants.get(&value) {
            return slot;
        }
        let slot = self.register(Class::Word).slot;
        self.kernel.words.push((slot, value));
        self.word_constants.insert(value, slot);
        slot
    }

    fn long(&mut self, value: u64) -> u16 {
        if let Some(&slot) = self.long_constants.get(&value) {
            return slot;
        }
        let slot = self.register(Class::Long).slot;
        self.kernel.longs.push((slot, value));
        self.long_constants.insert(value, slot);
        slot
    }

    fn special(&mut self, special: Special) -> Register {
        if let Some(&slot) = self.specials.get(&special) {
            return Register { class: Class::Word, slot };
        }
        let register = self.register(Class::Word);
        self.kernel.specials.push((register.slot, special));
        self.specials.insert(special, register.slot);
        register
    }

    fn binding(&self, name: &str) -> Option<Binding> {
        let frame = self.frames.last()?;
        let found = frame.scopes.iter().rev().find_map(|scope| scope.get(name));
        found.or_else(|| self.globals.get(name)).copied()
    }

    fn bind(&mut self, name: String, binding: Binding) {
        if let Some(scope) = self.frames.last_mut().and_then(|frame| frame.scopes.last_mut()) {
            scope.insert(name, binding);
        }
    }

    /// The register of an operand: itself, or one that holds the constant. Constants are of the class that is asked.
    fn value(&mut self, operand: &Operand, class: Class) -> Result<Register, PtxError> {
        let constant = |decoder: &mut Self, value: u64| match class {
            Class::Word => Ok(Register { class, slot: decoder.word(value as u32) }),
            Class::Long => Ok(Register { class, slot: decoder.long(value) }),
            Class::Predicate => {
                let register = decoder.register(class);
                if value != 0 {
                    decoder.kernel.set_predicates.push(register.slot);
                }
                Ok(register)
            }
        };
        match operand {
            Operand::Integer(value) | Operand::Float64(value) => constant(self, *value),
            Operand::Float32(bits) => constant(self, u64::from(*bits)),
            Operand::Not(name) => {
                let operand = self.slot(&Operand::Name(name.clone()), Class::Predicate)?;
                let result = self.register(Class::Predicate);
                let not = crate::alu::predicate_logic("not").expect("the table has it");
                self.emit_alu(not, result.slot, &[operand]);
                Ok(result)
            }
            Operand::Name(name) if name == "_" => Ok(self.register(class)),
            Operand::Name(name) if name == "WARP_SZ" => constant(self, 32),
            Operand::Name(name) => match self.binding(name) {
                Some(Binding::Register(register)) => Ok(register),
                Some(Binding::Variable(_, address)) => constant(self, address),
                Some(Binding::DynamicShared) => {
                    let register = self.register(class);
                    self.dynamic_shared.push(register);
                    Ok(register)
                }
                None => self.special_register(name),
            },
            _ => Err(self.error("an operand of this form is not supported here")),
        }
    }

    /// The slot of an operand that must be of a class.
    fn slot(&mut self, operand: &Operand, class: Class) -> Result<u16, PtxError> {
        let register = self.value(operand, class)?;
        match register.class == class {
            true => Ok(register.slot),
            false => Err(self.error(format!(
                "an operand is {}, but the instruction takes {}",
                class_name(register.class),
                class_name(class)
            ))),
        }
    }
}

fn class_name(class: Class) -> &'static str {
    match class {
        Class::Word => "a register of at most 32 bits",
        Class::Long => "a register of 64 bits",
        Class::Predicate => "a predicate",
    }
}

/// The register file of a type.
fn class_of(kind: ScalarType) -> Class {
    match kind {
        ScalarType::Pred => Class::Predicate,
        _ if kind.bytes() == 8 => Class::Long,
        _ => Class::Word,
    }
}

/// All kernels of a module.
///
/// # Errors
/// The line of what is not supported.
pub fn kernels(module: &Module, variables: &HashMap<String, u64>) -> Result<Vec<Arc<Kernel>>, PtxError> {
    let files = Arc::new(module.files.clone());
    let entries = module.functions.iter().filter(|function| function.is_entry && function.body.is_some());
    entries.map(|function| Ok(Arc::new(kernel(module, function, variables, &files)?))).collect()
}

/// All kernels of a text, for tests of kernels without a driver. Its global variables have no memory.
///
/// # Errors
/// The line of what is not supported.
pub fn text(text: &str) -> Result<Vec<Arc<Kernel>>, PtxError> {
    kernels(&ptx::parse(text)?, &HashMap::new())
}
