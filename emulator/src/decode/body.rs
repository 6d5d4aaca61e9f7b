//! Statements of a body: scopes, declarations, labels, branches, and calls, which are inlined.

use std::collections::HashMap;

use super::{Binding, Decoder, Frame, class_of};
use crate::kernel::{Guard, Operation};
use crate::ptx::{Function, Instruction, Operand, PtxError, ScalarType, StateSpace, Statement};
use crate::registers::Class;

/// How deeply calls may be nested.
const MAX_CALLS: usize = 32;

impl Decoder<'_> {
    /// Decodes the body of a function in a frame of its own.
    pub(super) fn function(&mut self, function: &Function) -> Result<(), PtxError> {
        let body = function.body.as_ref().ok_or_else(|| {
            self.error(format!("function `{}` has no body and is not known", function.name))
        })?;
        if self.frames.is_empty() {
            self.frames.push(Frame::new(HashMap::new()));
        }
        for statement in body {
            self.statement(statement)?;
        }
        self.close_frame()
    }

    fn statement(&mut self, statement: &Statement) -> Result<(), PtxError> {
        match statement {
            Statement::Open => self.frame().scopes.push(HashMap::new()),
            Statement::Close => {
                self.frame().scopes.pop();
            }
            Statement::Label(name) => {
                let at = self.kernel.code.len() as u32;
                self.frame().labels.insert(name.clone(), at);
            }
            Statement::Registers { kind, name, count } => self.declare(*kind, name, *count),
            Statement::Variable(variable) => {
                let binding = match variable.space {
                    StateSpace::Shared => self.shared(variable),
                    StateSpace::Local | StateSpace::Param => self.local(variable),
                    _ => return Err(self.error(format!("variable `{}` in a body", variable.name))),
                };
                self.bind(variable.name.clone(), binding);
            }
            Statement::Instruction(instruction) => self.instruction(instruction)?,
        }
        Ok(())
    }

    fn frame(&mut self) -> &mut Frame {
        self.frames.last_mut().expect("a body is decoded within a frame")
    }

    fn declare(&mut self, kind: ScalarType, name: &str, count: Option<u32>) {
        let class = class_of(kind);
        match count {
            None => {
                let register = self.register(class);
                self.bind(name.to_string(), Binding::Register(register));
            }
            Some(count) => {
                for number in 0..count {
                    let register = self.register(class);
                    self.bind(format!("{name}{number}"), Binding::Register(register));
                }
            }
        }
    }

    fn instruction(&mut self, instruction: &Instruction) -> Result<(), PtxError> {
        self.line = instruction.line;
        self.source = instruction.source;
        self.guard = None;
        if let Some((name, negated)) = &instruction.guard {
            let slot = self.slot(&Operand::Name(name.clone()), Class::Predicate)?;
            self.guard = Some(Guard { slot, negated: *negated });
        }
        let parts: Vec<&str> = instruction.opcode.split('.').collect();
        let operands = instruction.operands.as_slice();
        match (parts[0], operands) {
            ("bra", [Operand::Name(label)]) => {
                let branch = (self.kernel.code.len(), label.clone(), instruction.line);
                self.frame().branches.push(branch);
                self.emit(Operation::Branch(0));
            }
            ("ret", []) if self.frames.len() > 1 => {
                let at = self.kernel.code.len();
                self.frame().returns.push(at);
                self.emit(Operation::Branch(0));
            }
            ("ret" | "exit", []) => self.emit(Operation::Exit),
            ("trap", []) => self.emit(Operation::Trap),
            ("call", _) => self.call(operands)?,
            _ => self.opcode(instruction, &parts)?,
        }
        self.guard = None;
        Ok(())
    }

    /// `call (results), function, (arguments)`: the function's parameters are the caller's variables.
    fn call(&mut self, operands: &[Operand]) -> Result<(), PtxError> {
        let module = self.module;
        let names = |operand: Option<&Operand>| match operand {
            Some(Operand::Vector(items)) => items.clone(),
            _ => Vec::new(),
        };
        let at = operands.iter().position(|operand| matches!(operand, Operand::Name(_)));
        let (Some(at), false) = (at, self.guard.is_some()) else {
            return Err(self.error("this form of call is not supported"));
        };
        let Operand::Name(name) = &operands[at] else { return Err(self.error("a call without a name")) };
        let results = if at == 0 { Vec::new() } else { names(operands.first()) };
        let arguments = names(operands.get(at + 1));
        let function = module.functions.iter().find(|function| function.name == *name);
        // A declaration may come before the definition.
        let defined =
            module.functions.iter().find(|function| function.name == *name && function.body.is_some());
        let Some(function) = defined.or(function) else {
            return Err(self.error(format!("`{name}` is no function of the module")));
        };
        if self.frames.len() >= MAX_CALLS {
            return Err(
                self.error(format!("calls of `{name}` are nested deeper than {MAX_CALLS}: recursion?"))
            );
        }
        let mut scope = HashMap::new();
        let parameters =
            function.returns.iter().zip(&results).chain(function.parameters.iter().zip(&arguments));
        for (parameter, argument) in parameters {
            let Operand::Name(argument) = argument else {
                return Err(self.error(format!("an argument of `{name}` is no variable")));
            };
            let Some(binding) = self.binding(argument) else {
                return Err(self.error(format!("`{argument}` is not declared")));
            };
            scope.insert(parameter.name.clone(), binding);
        }
        let (line, source) = (self.line, self.source);
        self.frames.push(Frame::new(scope));
        self.function(function)?;
        (self.line, self.source) = (line, source);
        Ok(())
    }

    /// Points the branches of the innermost function at their labels.
    fn close_frame(&mut self) -> Result<(), PtxError> {
        let frame = self.frames.pop().expect("the frame that was opened");
        let end = self.kernel.code.len() as u32;
        let mut targets: Vec<(usize, u32)> = frame.returns.iter().map(|&at| (at, end)).collect();
        for (at, label, line) in frame.branches {
            let target = frame.labels.get(&label);
            let target = target.ok_or_else(|| PtxError::new(line, format!("there is no label `{label}`")))?;
            targets.push((at, *target));
        }
        for (at, target) in targets {
            self.kernel.code[at].operation = Operation::Branch(target);
        }
        Ok(())
    }
}

impl Frame {
    fn new(scope: HashMap<String, Binding>) -> Self {
        Self { scopes: vec![scope], labels: HashMap::new(), branches: Vec::new(), returns: Vec::new() }
    }
}
