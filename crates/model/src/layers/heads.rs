//! Softmax attention over sequences that several ranks share, divided by heads.
//!
//! Every rank has some tokens of the sequence. To gather the keys before them would give the last rank most
//! of the work, because a later query sees more keys. So the ranks exchange tokens for heads: each computes
//! all tokens of the sequence for its share of the query heads, and returns the rows to the ranks that own
//! them.
//! ```text
//! forward    q, k, v -> ranks by heads        o, lse -> ranks by tokens
//! backward   q, k, v, o, do, lse -> by heads  dq, dk, dv -> by tokens
//! ```
//! The work of n ranks is equal if n divides the number of heads, memory is that of the rank's own tokens,
//! and the kernel sees whole sequences, so its results have the bits of one rank. A share that does not end
//! with a group of query heads is computed by kv head; the gradients of a kv head that several ranks use are
//! f32 and are added in the order of the ranks.
//!
//! With a sliding window the work of all tokens is the same, and few keys cross a boundary: then they are
//! gathered.

use std::ops::Range;

use ballast_cluster::{Kind, even_parts};
use ballast_kernels::attention::{self as kernel, Dims, Options};
use ballast_kernels::elementwise::convert;
use ballast_kernels::{Element, Rounding};

use crate::batch::{Piece, Sequences};
use crate::context::{Context, Crossing, Sent};
use crate::error::Result;
use crate::run::{Run, zeros};

/// Inputs of the attention, of the rank's own tokens.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a, A> {
    /// [tokens, heads, hd]
    pub(super) q: &'a [A],
    /// [tokens, kv_heads, hd]
    pub(super) k: &'a [A],
    /// [tokens, kv_heads, vd]
    pub(super) v: &'a [A],
}

/// Query heads of a kernel call, and their kv heads.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    heads: Range<usize>,
    kv: Range<usize>,
}

impl Block {
    fn dims(&self, all: Dims) -> Dims {
        Dims { heads: self.heads.len(), kv_heads: self.kv.len(), ..all }
    }
}

/// Kernel calls of share `number` of `of`: one if the share consists of whole groups, else one for each kv
/// head.
fn blocks(dims: Dims, number: usize, of: usize) -> Vec<Block> {
    let share = even_parts(dims.heads, of)[number].clone();
    let group = dims.group();
    let kv = share.start / group..share.end.div_ceil(group);
    if share.is_empty() {
        return Vec::new();
    }
    if share.start.is_multiple_of(group) && share.end.is_multiple_of(group) {
        return vec![Block { heads: share, kv }];
    }
    let block = |kv: usize| {
        let heads = share.start.max(kv * group)..share.end.min((kv + 1) * group);
        Block { heads, kv: kv..kv + 1 }
    };
    kv.map(block).collect()
}

/// Appends columns `part` of rows [rows, heads, width].
fn take_columns<A: Element>(to: &mut Vec<A>, rows: &[A], heads: usize, width: usize, part: &Range<usize>) {
    for row in rows.chunks_exact(heads * width) {
        to.extend_from_slice(&row[part.start * width..part.end * width]);
    }
}

/// Takes columns `part` of rows [rows, heads, width] from the front of `from`, with `put` for each row.
fn put_columns<A: Element>(
    rows: &mut [A],
    from: &mut &[A],
    heads: usize,
    width: usize,
    part: &Range<usize>,
    put: impl Fn(&mut [A], &[A]),
) {
    let len = part.len() * width;
    for row in rows.chunks_exact_mut(heads * width) {
        let (values, rest) = from.split_at(len);
        put(&mut row[part.start * width..part.end * width], values);
        *from = rest;
    }
}

fn set<A: Element>(to: &mut [A], from: &[A]) {
    to.copy_from_slice(from);
}

fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

/// Tensors of a sequence that ranks exchange, with heads and width.
struct Layout<'a, A> {
    tensors: Vec<(&'a [A], bool, usize)>,
}

impl<A: Element> Layout<'_, A> {
    /// Message with the columns of a share: by block, by tensor, by row.
    fn pack(&self, rows: Range<usize>, dims: Dims, blocks: &[Block]) -> Vec<A> {
        let mut message = Vec::new();
        for block in blocks {
            for (tensor, is_kv, width) in &self.tensors {
                let (heads, part) =
                    if *is_kv { (dims.kv_heads, &block.kv) } else { (dims.heads, &block.heads) };
                let stride = heads * width;
                take_columns(
                    &mut message,
                    &tensor[rows.start * stride..rows.end * stride],
                    heads,
                    *width,
                    part,
                );
            }
        }
        message
    }

    /// Elements of a block in a message of one row.
    fn len(&self, block: &Block) -> usize {
        let len = |(_, is_kv, width): &(&[A], bool, usize)| {
            width * if *is_kv { block.kv.len() } else { block.heads.len() }
        };
        self.tensors.iter().map(len).sum()
    }

    /// Sends to every other rank its share of the rows.
    fn send(&self, context: &Context<'_>, crossing: &Crossing, dims: Dims) -> Result {
        for (number, (rank, _)) in crossing.ranks.iter().enumerate() {
            if number != crossing.own {
                let blocks = blocks(dims, number, crossing.ranks.len());
                context.send(*rank, Kind::Attention, &self.pack(crossing.rows.clone(), dims, &blocks))?;
            }
        }
        Ok(())
    }

    /// Receives this rank's share of all ranks' rows: by block, by tensor, the rows of the whole sequence.
    fn receive(&self, context: &Context<'_>, crossing: &Crossing, dims: Dims) -> Result<Vec<Vec<Vec<A>>>> {
        let blocks = blocks(dims, crossing.own, crossing.ranks.len());
        let row: usize = blocks.iter().map(|block| self.len(block)).sum();
        let messages = crossing.gather(
            context,
            |count| count * row,
            || self.pack(crossing.rows.clone(), dims, &blocks),
        )?;
        let mut all: Vec<Vec<Vec<A>>> = blocks.iter().map(|_| vec![Vec::new(); self.tensors.len()]).collect();
        for (message, (_, count)) in messages.iter().zip(&crossing.ranks) {
            let mut rest = &message[..];
            for (block, tensors) in blocks.iter().zip(&mut all) {
                for ((_, is_kv, width), tensor) in self.tensors.iter().zip(tensors) {
                    let heads = if *is_kv { block.kv.len() } else { block.heads.len() };
                    let (values, after) = rest.split_at(count * heads * width);
                    tensor.extend_from_slice(values);
                    rest = after;
                }
            }
        }
        Ok(all)
    }
}

/// Statistics of the softmax that forward saves, as rows [tokens, heads, 1 or 3]: lse, and m and l if the
/// logits are rounded.
fn join_statistics(saved: &kernel::Saved) -> Vec<f32> {
    if saved.max_sum.is_empty() {
        return saved.lse.clone();
    }
    let both = saved.lse.iter().zip(saved.max_sum.chunks_exact(2));
    both.flat_map(|(lse, max_sum)| [*lse, max_sum[0], max_sum[1]]).collect()
}

fn split_statistics(rows: &[f32], width: usize) -> kernel::Saved {
    if width == 1 {
        return kernel::Saved { lse: rows.to_vec(), max_sum: Vec::new() };
    }
    kernel::Saved {
        lse: rows.chunks_exact(width).map(|row| row[0]).collect(),
        max_sum: rows.chunks_exact(width).flat_map(|row| [row[1], row[2]]).collect(),
    }
}

fn statistics_width(options: &Options) -> usize {
    if options.logits == Rounding::F32 { 1 } else { 3 }
}

fn rows_of(rows: &Range<usize>, stride: usize) -> Range<usize> {
    rows.start * stride..rows.end * stride
}

fn input<'a, A>(q: &'a [A], k: &'a [A], v: &'a [A], cu_seqlens: &'a [usize]) -> kernel::Input<'a, A> {
    kernel::Input { q, k, v, sinks: None, selected: None, before: 0, cu_seqlens }
}

/// o and the statistics of a block of heads of a whole sequence, from its q, k and v.
fn block_forward<A: Element>(
    run: &Run<'_>,
    tensors: &[Vec<A>],
    dims: Dims,
    options: &Options,
) -> Result<(Vec<A>, Vec<f32>)> {
    let (q, k, v) = (&tensors[0], &tensors[1], &tensors[2]);
    let tokens = q.len() / (dims.heads * dims.head_dim);
    let (mut o, mut kept) = (zeros(tokens * dims.heads * dims.value_dim), kernel::Saved::default());
    let cu_seqlens = [0, tokens];
    let input = input(q, k, v, &cu_seqlens);
    kernel::attention_forward(&mut o, Some(&mut kept), &input, dims, options, run.scratch)?;
    Ok((o, join_statistics(&kept)))
}

/// dq, and dk and dv in f32, of a block of heads of a whole sequence, from its q, k, v, o and d_o.
fn block_backward<A: Element>(
    run: &Run<'_>,
    tensors: &[Vec<A>],
    kept: &kernel::Saved,
    dims: Dims,
    options: &Options,
) -> Result<(Vec<A>, Vec<f32>, Vec<f32>)> {
    let (q, k, v, o, d_o) = (&tensors[0], &tensors[1], &tensors[2], &tensors[3], &tensors[4]);
    let (mut dq, mut dk, mut dv) = (zeros::<A>(q.len()), vec![0.0; k.len()], vec![0.0; v.len()]);
    let cu_seqlens = [0, q.len() / (dims.heads * dims.head_dim)];
    let to = kernel::Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, dsinks: None };
    kernel_backward(run, to, [d_o, o], &input(q, k, v, &cu_seqlens), kept, dims, options)?;
    Ok((dq, dk, dv))
}

/// The kernel, with a workspace of its own.
fn kernel_backward<A: Element, K: Element>(
    run: &Run<'_>,
    to: kernel::Grads<'_, A, K>,
    [d_o, o]: [&[A]; 2],
    input: &kernel::Input<'_, A>,
    kept: &kernel::Saved,
    dims: Dims,
    options: &Options,
) -> Result {
    let tokens = input.q.len() / (dims.heads * dims.head_dim);
    let mut workspace = vec![0.0; kernel::attention_backward_workspace::<A>(dims, tokens)];
    kernel::attention_backward(to, d_o, o, input, kept, dims, options, &mut workspace, run.scratch)?;
    Ok(())
}

/// Sends every other rank its rows of two results of this rank's heads. Returns those of this rank's rows, by the
/// rank that computed them; `lens` are their elements.
fn return_rows<X: Element, Y: Element>(
    context: &Context<'_>,
    crossing: &Crossing,
    part_of: impl Fn(&Range<usize>) -> (Vec<X>, Vec<Y>),
    lens: impl Fn(usize) -> (usize, usize),
) -> Result<Vec<(Vec<X>, Vec<Y>)>> {
    for (rank, rows) in crossing.others() {
        let (first, second) = part_of(&rows);
        context.send(rank, Kind::Attention, &first)?;
        context.send(rank, Kind::Attention, &second)?;
    }
    let (first, second) = part_of(&crossing.own_rows());
    let first = crossing.collect(context, |number| lens(number).0, first)?;
    let second = crossing.collect(context, |number| lens(number).1, second)?;
    Ok(first.into_iter().zip(second).collect())
}

/// o [tokens, heads, vd] of the rank's own tokens; `saved` takes what backward needs.
pub(super) fn forward<A: Element>(
    run: &Run<'_>,
    context: &Context<'_>,
    o: &mut [A],
    saved: Option<&mut kernel::Saved>,
    inputs: Inputs<'_, A>,
    dims: Dims,
    options: &Options,
) -> Result {
    let Inputs { q, k, v } = inputs;
    let Dims { heads, kv_heads, head_dim: hd, value_dim: vd } = dims;
    let width = statistics_width(options);
    let mut statistics = vec![0.0; run.tokens() * heads * width];
    let layout = Layout { tensors: vec![(q, false, hd), (k, true, hd), (v, true, vd)] };
    let pieces = run.sequences().pieces();
    let crossings: Vec<Crossing> = pieces.iter().filter_map(|piece| context.crossing(piece)).collect();
    for crossing in &crossings {
        layout.send(context, crossing, dims)?;
    }
    for piece in pieces.iter().filter(|piece| !piece.began && !piece.goes_on) {
        let (rows, mut kept) = (&piece.tokens, kernel::Saved::default());
        let (q, k, v) = (
            &q[rows_of(rows, heads * hd)],
            &k[rows_of(rows, kv_heads * hd)],
            &v[rows_of(rows, kv_heads * vd)],
        );
        let (o, input) = (&mut o[rows_of(rows, heads * vd)], input(q, k, v, &piece.cu_seqlens));
        kernel::attention_forward(o, Some(&mut kept), &input, dims, options, run.scratch)?;
        statistics[rows_of(rows, heads * width)].copy_from_slice(&join_statistics(&kept));
    }
    for crossing in &crossings {
        let of = crossing.ranks.len();
        let own = blocks(dims, crossing.own, of);
        let mut results = Vec::new();
        for (block, tensors) in own.iter().zip(layout.receive(context, crossing, dims)?) {
            results.push(block_forward(run, &tensors, block.dims(dims), options)?);
        }
        let part_of = |rows: &Range<usize>| {
            let (mut outputs, mut rest) = (Vec::new(), Vec::new());
            for (block, (o, statistics)) in own.iter().zip(&results) {
                outputs.extend_from_slice(&o[rows_of(rows, block.heads.len() * vd)]);
                rest.extend_from_slice(&statistics[rows_of(rows, block.heads.len() * width)]);
            }
            (outputs, rest)
        };
        let share = |number: usize| even_parts(heads, of)[number].len() * crossing.rows.len();
        let lens = |number| (share(number) * vd, share(number) * width);
        for (number, (outputs, rest)) in return_rows(context, crossing, part_of, lens)?.iter().enumerate() {
            let (mut outputs, mut rest) = (&outputs[..], &rest[..]);
            let o = &mut o[rows_of(&crossing.rows, heads * vd)];
            let statistics = &mut statistics[rows_of(&crossing.rows, heads * width)];
            for block in blocks(dims, number, of) {
                put_columns(o, &mut outputs, heads, vd, &block.heads, set);
                put_columns(statistics, &mut rest, heads, width, &block.heads, set);
            }
        }
    }
    if let Some(saved) = saved {
        *saved = split_statistics(&statistics, width);
    }
    Ok(())
}

/// Gradients of q, k and v of the rank's own tokens, from `d_o` and what forward returned and saved.
#[allow(clippy::too_many_arguments)] // run, then outputs, then inputs
pub(super) fn backward<A: Element>(
    run: &Run<'_>,
    context: &Context<'_>,
    d_o: &[A],
    o: &[A],
    inputs: Inputs<'_, A>,
    saved: &kernel::Saved,
    dims: Dims,
    options: &Options,
) -> Result<(Vec<A>, Vec<A>, Vec<A>)> {
    let Inputs { q, k, v } = inputs;
    let Dims { heads, kv_heads, head_dim: hd, value_dim: vd } = dims;
    let width = statistics_width(options);
    let statistics = join_statistics(saved);
    let (mut dq, mut dk, mut dv) = (zeros::<A>(q.len()), zeros::<A>(k.len()), zeros::<A>(v.len()));
    let layout = Layout {
        tensors: vec![(q, false, hd), (k, true, hd), (v, true, vd), (o, false, vd), (d_o, false, vd)],
    };
    let rest = Layout { tensors: vec![(&statistics[..], false, width)] };
    let pieces = run.sequences().pieces();
    let crossings: Vec<Crossing> = pieces.iter().filter_map(|piece| context.crossing(piece)).collect();
    for crossing in &crossings {
        layout.send(context, crossing, dims)?;
        rest.send(context, crossing, dims)?;
    }
    for piece in pieces.iter().filter(|piece| !piece.began && !piece.goes_on) {
        let rows = &piece.tokens;
        let (queries, keys, values, outputs) = (
            rows_of(rows, heads * hd),
            rows_of(rows, kv_heads * hd),
            rows_of(rows, kv_heads * vd),
            rows_of(rows, heads * vd),
        );
        let kept = split_statistics(&statistics[rows_of(rows, heads * width)], width);
        let input = input(&q[queries.clone()], &k[keys.clone()], &v[values.clone()], &piece.cu_seqlens);
        let (dq, dk, dv) = (&mut dq[queries], &mut dk[keys], &mut dv[values]);
        let to = kernel::Grads { dq, dk, dv, dsinks: None };
        kernel_backward(run, to, [&d_o[outputs.clone()], &o[outputs]], &input, &kept, dims, options)?;
    }
    for crossing in &crossings {
        let of = crossing.ranks.len();
        let own = blocks(dims, crossing.own, of);
        let tensors = layout.receive(context, crossing, dims)?;
        let kept = rest.receive(context, crossing, dims)?;
        let mut results = Vec::new();
        for ((block, tensors), kept) in own.iter().zip(tensors).zip(kept) {
            let kept = split_statistics(&kept[0], width);
            results.push(block_backward(run, &tensors, &kept, block.dims(dims), options)?);
        }
        let part_of = |rows: &Range<usize>| {
            let (mut queries, mut keys) = (Vec::new(), Vec::new());
            for (block, (dq, dk, dv)) in own.iter().zip(&results) {
                queries.extend_from_slice(&dq[rows_of(rows, block.heads.len() * hd)]);
                keys.extend_from_slice(&dk[rows_of(rows, block.kv.len() * hd)]);
                keys.extend_from_slice(&dv[rows_of(rows, block.kv.len() * vd)]);
            }
            (queries, keys)
        };
        let count = crossing.rows.len();
        let kv_of =
            |number: usize| blocks(dims, number, of).iter().map(|block| block.kv.len()).sum::<usize>();
        let queries_of = |number: usize| even_parts(heads, of)[number].len() * count * hd;
        let lens = |number| (queries_of(number), kv_of(number) * count * (hd + vd));
        let rows = return_rows(context, crossing, part_of, lens)?;
        let (mut sum_k, mut sum_v) = (vec![0.0; count * kv_heads * hd], vec![0.0; count * kv_heads * vd]);
        for (number, (queries, keys)) in rows.iter().enumerate() {
            let (mut queries, mut keys) = (&queries[..], &keys[..]);
            for block in blocks(dims, number, of) {
                let dq = &mut dq[rows_of(&crossing.rows, heads * hd)];
                put_columns(dq, &mut queries, heads, hd, &block.heads, set);
                put_columns(&mut sum_k, &mut keys, kv_heads, hd, &block.kv, add);
                put_columns(&mut sum_v, &mut keys, kv_heads, vd, &block.kv, add);
            }
        }
        convert(&mut dk[rows_of(&crossing.rows, kv_heads * hd)], &sum_k)?;
        convert(&mut dv[rows_of(&crossing.rows, kv_heads * vd)], &sum_v)?;
    }
    Ok((dq, dk, dv))
}

/// Temporary bytes of [`backward`] beyond the gradients that it returns: the rank's share of the longest
/// sequence that it exchanges, with the kernel's workspace.
pub(super) fn transient<A: Element>(sequences: Sequences<'_>, dims: Dims) -> usize {
    let Some(part) = sequences.part else { return 0 };
    let share = |piece: &Piece| {
        let Some(crossing) = Crossing::new(part, piece) else { return 0 };
        let Dims { head_dim: hd, value_dim: vd, .. } = dims;
        let bytes = |block: &Block| {
            let queries = block.heads.len() * (2 * hd + 2 * vd) * size_of::<A>();
            let keys = block.kv.len() * (hd + vd) * (size_of::<A>() + 4);
            let tokens = crossing.tokens();
            let workspace = 4 * kernel::attention_backward_workspace::<A>(block.dims(dims), tokens);
            tokens * (queries + keys) + workspace
        };
        blocks(dims, crossing.own, crossing.ranks.len()).iter().map(bytes).sum()
    };
    sequences.pieces().iter().map(share).max().unwrap_or(0)
}

/// Bytes that [`forward`] and [`backward`] send.
pub(super) fn sent<A: Element>(sequences: Sequences<'_>, dims: Dims, options: &Options) -> Sent {
    let (mut sent, width) = (Sent::default(), statistics_width(options));
    let Dims { head_dim: hd, value_dim: vd, .. } = dims;
    let Some(part) = sequences.part else { return sent };
    for crossing in sequences.pieces().iter().filter_map(|piece| Crossing::new(part, piece)) {
        let heads_of = |number: usize| {
            let blocks = blocks(dims, number, crossing.ranks.len());
            blocks.iter().fold((0, 0), |sum, block| (sum.0 + block.heads.len(), sum.1 + block.kv.len()))
        };
        let (own, own_kv) = heads_of(crossing.own);
        for (number, (_, rows)) in
            crossing.ranks.iter().enumerate().filter(|(number, _)| *number != crossing.own)
        {
            let (heads, kv) = heads_of(number);
            let keys = kv * (hd + vd);
            sent.forward += crossing.rows.len() * (heads * hd + keys) * size_of::<A>();
            sent.forward += rows * own * (vd * size_of::<A>() + 4 * width);
            let there = (heads * (hd + 2 * vd) + keys) * size_of::<A>() + 4 * heads * width;
            sent.backward += crossing.rows.len() * there;
            sent.backward += rows * (own * hd * size_of::<A>() + 4 * own_kv * (hd + vd));
        }
    }
    sent
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_heads_once_by_whole_groups_where_they_can() {
        for (heads, kv_heads, of) in
            [(8, 2, 2), (8, 2, 4), (8, 2, 3), (6, 3, 4), (4, 4, 3), (2, 1, 5), (5, 1, 1)]
        {
            let dims = Dims { heads, kv_heads, head_dim: 4, value_dim: 4 };
            let all: Vec<Block> = (0..of).flat_map(|number| blocks(dims, number, of)).collect();
            assert!(all.iter().flat_map(|block| block.heads.clone()).eq(0..heads), "{heads} {kv_heads} {of}");
            for block in &all {
                let dims = block.dims(dims);
                assert!(dims.heads.is_multiple_of(dims.kv_heads), "{block:?}");
                // The kernel's head h uses kv head h / group.
                for (h, head) in block.heads.clone().enumerate() {
                    assert_eq!(block.kv.start + h / dims.group(), head / (heads / kv_heads), "{block:?}");
                }
            }
        }
        let dims = Dims { heads: 8, kv_heads: 2, head_dim: 4, value_dim: 4 };
        assert_eq!(blocks(dims, 1, 2), [Block { heads: 4..8, kv: 1..2 }]);
        assert_eq!(blocks(dims, 1, 3), [Block { heads: 2..4, kv: 0..1 }, Block { heads: 4..5, kv: 1..2 }]);
    }
}
