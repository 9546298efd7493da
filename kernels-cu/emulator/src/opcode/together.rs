//! What lanes and warps do collectively: barriers, shuffles, votes, products of
//! matrices.

use super::{Decoding, Result};
use crate::instruction::{Op, Shuffle, Together, Two, Ty};
use crate::parse::Operand;

impl<'a> Decoding<'_, 'a> {
    pub(super) fn barrier(&mut self) -> Result<()> {
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

    pub(super) fn with_mask(&mut self, together: Together, mask: u32) -> Result<()> {
        (self.i.list, self.i.length) = self.names.list(&[mask]);
        self.plain(Op::Together(together))
    }

    /// The registers of the lists, after the mask of all lanes.
    pub(super) fn with_lists(&mut self, together: Together, lists: &[(usize, usize)]) -> Result<()> {
        let mut registers = vec![self.names.constant(u64::from(u32::MAX), false)];
        for &(index, length) in lists {
            let Operand::List(list) = self.operand(index)?.clone() else {
                return Err("its registers".to_string());
            };
            if list.len() != length {
                return Err(format!("{} registers instead of {length}", list.len()));
            }
            for operand in &list {
                registers.push(self.names.source(operand, Ty::U32)?);
            }
        }
        (self.i.list, self.i.length) = self.names.list(&registers);
        self.plain(Op::Together(together))
    }

    pub(super) fn together(&mut self) -> Result<()> {
        let parts = std::mem::take(&mut self.parts);
        let result = self.together_of(&parts);
        self.parts = parts;
        result
    }

    pub(super) fn together_of(&mut self, parts: &[&str]) -> Result<()> {
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
                        self.i.d = self.names.destination(&value)?;
                        self.i.extra = self.names.destination(&valid)?;
                    }
                    value => self.i.d = self.names.destination(&value)?,
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
                // `!%p` becomes the predicate with `immediate` 1.
                self.i.a = match self.operand(1)?.clone() {
                    Operand::Not(name) => {
                        self.i.immediate = 1;
                        self.names.destination(&Operand::Name(name))?
                    }
                    other => self.names.source(&other, Ty::Pred)?,
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
                self.i.d = self.names.destination(&lane)?;
                self.i.extra = self.names.destination(&elected)?;
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

    pub(super) fn wide_product(&mut self, shape: &str, of: &str) -> Result<()> {
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
