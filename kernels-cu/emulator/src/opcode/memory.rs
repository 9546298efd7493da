//! Loads, stores, atomics, mbarriers and copies.

use super::{Decoding, Result};
use crate::instruction::{Atomic, Mbarrier, Op, Space, Ty};
use crate::parse::Operand;

impl<'a> Decoding<'_, 'a> {
    /// The space, and whether others may access the memory meanwhile. `from`: the first
    /// modifier.
    pub(super) fn space(&self) -> Result<(Space, bool)> {
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

    pub(super) fn memory(&mut self, load: bool) -> Result<()> {
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
            .map(|v| if load { self.names.destination(v) } else { self.names.source(v, ty) })
            .collect();
        (self.i.list, self.i.length) = self.names.list(&list?);
        self.plain(if load { Op::Load(space, ty, others) } else { Op::Store(space, ty, others) })
    }

    pub(super) fn atomic(&mut self) -> Result<()> {
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

    pub(super) fn mbarrier(&mut self) -> Result<()> {
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
            None => self.names.constant(1, false),
        };
        self.plain(Op::Mbarrier(op))
    }

    pub(super) fn copy(&mut self) -> Result<()> {
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
            ["async", "mbarrier", "arrive", rest @ .., "shared" | "shared::cta", "b64"]
                if rest.is_empty() || rest == ["noinc"] =>
            {
                let counted = rest.is_empty();
                self.i.a = self.plain_address(0)?;
                self.i.immediate = i64::from(counted);
                self.plain(Op::CopyArrive)
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
                    self.names.constant(bytes, false)
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
}
