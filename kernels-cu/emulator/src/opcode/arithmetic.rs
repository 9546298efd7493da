//! Moves, conversions, comparisons, and instructions with three operands.

use super::{Decoding, Result};
use crate::instruction::{Compare, Op, Round, Two, Ty};
use crate::parse::Operand;
use crate::program::{LOCAL_WINDOW, SHARED_WINDOW};

impl<'a> Decoding<'_, 'a> {
    pub(super) fn three(&mut self, exact: &[&str]) -> Result<()> {
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

    pub(super) fn bits(&mut self) -> Result<()> {
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

    pub(super) fn mov(&mut self) -> Result<()> {
        let ty = self.ty()?;
        match (self.operand(0)?.clone(), self.operand(1)?.clone()) {
            (Operand::List(parts), _) => {
                self.i.a = self.source(1, ty)?;
                let part = self.part(ty, parts.len())?;
                let list: Result<Vec<u32>> = parts.iter().map(|p| self.names.destination(p)).collect();
                (self.i.list, self.i.length) = self.names.list(&list?);
                self.plain(Op::Unpack(part))
            }
            (_, Operand::List(parts)) => {
                self.i.d = self.destination(0)?;
                let part = self.part(ty, parts.len())?;
                let list: Result<Vec<u32>> = parts.iter().map(|p| self.names.source(p, part)).collect();
                (self.i.list, self.i.length) = self.names.list(&list?);
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

    /// The type of a part, if there are `count` equal parts.
    pub(super) fn part(&self, whole: Ty, count: usize) -> Result<Ty> {
        match whole.bytes() / count.max(1) as u64 {
            1 => Ok(Ty::U8),
            2 => Ok(Ty::U16),
            4 => Ok(Ty::U32),
            _ => Err(format!("{count} parts")),
        }
    }

    pub(super) fn convert(&mut self) -> Result<()> {
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

    /// Converts between generic addresses and those of a space.
    pub(super) fn window(&mut self) -> Result<()> {
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
        self.i.b = self.names.constant(window, true);
        self.plain(Op::Two(if self.has("to") { Two::Sub } else { Two::Add }, Ty::U64))
    }

    pub(super) fn compare(&mut self) -> Result<()> {
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
                self.i.d = self.names.destination(&first)?;
                self.i.extra = self.names.destination(&second)?;
            }
            first => self.i.d = self.names.destination(&first)?,
        }
        self.i.a = self.source(1, ty)?;
        self.i.b = self.source(2, ty)?;
        self.plain(Op::SetPred(compare, ty))
    }
}
