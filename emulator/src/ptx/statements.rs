//! Bodies of functions: declarations, labels, instructions and their operands.

use super::parse::{Parser, integer};
use super::token::Kind;
use super::{Instruction, Operand, PtxError, ScalarType, StateSpace, Statement};

impl Parser<'_> {
    /// The statements between the braces of a body.
    pub(super) fn body(&mut self) -> Result<Vec<Statement>, PtxError> {
        self.expect('{')?;
        let mut statements = Vec::new();
        let mut depth = 0;
        loop {
            if self.take('}') {
                if depth == 0 {
                    return Ok(statements);
                }
                depth -= 1;
                statements.push(Statement::Close);
            } else if self.take('{') {
                depth += 1;
                statements.push(Statement::Open);
            } else {
                self.statement(&mut statements)?;
            }
        }
    }

    fn statement(&mut self, statements: &mut Vec<Statement>) -> Result<(), PtxError> {
        match self.peek() {
            Some(Kind::Sign(';')) => self.expect(';'),
            Some(Kind::Word(".loc")) => {
                self.next()?;
                self.location()
            }
            Some(Kind::Word(".pragma")) => self.skip_past(';'),
            Some(Kind::Word(".reg")) => {
                self.next()?;
                self.registers(statements)
            }
            Some(Kind::Word(word)) if word.starts_with('.') => {
                let space = StateSpace::from_name(&word[1..])
                    .ok_or_else(|| self.error(format!("`{word}` in a body is not supported")))?;
                self.next()?;
                loop {
                    statements.push(Statement::Variable(self.variable(space)?));
                    if !self.take(',') {
                        return self.expect(';');
                    }
                }
            }
            _ => self.instruction(statements),
        }
    }

    fn registers(&mut self, statements: &mut Vec<Statement>) -> Result<(), PtxError> {
        let word = self.word()?;
        let kind = ScalarType::from_name(word.trim_start_matches('.'))
            .ok_or_else(|| self.error(format!("registers of type `{word}` are not supported")))?;
        loop {
            let name = self.word()?.to_string();
            let count = if self.take('<') { Some(self.count()?) } else { None };
            if count.is_some() {
                self.expect('>')?;
            }
            statements.push(Statement::Registers { kind, name, count });
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    /// A label or an instruction.
    fn instruction(&mut self, statements: &mut Vec<Statement>) -> Result<(), PtxError> {
        let line = self.line();
        let guard = if self.take('@') {
            let negated = self.take('!');
            Some((self.word()?.to_string(), negated))
        } else {
            None
        };
        let opcode = self.word()?.to_string();
        if guard.is_none() && self.take(':') {
            statements.push(Statement::Label(opcode));
            return Ok(());
        }
        let mut operands = Vec::new();
        while !self.take(';') {
            if !operands.is_empty() {
                self.expect(',')?;
            }
            operands.push(self.operand()?);
        }
        let source = self.source;
        statements.push(Statement::Instruction(Instruction { line, source, guard, opcode, operands }));
        Ok(())
    }

    /// One operand.
    pub(super) fn operand(&mut self) -> Result<Operand, PtxError> {
        if self.take('!') {
            return Ok(Operand::Not(self.word()?.to_string()));
        }
        if self.take('[') {
            return self.address();
        }
        if self.take('{') {
            return self.list('}');
        }
        if self.take('(') {
            return self.list(')');
        }
        let single = self.single()?;
        if self.take('|') {
            return Ok(Operand::Pair(Box::new(single), Box::new(self.single()?)));
        }
        Ok(single)
    }

    /// A name or a number, with an offset that is added to a number.
    fn single(&mut self) -> Result<Operand, PtxError> {
        let negative = self.take('-');
        let word = self.word()?;
        let hexadecimal = |digits| u64::from_str_radix(digits, 16).ok();
        let value = match word.get(..2) {
            Some("0f" | "0F") => hexadecimal(&word[2..]).map(|bits| Operand::Float32(bits as u32)),
            Some("0d" | "0D") => hexadecimal(&word[2..]).map(Operand::Float64),
            _ => None,
        };
        let integer = || {
            let value = integer(word)?;
            Some(Operand::Integer(if negative { value.wrapping_neg() } else { value }))
        };
        match value.or_else(integer) {
            Some(value) => Ok(value),
            None if negative || word.starts_with(|letter: char| letter.is_ascii_digit()) => {
                Err(self.error(format!("`{word}` is no number")))
            }
            None => Ok(Operand::Name(word.to_string())),
        }
    }

    fn address(&mut self) -> Result<Operand, PtxError> {
        let base = self.single()?;
        let mut offset = 0i64;
        loop {
            let sign = match self.next()? {
                Kind::Sign(']') => return Ok(Operand::Address(Box::new(base), offset)),
                Kind::Sign('+') => 1,
                Kind::Sign('-') => -1,
                // `[tensor_map, {coordinates}]` and the like.
                _ => return Err(self.error("this form of address is not supported")),
            };
            match self.single()? {
                Operand::Integer(value) => offset = offset.wrapping_add((value as i64).wrapping_mul(sign)),
                _ => return Err(self.error("the offset of an address is no number")),
            }
        }
    }

    fn list(&mut self, end: char) -> Result<Operand, PtxError> {
        let mut items = Vec::new();
        while !self.take(end) {
            items.push(self.operand()?);
            self.take(',');
        }
        Ok(Operand::Vector(items))
    }
}
