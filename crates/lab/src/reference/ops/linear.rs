//! Linear layers:
//! ```text
//! y = x W^T        dx = dy W        dW = dy^T x
//! y = x + b        dx = dy          db = sum of dy over the rows
//! ```

use crate::reference::product::{add_outer, add_times, times_transposed};
use crate::reference::tape::{Param, Tape, Value, add};

/// Returns y [tokens, outputs] from x [tokens, inputs] and w [outputs, inputs].
pub fn linear<'w>(tape: &mut Tape<'w>, x: &Value, w: &Param<'w>, inputs: usize) -> Value {
    let outputs = w.values().len() / inputs;
    let y = times_transposed(x, w.values(), inputs, outputs);
    let (x, w) = (x.clone(), w.clone());
    tape.record(y, move |dy, sums| {
        add_times(sums.of(&x), dy, w.values(), inputs, outputs);
        add_outer(sums.parameter(&w), dy, &x, inputs, outputs);
    })
}

/// Returns y [tokens, outputs] = x + b, b `[outputs]`.
pub fn add_bias<'w>(tape: &mut Tape<'w>, x: &Value, b: &Param<'w>) -> Value {
    let width = b.values().len();
    let y = x.chunks(width).flat_map(|row| row.iter().zip(b.values()).map(|(x, b)| x + *b as f64)).collect();
    let (x, b) = (x.clone(), b.clone());
    tape.record(y, move |dy, sums| {
        add(sums.of(&x), dy);
        let db = sums.parameter(&b);
        dy.chunks(width).for_each(|dy| add(db, dy));
    })
}
