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
    /// Parses its PTX name; bit types count as unsigned.
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

    /// Whether its registers have 64 bits.
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
    /// Position of the highest bit that differs from the sign; with `.shiftamt`, the shift that
    /// moves it to the top.
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
    /// Also true if one of the two is NaN.
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

/// What lanes of a warp do collectively.
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
    /// This number of 8 x 8 matrices; true: transposed.
    StoreMatrix(u8, bool),
    LoadMatrix(u8, bool),
    /// wgmma with its N, the type of its factors, whether A is in shared memory, and which factors
    /// are transposed.
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
    /// a * b + c: the low half, the high half, or in twice the width.
    Mad(Ty),
    MadHigh(Ty),
    MadWide(Ty),
    Fma(Ty, Round),
    /// d = a cmp b; d2 (in `extra`) = the opposite.
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
    /// d = {b, a} as a pair of 16-bit floats.
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
    /// `list`: destinations or sources; a: base; `immediate`: offset. True: uses atomic
    /// instructions.
    Load(Space, Ty, bool),
    Store(Space, Ty, bool),
    /// d: the old value, or none.
    Atom(Atomic, Space, Ty),
    Branch,
    /// To entry a of `list`.
    BranchIndex,
    Call,
    Return,
    Exit,
    Trap,
    /// Copies `immediate` bytes of parameters from a to d.
    CopyParameter,
    Together(Together),
    /// Named barrier a of b threads; with `reduce`, d = the predicate c over all of them.
    Barrier {
        wait: bool,
        reduce: Option<Two>,
    },
    Mbarrier(Mbarrier),
    /// To shared d from global a; `immediate` bytes, of which b are read.
    Copy,
    CopyCommit,
    CopyWait,
    /// An arrival at barrier a after the lane's copies; `immediate`: number of arrivals by which its phase grows.
    CopyArrive,
    /// Bulk copy: to d, from a, b bytes, barrier c.
    BulkCopy,
    Sleep,
    /// Not emulated; the text is in the program.
    Unsupported,
}

/// No register.
pub(crate) const NONE: u32 = u32::MAX;
/// Flag: a register of constants, which all warps share.
pub(crate) const CONSTANT: u32 = 1 << 31;
/// Flag: a register of 64 bits.
pub(crate) const WIDE: u32 = 1 << 30;
/// The register's offset, without the flags.
pub(crate) const OFFSET: u32 = WIDE - 1;

/// One instruction. Registers are byte offsets with the flags above.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instruction {
    pub op: Op,
    /// True: executes if the predicate is false.
    pub guard_not: bool,
    /// Predicate register, or NONE.
    pub guard: u32,
    pub d: u32,
    pub a: u32,
    pub b: u32,
    pub c: u32,
    /// Target of a branch; second destination; or index of a text.
    pub extra: u32,
    /// First register of a list in `Program::lists`, and their number.
    pub list: u32,
    pub length: u32,
    pub immediate: i64,
}

/// Where a group continues.
pub(crate) enum Next {
    Step,
    /// As a step, for an instruction that polls for the work of others.
    Poll,
    Jump(u32),
    /// Its lanes are at different places now.
    Split,
    /// After this instruction, once others have had a turn.
    Yield,
}
