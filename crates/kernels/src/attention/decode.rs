//! Attention of new tokens on a KV cache: the code of forward, with queries at the end of the sequence.

use super::forward::{attention_forward_scratch, run};
use super::tile::{Problem, Span};
use super::{Dims, Options, Selected, check_dims, check_extras};
use crate::error::{Result, check, check_shape};
use crate::{Element, Scratch};

/// KV cache of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Cache<'a, T> {
    /// [capacity, kv_heads, hd]
    pub k: &'a [T],
    /// [capacity, kv_heads, vd]
    pub v: &'a [T],
    /// Number of filled tokens, including the new ones.
    pub len: usize,
}

/// Number of f32 of one scratch slot of [`attention_decode`]; `topk` is that of `selected`.
pub fn attention_decode_scratch<T: Element>(dims: Dims, topk: Option<usize>) -> usize {
    attention_forward_scratch::<T>(dims, topk)
}

/// o [n, heads, vd] of the last n tokens of the cache, whose queries are q [n, heads, hd]. `selected` has a
/// row for each of them.
///
/// ```
/// use ballast_kernels::{Scratch, attention};
///
/// let dims = attention::Dims { heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1 };
/// let (options, mut o) = (attention::Options::default(), [0.0f32]);
/// // Room for three tokens, two of which are filled.
/// let cache = attention::Cache { k: &[1.0, -1.0, 0.0], v: &[2.0, 4.0, 0.0], len: 2 };
/// let scratch = Scratch::new(attention::attention_decode_scratch::<f32>(dims, None));
/// attention::attention_decode(&mut o, &[0.0], &cache, None, None, dims, &options, &scratch)?;
/// assert_eq!(o, [3.0]);
/// # Ok::<(), ballast_kernels::KernelError>(())
/// ```
#[allow(clippy::too_many_arguments)] // outputs, then inputs, then sizes
pub fn attention_decode<T: Element>(
    o: &mut [T],
    q: &[T],
    cache: &Cache<'_, T>,
    sinks: Option<&[f32]>,
    selected: Option<Selected<'_>>,
    dims: Dims,
    options: &Options,
    scratch: &Scratch,
) -> Result {
    check_dims(dims, options)?;
    let queries = q.len() / (dims.heads * dims.head_dim);
    check_shape("q", q, [queries, dims.heads, dims.head_dim])?;
    check_shape("o", o, [queries, dims.heads, dims.value_dim])?;
    check_extras(dims, sinks, selected, queries)?;
    check(queries <= cache.len, || {
        format!("the cache must include the {queries} new tokens, but has only {}", cache.len)
    })?;
    let capacity = cache.k.len() / (dims.kv_heads * dims.head_dim);
    check(cache.len <= capacity, || {
        format!("cache length must be at most its capacity of {capacity}, got {}", cache.len)
    })?;
    check_shape("cache.k", cache.k, [capacity, dims.kv_heads, dims.head_dim])?;
    check_shape("cache.v", cache.v, [capacity, dims.kv_heads, dims.value_dim])?;
    let problem = Problem { q, k: cache.k, v: cache.v, sinks, selected, dims, options: *options };
    let span = Span { query: 0, queries, key: 0, offset: cache.len - queries };
    run(o, None, &problem, &[span], scratch);
    Ok(())
}
