//! The meaning of the names in a PTX module, and the instructions decoded so far.

use crate::instruction::{CONSTANT, Instruction, NONE, Op, Ty, WIDE};
use crate::parse::{Operand, Place};
use crate::program::Program;
use std::collections::HashMap;

/// Meaning of a name.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Symbol {
    Register(u32),
    /// Address in the variable's space: a thread's local memory (also for parameters), shared, or
    /// global.
    Address(u64),
}

/// Registers of one declaration: `%r<9>`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub first: u32,
    pub bytes: u32,
    pub count: u32,
}

/// Parameters of a function: results, then arguments, as (offset in local memory, bytes).
#[derive(Clone, Debug, Default)]
pub(crate) struct Signature {
    pub results: Vec<(u64, u64)>,
    pub arguments: Vec<(u64, u64)>,
    pub start: Option<u32>,
}

/// The names visible where decoding is now, and what has been decoded.
pub(crate) struct Names<'a> {
    pub program: Program,
    pub constants: Vec<u64>,
    known_constants: HashMap<(u64, bool), u32>,
    pub scopes: Vec<HashMap<&'a str, Symbol>>,
    pub ranges: HashMap<&'a str, Range>,
    pub signatures: HashMap<&'a str, Signature>,
    /// Instructions that refer to a label of the function, and calls.
    pub branches: Vec<(usize, &'a str)>,
    pub calls: Vec<(usize, &'a str)>,
    /// The place of the instruction being decoded.
    pub place: Place,
}

impl<'a> Names<'a> {
    pub(crate) fn new(program: Program) -> Self {
        Names {
            program,
            constants: Vec::new(),
            known_constants: HashMap::new(),
            scopes: vec![HashMap::new()],
            ranges: HashMap::new(),
            signatures: HashMap::new(),
            branches: Vec::new(),
            calls: Vec::new(),
            place: Place::default(),
        }
    }

    pub(crate) fn declare(&mut self, name: &'a str, symbol: Symbol) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name, symbol);
        }
    }

    pub(crate) fn blank() -> Instruction {
        Instruction {
            op: Op::Nop,
            guard_not: false,
            guard: NONE,
            d: NONE,
            a: NONE,
            b: NONE,
            c: NONE,
            extra: NONE,
            list: 0,
            length: 0,
            immediate: 0,
        }
    }

    pub(crate) fn emit(&mut self, instruction: Instruction) {
        self.program.instructions.push(instruction);
        self.program.places.push(self.place);
    }

    pub(crate) fn unsupported(&mut self, at: usize, text: String) {
        let line = self.program.places[at].line;
        self.program.instructions[at].op = Op::Unsupported;
        self.program.instructions[at].extra = self.program.texts.len() as u32;
        self.program.texts.push(format!("{text} (PTX line {line})"));
    }

    pub(crate) fn symbol(&self, name: &str) -> Option<Symbol> {
        if let Some(symbol) = self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            return Some(*symbol);
        }
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let range = self.ranges.get(stem)?;
        let number: u32 = name[stem.len()..].parse().ok()?;
        (number < range.count).then(|| Symbol::Register(range.first + number * range.bytes))
    }

    pub(crate) fn register(&self, name: &str) -> Option<u32> {
        match self.symbol(name)? {
            Symbol::Register(register) => Some(register),
            Symbol::Address(_) => None,
        }
    }

    /// A constant register that holds `value` in all lanes.
    pub(crate) fn constant(&mut self, value: u64, wide: bool) -> u32 {
        let value = if wide { value } else { value & u64::from(u32::MAX) };
        let constants = &mut self.constants;
        let offset = *self.known_constants.entry((value, wide)).or_insert_with(|| {
            let offset = constants.len() * 8;
            let (word, words) = if wide { (value, 32) } else { (value | value << 32, 16) };
            constants.resize(constants.len() + words, word);
            offset as u32
        });
        offset | CONSTANT | if wide { WIDE } else { 0 }
    }

    /// A source operand of `ty`.
    pub(crate) fn source(&mut self, operand: &Operand<'a>, ty: Ty) -> Result<u32, String> {
        let value = match operand {
            Operand::Name("WARP_SZ") => 32,
            Operand::Name(name) => match self.symbol(name) {
                Some(Symbol::Register(register)) => return Ok(register),
                Some(Symbol::Address(address)) => address,
                None => return Err(format!("{name} is not declared")),
            },
            Operand::Int(value) if ty == Ty::F64 => (*value as f64).to_bits(),
            Operand::Int(value) if ty == Ty::Pred => {
                if *value & 1 != 0 {
                    u64::MAX
                } else {
                    0
                }
            }
            Operand::Int(value) => match ty.bytes() {
                1 => value & 0xFF,
                2 => value & 0xFFFF,
                _ => *value,
            },
            Operand::F32(bits) => u64::from(*bits),
            Operand::F64(bits) if ty == Ty::F32 => u64::from((f64::from_bits(*bits) as f32).to_bits()),
            Operand::F64(bits) => *bits,
            other => return Err(format!("operand {other:?}")),
        };
        Ok(self.constant(value, ty.wide()))
    }

    /// A destination; `_` means none.
    pub(crate) fn destination(&self, operand: &Operand<'a>) -> Result<u32, String> {
        match operand {
            Operand::Name("_") => Ok(NONE),
            Operand::Name(name) => self.register(name).ok_or_else(|| format!("{name} is not declared")),
            other => Err(format!("destination {other:?}")),
        }
    }

    /// Base register (NONE: 0) and offset of `[base+offset]`.
    pub(crate) fn address(&self, operand: &Operand<'a>) -> Result<(u32, i64), String> {
        let Operand::Address(base, offset) = operand else { return Err(format!("address {operand:?}")) };
        match &**base {
            Operand::Name(name) => match self.symbol(name) {
                Some(Symbol::Register(register)) => Ok((register, *offset)),
                Some(Symbol::Address(address)) => Ok((NONE, address as i64 + offset)),
                None => Err(format!("{name} is not declared")),
            },
            Operand::Int(value) => Ok((NONE, *value as i64 + offset)),
            other => Err(format!("address {other:?}")),
        }
    }

    /// Adds registers to the lists; returns the first index and the number.
    pub(crate) fn list(&mut self, registers: &[u32]) -> (u32, u32) {
        let first = self.program.lists.len() as u32;
        self.program.lists.extend_from_slice(registers);
        (first, registers.len() as u32)
    }

    /// Records that the next instruction jumps to `label`.
    pub(crate) fn branches_to(&mut self, label: &'a str) {
        self.branches.push((self.program.instructions.len(), label));
    }

    /// Emits code that copies arguments, calls, and copies results.
    pub(crate) fn call(
        &mut self,
        name: &'a str,
        results: &[Operand<'a>],
        given: &[Operand<'a>],
    ) -> Result<(), String> {
        let signature =
            self.signatures.get(name).cloned().ok_or_else(|| format!("function {name} is not known"))?;
        if signature.results.len() != results.len() || signature.arguments.len() != given.len() {
            return Err(format!("{name} has other parameters"));
        }
        let own = |operand: &Operand<'a>| match operand {
            Operand::Name(name) => match self.symbol(name) {
                Some(Symbol::Address(address)) => Ok(address as u32),
                _ => Err(format!("parameter {name} is not declared")),
            },
            other => Err(format!("parameter {other:?}")),
        };
        let copy = |to: u32, from: u32, bytes: u64| Instruction {
            op: Op::CopyParameter,
            d: to,
            a: from,
            immediate: bytes as i64,
            ..Self::blank()
        };
        let mut before = Vec::new();
        for (operand, place) in given.iter().zip(&signature.arguments) {
            before.push(copy(place.0 as u32, own(operand)?, place.1));
        }
        let mut after = Vec::new();
        for (operand, place) in results.iter().zip(&signature.results) {
            after.push(copy(own(operand)?, place.0 as u32, place.1));
        }
        before.into_iter().for_each(|i| self.emit(i));
        self.calls.push((self.program.instructions.len(), name));
        self.emit(Instruction { op: Op::Call, ..Self::blank() });
        after.into_iter().for_each(|i| self.emit(i));
        Ok(())
    }
}
