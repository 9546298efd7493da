//! Resolves the names of a parsed module: registers, variables, labels and functions to offsets.

use crate::instruction::{CONSTANT, Instruction, NONE, Op, Ty, WIDE};
use crate::opcode;
use crate::parse::{self, Function, Module, Operand, Place, Raw, Statement, Variable};
use std::collections::HashMap;
use std::sync::Arc;

/// Generic addresses of a block's shared memory begin here, and those of a thread's local memory.
pub(crate) const SHARED_WINDOW: u64 = 1 << 56;
pub(crate) const LOCAL_WINDOW: u64 = 2 << 56;

/// Special registers that hold the same all the time, in the order of `Program::specials`.
pub(crate) const SPECIALS: [&str; 20] = [
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%warpid",
    "%lanemask_eq",
    "%lanemask_lt",
    "%lanemask_le",
    "%lanemask_gt",
    "%lanemask_ge",
    "%smid",
];

/// A kernel that can be launched.
#[derive(Debug)]
pub(crate) struct Entry {
    pub start: u32,
    /// Offset in local memory and bytes of each parameter.
    pub parameters: Vec<(u64, u64)>,
}

/// A decoded PTX file.
#[derive(Debug)]
pub struct Program {
    pub(crate) instructions: Vec<Instruction>,
    pub(crate) places: Vec<Place>,
    pub(crate) lists: Vec<u32>,
    pub(crate) texts: Vec<String>,
    pub(crate) entries: HashMap<String, Entry>,
    /// First instruction and name of each function.
    pub(crate) functions: Vec<(u32, String)>,
    pub(crate) files: HashMap<u32, String>,
    pub(crate) constants: Arc<Vec<u64>>,
    /// Registers of `SPECIALS`.
    pub(crate) specials: Vec<u32>,
    pub(crate) register_bytes: usize,
    /// Of a thread: parameters and local variables.
    pub(crate) local_bytes: u64,
    /// Static shared memory; the dynamic part follows.
    pub(crate) shared_bytes: u64,
    /// Variables of the whole program; never moved, since addresses of them are constants.
    pub(crate) globals: Vec<Box<[u64]>>,
}

impl Program {
    /// Reads PTX.
    ///
    /// # Errors
    /// It is not PTX as nvcc writes it. Instructions that are not known are errors only when one is executed.
    pub fn new(text: &str) -> Result<Program, String> {
        let module = parse::parse(text)?;
        let mut decoder = Decoder::new(&module);
        decoder.module(&module)?;
        Ok(decoder.finish(&module))
    }

    /// The instructions that would be errors: opcode and line of the PTX.
    pub fn unsupported(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().map(String::as_str)
    }

    /// Names of the kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Number of instructions.
    pub fn len(&self) -> usize {
        self.instructions.len()
    }

    /// True where there is none.
    pub fn is_empty(&self) -> bool {
        self.instructions.is_empty()
    }

    /// Words for the place of the instruction `at`.
    pub(crate) fn place(&self, at: u32) -> String {
        let Some(place) = self.places.get(at as usize) else { return format!("instruction {at}") };
        let function = self.functions.iter().rev().find(|f| f.0 <= at).map_or("?", |f| &f.1);
        let mut text = format!("{function}, PTX line {}", place.line);
        if let Some(file) = self.files.get(&place.file) {
            let file = file.split("/./").last().unwrap_or(file);
            text += &format!(", {file}:{}", place.source_line);
        }
        text
    }
}

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Symbol {
    Register(u32),
    /// Address in the space of the variable: a thread's local memory (parameters too), shared, global.
    Address(u64),
}

/// Registers of one declaration: `%r<9>`.
#[derive(Clone, Copy, Debug)]
struct Range {
    first: u32,
    bytes: u32,
    count: u32,
}

/// Parameters of a function: results, then arguments, as (offset in local memory, bytes).
#[derive(Clone, Debug, Default)]
struct Signature {
    results: Vec<(u64, u64)>,
    arguments: Vec<(u64, u64)>,
    start: Option<u32>,
}

pub(crate) struct Decoder<'a> {
    pub program: Program,
    constants: Vec<u64>,
    known_constants: HashMap<(u64, bool), u32>,
    scopes: Vec<HashMap<&'a str, Symbol>>,
    ranges: HashMap<&'a str, Range>,
    signatures: HashMap<&'a str, Signature>,
    /// Of the function: its labels, and the instructions that name one.
    labels: HashMap<&'a str, u32>,
    targets: HashMap<&'a str, Vec<&'a str>>,
    branches: Vec<(usize, &'a str)>,
    calls: Vec<(usize, &'a str)>,
    place: Place,
}

impl<'a> Decoder<'a> {
    fn new(module: &Module<'a>) -> Self {
        let program = Program {
            instructions: Vec::new(),
            places: Vec::new(),
            lists: Vec::new(),
            texts: Vec::new(),
            entries: HashMap::new(),
            functions: Vec::new(),
            files: module.files.iter().map(|(&number, name)| (number, (*name).to_string())).collect(),
            constants: Arc::default(),
            specials: Vec::new(),
            register_bytes: 0,
            local_bytes: 0,
            shared_bytes: 0,
            globals: Vec::new(),
        };
        Decoder {
            program,
            constants: Vec::new(),
            known_constants: HashMap::new(),
            scopes: vec![HashMap::new()],
            ranges: HashMap::new(),
            signatures: HashMap::new(),
            labels: HashMap::new(),
            targets: HashMap::new(),
            branches: Vec::new(),
            calls: Vec::new(),
            place: Place::default(),
        }
    }

    fn module(&mut self, module: &Module<'a>) -> Result<(), String> {
        for name in SPECIALS {
            let register = self.registers(1, 128);
            self.program.specials.push(register);
            self.scopes[0].insert(name, Symbol::Register(register));
        }
        // Dynamic shared memory lies after all that has a size.
        let (sized, dynamic): (Vec<_>, Vec<_>) = module.variables.iter().partition(|v| v.bytes != 0);
        for variable in sized {
            self.variable(variable)?;
        }
        for function in &module.functions {
            for variable in function.body.iter().flatten() {
                if let Statement::Variable(variable) = variable
                    && variable.space == ".shared"
                {
                    self.variable(variable)?;
                }
            }
        }
        for variable in dynamic {
            self.program.shared_bytes = self.program.shared_bytes.next_multiple_of(variable.align);
            self.scopes[0].insert(variable.name, Symbol::Address(self.program.shared_bytes));
        }
        for function in &module.functions {
            if !self.signatures.contains_key(function.name) {
                let signature = Signature {
                    results: self.parameters(&function.returns),
                    arguments: self.parameters(&function.params),
                    start: None,
                };
                self.signatures.insert(function.name, signature);
            }
        }
        for function in &module.functions {
            if let Some(body) = &function.body {
                self.function(function, body)?;
            }
        }
        for (at, name) in std::mem::take(&mut self.calls) {
            match self.signatures.get(name).and_then(|s| s.start) {
                Some(start) => self.program.instructions[at].extra = start,
                None => self.unsupported(at, format!("call of {name}, which has no body")),
            }
        }
        Ok(())
    }

    fn finish(mut self, module: &Module<'a>) -> Program {
        for function in module.functions.iter().filter(|f| f.entry) {
            if let Some(Signature { arguments, start: Some(start), .. }) = self.signatures.get(function.name)
            {
                let entry = Entry { start: *start, parameters: arguments.clone() };
                self.program.entries.insert(function.name.to_string(), entry);
            }
        }
        self.program.constants = Arc::new(self.constants);
        self.program
    }

    /// Offset of `count` registers of `bytes`.
    fn registers(&mut self, count: u32, bytes: u32) -> u32 {
        let first = self.program.register_bytes.next_multiple_of(128);
        self.program.register_bytes = first + count as usize * bytes as usize;
        first as u32
    }

    fn parameters(&mut self, list: &[Variable<'a>]) -> Vec<(u64, u64)> {
        list.iter().map(|v| (self.local(v.bytes, v.align), v.bytes)).collect()
    }

    fn local(&mut self, bytes: u64, align: u64) -> u64 {
        let offset = self.program.local_bytes.next_multiple_of(align.max(8));
        self.program.local_bytes = offset + bytes;
        offset
    }

    fn variable(&mut self, variable: &Variable<'a>) -> Result<(), String> {
        let address = match variable.space {
            ".local" | ".param" => self.local(variable.bytes, variable.align),
            ".shared" => {
                let offset = self.program.shared_bytes.next_multiple_of(variable.align);
                self.program.shared_bytes = offset + variable.bytes;
                self.scopes[0].insert(variable.name, Symbol::Address(offset));
                return Ok(());
            }
            _ => {
                if variable.align > 8 {
                    return Err(format!("variable {} is aligned to {}", variable.name, variable.align));
                }
                let mut words = vec![0u64; (variable.bytes as usize).div_ceil(8).max(1)].into_boxed_slice();
                for (i, value) in variable.values.iter().enumerate() {
                    let (at, size) = (i * variable.element as usize, variable.element as usize);
                    for byte in 0..size {
                        let (word, shift) = ((at + byte) / 8, (at + byte) % 8 * 8);
                        words[word] |= (value >> (byte * 8) & 0xFF) << shift;
                    }
                }
                let address = words.as_ptr() as u64;
                self.program.globals.push(words);
                address
            }
        };
        self.declare(variable.name, Symbol::Address(address));
        Ok(())
    }

    fn declare(&mut self, name: &'a str, symbol: Symbol) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name, symbol);
        }
    }

    fn function(&mut self, function: &Function<'a>, body: &[Statement<'a>]) -> Result<(), String> {
        let start = self.program.instructions.len() as u32;
        self.program.functions.push((start, function.name.to_string()));
        let mut names = HashMap::new();
        if let Some(signature) = self.signatures.get_mut(function.name) {
            signature.start = Some(start);
            let all = signature.results.iter().chain(&signature.arguments);
            for (variable, place) in function.returns.iter().chain(&function.params).zip(all) {
                names.insert(variable.name, Symbol::Address(place.0));
            }
        }
        self.scopes.push(names);
        self.ranges.clear();
        self.labels.clear();
        self.targets.clear();
        let mut last_label = "";
        for statement in body {
            match statement {
                Statement::Open => self.scopes.push(HashMap::new()),
                Statement::Close => {
                    self.scopes.pop();
                }
                Statement::Registers(kind, names) => self.declare_registers(kind, names)?,
                Statement::Variable(variable) if variable.space == ".shared" => {}
                Statement::Variable(variable) => self.variable(variable)?,
                Statement::Label(name) => {
                    last_label = name;
                    self.labels.insert(name, self.program.instructions.len() as u32);
                }
                Statement::Targets(list) => {
                    self.targets.insert(last_label, list.clone());
                }
                Statement::Instruction(raw) => self.instruction(raw),
            }
        }
        self.scopes.truncate(1);
        // A function without `ret` at its end falls off nowhere.
        self.emit(Instruction { op: Op::Return, ..Self::blank() });
        for (at, label) in std::mem::take(&mut self.branches) {
            if self.program.instructions[at].op == Op::BranchIndex {
                let list = self.targets.get(label).ok_or_else(|| format!("no targets at label {label}"))?;
                let mut places = Vec::new();
                for name in list {
                    places.push(*self.labels.get(name).ok_or_else(|| format!("no label {name}"))?);
                }
                let instruction = &mut self.program.instructions[at];
                (instruction.list, instruction.length) =
                    (self.program.lists.len() as u32, places.len() as u32);
                self.program.lists.extend(places);
            } else {
                let place = self.labels.get(label).ok_or_else(|| format!("no label {label}"))?;
                self.program.instructions[at].extra = *place;
            }
        }
        Ok(())
    }

    fn declare_registers(&mut self, kind: &str, names: &[(&'a str, Option<u32>)]) -> Result<(), String> {
        let ty =
            Ty::named(kind.trim_start_matches('.')).ok_or_else(|| format!("registers of type {kind}"))?;
        let bytes = if ty == Ty::Pred {
            4
        } else if ty.wide() {
            256
        } else {
            128
        };
        for &(name, count) in names {
            let first = self.registers(count.unwrap_or(1), bytes) | if ty.wide() { WIDE } else { 0 };
            match count {
                Some(count) => {
                    self.ranges.insert(name, Range { first, bytes, count });
                }
                None => self.declare(name, Symbol::Register(first)),
            }
        }
        Ok(())
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

    fn unsupported(&mut self, at: usize, text: String) {
        let line = self.program.places[at].line;
        self.program.instructions[at].op = Op::Unsupported;
        self.program.instructions[at].extra = self.program.texts.len() as u32;
        self.program.texts.push(format!("{text} (PTX line {line})"));
    }

    fn instruction(&mut self, raw: &Raw<'a>) {
        self.place = raw.place;
        let first = self.program.instructions.len();
        let result = opcode::decode(self, raw);
        let guard = raw.guard.and_then(|(not, name)| Some((not, self.register(name)?)));
        let problem = match (result, raw.guard.is_some() && guard.is_none()) {
            (Err(problem), _) => Some(problem),
            (Ok(()), true) => Some("its predicate is not declared".to_string()),
            (Ok(()), false) => None,
        };
        if let Some(problem) = problem {
            self.program.instructions.truncate(first);
            self.program.places.truncate(first);
            self.branches.retain(|b| b.0 < first);
            self.calls.retain(|c| c.0 < first);
            self.emit(Self::blank());
            self.unsupported(first, format!("{}: {problem}", raw.opcode));
        }
        if let Some((not, register)) = guard {
            for instruction in &mut self.program.instructions[first..] {
                (instruction.guard, instruction.guard_not) = (register, not);
            }
        }
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

    /// A register of constants that holds `value` in all lanes.
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

    /// A destination; `_` is none.
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

    /// Adds registers to the lists: first and number.
    pub(crate) fn list(&mut self, registers: &[u32]) -> (u32, u32) {
        let first = self.program.lists.len() as u32;
        self.program.lists.extend_from_slice(registers);
        (first, registers.len() as u32)
    }

    /// The next instruction jumps to `label`.
    pub(crate) fn branches_to(&mut self, label: &'a str) {
        self.branches.push((self.program.instructions.len(), label));
    }

    /// Copies arguments, calls, copies results.
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
