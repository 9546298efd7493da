//! Walks over a parsed module: places variables, functions and labels, and decodes instructions.

use crate::instruction::{Instruction, Op, Ty, WIDE};
use crate::names::{Names, Range, Signature, Symbol};
use crate::opcode;
use crate::parse::{self, Function, Module, Raw, Statement, Variable};
use crate::program::{Entry, Program, SPECIALS, SUMS_AT_ONCE};
use std::collections::HashMap;
use std::sync::Arc;

impl Program {
    /// Reads PTX.
    ///
    /// # Errors
    /// The text is not PTX as nvcc writes it. An unknown instruction is an error only when it is executed.
    pub fn new(text: &str) -> Result<Program, String> {
        let module = parse::parse(text)?;
        let mut decoder = Decoder::new(&module);
        decoder.module(&module)?;
        let mut program = decoder.finish(&module);
        program.sums_at_once = text.lines().any(|line| line == SUMS_AT_ONCE);
        Ok(program)
    }
}

/// The walk over a module.
struct Decoder<'a> {
    names: Names<'a>,
    /// The labels of the current function, and the lists of labels for indexed branches.
    labels: HashMap<&'a str, u32>,
    targets: HashMap<&'a str, Vec<&'a str>>,
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
            sums_at_once: false,
        };
        Decoder { names: Names::new(program), labels: HashMap::new(), targets: HashMap::new() }
    }

    fn module(&mut self, module: &Module<'a>) -> Result<(), String> {
        for name in SPECIALS {
            let register = self.registers(1, 128);
            self.names.program.specials.push(register);
            self.names.scopes[0].insert(name, Symbol::Register(register));
        }
        // Dynamic shared memory comes after all variables that have a size.
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
            self.names.program.shared_bytes =
                self.names.program.shared_bytes.next_multiple_of(variable.align);
            self.names.scopes[0].insert(variable.name, Symbol::Address(self.names.program.shared_bytes));
        }
        for function in &module.functions {
            if !self.names.signatures.contains_key(function.name) {
                let signature = Signature {
                    results: self.parameters(&function.returns),
                    arguments: self.parameters(&function.params),
                    start: None,
                };
                self.names.signatures.insert(function.name, signature);
            }
        }
        for function in &module.functions {
            if let Some(body) = &function.body {
                self.function(function, body)?;
            }
        }
        for (at, name) in std::mem::take(&mut self.names.calls) {
            match self.names.signatures.get(name).and_then(|s| s.start) {
                Some(start) => self.names.program.instructions[at].extra = start,
                None => self.names.unsupported(at, format!("call of {name}, which has no body")),
            }
        }
        Ok(())
    }

    fn finish(mut self, module: &Module<'a>) -> Program {
        for function in module.functions.iter().filter(|f| f.entry) {
            if let Some(Signature { arguments, start: Some(start), .. }) =
                self.names.signatures.get(function.name)
            {
                let entry = Entry { start: *start, parameters: arguments.clone() };
                self.names.program.entries.insert(function.name.to_string(), entry);
            }
        }
        self.names.program.constants = Arc::new(self.names.constants);
        self.names.program
    }

    /// Offset of `count` registers of `bytes` bytes each.
    fn registers(&mut self, count: u32, bytes: u32) -> u32 {
        let first = self.names.program.register_bytes.next_multiple_of(128);
        self.names.program.register_bytes = first + count as usize * bytes as usize;
        first as u32
    }

    fn parameters(&mut self, list: &[Variable<'a>]) -> Vec<(u64, u64)> {
        list.iter().map(|v| (self.local(v.bytes, v.align), v.bytes)).collect()
    }

    fn local(&mut self, bytes: u64, align: u64) -> u64 {
        let offset = self.names.program.local_bytes.next_multiple_of(align.max(8));
        self.names.program.local_bytes = offset + bytes;
        offset
    }

    fn variable(&mut self, variable: &Variable<'a>) -> Result<(), String> {
        let address = match variable.space {
            ".local" | ".param" => self.local(variable.bytes, variable.align),
            ".shared" => {
                let offset = self.names.program.shared_bytes.next_multiple_of(variable.align);
                self.names.program.shared_bytes = offset + variable.bytes;
                self.names.scopes[0].insert(variable.name, Symbol::Address(offset));
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
                self.names.program.globals.push(words);
                address
            }
        };
        self.names.declare(variable.name, Symbol::Address(address));
        Ok(())
    }

    fn function(&mut self, function: &Function<'a>, body: &[Statement<'a>]) -> Result<(), String> {
        let start = self.names.program.instructions.len() as u32;
        self.names.program.functions.push((start, function.name.to_string()));
        let mut names = HashMap::new();
        if let Some(signature) = self.names.signatures.get_mut(function.name) {
            signature.start = Some(start);
            let all = signature.results.iter().chain(&signature.arguments);
            for (variable, place) in function.returns.iter().chain(&function.params).zip(all) {
                names.insert(variable.name, Symbol::Address(place.0));
            }
        }
        self.names.scopes.push(names);
        self.names.ranges.clear();
        self.labels.clear();
        self.targets.clear();
        let mut last_label = "";
        for statement in body {
            match statement {
                Statement::Open => self.names.scopes.push(HashMap::new()),
                Statement::Close => {
                    self.names.scopes.pop();
                }
                Statement::Registers(kind, names) => self.declare_registers(kind, names)?,
                Statement::Variable(variable) if variable.space == ".shared" => {}
                Statement::Variable(variable) => self.variable(variable)?,
                Statement::Label(name) => {
                    last_label = name;
                    self.labels.insert(name, self.names.program.instructions.len() as u32);
                }
                Statement::Targets(list) => {
                    self.targets.insert(last_label, list.clone());
                }
                Statement::Instruction(raw) => self.instruction(raw),
            }
        }
        self.names.scopes.truncate(1);
        // A function without `ret` at its end must not run into the next one.
        self.names.emit(Instruction { op: Op::Return, ..Names::blank() });
        for (at, label) in std::mem::take(&mut self.names.branches) {
            if self.names.program.instructions[at].op == Op::BranchIndex {
                let list = self.targets.get(label).ok_or_else(|| format!("no targets at label {label}"))?;
                let mut places = Vec::new();
                for name in list {
                    places.push(*self.labels.get(name).ok_or_else(|| format!("no label {name}"))?);
                }
                let instruction = &mut self.names.program.instructions[at];
                (instruction.list, instruction.length) =
                    (self.names.program.lists.len() as u32, places.len() as u32);
                self.names.program.lists.extend(places);
            } else {
                let place = self.labels.get(label).ok_or_else(|| format!("no label {label}"))?;
                self.names.program.instructions[at].extra = *place;
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
                    self.names.ranges.insert(name, Range { first, bytes, count });
                }
                None => self.names.declare(name, Symbol::Register(first)),
            }
        }
        Ok(())
    }

    fn instruction(&mut self, raw: &Raw<'a>) {
        self.names.place = raw.place;
        let first = self.names.program.instructions.len();
        let result = opcode::decode(&mut self.names, raw);
        let guard = raw.guard.and_then(|(not, name)| Some((not, self.names.register(name)?)));
        let problem = match (result, raw.guard.is_some() && guard.is_none()) {
            (Err(problem), _) => Some(problem),
            (Ok(()), true) => Some("its predicate is not declared".to_string()),
            (Ok(()), false) => None,
        };
        if let Some(problem) = problem {
            self.names.program.instructions.truncate(first);
            self.names.program.places.truncate(first);
            self.names.branches.retain(|b| b.0 < first);
            self.names.calls.retain(|c| c.0 < first);
            self.names.emit(Names::blank());
            self.names.unsupported(first, format!("{}: {problem}", raw.opcode));
        }
        if let Some((not, register)) = guard {
            for instruction in &mut self.names.program.instructions[first..] {
                (instruction.guard, instruction.guard_not) = (register, not);
            }
        }
    }
}
