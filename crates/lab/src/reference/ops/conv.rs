//! Causal depthwise convolution with W taps per channel, tap W-1 on the token itself, zeros before a
//! sequence:
//! ```text
//! y_t = sum_j w_j x_{t-(W-1)+j}        dx_t = sum_j w_j dy_{t+(W-1)-j}        dw_j = sum_t dy_t x_{t-(W-1)+j}
//! ```

use rayon::prelude::*;

use super::each_row;
use crate::reference::tape::{Param, Tape, Value};

/// Channels per task of a sum over tokens.
const CHANNELS: usize = 64;

/// Returns y [tokens, channels] from x [tokens, channels] and w [channels, 1, taps].
pub fn conv<'w>(tape: &mut Tape<'w>, x: &Value, w: &Param<'w>, taps: usize, cu_seqlens: &[usize]) -> Value {
    let channels = w.values().len() / taps;
    // Begin and end of every token's sequence.
    let sequences: Vec<(usize, usize)> =
        cu_seqlens.windows(2).flat_map(|ends| vec![(ends[0], ends[1]); ends[1] - ends[0]]).collect();
    let mut y = vec![0.0; x.len()];
    each_row(&mut y, channels, |t, y| {
        for back in 0..taps.min(t - sequences[t].0 + 1) {
            let x = &x[(t - back) * channels..][..channels];
            for (c, y) in y.iter_mut().enumerate() {
                *y += w.at(c * taps + taps - 1 - back) * x[c];
            }
        }
    });
    let (x, w) = (x.clone(), w.clone());
    tape.record(y, move |dy, sums| {
        each_row(sums.of(&x), channels, |t, dx| {
            for ahead in 0..taps.min(sequences[t].1 - t) {
                let dy = &dy[(t + ahead) * channels..][..channels];
                for (c, dx) in dx.iter_mut().enumerate() {
                    *dx += w.at(c * taps + taps - 1 - ahead) * dy[c];
                }
            }
        });
        let parts = sums.parameter(&w).par_chunks_mut(CHANNELS * taps).enumerate();
        parts.for_each(|(part, dw)| {
            for (t, (begin, _)) in sequences.iter().enumerate() {
                for back in 0..taps.min(t - begin + 1) {
                    for (c, dw) in dw.chunks_mut(taps).enumerate() {
                        let c = part * CHANNELS + c;
                        dw[taps - 1 - back] += dy[t * channels + c] * x[(t - back) * channels + c];
                    }
                }
            }
        });
    })
}
