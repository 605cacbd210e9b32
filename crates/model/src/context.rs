//! Context parallelism: the ranks of a group share a batch, each with a part of its tokens.
//!
//! A rank computes its own tokens and asks earlier ranks for what they depend on:
//! ```text
//! convolution        the W-1 rows before the part, in their storage type; kept for backward
//! delta rule         the state before the part, head by head, in f32
//! full attention     tokens for heads, in their storage type (layers/heads.rs); not kept
//! sliding window     keys and values inside the window before the part, in their storage type; not kept
//! latent attention   latent rows and indexer keys of the first sequence, in their storage type; not kept
//! ```
//! Only a sequence that crosses a boundary is exchanged, and with a sliding window only the keys inside it.
//! Backward sends the gradients back in f32; the owner adds them in the order of the ranks. Everything else
//! (projections, norms, experts, the loss) is by token, so it is local; sums over the batch (tokens with a
//! target, the balance of the experts) are those of all ranks.
//!
//! Gathered keys are not kept, because memory is the reason to divide a sequence: backward gathers them
//! again. The few rows of the convolution are kept: to ask again would make a rank wait for the one before
//! it, which in backward is behind.
//!
//! All ranks call the same operations in the same order, and lengths follow from the sequence lengths of the
//! whole batch, which every rank knows. So messages carry values only and need no agreement.

use std::borrow::Cow;
use std::ops::Range;

use ballast_cluster::{Group, Kind, Receive};
use ballast_kernels::Element;
use ballast_kernels::elementwise::accumulate;

use crate::batch::{Batch, BatchPart, Piece};
use crate::error::{Error, Result};
use crate::run::zeros;

/// The ranks that share the batch of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context<'a> {
    group: &'a Group,
    part: &'a BatchPart,
}

impl<'a> Context<'a> {
    /// Context of a batch; `None` for a batch that is not divided.
    pub(crate) fn of(batch: &'a Batch, group: Option<&'a Group>) -> Result<Option<Context<'a>>> {
        let Some(part) = &batch.part else { return Ok(None) };
        let (index, of) = (part.index(), part.of());
        match group {
            Some(group) if (group.rank(), group.size()) == (index, of) => Ok(Some(Context { group, part })),
            Some(group) => Err(Error::Input(format!(
                "the batch is part {index} of {of}, but this rank is number {} of {}",
                group.rank(),
                group.size()
            ))),
            None => Err(Error::Input(format!(
                "the batch is part {index} of {of}, but the model has no ranks to share it with; call set_context"
            ))),
        }
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Rows [before + tokens, width]: those of the first sequence on earlier ranks, at most the last `limit`,
    /// then the rank's own. Borrowed if there are no earlier ones.
    pub(crate) fn with_earlier<'r, A: Element>(
        &self,
        kind: Kind,
        rows: &'r [A],
        width: usize,
        limit: Option<usize>,
    ) -> Result<Cow<'r, [A]>> {
        let mut all = self.fetch(kind, rows, width, limit, rows.len())?;
        if all.is_empty() {
            return Ok(Cow::Borrowed(rows));
        }
        all.extend_from_slice(rows);
        Ok(Cow::Owned(all))
    }

    /// Rows [before, width] of the first sequence on earlier ranks, at most the last `limit`. Later ranks get
    /// theirs of `rows`, which are the rank's own.
    pub(crate) fn earlier<A: Element>(
        &self,
        kind: Kind,
        rows: &[A],
        width: usize,
        limit: Option<usize>,
    ) -> Result<Vec<A>> {
        self.fetch(kind, rows, width, limit, 0)
    }

    /// [`Context::earlier`] with room for `room` elements more.
    fn fetch<A: Element>(
        &self,
        kind: Kind,
        rows: &[A],
        width: usize,
        limit: Option<usize>,
        room: usize,
    ) -> Result<Vec<A>> {
        let (rank, part) = (self.rank(), self.part);
        for to in rank + 1..part.of() {
            let shared = part.shared(rank, to, limit);
            if !shared.is_empty() {
                let rows = &rows[shared.start * width..shared.end * width];
                self.group.send(to, kind, bytemuck::cast_slice(rows).to_vec())?;
            }
        }
        let mut receives = Vec::new();
        for from in 0..rank {
            let len = part.shared(from, rank, limit).len() * width;
            if len > 0 {
                receives.push((self.group.receive(from, len * size_of::<A>())?, len));
            }
        }
        let len = part.before(rank, limit) * width;
        let mut earlier: Vec<A> = Vec::with_capacity(if len > 0 { len + room } else { 0 });
        earlier.resize(len, A::default());
        let mut rest = &mut earlier[..];
        for (receive, len) in receives {
            let (target, after) = rest.split_at_mut(len);
            copy_bytes(target, &self.group.wait(receive)?);
            rest = after;
        }
        Ok(earlier)
    }

    /// Sends the gradient [before, width] of the rows that [`Context::earlier`] returned to their owners, and
    /// adds to `own` [rows, width] what later ranks send for the rank's last rows.
    pub(crate) fn give_back(
        &self,
        kind: Kind,
        own: &mut [f32],
        earlier: &[f32],
        width: usize,
        limit: Option<usize>,
    ) -> Result {
        let (rank, part) = (self.rank(), self.part);
        let mut rest = earlier;
        for from in 0..rank {
            let len = part.shared(from, rank, limit).len() * width;
            if len > 0 {
                let (rows, after) = rest.split_at(len);
                self.group.send(from, kind, bytemuck::cast_slice(rows).to_vec())?;
                rest = after;
            }
        }
        // Rows of the part that are not in `own`.
        let skipped = part.tokens(rank).len() - own.len() / width;
        for to in rank + 1..part.of() {
            let shared = part.shared(rank, to, limit);
            if !shared.is_empty() {
                let receive = self.group.receive(to, 4 * shared.len() * width)?;
                let more: Vec<f32> = from_bytes(&self.group.wait(receive)?);
                let rows = (shared.start - skipped) * width..(shared.end - skipped) * width;
                accumulate(&mut own[rows], &more)?;
            }
        }
        Ok(())
    }

    /// Sends values to a rank; nothing if there are none.
    pub(crate) fn send<A: Element>(&self, to: usize, kind: Kind, values: &[A]) -> Result {
        if !values.is_empty() {
            self.group.send(to, kind, bytemuck::cast_slice(values).to_vec())?;
        }
        Ok(())
    }

    /// The sequence of a piece, if other ranks have tokens of it.
    pub(crate) fn crossing(&self, piece: &Piece) -> Option<Crossing> {
        Crossing::new(self.part, piece)
    }

    /// Sends the state of a head to the next rank, or its gradient to the one before.
    pub(crate) fn send_state(&self, to: Neighbor, state: &[f32]) -> Result {
        Ok(self.group.send(self.neighbor(to), Kind::States, bytemuck::cast_slice(state).to_vec())?)
    }

    /// Starts to receive the state of a head, of `len` elements.
    pub(crate) fn receive_state(&self, from: Neighbor, len: usize) -> Result<Receive> {
        Ok(self.group.receive(self.neighbor(from), 4 * len)?)
    }

    /// Waits for the state of a head.
    pub(crate) fn wait_state(&self, state: &mut [f32], receive: Receive) -> Result {
        copy_bytes(state, &self.group.wait(receive)?);
        Ok(())
    }

    fn neighbor(&self, which: Neighbor) -> usize {
        match which {
            Neighbor::Before => self.rank() - 1,
            Neighbor::After => self.rank() + 1,
        }
    }

    /// Values of every rank, by rank; all have as many.
    pub(crate) fn gather(&self, own: &[f64]) -> Result<Vec<Vec<f64>>> {
        Ok(self.group.all_gather_f64(Kind::Scalars, own)?)
    }
}

/// Bytes that a rank sends in the forward and in the backward pass of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) forward: usize,
    pub(crate) backward: usize,
}

/// Rows that a rank sends to later ranks, and those whose gradients it returns to earlier ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rows {
    pub(crate) later: usize,
    pub(crate) earlier: usize,
}

impl Rows {
    /// Rows of [`Context::earlier`] with this limit.
    pub(crate) fn new(part: &BatchPart, limit: Option<usize>) -> Rows {
        let rank = part.index();
        Rows {
            later: (rank + 1..part.of()).map(|to| part.shared(rank, to, limit).len()).sum(),
            earlier: part.before(rank, limit),
        }
    }
}

/// A sequence whose tokens several ranks have.
#[derive(Clone, Debug)]
pub(crate) struct Crossing {
    /// Rows of this rank's part that belong to it.
    pub(crate) rows: Range<usize>,
    /// The ranks that have some of its tokens, in order, and how many.
    pub(crate) ranks: Vec<(usize, usize)>,
    /// Index of this rank among them.
    pub(crate) own: usize,
}

impl Crossing {
    /// The sequence of a piece, if other ranks have tokens of it.
    pub(crate) fn new(part: &BatchPart, piece: &Piece) -> Option<Crossing> {
        if !piece.began && !piece.goes_on {
            return None;
        }
        let sequence = part.sequence_of(part.tokens(part.index()).start + piece.tokens.start);
        let count = |rank: usize| {
            let tokens = part.tokens(rank);
            (rank, tokens.end.min(sequence.end).saturating_sub(tokens.start.max(sequence.start)))
        };
        let ranks: Vec<(usize, usize)> = (0..part.of()).map(count).filter(|(_, count)| *count > 0).collect();
        let own = ranks.iter().position(|(rank, _)| *rank == part.index())?;
        Some(Crossing { rows: piece.tokens.clone(), ranks, own })
    }

    /// Length of the sequence.
    pub(crate) fn tokens(&self) -> usize {
        self.ranks.iter().map(|(_, count)| count).sum()
    }

    /// Rows of each rank in the sequence.
    fn parts(&self) -> impl Iterator<Item = Range<usize>> {
        self.ranks.iter().scan(0, |begin, (_, count)| {
            *begin += count;
            Some(*begin - count..*begin)
        })
    }

    /// Rows of this rank in the sequence.
    pub(crate) fn own_rows(&self) -> Range<usize> {
        self.parts().nth(self.own).unwrap_or_default()
    }

    /// The other ranks, and their rows in the sequence.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let all = self.ranks.iter().zip(self.parts()).enumerate();
        all.filter(|(number, _)| *number != self.own).map(|(_, ((rank, _), rows))| (*rank, rows))
    }

    /// Messages of all ranks by their number of rows: `len` elements for each number of rows; `own` is this
    /// rank's.
    pub(crate) fn gather<A: Element>(
        &self,
        context: &Context<'_>,
        len: impl Fn(usize) -> usize,
        own: impl FnOnce() -> Vec<A>,
    ) -> Result<Vec<Vec<A>>> {
        self.collect(context, |number| len(self.ranks[number].1), own())
    }

    /// Messages of all ranks, in their order: `len` elements of the rank with an index in `ranks`; `own` is
    /// this rank's.
    pub(crate) fn collect<A: Element>(
        &self,
        context: &Context<'_>,
        len: impl Fn(usize) -> usize,
        own: Vec<A>,
    ) -> Result<Vec<Vec<A>>> {
        let mut receives = Vec::new();
        for (number, (rank, _)) in self.ranks.iter().enumerate() {
            let len = if number == self.own { 0 } else { len(number) * size_of::<A>() };
            receives.push(if len > 0 { Some(context.group.receive(*rank, len)?) } else { None });
        }
        let mut own = Some(own);
        let mut messages = Vec::new();
        for (number, receive) in receives.into_iter().enumerate() {
            messages.push(match receive {
                Some(receive) => from_bytes(&context.group.wait(receive)?),
                None if number == self.own => own.take().unwrap_or_default(),
                None => Vec::new(),
            });
        }
        Ok(messages)
    }
}

/// The rank with the tokens before or after this one's.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Neighbor {
    Before,
    After,
}

/// Copies a message, whose length was checked by the transport and whose memory may have any alignment.
fn copy_bytes<A: Element>(target: &mut [A], bytes: &[u8]) {
    bytemuck::cast_slice_mut(target).copy_from_slice(bytes);
}

fn from_bytes<A: Element>(bytes: &[u8]) -> Vec<A> {
    let mut values = zeros(bytes.len() / size_of::<A>());
    copy_bytes(&mut values, bytes);
    values
}
