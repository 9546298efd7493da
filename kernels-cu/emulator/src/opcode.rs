//! PTX's names of instructions to operations. What is not known here is refused by name.

use crate::decode::{Decoder, LOCAL_WINDOW, SHARED_WINDOW};
use crate::instruction::{
    Atomic, Compare, Instruction, Mbarrier, NONE, One, Op, Round, Shuffle, Space, Together, Two, Ty,
};
use crate::parse::{Operand, Raw};

type Result<T> = std::result::Result<T, String>;

/// Adds the instructions that `raw` is.
pub(crate) fn decode<'a>(decoder: &mut Decoder<'a>, raw: &Raw<'a>) -> Result<()> {
    let parts: Vec<&str> = raw.opcode.split('.').collect();
    let mut d = Decoding { decoder, operands: &raw.operands, parts, i: Decoder::blank() };
    if d.parts[0] == "call" {
        return d.call();
    }
    d.instruction()?;
    let instruction = d.i;
    decoder.emit(instruction);
    Ok(())
}

struct Decoding<'d, 'a> {
    decoder: &'d mut Decoder<'a>,
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
        self.decoder.source(&operand, ty)
    }

    fn destination(&mut self, index: usize) -> Result<u32> {
        self.decoder.destination(self.operand(index)?)
    }

    fn address(&mut self, index: usize) -> Result<(u32, i64)> {
        self.decoder.address(self.operand(index)?)
    }

    /// The register of `[register]`.
    fn plain_address(&mut self, index: usize) -> Result<u32> {
        match self.address(index)? {
            (NONE, address) => Ok(self.decoder.constant(address as u64, false)),
            (register, 0) => Ok(register),
            _ => Err("an address with an offset".to_string()),
        }
    }

    /// Words between the name and the type must be of `known`.
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
                self.decoder.branches_to(label);
                self.i.op = Op::Branch;
                Ok(())
            }
            "brx" => {
                let Operand::Name(label) = *self.operand(1)? else { return Err("its label".to_string()) };
                self.i.a = self.source(0, Ty::U32)?;
                self.decoder.branches_to(label);
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
                self.i.a = self.decoder.constant(0, true);
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

    fn three(&mut self, exact: &[&str]) -> Result<()> {
        let ty = self.ty()?;
        let double = if ty == Ty::U16 || ty == Ty::S16 { Ty::U32 } else { Ty::U64 };
        let (op, third) = match self.parts[1] {
            "wide" => (Op::MadWide(ty), double),
            "hi" => (Op::MadHigh(ty), ty),
            "lo" => (Op::Mad(ty), ty),
            "rz" => (Op::Fma(ty, Round::Zero), ty),
            "rm" => (Op::Fma(ty, Round::Down), ty),
            "rp" => (Op::Fma(ty, Round::Up), ty),
            part if exact.contains(&part) => (Op::Fma(ty, Round::Nearest), ty),
            part => return Err(format!("modifier .{part}")),
        };
        self.only(2, &[])?;
        let known = [self.parts[0], self.parts[1]];
        self.four(op, [ty, ty, third], &known)
    }

    fn bits(&mut self) -> Result<()> {
        let ty = self.ty()?;
        let (two, pred) = match self.parts[0] {
            "and" => (Two::And, Op::PredAnd),
            "or" => (Two::Or, Op::PredOr),
            _ => (Two::Xor, Op::PredXor),
        };
        self.two(two, ty)?;
        if ty == Ty::Pred {
            self.i.op = pred;
        }
        Ok(())
    }

    fn mov(&mut self) -> Result<()> {
        let ty = self.ty()?;
        match (self.operand(0)?.clone(), self.operand(1)?.clone()) {
            (Operand::List(parts), _) => {
                self.i.a = self.source(1, ty)?;
                let part = self.part(ty, parts.len())?;
                let list: Result<Vec<u32>> = parts.iter().map(|p| self.decoder.destination(p)).collect();
                (self.i.list, self.i.length) = self.decoder.list(&list?);
                self.plain(Op::Unpack(part))
            }
            (_, Operand::List(parts)) => {
                self.i.d = self.destination(0)?;
                let part = self.part(ty, parts.len())?;
                let list: Result<Vec<u32>> = parts.iter().map(|p| self.decoder.source(p, part)).collect();
                (self.i.list, self.i.length) = self.decoder.list(&list?);
                self.plain(Op::Pack(part))
            }
            (_, Operand::Name("%globaltimer")) => {
                self.i.d = self.destination(0)?;
                self.plain(Op::GlobalTime)
            }
            (_, Operand::Name("%clock64" | "%clock")) => {
                self.i.d = self.destination(0)?;
                self.plain(Op::Clock)
            }
            _ => {
                self.i.d = self.destination(0)?;
                self.i.a = self.source(1, ty)?;
                self.plain(if ty == Ty::Pred { Op::MovPred } else { Op::Mov(ty.wide()) })
            }
        }
    }

    /// The type of one of `count` equal parts.
    fn part(&self, whole: Ty, count: usize) -> Result<Ty> {
        match whole.bytes() / count.max(1) as u64 {
            1 => Ok(Ty::U8),
            2 => Ok(Ty::U16),
            4 => Ok(Ty::U32),
            _ => Err(format!("{count} parts")),
        }
    }

    fn convert(&mut self) -> Result<()> {
        let [.., to, from] = self.parts[..] else { return Err("its types".to_string()) };
        let types = Ty::named(to).zip(Ty::named(from));
        let (to, from) = types.ok_or_else(|| format!("types {to} and {from}"))?;
        let (mut round, mut integral, mut saturate, mut relu) = (Round::Nearest, false, false, false);
        for part in &self.parts[1..self.parts.len() - 2] {
            match *part {
                "rn" => round = Round::Nearest,
                "rz" => round = Round::Zero,
                "rm" => round = Round::Down,
                "rp" => round = Round::Up,
                "rni" => (round, integral) = (Round::Nearest, true),
                "rzi" => (round, integral) = (Round::Zero, true),
                "rmi" => (round, integral) = (Round::Down, true),
                "rpi" => (round, integral) = (Round::Up, true),
                "sat" => saturate = true,
                "relu" => relu = true,
                other => return Err(format!("modifier .{other}")),
            }
        }
        self.i.d = self.destination(0)?;
        self.i.a = self.source(1, from)?;
        if matches!(to, Ty::F16x2 | Ty::Bf16x2) {
            if from != Ty::F32 || round != Round::Nearest || saturate || relu {
                return Err("this form of a conversion to two halves".to_string());
            }
            self.i.b = self.source(2, Ty::F32)?;
            return self.plain(Op::ConvertPair(to));
        }
        self.plain(Op::Convert { to, from, round, integral, saturate, relu })
    }

    /// Generic addresses from those of a space, and back.
    fn window(&mut self) -> Result<()> {
        self.i.d = self.destination(0)?;
        self.i.a = self.source(1, Ty::U64)?;
        let window = if self.has("shared") || self.has("shared::cta") {
            SHARED_WINDOW
        } else if self.has("local") || self.has("param") {
            LOCAL_WINDOW
        } else if self.has("global") || self.has("const") {
            0
        } else {
            return Err("its space".to_string());
        };
        self.i.b = self.decoder.constant(window, true);
        self.plain(Op::Two(if self.has("to") { Two::Sub } else { Two::Add }, Ty::U64))
    }

    fn compare(&mut self) -> Result<()> {
        let ty = self.ty()?;
        let compare = match self.parts[1] {
            "eq" => Compare::Eq,
            "ne" => Compare::Ne,
            "lt" | "lo" => Compare::Lt,
            "le" | "ls" => Compare::Le,
            "gt" | "hi" => Compare::Gt,
            "ge" | "hs" => Compare::Ge,
            "equ" => Compare::Equ,
            "neu" => Compare::Neu,
            "ltu" => Compare::Ltu,
            "leu" => Compare::Leu,
            "gtu" => Compare::Gtu,
            "geu" => Compare::Geu,
            "num" => Compare::Num,
            "nan" => Compare::Nan,
            other => return Err(format!("comparison .{other}")),
        };
        self.only(2, &[])?;
        match self.operand(0)?.clone() {
            Operand::Pair(first, second) => {
                self.i.d = self.decoder.destination(&first)?;
                self.i.extra = self.decoder.destination(&second)?;
            }
            first => self.i.d = self.decoder.destination(&first)?,
        }
        self.i.a = self.source(1, ty)?;
        self.i.b = self.source(2, ty)?;
        self.plain(Op::SetPred(compare, ty))
    }

    /// Space, and whether others may touch the memory meanwhile. `from`: the first modifier.
    fn space(&self) -> Result<(Space, bool)> {
        let (mut space, mut shared_by_others) = (Space::Generic, false);
        for part in &self.parts[1..self.parts.len() - 1] {
            match *part {
                "global" | "const" => space = Space::Global,
                "shared" | "shared::cta" => space = Space::Shared,
                "local" | "param" => space = Space::Local,
                "volatile" | "relaxed" | "acquire" | "release" | "acq_rel" | "mmio" => {
                    shared_by_others = true
                }
                "weak" | "cta" | "cluster" | "gpu" | "sys" | "nc" | "ca" | "cg" | "cs" | "cv" | "lu"
                | "wb" | "wt" | "v2" | "v4" | "v8" | "unified" => {}
                part if part.starts_with("L1::") || part.starts_with("L2::") => {}
                other => return Err(format!("modifier .{other}")),
            }
        }
        Ok((space, shared_by_others))
    }

    fn memory(&mut self, load: bool) -> Result<()> {
        let ty = self.ty()?;
        let (space, others) = self.space()?;
        let (values, address) = if load { (0, 1) } else { (1, 0) };
        (self.i.a, self.i.immediate) = self.address(address)?;
        let values = match self.operand(values)?.clone() {
            Operand::List(list) => list,
            one => vec![one],
        };
        let vector = if self.has("v2") {
            2
        } else if self.has("v4") {
            4
        } else if self.has("v8") {
            8
        } else {
            1
        };
        if values.len() != vector {
            return Err(format!("{} registers", values.len()));
        }
        let list: Result<Vec<u32>> = values
            .iter()
            .map(|v| if load { self.decoder.destination(v) } else { self.decoder.source(v, ty) })
            .collect();
        (self.i.list, self.i.length) = self.decoder.list(&list?);
        self.plain(if load { Op::Load(space, ty, others) } else { Op::Store(space, ty, others) })
    }

    fn atomic(&mut self) -> Result<()> {
        let ty = self.ty()?;
        let returns = usize::from(self.parts[0] == "atom");
        let last = self.parts.len() - 2;
        let atomic = match self.parts[last] {
            "add" => Atomic::Add,
            "min" => Atomic::Min,
            "max" => Atomic::Max,
            "and" => Atomic::And,
            "or" => Atomic::Or,
            "xor" => Atomic::Xor,
            "exch" => Atomic::Exchange,
            "cas" => Atomic::CompareSwap,
            "inc" => Atomic::Inc,
            "dec" => Atomic::Dec,
            other => return Err(format!("operation .{other}")),
        };
        if !matches!(ty, Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64 | Ty::F32)
            || (ty == Ty::F32 && atomic != Atomic::Add)
        {
            return Err(format!("type {ty:?}"));
        }
        let parts = self.parts.clone();
        self.parts.remove(last);
        let space = self.space();
        self.parts = parts;
        if returns == 1 {
            self.i.d = self.destination(0)?;
        }
        (self.i.a, self.i.immediate) = self.address(returns)?;
        self.i.b = self.source(returns + 1, ty)?;
        if atomic == Atomic::CompareSwap {
            self.i.c = self.source(returns + 2, ty)?;
        }
        self.plain(Op::Atom(atomic, space?.0, ty))
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
        self.decoder.call(name, results, given)
    }

    fn barrier(&mut self) -> Result<()> {
        let arguments = match &self.parts[1..] {
            ["warp", "sync"] => {
                let mask = self.source(0, Ty::U32)?;
                return self.with_mask(Together::Barrier, mask);
            }
            ["sync"] | ["sync", "aligned"] | ["cta", "sync"] => {
                self.i.op = Op::Barrier { wait: true, reduce: None };
                0
            }
            ["arrive"] | ["arrive", "aligned"] | ["cta", "arrive"] => {
                self.i.op = Op::Barrier { wait: false, reduce: None };
                0
            }
            ["red", how, "pred"] => {
                let two = if *how == "or" { Two::Or } else { Two::And };
                self.i.op = Op::Barrier { wait: true, reduce: Some(two) };
                self.i.d = self.destination(0)?;
                1
            }
            _ => return Err("this form of a barrier".to_string()),
        };
        self.i.a = self.source(arguments, Ty::U32)?;
        let mut next = arguments + 1;
        if self.operands.len() > next + arguments {
            self.i.b = self.source(next, Ty::U32)?;
            next += 1;
        }
        if arguments == 1 {
            self.i.c = self.source(next, Ty::Pred)?;
        }
        Ok(())
    }

    fn mbarrier(&mut self) -> Result<()> {
        if self.parts.iter().any(|p| p.starts_with("shared::cluster")) {
            return Err("a barrier of another block".to_string());
        }
        let (op, address, value) = match &self.parts[1..] {
            ["init", ..] => (Mbarrier::Init, 0, Some(1)),
            ["inval", ..] => (Mbarrier::Invalidate, 0, None),
            ["arrive", "expect_tx", ..] => (Mbarrier::ArriveExpect, 1, Some(2)),
            ["arrive", ..] if !self.has("noComplete") => {
                (Mbarrier::Arrive, 1, (self.operands.len() > 2).then_some(2))
            }
            ["expect_tx", ..] => (Mbarrier::Expect, 0, Some(1)),
            ["test_wait", "parity", ..] => (Mbarrier::Test, 1, Some(2)),
            ["try_wait", "parity", ..] => (Mbarrier::TryWait, 1, Some(2)),
            _ => return Err("this form of an mbarrier".to_string()),
        };
        if address == 1 {
            self.i.d = self.destination(0)?;
        }
        (self.i.a, self.i.immediate) = self.address(address)?;
        self.i.b = match value {
            Some(index) => self.source(index, Ty::U32)?,
            None => self.decoder.constant(1, false),
        };
        self.plain(Op::Mbarrier(op))
    }

    fn copy(&mut self) -> Result<()> {
        match &self.parts[1..] {
            ["async", "commit_group"] => self.plain(Op::CopyCommit),
            ["async", "wait_all"] => {
                self.i.immediate = -1;
                self.plain(Op::CopyWait)
            }
            ["async", "wait_group"] => {
                let Operand::Int(groups) = *self.operand(0)? else { return Err("its number".to_string()) };
                self.i.immediate = groups as i64;
                self.plain(Op::CopyWait)
            }
            ["async", "bulk", "prefetch", ..] => self.plain(Op::Nop),
            ["async", "ca" | "cg", "shared" | "shared::cta", "global", ..] => {
                let Operand::Int(bytes) = *self.operand(2)? else { return Err("its size".to_string()) };
                self.i.d = self.plain_address(0)?;
                self.i.a = self.plain_address(1)?;
                self.i.immediate = bytes as i64;
                self.i.b = if self.operands.len() > 3 {
                    self.source(3, Ty::U32)?
                } else {
                    self.decoder.constant(bytes, false)
                };
                self.plain(Op::Copy)
            }
            [
                "async",
                "bulk",
                "shared::cluster" | "shared::cta",
                "global",
                "mbarrier::complete_tx::bytes",
                rest @ ..,
            ] if rest.is_empty() || rest == ["L2::cache_hint"] => {
                self.i.d = self.plain_address(0)?;
                self.i.a = self.plain_address(1)?;
                self.i.b = self.source(2, Ty::U32)?;
                self.i.c = self.plain_address(3)?;
                self.plain(Op::BulkCopy)
            }
            _ => Err("this form of a copy".to_string()),
        }
    }

    fn with_mask(&mut self, together: Together, mask: u32) -> Result<()> {
        (self.i.list, self.i.length) = self.decoder.list(&[mask]);
        self.plain(Op::Together(together))
    }

    /// Registers of the lists, after the mask of all lanes.
    fn with_lists(&mut self, together: Together, lists: &[(usize, usize)]) -> Result<()> {
        let mut registers = vec![self.decoder.constant(u64::from(u32::MAX), false)];
        for &(index, length) in lists {
            let Operand::List(list) = self.operand(index)?.clone() else {
                return Err("its registers".to_string());
            };
            if list.len() != length {
                return Err(format!("{} registers instead of {length}", list.len()));
            }
            for operand in &list {
                registers.push(self.decoder.source(operand, Ty::U32)?);
            }
        }
        (self.i.list, self.i.length) = self.decoder.list(&registers);
        self.plain(Op::Together(together))
    }

    fn together(&mut self) -> Result<()> {
        let parts = std::mem::take(&mut self.parts);
        let result = self.together_of(&parts);
        self.parts = parts;
        result
    }

    fn together_of(&mut self, parts: &[&str]) -> Result<()> {
        match *parts {
            ["shfl", "sync", mode, "b32"] => {
                let mode = match mode {
                    "up" => Shuffle::Up,
                    "down" => Shuffle::Down,
                    "bfly" => Shuffle::Xor,
                    "idx" => Shuffle::Index,
                    _ => return Err("its mode".to_string()),
                };
                match self.operand(0)?.clone() {
                    Operand::Pair(value, valid) => {
                        self.i.d = self.decoder.destination(&value)?;
                        self.i.extra = self.decoder.destination(&valid)?;
                    }
                    value => self.i.d = self.decoder.destination(&value)?,
                }
                self.i.a = self.source(1, Ty::U32)?;
                self.i.b = self.source(2, Ty::U32)?;
                self.i.c = self.source(3, Ty::U32)?;
                let mask = self.source(4, Ty::U32)?;
                self.with_mask(Together::Shuffle(mode), mask)
            }
            ["vote", "sync", mode, _] => {
                let mode = match mode {
                    "any" => Together::Any,
                    "all" => Together::All,
                    "uni" => Together::Uniform,
                    "ballot" => Together::Ballot,
                    _ => return Err("its mode".to_string()),
                };
                self.i.d = self.destination(0)?;
                // `!%p` is the predicate with `immediate` 1.
                self.i.a = match self.operand(1)?.clone() {
                    Operand::Not(name) => {
                        self.i.immediate = 1;
                        self.decoder.destination(&Operand::Name(name))?
                    }
                    other => self.decoder.source(&other, Ty::Pred)?,
                };
                let mask = self.source(2, Ty::U32)?;
                self.with_mask(mode, mask)
            }
            ["match", "any", "sync", "b32" | "b64"] => {
                self.i.d = self.destination(0)?;
                self.i.a = self.source(1, Ty::U32)?;
                let mask = self.source(2, Ty::U32)?;
                self.with_mask(Together::MatchAny, mask)
            }
            ["redux", "sync", how, ty] => {
                let two = match how {
                    "add" => Two::Add,
                    "min" => Two::Min,
                    "max" => Two::Max,
                    "and" => Two::And,
                    "or" => Two::Or,
                    "xor" => Two::Xor,
                    _ => return Err(format!("operation .{how}")),
                };
                let ty = Ty::named(ty).filter(|t| matches!(t, Ty::U32 | Ty::S32)).ok_or("its type")?;
                self.i.d = self.destination(0)?;
                self.i.a = self.source(1, ty)?;
                let mask = self.source(2, Ty::U32)?;
                self.with_mask(Together::Reduce(two, ty), mask)
            }
            ["elect", "sync"] => {
                let Operand::Pair(lane, elected) = self.operand(0)?.clone() else {
                    return Err("its results".to_string());
                };
                self.i.d = self.decoder.destination(&lane)?;
                self.i.extra = self.decoder.destination(&elected)?;
                let mask = self.source(1, Ty::U32)?;
                self.with_mask(Together::Elect, mask)
            }
            ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", a, b, "f32"] if a == b => {
                let of = Ty::named(a).filter(|t| matches!(t, Ty::F16 | Ty::Bf16)).ok_or("its type")?;
                self.with_lists(Together::Product(of), &[(0, 4), (1, 4), (2, 2), (3, 4)])
            }
            ["stmatrix", "sync", "aligned", "m8n8", count, .., "b16"] => {
                let count = matrices(count)?;
                self.i.a = self.plain_address(0)?;
                let trans = parts.contains(&"trans");
                self.with_lists(Together::StoreMatrix(count, trans), &[(1, count.into())])
            }
            ["ldmatrix", "sync", "aligned", "m8n8", count, .., "b16"] => {
                let count = matrices(count)?;
                self.i.a = self.plain_address(1)?;
                let trans = parts.contains(&"trans");
                self.with_lists(Together::LoadMatrix(count, trans), &[(0, count.into())])
            }
            ["wgmma", "fence", ..] => self.with_lists(Together::WideFence, &[]),
            ["wgmma", "commit_group", ..] => self.with_lists(Together::WideCommit, &[]),
            ["wgmma", "wait_group", ..] => {
                let Operand::Int(groups) = *self.operand(0)? else { return Err("its number".to_string()) };
                self.i.immediate = groups as i64;
                self.with_lists(Together::WideWait, &[])
            }
            ["wgmma", "mma_async", "sync", "aligned", shape, "f32", a, b] if a == b => {
                self.wide_product(shape, a)
            }
            _ => Err("this form of it".to_string()),
        }
    }

    fn wide_product(&mut self, shape: &str, of: &str) -> Result<()> {
        let n = shape
            .strip_prefix("m64n")
            .and_then(|s| s.strip_suffix("k16"))
            .and_then(|n| n.parse::<u16>().ok());
        let n = n.filter(|n| n % 8 == 0 && (8..=256).contains(n)).ok_or_else(|| format!("shape {shape}"))?;
        let of = Ty::named(of).filter(|t| matches!(t, Ty::F16 | Ty::Bf16)).ok_or("its type")?;
        let a_shared = !matches!(self.operand(1)?, Operand::List(_));
        let number = |d: &Self, index: usize| match d.operand(index) {
            Ok(Operand::Int(value)) => Ok(*value),
            _ => Err("its immediates".to_string()),
        };
        if number(self, 4)? != 1 || number(self, 5)? != 1 {
            return Err("negated factors".to_string());
        }
        let (a_trans, b_trans) = if a_shared {
            (number(self, 6)? == 1, number(self, 7)? == 1)
        } else {
            (false, number(self, 6)? == 1)
        };
        if a_trans {
            return Err("A transposed".to_string());
        }
        self.i.b = self.source(2, Ty::U64)?;
        self.i.c = self.source(3, Ty::Pred)?;
        if a_shared {
            self.i.a = self.source(1, Ty::U64)?;
        }
        let sums = usize::from(n) / 2;
        let lists: &[(usize, usize)] = if a_shared { &[(0, sums)] } else { &[(0, sums), (1, 4)] };
        self.with_lists(Together::WideProduct { n, of, a_shared, a_trans, b_trans }, lists)
    }
}

fn matrices(count: &str) -> Result<u8> {
    match count {
        "x1" => Ok(1),
        "x2" => Ok(2),
        "x4" => Ok(4),
        _ => Err(format!("number of matrices {count}")),
    }
}
