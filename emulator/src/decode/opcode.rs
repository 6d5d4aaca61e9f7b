//! Opcodes: which family they belong to, and the operands of those that compute.

use super::special::clock;
use super::{Decoder, class_of};
use crate::alu;
use crate::kernel::{Barrier, BarrierReduction, Operation, Register};
use crate::memory::{LOCAL_WINDOW, SHARED_WINDOW};
use crate::ptx::{Instruction, Operand, PtxError, ScalarType, StateSpace};
use crate::registers::Class;

impl Decoder<'_> {
    /// Decodes an instruction that is no branch and no call.
    pub(super) fn opcode(&mut self, instruction: &Instruction, parts: &[&str]) -> Result<(), PtxError> {
        let operands = instruction.operands.as_slice();
        match parts[0] {
            "ld" | "ldu" | "st" => self.transfer(parts, operands),
            "atom" | "red" => self.atomic(parts, operands),
            "cp" => self.async_copy(parts, operands),
            "ldmatrix" => self.load_matrix(parts, operands),
            "mma" => self.multiply(parts, operands),
            "shfl" | "vote" | "match" | "redux" => self.exchange(parts, operands),
            "activemask" => self.active_mask(operands),
            "bar" | "barrier" => self.barrier(parts, operands),
            "membar" | "fence" if is_plain_fence(parts) => {
                self.emit(Operation::Fence);
                Ok(())
            }
            "prefetch" | "prefetchu" | "discard" | "applypriority" => Ok(()),
            "setp" => self.set_predicate(parts, operands),
            "set" => self.set(parts, operands),
            "mov" if matches!(operands, [Operand::Vector(_), _] | [_, Operand::Vector(_)]) => {
                self.pack(parts, operands)
            }
            "mov" => self.mov(parts, operands),
            "cvta" => self.convert_address(parts, operands),
            "isspacep" => Err(self.error("`isspacep` is not supported")),
            _ => self.compute(parts, operands),
        }
    }

    /// The error of an opcode that has no meaning here.
    pub(super) fn unknown(&self, parts: &[&str]) -> PtxError {
        let name = parts.join(".");
        let refused = [".cluster", "shared::cluster", "bulk", "tensor", "mbarrier", "wgmma", "tcgen05"];
        match refused.iter().find(|word| name.contains(*word)) {
            Some(_) => {
                self.error(format!("`{name}`: clusters and the tensor memory accelerator are not supported"))
            }
            None => self.error(format!("instruction `{name}` is not supported")),
        }
    }

    /// An instruction whose operands are a result and values.
    fn compute(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let alu = alu::find(parts).ok_or_else(|| self.unknown(parts))?;
        let Some((result, values)) =
            operands.split_first().filter(|(_, rest)| rest.len() == alu.operands.len())
        else {
            let name = parts.join(".");
            let what =
                format!("`{name}` takes {} operands, found {}", alu.operands.len() + 1, operands.len());
            return Err(self.error(what));
        };
        let mut slots = Vec::new();
        for (value, &class) in values.iter().zip(alu.operands) {
            slots.push(self.operand(value, class)?);
        }
        let result = self.slot(result, alu.result)?;
        self.emit_alu(alu, result, &slots);
        Ok(())
    }

    /// The slot of a value; a register of 64 bits in place of 32 gives its lower half, as `cvt` and `st` allow.
    pub(super) fn operand(&mut self, operand: &Operand, class: Class) -> Result<u16, PtxError> {
        let register = self.value(operand, class)?;
        match (register.class, class) {
            (Class::Long, Class::Word) => Ok(self.lower_half(register)),
            _ => self.slot(operand, class),
        }
    }

    /// A register with the lower 32 bits.
    pub(super) fn lower_half(&mut self, register: Register) -> u16 {
        let result = self.register(Class::Word);
        let alu = alu::unpack(8, false).expect("the table has it");
        self.emit_alu(alu, result.slot, &[register.slot]);
        result.slot
    }

    fn mov(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let [result, Operand::Name(name)] = operands else { return self.compute(parts, operands) };
        let Some(is_long) = clock(name) else { return self.compute(parts, operands) };
        let class = if is_long { Class::Long } else { Class::Word };
        let slot = self.slot(result, class)?;
        self.emit(Operation::Clock(Register { class, slot }));
        Ok(())
    }

    /// `mov.b64 d, {a, b}` and `mov.b64 {a, b}, d`
    fn pack(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let kind = parts.last().and_then(|name| ScalarType::from_name(name));
        let bytes = kind.ok_or_else(|| self.unknown(parts))?.bytes();
        let part = class_of(if bytes == 8 { ScalarType::B32 } else { ScalarType::B16 });
        let whole = if bytes == 8 { Class::Long } else { Class::Word };
        match operands {
            [result, Operand::Vector(halves)] if halves.len() == 2 => {
                let alu = alu::pack(bytes).ok_or_else(|| self.unknown(parts))?;
                let slots = [self.slot(&halves[0], part)?, self.slot(&halves[1], part)?];
                let result = self.slot(result, whole)?;
                self.emit_alu(alu, result, &slots);
            }
            [Operand::Vector(halves), value] if halves.len() == 2 => {
                let value = self.slot(value, whole)?;
                // The first result may be the operand itself: it is written last.
                let results = [self.register(part), self.register(part)];
                for (upper, result) in [false, true].into_iter().zip(results) {
                    let alu = alu::unpack(bytes, upper).ok_or_else(|| self.unknown(parts))?;
                    self.emit_alu(alu, result.slot, &[value]);
                }
                let copy = alu::find(&["mov", "b32"]).expect("the table has it");
                for (half, result) in halves.iter().zip(results) {
                    let half = self.slot(half, part)?;
                    self.emit_alu(copy, half, &[result.slot]);
                }
            }
            _ => return Err(self.error("a vector of other than two registers is not supported here")),
        }
        Ok(())
    }

    /// `cvta` adds the beginning of the window in which a space lies, `cvta.to` subtracts it.
    fn convert_address(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let (to, space) = match parts {
            ["cvta", "to", space, "u64"] => (true, *space),
            ["cvta", space, "u64"] => (false, *space),
            _ => return Err(self.unknown(parts)),
        };
        let [result, value] = operands else { return Err(self.unknown(parts)) };
        let window = match StateSpace::from_name(space) {
            Some(StateSpace::Shared) => SHARED_WINDOW,
            Some(StateSpace::Local) => LOCAL_WINDOW,
            Some(_) => 0,
            None => return Err(self.unknown(parts)),
        };
        let offset = self.long(if to { window.wrapping_neg() } else { window });
        let value = self.slot(value, Class::Long)?;
        let result = self.slot(result, Class::Long)?;
        self.emit_alu(alu::add_long(), result, &[value, offset]);
        Ok(())
    }

    /// The comparison of `setp` and `set`: its function, and the name of the logic that follows.
    fn comparison<'p>(&self, parts: &[&'p str]) -> Result<(alu::Alu, Option<&'p str>), PtxError> {
        let (&kind, modifiers) = parts.split_last().ok_or_else(|| self.unknown(parts))?;
        let (&name, modifiers) = modifiers.split_first().ok_or_else(|| self.unknown(parts))?;
        let logic = modifiers.iter().find(|word| matches!(**word, "and" | "or" | "xor")).copied();
        let ftz = modifiers.contains(&"ftz");
        let known = ScalarType::from_name(kind).and_then(|kind| alu::comparison(name, ftz, kind));
        let expected = usize::from(logic.is_some()) + usize::from(ftz);
        match known.filter(|_| modifiers.len() == expected) {
            Some(alu) => Ok((alu, logic)),
            None => Err(self.unknown(parts)),
        }
    }

    fn set_predicate(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let (alu, logic) = self.comparison(&parts[1..]).map_err(|_| self.unknown(parts))?;
        let [result, a, b, rest @ ..] = operands else { return Err(self.unknown(parts)) };
        let slots = [self.operand(a, alu.operands[0])?, self.operand(b, alu.operands[1])?];
        let (first, second) = match result {
            Operand::Pair(first, second) => (first.as_ref(), Some(second.as_ref())),
            single => (single, None),
        };
        let compared = self.register(Class::Predicate).slot;
        self.emit_alu(alu, compared, &slots);
        let other = match (logic, rest) {
            (Some(_), [other]) => Some(self.slot(other, Class::Predicate)?),
            (None, []) => None,
            _ => return Err(self.unknown(parts)),
        };
        // `other` may be a result too: both are computed before either is written.
        let mut results = vec![(first, compared)];
        if let Some(second) = second {
            let opposite = self.register(Class::Predicate).slot;
            self.emit_alu(alu::predicate_logic("not").expect("the table has it"), opposite, &[compared]);
            results.push((second, opposite));
        }
        if let (Some(logic), Some(other)) = (logic, other) {
            let alu = alu::predicate_logic(logic).expect("the table has it");
            for (_, value) in &results {
                self.emit_alu(alu, *value, &[*value, other]);
            }
        }
        let copy = alu::find(&["mov", "pred"]).expect("the table has it");
        for (result, value) in results {
            let result = self.slot(result, Class::Predicate)?;
            self.emit_alu(copy, result, &[value]);
        }
        Ok(())
    }

    /// `set`: a comparison whose result is all ones, or 1.0.
    fn set(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let [_, modifiers @ .., to, from] = parts else { return Err(self.unknown(parts)) };
        let words: Vec<&str> = modifiers.iter().chain([from]).copied().collect();
        let (alu, logic) = self.comparison(&words).map_err(|_| self.unknown(parts))?;
        let ([result, a, b], None) = (operands, logic) else { return Err(self.unknown(parts)) };
        let yes = match *to {
            "u32" | "s32" => u32::MAX,
            "f32" => 1f32.to_bits(),
            _ => return Err(self.unknown(parts)),
        };
        let slots = [self.operand(a, alu.operands[0])?, self.operand(b, alu.operands[1])?];
        let compared = self.register(Class::Predicate).slot;
        self.emit_alu(alu, compared, &slots);
        let select = alu::find(&["selp", "b32"]).expect("the table has it");
        let values = [self.word(yes), self.word(0), compared];
        let result = self.slot(result, Class::Word)?;
        self.emit_alu(select, result, &values);
        Ok(())
    }

    fn barrier(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let words: Vec<&str> =
            parts[1..].iter().filter(|word| !matches!(**word, "cta" | "aligned")).copied().collect();
        let registers = |decoder: &mut Self, operands: &[Operand]| -> Result<Vec<Register>, PtxError> {
            let slots = operands.iter().map(|operand| decoder.slot(operand, Class::Word));
            Ok(slots.collect::<Result<Vec<_>, _>>()?.into_iter().map(word_register).collect())
        };
        match words.as_slice() {
            ["warp", "sync"] => {
                let [members] = operands else { return Err(self.unknown(parts)) };
                let members = self.slot(members, Class::Word)?;
                self.emit(Operation::SyncWarp(members));
            }
            [kind @ ("sync" | "arrive")] => {
                let registers = registers(self, operands)?;
                let [number, threads @ ..] = registers.as_slice() else { return Err(self.unknown(parts)) };
                let (threads, waits) = (threads.first().copied(), *kind == "sync");
                self.emit(Operation::Barrier(Box::new(Barrier {
                    number: *number,
                    threads,
                    waits,
                    reduction: None,
                })));
            }
            ["red", function, _] => {
                let (function, class) = match *function {
                    "and" => (BarrierReduction::And, Class::Predicate),
                    "or" => (BarrierReduction::Or, Class::Predicate),
                    "popc" => (BarrierReduction::Count, Class::Word),
                    _ => return Err(self.unknown(parts)),
                };
                let [result, numbers @ .., operand] = operands else { return Err(self.unknown(parts)) };
                let registers = registers(self, numbers)?;
                let [number, threads @ ..] = registers.as_slice() else { return Err(self.unknown(parts)) };
                let operand = self.value(operand, Class::Predicate)?;
                let result = Register { class, slot: self.slot(result, class)? };
                let (threads, reduction) = (threads.first().copied(), Some((function, operand, result)));
                self.emit(Operation::Barrier(Box::new(Barrier {
                    number: *number,
                    threads,
                    waits: true,
                    reduction,
                })));
            }
            _ => return Err(self.unknown(parts)),
        }
        Ok(())
    }
}

fn word_register(slot: u16) -> Register {
    Register { class: Class::Word, slot }
}

/// Fences between threads of one device; not those of proxies or clusters.
fn is_plain_fence(parts: &[&str]) -> bool {
    parts[1..]
        .iter()
        .all(|word| matches!(*word, "cta" | "gl" | "sys" | "gpu" | "sc" | "acq_rel" | "acquire" | "release"))
}
