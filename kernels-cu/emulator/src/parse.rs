//! Parses PTX text into functions, variables and statements. Names and types are resolved by
//! `decode`.

use std::collections::HashMap;

/// A PTX file.
#[derive(Debug, Default)]
pub(crate) struct Module<'a> {
    pub functions: Vec<Function<'a>>,
    /// Variables outside functions.
    pub variables: Vec<Variable<'a>>,
    /// Source files by number.
    pub files: HashMap<u32, &'a str>,
}

#[derive(Debug)]
pub(crate) struct Function<'a> {
    pub name: &'a str,
    pub entry: bool,
    pub returns: Vec<Variable<'a>>,
    pub params: Vec<Variable<'a>>,
    /// None: a declaration only.
    pub body: Option<Vec<Statement<'a>>>,
}

/// A variable of a state space, or a parameter.
#[derive(Clone, Debug)]
pub(crate) struct Variable<'a> {
    pub space: &'a str,
    pub name: &'a str,
    pub align: u64,
    /// 0 for an array without a length: dynamic shared memory.
    pub bytes: u64,
    /// Element values, each of `element` bytes.
    pub values: Vec<u64>,
    pub element: u64,
}

#[derive(Debug)]
pub(crate) enum Statement<'a> {
    Open,
    Close,
    /// Type, name and, for `%r<9>`, the number of registers.
    Registers(&'a str, Vec<(&'a str, Option<u32>)>),
    Variable(Variable<'a>),
    Label(&'a str),
    /// For `brx.idx`: the labels of the list named by the label before it.
    Targets(Vec<&'a str>),
    Instruction(Raw<'a>),
}

/// Position of an instruction: line of the PTX, number of the source file and line there (0:
/// unknown).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    pub line: u32,
    pub file: u32,
    pub source_line: u32,
}

/// An instruction as it is written.
#[derive(Debug)]
pub(crate) struct Raw<'a> {
    /// The predicate, and true for `@!`.
    pub guard: Option<(bool, &'a str)>,
    pub opcode: &'a str,
    pub operands: Vec<Operand<'a>>,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand<'a> {
    Name(&'a str),
    /// `!%p`.
    Not(&'a str),
    Int(u64),
    F32(u32),
    F64(u64),
    /// `[base+offset]`.
    Address(Box<Operand<'a>>, i64),
    List(Vec<Operand<'a>>),
    /// `%p|%q`.
    Pair(Box<Operand<'a>>, Box<Operand<'a>>),
}

pub(crate) fn parse(text: &str) -> Result<Module<'_>, String> {
    let mut parser = Parser { text, at: 0, line: 1, place: Place::default() };
    let mut module = Module::default();
    parser.module(&mut module).map_err(|problem| format!("PTX line {}: {problem}", parser.line))?;
    Ok(module)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    place: Place,
}

impl<'a> Parser<'a> {
    fn byte(&self) -> u8 {
        self.text.as_bytes().get(self.at).copied().unwrap_or(0)
    }

    fn step(&mut self) {
        if self.byte() == b'\n' {
            self.line += 1;
        }
        self.at += 1;
    }

    /// Skips blanks and comments.
    fn blanks(&mut self) {
        loop {
            let rest = &self.text[self.at..];
            if self.at < self.text.len() && self.byte().is_ascii_whitespace() {
                self.step();
            } else if rest.starts_with("//") {
                while self.at < self.text.len() && self.byte() != b'\n' {
                    self.at += 1;
                }
            } else if rest.starts_with("/*") {
                let end = rest.find("*/").map_or(rest.len(), |end| end + 2);
                (0..end).for_each(|_| self.step());
            } else {
                return;
            }
        }
    }

    fn word(&mut self) -> &'a str {
        let from = self.at;
        while matches!(self.byte(), b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'$' | b'%' | b'.') {
            self.at += 1;
        }
        &self.text[from..self.at]
    }

    fn take(&mut self, wanted: u8) -> Result<(), String> {
        self.blanks();
        if self.byte() != wanted {
            let rest: String = self.text[self.at..].chars().take(30).collect();
            return Err(format!("`{}` expected before `{rest}`", char::from(wanted)));
        }
        self.step();
        Ok(())
    }

    fn takes(&mut self, wanted: u8) -> bool {
        self.blanks();
        let there = self.byte() == wanted;
        if there {
            self.step();
        }
        there
    }

    fn rest_of_line(&mut self) -> &'a str {
        let from = self.at;
        while self.at < self.text.len() && self.byte() != b'\n' {
            self.at += 1;
        }
        &self.text[from..self.at]
    }

    fn until(&mut self, end: u8) -> Result<&'a str, String> {
        let from = self.at;
        while self.byte() != end {
            if self.at >= self.text.len() {
                return Err(format!("no `{}` up to the end", char::from(end)));
            }
            self.step();
        }
        let text = &self.text[from..self.at];
        self.step();
        Ok(text)
    }

    fn module(&mut self, module: &mut Module<'a>) -> Result<(), String> {
        loop {
            self.blanks();
            if self.at >= self.text.len() {
                return Ok(());
            }
            let at = self.at;
            match self.word() {
                ".version" | ".target" | ".address_size" => {
                    self.rest_of_line();
                }
                ".file" => {
                    let line = self.rest_of_line();
                    let number = line.split_whitespace().next().and_then(|n| n.parse().ok());
                    if let (Some(number), Some(name)) = (number, line.split('"').nth(1)) {
                        module.files.insert(number, name);
                    }
                }
                ".section" => {
                    self.until(b'{')?;
                    self.until(b'}')?;
                }
                ".extern" | ".visible" | ".weak" | ".common" => {}
                ".func" => module.functions.extend(self.function(false)?),
                ".entry" => module.functions.extend(self.function(true)?),
                space @ (".global" | ".const" | ".shared") => {
                    module.variables.push(self.variable(space)?);
                    self.take(b';')?;
                }
                "" => return Err(format!("`{}` is not known here", char::from(self.byte()))),
                _ => return Err(format!("`{}` is not known here", &self.text[at..self.at])),
            }
        }
    }

    fn function(&mut self, entry: bool) -> Result<Option<Function<'a>>, String> {
        let returns = if !entry { self.parameters()? } else { Vec::new() };
        self.blanks();
        let name = self.word();
        let params = self.parameters()?;
        loop {
            self.blanks();
            match self.byte() {
                b';' => {
                    self.step();
                    return Ok(Some(Function { name, entry, returns, params, body: None }));
                }
                b'{' => {
                    self.step();
                    let body = Some(self.body()?);
                    return Ok(Some(Function { name, entry, returns, params, body }));
                }
                b'.' => {
                    // .maxntid, .minnctapersm, .noreturn and the like.
                    self.word();
                    while matches!(self.byte(), b' ' | b'\t' | b',' | b'0'..=b'9') {
                        self.at += 1;
                    }
                }
                _ => return Err(format!("function {name} has no body")),
            }
        }
    }

    /// `(.param .b32 a, .param ...)`, or nothing.
    fn parameters(&mut self) -> Result<Vec<Variable<'a>>, String> {
        let mut list = Vec::new();
        if !self.takes(b'(') {
            return Ok(list);
        }
        while !self.takes(b')') {
            self.takes(b',');
            self.blanks();
            if self.word() != ".param" {
                return Err("a parameter that is not `.param`".to_string());
            }
            list.push(self.variable(".param")?);
        }
        Ok(list)
    }

    /// A variable after its space: `.align 8 .b8 name[4] = {1, 2}`.
    fn variable(&mut self, space: &'a str) -> Result<Variable<'a>, String> {
        let (mut align, mut element) = (0, 0);
        loop {
            self.blanks();
            match self.word() {
                ".align" => {
                    self.blanks();
                    align = self.word().parse().map_err(|_| "no number after .align")?;
                }
                ".ptr" | ".global" | ".noalias" | ".shared" => {}
                kind if kind.starts_with('.') => {
                    let bits = kind.trim_start_matches(|c: char| !c.is_ascii_digit());
                    element = bits.parse::<u64>().map_err(|_| format!("type {kind}"))? / 8;
                }
                name if !name.is_empty() => {
                    let mut bytes = element;
                    while self.takes(b'[') {
                        self.blanks();
                        let count = self.word();
                        bytes *= if count.is_empty() {
                            0
                        } else {
                            count.parse().map_err(|_| "an array's length")?
                        };
                        self.take(b']')?;
                    }
                    let mut values = Vec::new();
                    if self.takes(b'=') {
                        let list = if self.takes(b'{') { self.until(b'}')? } else { self.word() };
                        for value in list.split(',').map(str::trim) {
                            values.push(integer(value).ok_or_else(|| format!("value {value} of {name}"))?);
                        }
                    }
                    return Ok(Variable {
                        space,
                        name,
                        align: align.max(element).max(1),
                        bytes,
                        values,
                        element,
                    });
                }
                _ => return Err("a variable without name".to_string()),
            }
        }
    }

    fn body(&mut self) -> Result<Vec<Statement<'a>>, String> {
        let mut list = Vec::new();
        let mut depth = 0;
        loop {
            self.blanks();
            match self.byte() {
                0 => return Err("a function without end".to_string()),
                b';' => self.step(),
                b'{' => {
                    self.step();
                    depth += 1;
                    list.push(Statement::Open);
                }
                b'}' => {
                    self.step();
                    if depth == 0 {
                        return Ok(list);
                    }
                    depth -= 1;
                    list.push(Statement::Close);
                }
                b'.' => self.directive(&mut list)?,
                _ => self.statement(&mut list)?,
            }
        }
    }

    fn directive(&mut self, list: &mut Vec<Statement<'a>>) -> Result<(), String> {
        match self.word() {
            ".loc" => {
                let line = self.rest_of_line();
                let mut numbers = line.split_whitespace().map(|n| n.trim_end_matches(',').parse::<u32>());
                if let (Some(Ok(file)), Some(Ok(source_line))) = (numbers.next(), numbers.next())
                    && source_line != 0
                {
                    (self.place.file, self.place.source_line) = (file, source_line);
                }
            }
            ".pragma" => {
                self.until(b';')?;
            }
            ".reg" => {
                self.blanks();
                let kind = self.word();
                let names = self.until(b';')?;
                let mut registers = Vec::new();
                for name in names.split(',').map(str::trim) {
                    registers.push(match name.split_once('<') {
                        None => (name, None),
                        Some((name, count)) => {
                            let count = count.trim_end_matches('>').parse();
                            (name, Some(count.map_err(|_| format!("number of registers {name}"))?))
                        }
                    });
                }
                list.push(Statement::Registers(kind, registers));
            }
            space @ (".local" | ".shared" | ".param") => {
                let variable = self.variable(space)?;
                self.take(b';')?;
                list.push(Statement::Variable(variable));
            }
            ".branchtargets" => {
                list.push(Statement::Targets(self.until(b';')?.split(',').map(str::trim).collect()));
            }
            other => return Err(format!("directive {other}")),
        }
        Ok(())
    }

    fn statement(&mut self, list: &mut Vec<Statement<'a>>) -> Result<(), String> {
        let mut guard = None;
        self.place.line = self.line;
        if self.takes(b'@') {
            let not = self.takes(b'!');
            guard = Some((not, self.word()));
            self.blanks();
        }
        let opcode = self.opcode();
        if guard.is_none() && self.takes(b':') {
            list.push(Statement::Label(opcode));
            return Ok(());
        }
        let place = self.place;
        let mut operands = Vec::new();
        while !self.takes(b';') {
            if !operands.is_empty() {
                self.take(b',')?;
            }
            operands.push(self.operand()?);
        }
        list.push(Statement::Instruction(Raw { guard, opcode, operands, place }));
        Ok(())
    }

    /// A word that may contain `::`.
    fn opcode(&mut self) -> &'a str {
        let from = self.at;
        loop {
            self.word();
            if !self.text[self.at..].starts_with("::") {
                return &self.text[from..self.at];
            }
            self.at += 2;
        }
    }

    fn operand(&mut self) -> Result<Operand<'a>, String> {
        self.blanks();
        match self.byte() {
            open @ (b'{' | b'(') => {
                self.step();
                let close = if open == b'{' { b'}' } else { b')' };
                let mut list = Vec::new();
                while !self.takes(close) {
                    if !list.is_empty() {
                        self.take(b',')?;
                    }
                    list.push(self.operand()?);
                }
                Ok(Operand::List(list))
            }
            b'[' => {
                self.step();
                let base = self.operand()?;
                self.blanks();
                let mut offset = 0;
                if self.takes(b'+') {
                    self.blanks();
                    offset = self.number()? as i64;
                }
                self.take(b']')?;
                Ok(Operand::Address(Box::new(base), offset))
            }
            b'!' => {
                self.step();
                Ok(Operand::Not(self.word()))
            }
            b'-' | b'0'..=b'9' => {
                let negative = self.takes(b'-');
                let word = self.word();
                if let Some(bits) = word.strip_prefix("0f").or(word.strip_prefix("0F")) {
                    return Ok(Operand::F32(u32::from_str_radix(bits, 16).map_err(|e| e.to_string())?));
                }
                if let Some(bits) = word.strip_prefix("0d").or(word.strip_prefix("0D")) {
                    return Ok(Operand::F64(u64::from_str_radix(bits, 16).map_err(|e| e.to_string())?));
                }
                if word.contains('.') {
                    let value: f64 = word.parse().map_err(|_| format!("number {word}"))?;
                    return Ok(Operand::F64(if negative { -value } else { value }.to_bits()));
                }
                let value = integer(word).ok_or_else(|| format!("number {word}"))?;
                Ok(Operand::Int(if negative { value.wrapping_neg() } else { value }))
            }
            _ => {
                let name = self.word();
                if name.is_empty() {
                    return Err(format!("operand `{}`", char::from(self.byte())));
                }
                if self.takes(b'|') {
                    return Ok(Operand::Pair(Box::new(Operand::Name(name)), Box::new(self.operand()?)));
                }
                Ok(Operand::Name(name))
            }
        }
    }

    fn number(&mut self) -> Result<u64, String> {
        let negative = self.takes(b'-');
        let word = self.word();
        let value = integer(word).ok_or_else(|| format!("number {word}"))?;
        Ok(if negative { value.wrapping_neg() } else { value })
    }
}

/// A decimal, hexadecimal or octal integer, possibly with a final `U`.
fn integer(word: &str) -> Option<u64> {
    let word = word.trim_end_matches('U');
    if let Some(negative) = word.strip_prefix('-') {
        return integer(negative).map(u64::wrapping_neg);
    }
    if let Some(digits) = word.strip_prefix("0x").or(word.strip_prefix("0X")) {
        return u64::from_str_radix(digits, 16).ok();
    }
    word.parse().ok()
}
