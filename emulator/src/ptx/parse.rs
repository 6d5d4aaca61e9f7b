//! Modules: directives, variables, and the heads of functions. Bodies are in `statements`.

use super::token::{Kind, Token, tokens};
use super::{Function, Module, Operand, PtxError, ScalarType, SourceLine, StateSpace, Variable};

/// Reads a module.
///
/// # Errors
/// The line and reason, if the text is not PTX as this crate knows it.
pub fn parse(text: &str) -> Result<Module, PtxError> {
    let tokens = tokens(text)?;
    let mut parser = Parser { tokens: &tokens, at: 0, source: SourceLine::default() };
    let mut module = Module::default();
    while parser.at < tokens.len() {
        parser.item(&mut module)?;
    }
    Ok(module)
}

/// A cursor over the tokens.
pub(super) struct Parser<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
    /// The source line that the last `.loc` gave.
    pub source: SourceLine,
}

impl<'a> Parser<'a> {
    /// The line of the next token.
    pub fn line(&self) -> u32 {
        let token = self.tokens.get(self.at).or(self.tokens.last());
        token.map_or(0, |token| token.line)
    }

    /// An error at the next token.
    pub fn error(&self, what: impl Into<String>) -> PtxError {
        PtxError::new(self.line(), what)
    }

    /// The next token, which stays.
    pub fn peek(&self) -> Option<Kind<'a>> {
        self.tokens.get(self.at).map(|token| token.kind)
    }

    /// The next token.
    pub fn next(&mut self) -> Result<Kind<'a>, PtxError> {
        let kind = self.peek().ok_or_else(|| self.error("the text ends within a statement"))?;
        self.at += 1;
        Ok(kind)
    }

    /// Takes the sign if it comes next.
    pub fn take(&mut self, sign: char) -> bool {
        let is_next = self.peek() == Some(Kind::Sign(sign));
        self.at += usize::from(is_next);
        is_next
    }

    /// Takes the sign, which must come next.
    pub fn expect(&mut self, sign: char) -> Result<(), PtxError> {
        match self.take(sign) {
            true => Ok(()),
            false => Err(self.error(format!("expected `{sign}`, found {}", self.found()))),
        }
    }

    /// The next token for a message.
    pub fn found(&self) -> String {
        match self.peek() {
            Some(Kind::Word(word)) => format!("`{word}`"),
            Some(Kind::Text(text)) => format!("\"{text}\""),
            Some(Kind::Sign(sign)) => format!("`{sign}`"),
            None => "the end".to_string(),
        }
    }

    /// The next token, which must be a word.
    pub fn word(&mut self) -> Result<&'a str, PtxError> {
        match self.peek() {
            Some(Kind::Word(word)) => {
                self.at += 1;
                Ok(word)
            }
            _ => Err(self.error(format!("expected a name, found {}", self.found()))),
        }
    }

    /// A count, such as of registers or bytes.
    pub fn count(&mut self) -> Result<u32, PtxError> {
        match integer(self.word()?) {
            Some(value) if value <= u64::from(u32::MAX) => Ok(value as u32),
            _ => Err(self.error("expected a count")),
        }
    }

    /// Skips tokens up to the end of the line.
    fn skip_line(&mut self, line: u32) {
        while self.tokens.get(self.at).is_some_and(|token| token.line == line) {
            self.at += 1;
        }
    }

    /// Skips tokens up to and with the sign.
    pub fn skip_past(&mut self, sign: char) -> Result<(), PtxError> {
        while self.next()? != Kind::Sign(sign) {}
        Ok(())
    }

    /// `.loc file line column`, up to the end of its line.
    pub fn location(&mut self) -> Result<(), PtxError> {
        let line = self.tokens[self.at - 1].line;
        self.source = SourceLine { file: self.count()?, line: self.count()? };
        self.skip_line(line);
        Ok(())
    }

    fn item(&mut self, module: &mut Module) -> Result<(), PtxError> {
        if self.take(';') {
            return Ok(());
        }
        let line = self.line();
        match self.peek() {
            Some(Kind::Word(".version" | ".address_size")) => self.skip_line(line),
            Some(Kind::Word(".target")) => {
                self.at += 1;
                module.target = self.word()?.to_string();
                self.skip_line(line);
            }
            Some(Kind::Word(".file")) => {
                self.at += 1;
                let number = self.count()?;
                if let Kind::Text(name) = self.next()? {
                    module.files.insert(number, name.to_string());
                }
                self.skip_line(line);
            }
            Some(Kind::Word(".section")) => self.skip_past('}')?,
            Some(Kind::Word(".pragma")) => self.skip_past(';')?,
            Some(Kind::Word(_)) => self.declaration(module)?,
            _ => return Err(self.error(format!("expected a directive, found {}", self.found()))),
        }
        Ok(())
    }

    /// A function or a variable, behind its linking directives.
    fn declaration(&mut self, module: &mut Module) -> Result<(), PtxError> {
        loop {
            match self.word()? {
                ".visible" | ".extern" | ".weak" | ".common" => {}
                ".entry" => return self.function(module, true),
                ".func" => return self.function(module, false),
                word => {
                    let Some(space) = StateSpace::from_name(word.trim_start_matches('.')) else {
                        let what = format!("unknown directive `{word}`");
                        self.at -= 1;
                        return Err(self.error(what));
                    };
                    let variable = self.variable(space)?;
                    module.variables.push(variable);
                    return self.expect(';');
                }
            }
        }
    }

    fn function(&mut self, module: &mut Module, is_entry: bool) -> Result<(), PtxError> {
        let returns = if self.peek() == Some(Kind::Sign('(')) { self.parameters()? } else { Vec::new() };
        let line = self.line();
        let name = self.word()?.to_string();
        let parameters = if self.peek() == Some(Kind::Sign('(')) { self.parameters()? } else { Vec::new() };
        let mut max_threads = 0;
        while let Some(Kind::Word(word)) = self.peek() {
            self.at += 1;
            if matches!(word, ".maxntid" | ".reqntid") {
                max_threads = self.count()?;
                while self.take(',') {
                    max_threads *= self.count()?;
                }
            } else if matches!(word, ".minnctapersm" | ".maxnctapersm" | ".maxnreg") {
                self.count()?;
            } else if word != ".noreturn" {
                return Err(self.error(format!("`{word}` of function `{name}` is not supported")));
            }
        }
        let body = if self.take(';') { None } else { Some(self.body()?) };
        module.functions.push(Function { name, is_entry, returns, parameters, max_threads, body, line });
        Ok(())
    }

    fn parameters(&mut self) -> Result<Vec<Variable>, PtxError> {
        let mut found = Vec::new();
        self.expect('(')?;
        while !self.take(')') {
            match self.word()? {
                ".param" | ".reg" => found.push(self.variable(StateSpace::Param)?),
                word => return Err(self.error(format!("expected a parameter, found `{word}`"))),
            }
            self.take(',');
        }
        Ok(found)
    }

    /// The rest of a declaration of a variable, behind its state space.
    pub fn variable(&mut self, space: StateSpace) -> Result<Variable, PtxError> {
        let line = self.line();
        let (mut align, mut element, mut count) = (0, 0, 1);
        let name = loop {
            let word = self.word()?;
            match word.strip_prefix('.') {
                Some("align") => align = self.count()? as usize,
                Some("v2") => count = 2,
                Some("v4") => count = 4,
                // Attributes of pointer parameters: `.ptr .global .align 16`.
                Some("ptr" | "global" | "shared" | "local" | "const") => {}
                Some(kind) => {
                    let known = ScalarType::from_name(kind);
                    element =
                        known.ok_or_else(|| PtxError::new(line, format!("unknown type `.{kind}`")))?.bytes();
                }
                None => break word.to_string(),
            }
        };
        while self.take('[') {
            count *= if self.take(']') {
                0
            } else {
                let count = self.count()? as usize;
                self.expect(']')?;
                count
            };
        }
        let initial = if self.take('=') { self.initial(element)? } else { Vec::new() };
        let bytes = (element * count).max(initial.len());
        Ok(Variable { name, space, align: align.max(element), bytes, initial, line })
    }

    /// A number or a list of numbers in braces.
    fn initial(&mut self, element: usize) -> Result<Vec<u8>, PtxError> {
        let mut bytes = Vec::new();
        let listed = self.take('{');
        loop {
            let bits = match self.operand()? {
                Operand::Integer(value) | Operand::Float64(value) => value,
                Operand::Float32(value) => u64::from(value),
                _ => return Err(self.error("an initial value that is no number is not supported")),
            };
            bytes.extend_from_slice(&bits.to_le_bytes()[..element]);
            if !self.take(',') {
                break;
            }
        }
        if listed {
            self.expect('}')?;
        }
        Ok(bytes)
    }
}

/// An integer literal: decimal, `0x`, `0b` or octal, with an optional `U`.
pub(super) fn integer(word: &str) -> Option<u64> {
    let word = word.strip_suffix('U').unwrap_or(word);
    let lower = word.to_ascii_lowercase();
    if let Some(digits) = lower.strip_prefix("0x") {
        u64::from_str_radix(digits, 16).ok()
    } else if let Some(digits) = lower.strip_prefix("0b") {
        u64::from_str_radix(digits, 2).ok()
    } else if lower.len() > 1 && lower.starts_with('0') {
        u64::from_str_radix(&lower, 8).ok()
    } else {
        lower.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::Statement;

    const TEXT: &str = r#"
.version 8.8
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 sh[];
.global .align 4 .b8 table[3] = {65, 0x90, 67};
.visible .entry twice(.param .u64 p0, .param .align 8 .b8 p1[12])
.maxntid 128, 2, 1
{
  .reg .pred %p<2>;
  .loc 1 7 3
  @!%p1 bra $L_1;
  ld.global.v2.f32 {%f1, %f2}, [%rd1+-8];
$L_1:
  call.uni (r), f, (a, b);
  ret;
}
.file 1 "a.cu"
"#;

    #[test]
    fn a_module() {
        let module = parse(TEXT).unwrap();
        assert_eq!(module.target, "sm_80");
        assert_eq!(module.files[&1], "a.cu");
        assert_eq!((module.variables[0].bytes, module.variables[0].align), (0, 16));
        assert_eq!(module.variables[1].initial, [65, 0x90, 67]);
        let kernel = &module.functions[0];
        assert_eq!((kernel.name.as_str(), kernel.max_threads), ("twice", 256));
        assert_eq!((kernel.parameters[1].bytes, kernel.parameters[1].align), (12, 8));
        let body = kernel.body.as_ref().unwrap();
        let Statement::Instruction(load) = &body[2] else { panic!("{:?}", body[2]) };
        assert_eq!(load.source, SourceLine { file: 1, line: 7 });
        assert_eq!(load.opcode, "ld.global.v2.f32");
        assert_eq!(load.operands[1], Operand::Address(Box::new(Operand::Name("%rd1".into())), -8));
    }

    #[test]
    fn a_refused_text_names_its_line() {
        let error = parse(".version 8.8\n\n.nothing x;\n").unwrap_err();
        assert_eq!(error, PtxError::new(3, "unknown directive `.nothing`"));
        assert_eq!(parse(".entry k() {\nret\n").unwrap_err().line, 2);
    }
}
