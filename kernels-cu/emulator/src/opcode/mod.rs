//! Maps PTX instruction names to operations. Unknown names are refused.

use crate::instruction::{Instruction, NONE, One, Op, Two, Ty};
use crate::names::Names;
use crate::parse::{Operand, Raw};

mod arithmetic;
mod memory;
mod together;

type Result<T> = std::result::Result<T, String>;

/// Adds the instructions for `raw`.
pub(crate) fn decode<'a>(names: &mut Names<'a>, raw: &Raw<'a>) -> Result<()> {
    let parts: Vec<&str> = raw.opcode.split('.').collect();
    let mut d = Decoding { names, operands: &raw.operands, parts, i: Names::blank() };
    if d.parts[0] == "call" {
        return d.call();
    }
    d.instruction()?;
    let instruction = d.i;
    names.emit(instruction);
    Ok(())
}

struct Decoding<'d, 'a> {
    names: &'d mut Names<'a>,
    operands: &'d [Operand<'a>],
    parts: Vec<&'a str>,
    i: Instruction,
}

impl<'a> Decoding<'_, 'a> {
    /// The type that the opcode ends with.
    fn ty(&self) -> Result<Ty> {
        let last = self.parts.last().copied().unwrap_or_default();
        Ty::named(last).ok_or_else(|| format!("type {last}"))
    }

    fn operand(&self, index: usize) -> Result<&Operand<'a>> {
        self.operands.get(index).ok_or_else(|| format!("it has {} operands", self.operands.len()))
    }

    fn source(&mut self, index: usize, ty: Ty) -> Result<u32> {
        let operand = self.operand(index)?.clone();
        self.names.source(&operand, ty)
    }

    fn destination(&mut self, index: usize) -> Result<u32> {
        self.names.destination(self.operand(index)?)
    }

    fn address(&mut self, index: usize) -> Result<(u32, i64)> {
        self.names.address(self.operand(index)?)
    }

    /// The register of `[register]`.
    fn plain_address(&mut self, index: usize) -> Result<u32> {
        match self.address(index)? {
            (NONE, address) => Ok(self.names.constant(address as u64, false)),
            (register, 0) => Ok(register),
            _ => Err("an address with an offset".to_string()),
        }
    }

    /// Checks that the words between the name and the type are among `known`.
    fn only(&self, from: usize, known: &[&str]) -> Result<()> {
        let end = self.parts.len().saturating_sub(1).max(from);
        match self.parts[from.min(end)..end].iter().find(|part| !known.contains(part)) {
            Some(part) => Err(format!("modifier .{part}")),
            None => Ok(()),
        }
    }

    fn has(&self, part: &str) -> bool {
        self.parts.contains(&part)
    }

    /// d, a, b of one type; `shift`: b has 32 bits.
    fn two(&mut self, two: Two, ty: Ty) -> Result<()> {
        self.i.d = self.destination(0)?;
        self.i.a = self.source(1, ty)?;
        let shift = matches!(two, Two::Shl | Two::Shr);
        self.i.b = self.source(2, if shift { Ty::U32 } else { ty })?;
        self.i.op = Op::Two(two, ty);
        Ok(())
    }

    fn one(&mut self, one: One, ty: Ty) -> Result<()> {
        self.i.d = self.destination(0)?;
        self.i.a = self.source(1, ty)?;
        self.i.op = Op::One(one, ty);
        self.i.immediate = self.has("ftz").into();
        Ok(())
    }

    fn instruction(&mut self) -> Result<()> {
        let exact = ["rn", "lo"];
        match self.parts[0] {
            "add" | "sub" | "min" | "max" | "div" | "rem" => {
                let two = match self.parts[0] {
                    "add" => Two::Add,
                    "sub" => Two::Sub,
                    "min" => Two::Min,
                    "max" => Two::Max,
                    "div" => Two::Div,
                    _ => Two::Rem,
                };
                self.only(1, if two == Two::Div { &["rn", "full", "approx"] } else { &["rn"] })?;
                self.two(two, self.ty()?)
            }
            "mul" if self.has("wide") => {
                let ty = self.ty()?;
                self.two(Two::Mul, ty)?;
                self.i.op = Op::MulWide(ty);
                Ok(())
            }
            "mul" => {
                self.only(1, &["rn", "lo", "hi"])?;
                self.two(if self.has("hi") { Two::MulHigh } else { Two::Mul }, self.ty()?)
            }
            "mad" | "fma" => self.three(&exact),
            "and" | "or" | "xor" => self.bits(),
            "not" if self.ty()? == Ty::Pred => {
                self.i.d = self.destination(0)?;
                self.i.a = self.source(1, Ty::Pred)?;
                self.i.op = Op::PredNot;
                Ok(())
            }
            "shl" => self.two(Two::Shl, self.ty()?),
            "shr" => self.two(Two::Shr, self.ty()?),
            "neg" => self.one(One::Neg, self.ty()?),
            "abs" => self.one(One::Abs, self.ty()?),
            "not" => self.one(One::Not, self.ty()?),
            "popc" => self.one(One::Count, self.ty()?),
            "clz" => self.one(One::LeadingZeros, self.ty()?),
            "brev" => self.one(One::Reverse, self.ty()?),
            "bfind" => self.one(if self.has("shiftamt") { One::FindShift } else { One::Find }, self.ty()?),
            "sqrt" => self.one(One::Sqrt, self.ty()?),
            "rsqrt" => self.one(One::Rsqrt, self.ty()?),
            "rcp" => self.one(One::Reciprocal, self.ty()?),
            "ex2" => self.one(One::Exp2, self.ty()?),
            "lg2" => self.one(One::Log2, self.ty()?),
            "sin" => self.one(One::Sine, self.ty()?),
            "cos" => self.one(One::Cosine, self.ty()?),
            "tanh" => self.one(One::Tanh, self.ty()?),
            "mov" => self.mov(),
            "cvt" => self.convert(),
            "cvta" => self.window(),
            "setp" => self.compare(),
            "selp" => {
                let ty = self.ty()?;
                self.i.d = self.destination(0)?;
                self.i.a = self.source(1, ty)?;
                self.i.b = self.source(2, ty)?;
                self.i.c = self.source(3, Ty::Pred)?;
                self.i.op = Op::Select(ty.wide());
                Ok(())
            }
            "prmt" => self.four(Op::Permute, [Ty::U32; 3], &["prmt", "b32"]),
            "lop3" => {
                let Operand::Int(table) = *self.operand(4)? else { return Err("its table".to_string()) };
                self.four(Op::Logic3(table as u8), [Ty::U32; 3], &["lop3", "b32"])
            }
            "shf" => {
                let op = if self.has("l") { Op::FunnelLeft } else { Op::FunnelRight };
                self.four(op(self.has("wrap")), [Ty::U32; 3], &["shf", "l", "r", "wrap", "clamp", "b32"])
            }
            "bfe" => {
                let ty = self.ty()?;
                self.four(Op::Extract(ty), [ty, Ty::U32, Ty::U32], &["bfe", "u32", "s32", "u64", "s64"])
            }
            "bfi" => {
                let ty = self.ty()?;
                self.i.list = self.source(4, Ty::U32)?;
                self.four(Op::Insert(ty.wide()), [ty, ty, Ty::U32], &["bfi", "b32", "b64"])
            }
            "ld" | "ldu" => self.memory(true),
            "st" => self.memory(false),
            "atom" | "red" => self.atomic(),
            "bra" => {
                let Operand::Name(label) = *self.operand(0)? else { return Err("its label".to_string()) };
                self.names.branches_to(label);
                self.i.op = Op::Branch;
                Ok(())
            }
            "brx" => {
                let Operand::Name(label) = *self.operand(1)? else { return Err("its label".to_string()) };
                self.i.a = self.source(0, Ty::U32)?;
                self.names.branches_to(label);
                self.i.op = Op::BranchIndex;
                Ok(())
            }
            "ret" => self.plain(Op::Return),
            "exit" => self.plain(Op::Exit),
            "trap" => self.plain(Op::Trap),
            // Memory is sequentially consistent here, and caches are not modelled.
            "fence" | "membar" | "prefetch" | "prefetchu" | "setmaxnreg" | "discard" | "applypriority" => {
                self.plain(Op::Nop)
            }
            "createpolicy" => {
                self.i.d = self.destination(0)?;
                self.i.a = self.names.constant(0, true);
                self.plain(Op::Mov(true))
            }
            "nanosleep" => {
                self.i.a = self.source(0, Ty::U32)?;
                self.plain(Op::Sleep)
            }
            "activemask" => {
                self.i.d = self.destination(0)?;
                self.plain(Op::ActiveMask)
            }
            "shfl" | "vote" | "match" | "redux" | "elect" | "mma" | "stmatrix" | "ldmatrix" | "wgmma" => {
                self.together()
            }
            "bar" | "barrier" => self.barrier(),
            "mbarrier" => self.mbarrier(),
            "cp" => self.copy(),
            _ => Err("it is not known".to_string()),
        }
    }

    fn plain(&mut self, op: Op) -> Result<()> {
        self.i.op = op;
        Ok(())
    }

    /// d, a, b, c.
    fn four(&mut self, op: Op, types: [Ty; 3], known: &[&str]) -> Result<()> {
        self.only(0, known)?;
        self.i.d = self.destination(0)?;
        self.i.a = self.source(1, types[0])?;
        self.i.b = self.source(2, types[1])?;
        self.i.c = self.source(3, types[2])?;
        self.plain(op)
    }

    fn call(&mut self) -> Result<()> {
        let none = Vec::new();
        let (results, name, given) = match self.operands {
            [Operand::List(results), Operand::Name(name), Operand::List(given)] => (results, *name, given),
            [Operand::Name(name), Operand::List(given)] => (&none, *name, given),
            [Operand::List(results), Operand::Name(name)] => (results, *name, &none),
            [Operand::Name(name)] => (&none, *name, &none),
            _ => return Err("this form of a call".to_string()),
        };
        self.names.call(name, results, given)
    }
}
