//! Exchanges between the lanes of a warp: shuffles, votes, matches and reductions.

use super::Decoder;
use crate::kernel::{Exchange, ExchangeKind as Kind, Operation, Register};
use crate::ptx::{Operand, PtxError};
use crate::registers::Class;

impl Decoder<'_> {
    pub(super) fn active_mask(&mut self, operands: &[Operand]) -> Result<(), PtxError> {
        let [result] = operands else { return Err(self.error("`activemask` takes one operand")) };
        let slot = self.slot(result, Class::Word)?;
        self.emit(Operation::ActiveMask(slot));
        Ok(())
    }

    pub(super) fn exchange(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let (kind, result_class, operand_class) = kind(parts).ok_or_else(|| self.unknown(parts))?;
        let [result, operand, rest @ ..] = operands else { return Err(self.unknown(parts)) };
        let (lane, members) = match rest {
            [lane, clamp, members] if parts[0] == "shfl" => {
                ([self.slot(lane, Class::Word)?, self.slot(clamp, Class::Word)?], members)
            }
            [members] if parts[0] != "shfl" => ([0; 2], members),
            _ => return Err(self.unknown(parts)),
        };
        let members = self.slot(members, Class::Word)?;
        let operand = Register { class: operand_class, slot: self.slot(operand, operand_class)? };
        let (result, predicate) = match result {
            Operand::Pair(result, predicate) => {
                (result.as_ref(), Some(self.slot(predicate, Class::Predicate)?))
            }
            single => (single, None),
        };
        let result = Register { class: result_class, slot: self.slot(result, result_class)? };
        self.emit(Operation::Exchange(Box::new(Exchange {
            kind,
            result,
            predicate,
            operand,
            lane,
            members,
        })));
        Ok(())
    }
}

/// The kind of an opcode, with the classes of its result and operand.
fn kind(parts: &[&str]) -> Option<(Kind, Class, Class)> {
    let (word, predicate) = (Class::Word, Class::Predicate);
    Some(match parts {
        ["shfl", "sync", "bfly", "b32"] => (Kind::ShuffleXor, word, word),
        ["shfl", "sync", "down", "b32"] => (Kind::ShuffleDown, word, word),
        ["shfl", "sync", "up", "b32"] => (Kind::ShuffleUp, word, word),
        ["shfl", "sync", "idx", "b32"] => (Kind::ShuffleIndex, word, word),
        ["vote", "sync", "all", "pred"] => (Kind::VoteAll, predicate, predicate),
        ["vote", "sync", "any", "pred"] => (Kind::VoteAny, predicate, predicate),
        ["vote", "sync", "uni", "pred"] => (Kind::VoteUniform, predicate, predicate),
        ["vote", "sync", "ballot", "b32"] => (Kind::Ballot, word, predicate),
        ["match", "any", "sync", "b32"] => (Kind::MatchAny, word, word),
        ["match", "all", "sync", "b32"] => (Kind::MatchAll, word, word),
        ["match", "any", "sync", "b64"] => (Kind::MatchAny, word, Class::Long),
        ["match", "all", "sync", "b64"] => (Kind::MatchAll, word, Class::Long),
        ["redux", "sync", "add", "u32" | "s32"] => (Kind::ReduceAdd, word, word),
        ["redux", "sync", "min", "u32"] => (Kind::ReduceMin, word, word),
        ["redux", "sync", "max", "u32"] => (Kind::ReduceMax, word, word),
        ["redux", "sync", "min", "s32"] => (Kind::ReduceMinSigned, word, word),
        ["redux", "sync", "max", "s32"] => (Kind::ReduceMaxSigned, word, word),
        ["redux", "sync", "and", "b32"] => (Kind::ReduceAnd, word, word),
        ["redux", "sync", "or", "b32"] => (Kind::ReduceOr, word, word),
        ["redux", "sync", "xor", "b32"] => (Kind::ReduceXor, word, word),
        _ => return None,
    })
}
