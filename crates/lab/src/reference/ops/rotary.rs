//! Rotary embedding of q and k:
//! ```text
//! (x, y) -> m (x cos a - y sin a,  x sin a + y cos a)       a = position f_i       gradient: the same with -a
//! ```
//! The frequencies f_i and the factor m are f32 numbers of the model; angle, sine and cosine are f64. The
//! model rounds its angles to f32.

use std::sync::Arc;

use ballast_kernels::rotary::{Heads, Layout};
use ballast_model::config::Rope;

use super::each_row;
use crate::Result;
use crate::reference::tape::{self, Tape, Value};

/// Cosines and sines of a batch, times m.
#[derive(Debug)]
pub struct Rotation {
    /// [tokens, pairs] of (cos, sin)
    turns: Vec<(f64, f64)>,
    pairs: usize,
    layout: Layout,
}

impl Rotation {
    /// Computes the tables for these positions.
    pub fn new(rope: &Rope, positions: &[u32]) -> Result<Rotation> {
        let rotary = rope.rotary()?;
        let m = rotary.attention_factor() as f64;
        let turn = |position: u32, f: f32| {
            let (sin, cos) = (position as f64 * f as f64).sin_cos();
            (m * cos, m * sin)
        };
        let row = |position: &u32| rotary.inv_freq().iter().map(|f| turn(*position, *f)).collect::<Vec<_>>();
        let turns = positions.iter().flat_map(row).collect();
        Ok(Rotation { turns, pairs: rotary.inv_freq().len(), layout: rope.layout })
    }

    /// Rotates x [tokens, heads, width], by the opposite angles if `back`.
    pub fn rotate(&self, x: &mut [f64], heads: Heads, back: bool) {
        let Heads { heads, width, offset } = heads;
        each_row(x, width, |row, head| {
            let token = row / heads;
            for i in 0..self.pairs {
                let (cos, sin) = self.turns[token * self.pairs + i];
                let sin = if back { -sin } else { sin };
                let (i, j) = match self.layout {
                    Layout::HalfSplit => (offset + i, offset + i + self.pairs),
                    Layout::Interleaved => (offset + 2 * i, offset + 2 * i + 1),
                };
                (head[i], head[j]) = (head[i] * cos - head[j] * sin, head[i] * sin + head[j] * cos);
            }
        });
    }
}

/// Rotates x [tokens, heads, width].
pub fn rotary(tape: &mut Tape<'_>, x: &Value, rotation: &Arc<Rotation>, heads: Heads) -> Value {
    let mut y = x.to_vec();
    rotation.rotate(&mut y, heads, false);
    let (x, rotation) = (x.clone(), rotation.clone());
    tape.record(y, move |dy, sums| {
        let mut dx = dy.to_vec();
        rotation.rotate(&mut dx, heads, true);
        tape::add(sums.of(&x), &dx);
    })
}
