//! Sampling by sorting, in f64, and Philox as its authors describe it.

use crate::abi::mpk_sampling;

/// Logits after penalties and temperature; `seen` says whether a token is in the sequence, and how often it occurs as a
/// new token.
pub fn processed(logits: &[f32], seen: &[(bool, u32)], s: &mpk_sampling) -> Vec<f64> {
    let repetition = f64::from(s.repetition);
    logits
        .iter()
        .zip(seen)
        .map(|(&x, &(stands, times))| {
            let mut x = if x.is_nan() { f64::NEG_INFINITY } else { f64::from(x) };
            if stands {
                x = if x > 0.0 { x / repetition } else { x * repetition };
            }
            if times > 0 {
                x -= f64::from(s.presence) + f64::from(s.frequency) * f64::from(times);
            }
            x * f64::from(s.inverse_temperature)
        })
        .collect()
}

/// Tokens by descending value, the lower token first among equals.
pub fn order(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order
}

/// The distribution after the filters: min-p, then top-k, then top-p of the tokens that these two keep.
pub fn filtered(values: &[f64], s: &mpk_sampling) -> Vec<f64> {
    let mut order = order(values);
    let highest = values[order[0]];
    let weight = |t: usize| if values[t] == highest { 1.0 } else { (values[t] - highest).exp() };
    order.retain(|&t| weight(t) >= f64::from(s.log_min_p).exp());
    if s.top_k > 0 {
        order.truncate(s.top_k as usize);
    }
    let all: f64 = order.iter().map(|&t| weight(t)).sum();
    let mut before = 0.0;
    let kept = order.iter().take_while(|&&t| {
        let keeps = s.top_p >= 1.0 || before < f64::from(s.top_p) * all;
        before += weight(t);
        keeps
    });
    let kept = kept.count();
    order.truncate(kept);
    let all: f64 = order.iter().map(|&t| weight(t)).sum();
    let mut probabilities = vec![0.0; values.len()];
    order.iter().for_each(|&t| probabilities[t] = weight(t) / all);
    probabilities
}

/// Philox4x32-10.
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = 0xD251_1F53_u64 * u64::from(counter[0]);
        let b = 0xCD9E_8D57_u64 * u64::from(counter[2]);
        let high = |x: u64| (x >> 32) as u32;
        counter = [high(b) ^ counter[1] ^ key[0], b as u32, high(a) ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The Gumbel noise of a token.
pub fn noise(seed: u64, position: u32, token: u32) -> f64 {
    let word = philox([position, token, 0, 0], [seed as u32, (seed >> 32) as u32])[0];
    let v = ((f64::from(word) + 0.5) * 2f64.powi(-32)).min(1.0 - 2f64.powi(-24));
    -(-(-v).ln_1p()).ln()
}

/// The token that is drawn, and by how much its noisy value is above the next one's.
pub fn draw(values: &[f64], s: &mpk_sampling, position: u32) -> (usize, f64) {
    let kept = filtered(values, s);
    let mut best = (usize::MAX, f64::NEG_INFINITY, f64::NEG_INFINITY);
    for (t, _) in kept.iter().enumerate().filter(|p| *p.1 > 0.0) {
        let noisy = values[t] + noise(s.seed, position, t as u32);
        if noisy > best.1 {
            best = (t, noisy, best.1);
        } else if noisy > best.2 {
            best.2 = noisy;
        }
    }
    (best.0, best.1 - best.2)
}
