//! The auxiliary loss that spreads tokens over experts, as Switch and transformers have it.

use super::{Dims, Routing, check_dims, route::check_routing};
use crate::error::{Result, check, check_len};

/// E sum_e f_e P_e, from logits [tokens, E] and their routing; dlogits [tokens, E], unless `None`, gets `coefficient`
/// times its gradient added. The rows of several layers may stand one after another, as transformers does it.
pub fn load_balancing_loss(
    dlogits: Option<&mut [f32]>,
    logits: &[f32],
    routing: &Routing,
    coefficient: f32,
    dims: Dims,
) -> Result<f64> {
    check_dims(dims)?;
    let e = dims.experts;
    check(logits.len().is_multiple_of(e), || format!("{} logits, not rows of {e}", logits.len()))?;
    let tokens = logits.len() / e;
    check_routing(routing, tokens, dims)?;
    if tokens == 0 {
        return Ok(0.0);
    }
    let mut share = vec![0f64; e];
    for expert in &routing.experts {
        share[*expert as usize] += 1.0 / tokens as f64;
    }
    let softmax = |row: &[f32], p: &mut Vec<f64>| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        p.clear();
        p.extend(row.iter().map(|l| ((l - max) as f64).exp()));
        let sum: f64 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= sum);
    };
    let (mut p, mut loss) = (Vec::with_capacity(e), 0.0);
    let dot = |p: &[f64]| -> f64 { p.iter().zip(&share).map(|(p, f)| p * f).sum() };
    let scale = e as f64 / tokens as f64;
    for row in logits.chunks(e) {
        softmax(row, &mut p);
        loss += scale * dot(&p);
    }
    if let Some(dlogits) = dlogits {
        check_len("dlogits", dlogits, logits.len())?;
        for (drow, row) in dlogits.chunks_mut(e).zip(logits.chunks(e)) {
            softmax(row, &mut p);
            let along = dot(&p);
            for ((dl, p), f) in drow.iter_mut().zip(&p).zip(&share) {
                *dl += (coefficient as f64 * scale * p * (f - along)) as f32;
            }
        }
    }
    Ok(loss)
}
