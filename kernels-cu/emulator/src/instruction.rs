//! Decoded instructions: an operation and offsets in a warp's register file.

/// Type of an instruction's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ty {
    Pred,
    U8,
    S8,
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
    F16,
    Bf16,
    F16x2,
    Bf16x2,
    F32,
    F64,
}

impl Ty {
    /// From its PTX name; bits are unsigned.
    pub(crate) fn named(name: &str) -> Option<Ty> {
        Some(match name {
            "pred" => Ty::Pred,
            "u8" | "b8" => Ty::U8,
            "s8" => Ty::S8,
            "u16" | "b16" => Ty::U16,
            "s16" => Ty::S16,
            "u32" | "b32" => Ty::U32,
            "s32" => Ty::S32,
            "u64" | "b64" => Ty::U64,
            "s64" => Ty::S64,
            "f16" => Ty::F16,
            "bf16" => Ty::Bf16,
            "f16x2" => Ty::F16x2,
            "bf16x2" => Ty::Bf16x2,
            "f32" => Ty::F32,
            "f64" => Ty::F64,
            _ => return None,
        })
    }

    pub(crate) fn bytes(self) -> u64 {
        match self {
            Ty::Pred | Ty::U8 | Ty::S8 => 1,
            Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => 2,
            Ty::U32 | Ty::S32 | Ty::F32 | Ty::F16x2 | Ty::Bf16x2 => 4,
            Ty::U64 | Ty::S64 | Ty::F64 => 8,
        }
    }

    /// Its registers have 64 bits.
    pub(crate) fn wide(self) -> bool {
        self.bytes() == 8
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Two {
    Add,
    Sub,
    Mul,
    MulHigh,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum One {
    Neg,
    Abs,
    Not,
    Count,
    LeadingZeros,
    Reverse,
    /// Position of the highest bit that is not the sign's; of `.shiftamt` what shifts it to the top.
    Find,
    FindShift,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Exp2,
    Log2,
    Sine,
    Cosine,
    Tanh,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// True as well where one is not a number.
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

/// Rounding to an integer or to the type's precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Atomic {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareSwap,
    Inc,
    Dec,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Xor,
    Index,
}

/// What lanes of a warp do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Together {
    Shuffle(Shuffle),
    Any,
    All,
    Uniform,
    Ballot,
    MatchAny,
    Reduce(Two, Ty),
    Elect,
    Barrier,
    /// A product of m16n8k16 fragments of this type.
    Product(Ty),
    /// 8 x 8 matrices, as many; true: transposed.
    StoreMatrix(u8, bool),
    LoadMatrix(u8, bool),
    /// wgmma with N, the type of its factors, A in shared memory, and what is transposed.
    WideProduct {
        n: u16,
        of: Ty,
        a_shared: bool,
        a_trans: bool,
        b_trans: bool,
    },
    WideFence,
    WideCommit,
    WideWait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mbarrier {
    Init,
    Invalidate,
    Arrive,
    ArriveExpect,
    Expect,
    /// Test of a parity; `try_wait` may yield.
    Test,
    TryWait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Nop,
    /// d = a.
    Mov(bool),
    MovPred,
    /// d = a list of equal parts, lowest first.
    Pack(Ty),
    Unpack(Ty),
    Two(Two, Ty),
    One(One, Ty),
    MulWide(Ty),
    /// a * b + c: low half, high half, twice as wide.
    Mad(Ty),
    MadHigh(Ty),
    MadWide(Ty),
    Fma(Ty, Round),
    /// d = a cmp b, d2 (in `extra`) = not.
    SetPred(Compare, Ty),
    PredAnd,
    PredOr,
    PredXor,
    PredNot,
    /// d = c ? a : b.
    Select(bool),
    Convert {
        to: Ty,
        from: Ty,
        round: Round,
        integral: bool,
        saturate: bool,
        relu: bool,
    },
    /// d = {b, a} as two halves.
    ConvertPair(Ty),
    Permute,
    Logic3(u8),
    FunnelLeft(bool),
    FunnelRight(bool),
    Extract(Ty),
    Insert(bool),
    GlobalTime,
    Clock,
    ActiveMask,
    /// `list`: destinations or sources; a: base, `immediate`: offset. True: by atomic instructions.
    Load(Space, Ty, bool),
    Store(Space, Ty, bool),
    /// d: what was there, or none.
    Atom(Atomic, Space, Ty),
    Branch,
    /// By a in `list`.
    BranchIndex,
    Call,
    Return,
    Exit,
    Trap,
    /// `immediate` bytes of parameters from a to d.
    CopyParameter,
    Together(Together),
    /// Named barrier a of b threads; c with `d`: any of the predicates.
    Barrier {
        wait: bool,
        reduce: Option<Two>,
    },
    Mbarrier(Mbarrier),
    /// To shared d from global a; `immediate` bytes, of which b are read.
    Copy,
    CopyCommit,
    CopyWait,
    /// Once the lane's copies are done, an arrival at barrier a; `immediate`: arrivals that its phase waits for in addition.
    CopyArrive,
    /// Bulk copy: to d, from a, b bytes, barrier c.
    BulkCopy,
    Sleep,
    /// A text of the program.
    Unsupported,
}

/// No register.
pub(crate) const NONE: u32 = u32::MAX;
/// A register of constants, which all warps share.
pub(crate) const CONSTANT: u32 = 1 << 31;
/// A register of 64 bits.
pub(crate) const WIDE: u32 = 1 << 30;
/// Its offset.
pub(crate) const OFFSET: u32 = WIDE - 1;

/// One instruction. Registers are byte offsets with the flags above.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instruction {
    pub op: Op,
    /// True: executes where the predicate is false.
    pub guard_not: bool,
    /// Predicate register, or NONE.
    pub guard: u32,
    pub d: u32,
    pub a: u32,
    pub b: u32,
    pub c: u32,
    /// Target of a branch; second destination; index of a text.
    pub extra: u32,
    /// First register of a list in `Program::lists`, and their number.
    pub list: u32,
    pub length: u32,
    pub immediate: i64,
}

/// Where a group goes on.
pub(crate) enum Next {
    Step,
    /// As a step; the instruction looks for what others do.
    Poll,
    Jump(u32),
    /// Its lanes have places of their own.
    Split,
    /// After this instruction, once others had a turn.
    Yield,
}
