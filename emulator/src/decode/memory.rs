//! Loads, stores, atomic operations and asynchronous copies.

use super::Decoder;
use crate::kernel::{Address, AsyncCopy, Atomic, AtomicOperation, Operation, Register, Transfer};
use crate::numbers::{Bfloat16, Binary16, Narrow};
use crate::ptx::{Operand, PtxError, ScalarType, StateSpace};
use crate::registers::Class;

/// Words that say how a value is cached or ordered, which makes no difference here.
const CACHE_HINTS: [&str; 26] = [
    "nc",
    "ca",
    "cg",
    "cs",
    "cv",
    "lu",
    "wb",
    "wt",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "weak",
    "cta",
    "gpu",
    "sys",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "noftz",
];

/// The modifiers of a memory instruction.
struct Words<'a> {
    space: StateSpace,
    count: usize,
    kind: ScalarType,
    others: Vec<&'a str>,
}

impl Decoder<'_> {
    fn words<'p>(&self, parts: &[&'p str]) -> Result<Words<'p>, PtxError> {
        let (&last, modifiers) = parts[1..].split_last().ok_or_else(|| self.unknown(parts))?;
        let kind = ScalarType::from_name(last).ok_or_else(|| self.unknown(parts))?;
        let mut words = Words { space: StateSpace::Generic, count: 1, kind, others: Vec::new() };
        for &word in modifiers {
            match word {
                "v2" => words.count = 2,
                "v4" => words.count = 4,
                _ if CACHE_HINTS.contains(&word) => {}
                _ => match StateSpace::from_name(word) {
                    Some(space) => words.space = space,
                    None => words.others.push(word),
                },
            }
        }
        Ok(words)
    }

    /// An address, and the space of the variable that it names.
    pub(super) fn address(&mut self, operand: &Operand) -> Result<(Address, Option<StateSpace>), PtxError> {
        let Operand::Address(base, offset) = operand else {
            return Err(self.error("expected an address in brackets"));
        };
        let mut space = None;
        if let Operand::Name(name) = base.as_ref()
            && let Some(super::Binding::Variable(of, _)) = self.binding(name)
        {
            space = Some(of);
        }
        let register = self.value(base, Class::Long)?;
        match register.class {
            Class::Predicate => Err(self.error("a predicate is no address")),
            _ => Ok((Address { register, offset: *offset }, space)),
        }
    }

    pub(super) fn transfer(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let words = self.words(parts)?;
        let is_store = parts[0] == "st";
        let ([first, second], []) = (operands, words.others.as_slice()) else {
            return Err(self.unknown(parts));
        };
        let (address, value) = if is_store { (first, second) } else { (second, first) };
        let (address, named) = self.address(address)?;
        // Parameters of functions that were inlined are variables of the thread.
        let space = match (words.space, named) {
            (StateSpace::Param, Some(StateSpace::Local)) => StateSpace::Local,
            (space, _) => space,
        };
        if is_store && matches!(space, StateSpace::Param | StateSpace::Const) {
            return Err(self.error("kernel parameters and constants cannot be written"));
        }
        let values = match value {
            Operand::Vector(items) => items.as_slice(),
            single => std::slice::from_ref(single),
        };
        if values.len() != words.count {
            return Err(self.error(format!("{} registers for {} values", values.len(), words.count)));
        }
        let bytes = words.kind.bytes();
        let class = if bytes == 8 { Class::Long } else { Class::Word };
        if bytes * words.count > 16 {
            return Err(self.error("accesses of more than 16 bytes are not supported"));
        }
        let values = values.iter().map(|value| self.value(value, class)).collect::<Result<Vec<_>, _>>()?;
        if values
            .iter()
            .any(|value| value.class == Class::Predicate || bytes == 8 && value.class == Class::Word)
        {
            return Err(self.error("a register is narrower than the value"));
        }
        let transfer = Transfer { space, address, bytes, signed: words.kind.is_signed(), values };
        let transfer = Box::new(transfer);
        self.emit(if is_store { Operation::Store(transfer) } else { Operation::Load(transfer) });
        Ok(())
    }

    pub(super) fn atomic(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let words = self.words(parts)?;
        let [name] = words.others.as_slice() else { return Err(self.unknown(parts)) };
        let operation = atomic_operation(name, words.kind).ok_or_else(|| self.unknown(parts))?;
        let class = if words.kind.bytes() == 8 { Class::Long } else { Class::Word };
        let register = |decoder: &mut Self, operand: &Operand| -> Result<Register, PtxError> {
            Ok(Register { class, slot: decoder.slot(operand, class)? })
        };
        let (result, rest) = match (parts[0], operands) {
            ("atom", [result, rest @ ..]) => (Some(register(self, result)?), rest),
            _ => (None, operands),
        };
        let (address, operand, new) = match (operation, rest) {
            (AtomicOperation::CompareAndSwap, [address, operand, new]) => {
                (address, operand, Some(register(self, new)?))
            }
            (AtomicOperation::Apply(_), [address, operand]) => (address, operand, None),
            _ => return Err(self.unknown(parts)),
        };
        let (address, _) = self.address(address)?;
        let operand = register(self, operand)?;
        let atomic = Atomic {
            space: words.space,
            address,
            operation,
            bytes: words.kind.bytes(),
            result,
            operand,
            new,
        };
        self.emit(Operation::Atomic(Box::new(atomic)));
        Ok(())
    }

    pub(super) fn async_copy(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        match (parts, operands) {
            (["cp", "async", "commit_group"], []) => self.emit(Operation::AsyncCommit),
            (["cp", "async", "wait_all"], []) => self.emit(Operation::AsyncWaitAll),
            (["cp", "async", "wait_group"], [Operand::Integer(count)]) => {
                self.emit(Operation::AsyncWait(*count as u32));
            }
            (
                ["cp", "async", "ca" | "cg", "shared" | "shared::cta", "global", hints @ ..],
                [to, from, rest @ ..],
            ) if hints.iter().all(|hint| CACHE_HINTS.contains(hint)) => {
                let [Operand::Integer(bytes), rest @ ..] = rest else { return Err(self.unknown(parts)) };
                let source_bytes = match rest {
                    [] => None,
                    [count] => Some(self.operand(count, Class::Word)?),
                    _ => return Err(self.unknown(parts)),
                };
                let bytes = *bytes as usize;
                let known = if parts[2] == "cg" { bytes == 16 } else { matches!(bytes, 4 | 8 | 16) };
                if !known {
                    return Err(self.error(format!("`{}` of {bytes} bytes", parts.join("."))));
                }
                let (to, _) = self.address(to)?;
                let (from, _) = self.address(from)?;
                self.emit(Operation::AsyncCopy(Box::new(AsyncCopy { to, from, bytes, source_bytes })));
            }
            _ => return Err(self.unknown(parts)),
        }
        Ok(())
    }
}

/// The function of an atomic operation.
fn atomic_operation(name: &str, kind: ScalarType) -> Option<AtomicOperation> {
    use ScalarType::*;
    if name == "cas" {
        return matches!(kind, B16 | B32 | B64).then_some(AtomicOperation::CompareAndSwap);
    }
    let apply: fn(u64, u64) -> u64 = match (name, kind) {
        ("add", U32 | S32) => |a, b| u64::from((a as u32).wrapping_add(b as u32)),
        ("add", U64) => u64::wrapping_add,
        ("add", F32) => |a, b| u64::from((f32::from_bits(a as u32) + f32::from_bits(b as u32)).to_bits()),
        ("add", F64) => |a, b| (f64::from_bits(a) + f64::from_bits(b)).to_bits(),
        ("add", F16) => add_narrow::<Binary16>,
        ("add", Bf16) => add_narrow::<Bfloat16>,
        ("add", F16x2) => {
            |a, b| add_narrow::<Binary16>(a, b) | add_narrow::<Binary16>(a >> 16, b >> 16) << 16
        }
        ("add", Bf16x2) => {
            |a, b| add_narrow::<Bfloat16>(a, b) | add_narrow::<Bfloat16>(a >> 16, b >> 16) << 16
        }
        ("min", U32 | U64) => |a, b| a.min(b),
        ("max", U32 | U64) => |a, b| a.max(b),
        ("min", S32) => |a, b| u64::from((a as i32).min(b as i32) as u32),
        ("max", S32) => |a, b| u64::from((a as i32).max(b as i32) as u32),
        ("min", S64) => |a, b| (a as i64).min(b as i64) as u64,
        ("max", S64) => |a, b| (a as i64).max(b as i64) as u64,
        ("and", B32 | B64) => |a, b| a & b,
        ("or", B32 | B64) => |a, b| a | b,
        ("xor", B32 | B64) => |a, b| a ^ b,
        ("exch", B32 | B64) => |_, b| b,
        ("inc", U32) => |a, b| if a >= b { 0 } else { a + 1 },
        ("dec", U32) => |a, b| if a == 0 || a > b { b } else { a - 1 },
        _ => return None,
    };
    Some(AtomicOperation::Apply(apply))
}

fn add_narrow<N: Narrow + Bits>(a: u64, b: u64) -> u64 {
    let wide = |bits: u64| f64::from(N::from_bits(bits as u16).wide());
    u64::from(N::nearest64(wide(a) + wide(b)).bits())
}

/// Numbers of 16 bits as their bits.
trait Bits {
    fn from_bits(bits: u16) -> Self;
    fn bits(self) -> u16;
}

impl Bits for Binary16 {
    fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    fn bits(self) -> u16 {
        self.0
    }
}

impl Bits for Bfloat16 {
    fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    fn bits(self) -> u16 {
        self.0
    }
}
