//! Runs a warp: each lane has its own place; lanes at the same place execute together.

use crate::execute::execute;
use crate::instruction::{NONE, Next};
use crate::state::Context;

/// Executes up to about `quantum` instructions of a warp, and returns their number.
pub(crate) fn run(context: &mut Context<'_>, quantum: u32) -> Result<u32, String> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has these features.
        return unsafe { run_with_vectors(context, quantum) };
    }
    steps(context, quantum)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_with_vectors(context: &mut Context<'_>, quantum: u32) -> Result<u32, String> {
    steps(context, quantum)
}

#[inline(always)]
fn steps(context: &mut Context<'_>, quantum: u32) -> Result<u32, String> {
    let mut executed = 0;
    loop {
        let ready = context.warp.ready();
        if ready == 0 {
            return Ok(executed);
        }
        let (mut pc, group, next) = context.warp.group(ready);
        loop {
            if executed >= quantum {
                context.warp.go(group, pc);
                if group != ready {
                    context.warp.passed |= group;
                }
                return Ok(executed);
            }
            let instruction = &context.program.instructions[pc as usize];
            let mask = match instruction.guard {
                NONE => group,
                guard => {
                    let bits = context.warp.registers.predicate(guard);
                    group & if instruction.guard_not { !bits } else { bits }
                }
            };
            executed += 1;
            if mask == 0 {
                pc += 1;
            } else {
                match execute(context, instruction, pc, mask, group) {
                    Ok(Next::Step) => pc += 1,
                    // It waits for others, so the turn ends sooner.
                    Ok(Next::Poll) => {
                        pc += 1;
                        executed += 8;
                    }
                    Ok(Next::Jump(to)) => pc = to,
                    Ok(Next::Split) => break,
                    Ok(Next::Yield) => {
                        context.warp.go(group, pc + 1);
                        if group != ready {
                            context.warp.passed |= group;
                        }
                        return Ok(executed);
                    }
                    Err(problem) => {
                        let place = context.program.place(pc);
                        let (block, warp) = (context.block.index, context.warp.number);
                        return Err(format!(
                            "{problem}; {place}, block {block}, warp {warp}, lanes {mask:#x}"
                        ));
                    }
                }
            }
            if pc >= next {
                context.warp.go(group, pc);
                break;
            }
        }
    }
}
