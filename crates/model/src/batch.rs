//! Batches: several sequences packed end to end, with their targets and positions.
//!
//! A batch can be divided over several ranks ([`Batch::part()`]). A part has contiguous tokens, so at most
//! its first sequence began on an earlier rank and at most its last one continues on a later one.

use std::ops::Range;

use ballast_kernels::packing::check_cu_seqlens;

use crate::error::{Error, Result};

/// Target of a token that is excluded from the loss, as in PyTorch.
pub const IGNORED: i64 = -100;

/// Sequences packed end to end, without padding: [`Batch::padded`] removes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids: `[tokens]`
    pub ids: Vec<u32>,
    /// Target of each token, the id that it should predict or [`IGNORED`]: `[tokens]`
    pub targets: Vec<i64>,
    /// Cumulative sequence lengths: `[sequences + 1]`, from 0 to the number of tokens.
    pub cu_seqlens: Vec<usize>,
    /// Position of each token in its sequence: `[tokens]`
    pub positions: Vec<u32>,
    /// Place in a larger batch, if this is a part of one: see [`Batch::part()`].
    pub part: Option<BatchPart>,
}

/// Place of a part in the batch whose tokens are divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPart {
    index: usize,
    of: usize,
    /// Cumulative sequence lengths of the whole batch.
    cu_seqlens: Vec<usize>,
    /// Number of tokens of the whole batch that have a target.
    counted: usize,
}

impl Batch {
    /// Packs sequences with these boundaries. The target of a token is the next token; the last of a sequence
    /// has none.
    pub fn packed(ids: Vec<u32>, cu_seqlens: Vec<usize>) -> Result<Batch> {
        let labels: Vec<i64> = ids.iter().map(|id| *id as i64).collect();
        Batch::with_labels(ids, &labels, cu_seqlens)
    }

    /// Packs sequences with labels aligned to the ids, as in transformers: token t has the target label t +
    /// 1.
    pub fn with_labels(ids: Vec<u32>, labels: &[i64], cu_seqlens: Vec<usize>) -> Result<Batch> {
        let tokens = check_cu_seqlens(&cu_seqlens)?;
        if ids.len() != tokens || labels.len() != tokens {
            return Err(Error::Input(format!(
                "cu_seqlens ends at {tokens} tokens, got {} ids and {} labels",
                ids.len(),
                labels.len()
            )));
        }
        let (mut targets, mut positions) = (vec![IGNORED; tokens], vec![0; tokens]);
        for ends in cu_seqlens.windows(2) {
            for t in ends[0]..ends[1] {
                positions[t] = (t - ends[0]) as u32;
                if t + 1 < ends[1] {
                    targets[t] = labels[t + 1];
                }
            }
        }
        Ok(Batch { ids, targets, cu_seqlens, positions, part: None })
    }

    /// Makes a batch of equally long sequences from ids [rows, columns].
    pub fn rows(ids: Vec<u32>, columns: usize) -> Result<Batch> {
        if columns == 0 || !ids.len().is_multiple_of(columns) {
            return Err(Error::Input(format!("ids must fill rows of {columns}, got {} ids", ids.len())));
        }
        let ends = (0..=ids.len() / columns).map(|row| row * columns).collect();
        Batch::packed(ids, ends)
    }

    /// Packs rows of `columns` tokens without their padding, which is where `mask` is false: before or after
    /// a row's tokens. Labels are as in [`Batch::with_labels`].
    pub fn padded(ids: &[u32], labels: &[i64], mask: &[bool], columns: usize) -> Result<Batch> {
        if columns == 0
            || ids.len() != mask.len()
            || ids.len() != labels.len()
            || !ids.len().is_multiple_of(columns)
        {
            return Err(Error::Input(format!(
                "ids, labels and mask must have the same length, a multiple of the row length {columns}, got {}, \
                 {} and {}",
                ids.len(),
                labels.len(),
                mask.len()
            )));
        }
        let kept = |row: usize| (row * columns..(row + 1) * columns).filter(|t| mask[*t]);
        let rows = ids.len() / columns;
        for (row, mask) in mask.chunks(columns).enumerate() {
            let end = mask.iter().rposition(|kept| *kept).map_or(0, |last| last + 1);
            let begin = mask.iter().position(|kept| *kept).unwrap_or(end);
            if let Some(gap) = mask[begin..end].iter().position(|kept| !kept) {
                // Removing the gap would change the positions of the tokens after it.
                return Err(Error::Input(format!(
                    "row {row} is masked at column {}, between unmasked tokens; padding must come before or after \
                     all tokens of a row",
                    begin + gap
                )));
            }
        }
        let order: Vec<usize> = (0..rows).flat_map(kept).collect();
        let mut ends = vec![0];
        for row in 0..rows {
            ends.push(ends[row] + kept(row).count());
        }
        let labels: Vec<i64> = order.iter().map(|t| labels[*t]).collect();
        Batch::with_labels(order.iter().map(|t| ids[*t]).collect(), &labels, ends)
    }

    /// Returns part `index` of `of` parts with nearly equal numbers of tokens. Positions and targets are
    /// those of the whole batch. One part of one is the batch itself.
    pub fn part(&self, index: usize, of: usize) -> Result<Batch> {
        if self.part.is_some() {
            return Err(Error::Input(
                "a part of a batch cannot be divided again; divide the whole batch".into(),
            ));
        }
        if of <= 1 && index == 0 {
            return Ok(self.clone());
        }
        let part = BatchPart::new(&self.cu_seqlens, self.counted(), index, of)?;
        let tokens = part.tokens(index);
        Ok(Batch {
            ids: self.ids[tokens.clone()].to_vec(),
            targets: self.targets[tokens.clone()].to_vec(),
            positions: self.positions[tokens].to_vec(),
            cu_seqlens: part.local(),
            part: Some(part),
        })
    }

    /// Sequence lengths, and the place in a larger batch.
    pub(crate) fn sequences(&self) -> Sequences<'_> {
        Sequences { cu_seqlens: &self.cu_seqlens, part: self.part.as_ref() }
    }

    /// Number of tokens that have a target, in all parts.
    pub(crate) fn counted_in_whole(&self) -> usize {
        self.part.as_ref().map_or_else(|| self.counted(), |part| part.counted)
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Number of tokens that have a target.
    pub fn counted(&self) -> usize {
        self.targets.iter().filter(|target| **target != IGNORED).count()
    }

    /// Returns an error unless every id and target is below `vocabulary`.
    pub fn check(&self, vocabulary: usize) -> Result {
        let bad = |value: i64| value != IGNORED && !(0..vocabulary as i64).contains(&value);
        let ids = self.ids.iter().map(|id| *id as i64);
        if let Some((at, id)) = ids.clone().enumerate().find(|(_, id)| bad(*id)) {
            return Err(Error::Input(format!(
                "token {at} has the id {id}, outside the vocabulary of {vocabulary}"
            )));
        }
        match self.targets.iter().enumerate().find(|(_, target)| bad(**target)) {
            Some((at, target)) => Err(Error::Input(format!(
                "token {at} has the target {target}, outside the vocabulary of {vocabulary}"
            ))),
            None => Ok(()),
        }
    }
}

impl BatchPart {
    /// Part `index` of `of` parts of a batch with these sequences, of which `counted` tokens have a target.
    pub(crate) fn new(cu_seqlens: &[usize], counted: usize, index: usize, of: usize) -> Result<BatchPart> {
        let tokens = cu_seqlens.last().copied().unwrap_or(0);
        if index >= of {
            return Err(Error::Input(format!("part must be 0 to {}, got {index}", of.saturating_sub(1))));
        }
        if tokens < of {
            return Err(Error::Input(format!(
                "a batch of {tokens} tokens cannot be divided over {of} ranks; lower cluster.context to {tokens} \
                 or use longer batches"
            )));
        }
        Ok(BatchPart { index, of, cu_seqlens: cu_seqlens.to_vec(), counted })
    }

    /// Number of this part.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Number of parts.
    pub fn of(&self) -> usize {
        self.of
    }

    /// Tokens of the whole batch that are in part `index`.
    pub fn tokens(&self, index: usize) -> Range<usize> {
        let tokens = self.cu_seqlens[self.cu_seqlens.len() - 1];
        index * tokens / self.of..(index + 1) * tokens / self.of
    }

    /// Cumulative lengths of the sequences in this part, without empty ones.
    pub(crate) fn local(&self) -> Vec<usize> {
        let tokens = self.tokens(self.index);
        let inside = |end: &&usize| tokens.start < **end && **end < tokens.end;
        let ends = self.cu_seqlens.iter().filter(inside).map(|end| end - tokens.start);
        let mut local: Vec<usize> = std::iter::once(0).chain(ends).chain([tokens.len()]).collect();
        local.dedup();
        local
    }

    /// Number of tokens before part `index` that belong to its first sequence, at most `limit`.
    pub(crate) fn before(&self, index: usize, limit: Option<usize>) -> usize {
        let first = self.tokens(index).start;
        (first - self.sequence_of(first).start).min(limit.unwrap_or(usize::MAX))
    }

    /// Tokens of the sequence that a token of the whole batch belongs to.
    pub(crate) fn sequence_of(&self, token: usize) -> Range<usize> {
        let next = self.cu_seqlens.partition_point(|begin| *begin <= token);
        self.cu_seqlens[next - 1]..self.cu_seqlens[next]
    }

    /// Tokens that part `to` needs of part `from`, counted from the start of `from`: those of its first
    /// sequence, at most the last `limit` before it.
    pub(crate) fn shared(&self, from: usize, to: usize, limit: Option<usize>) -> Range<usize> {
        let (own, end) = (self.tokens(from), self.tokens(to).start);
        let begin = own.start.max(end - self.before(to, limit));
        let end = own.end.min(end).max(begin);
        begin - own.start..end - own.start
    }
}

/// Lengths of the sequences of a batch, and its place in a larger one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequences<'a> {
    /// Cumulative lengths of the sequences that are here.
    pub(crate) cu_seqlens: &'a [usize],
    pub(crate) part: Option<&'a BatchPart>,
}

/// Consecutive sequences of a part that are computed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Tokens in the part.
    pub(crate) tokens: Range<usize>,
    /// Cumulative lengths of the sequences.
    pub(crate) cu_seqlens: Vec<usize>,
    /// True if it is a sequence that began on an earlier rank.
    pub(crate) began: bool,
    /// True if it is a sequence that continues on the next rank.
    pub(crate) goes_on: bool,
}

impl<'a> Sequences<'a> {
    #[cfg(test)]
    pub(crate) fn of(cu_seqlens: &'a [usize]) -> Sequences<'a> {
        Sequences { cu_seqlens, part: None }
    }

    /// Number of tokens that are here.
    pub(crate) fn tokens(&self) -> usize {
        self.cu_seqlens.last().copied().unwrap_or(0)
    }

    /// Number of tokens of the whole batch.
    pub(crate) fn tokens_in_whole(&self) -> usize {
        self.whole().last().copied().unwrap_or(0)
    }

    /// Cumulative sequence lengths of the whole batch.
    pub(crate) fn whole(&self) -> &'a [usize] {
        self.part.map_or(self.cu_seqlens, |part| &part.cu_seqlens)
    }

    /// Number of tokens of the first sequence on earlier ranks, at most `limit`.
    pub(crate) fn before(&self, limit: Option<usize>) -> usize {
        self.part.map_or(0, |part| part.before(part.index, limit))
    }

    /// Returns true if the last sequence continues on the next rank.
    fn goes_on(&self) -> bool {
        self.part.is_some_and(|part| part.index + 1 < part.of && part.before(part.index + 1, Some(1)) > 0)
    }

    /// Divides the sequences: one that crosses a boundary of the part is by itself.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        let (began, goes_on) = (self.before(Some(1)) > 0, self.goes_on());
        let last = self.cu_seqlens.len() - 1;
        let mut cuts = vec![0, last];
        if began {
            cuts.push(last.min(1));
        }
        if goes_on {
            cuts.push(last.saturating_sub(1));
        }
        cuts.sort_unstable();
        cuts.dedup();
        let piece = |cuts: &[usize]| {
            let ends = &self.cu_seqlens[cuts[0]..=cuts[1]];
            Piece {
                tokens: ends[0]..ends[ends.len() - 1],
                cu_seqlens: ends.iter().map(|end| end - ends[0]).collect(),
                began: began && cuts[0] == 0,
                goes_on: goes_on && cuts[1] == last,
            }
        };
        cuts.windows(2).map(piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_the_positions_and_targets_of_the_whole() {
        // Sequences of 5, 0, 1 and 6 tokens.
        let batch = Batch::packed((10..22).collect(), vec![0, 5, 5, 6, 12]).unwrap();
        for of in 2..=12 {
            let parts: Vec<Batch> = (0..of).map(|index| batch.part(index, of).unwrap()).collect();
            let joined = |f: &dyn Fn(&Batch) -> Vec<i64>| parts.iter().flat_map(f).collect::<Vec<i64>>();
            let wide = |x: &[u32]| x.iter().map(|x| *x as i64).collect::<Vec<i64>>();
            assert_eq!(joined(&|part| wide(&part.ids)), wide(&batch.ids));
            assert_eq!(joined(&|part| wide(&part.positions)), wide(&batch.positions));
            assert_eq!(joined(&|part| part.targets.clone()), batch.targets);
            for (index, part) in parts.iter().enumerate() {
                assert!(part.tokens() > 0 && part.counted_in_whole() == batch.counted());
                assert_eq!(part.sequences().tokens_in_whole(), 12);
                // Where a position is 0 a sequence begins, and only there, except at the start of the part.
                let begins: Vec<usize> =
                    (0..part.tokens()).filter(|t| *t == 0 || part.positions[*t] == 0).collect();
                assert_eq!(part.cu_seqlens[..part.cu_seqlens.len() - 1], begins, "{index} of {of}");
                assert_eq!(part.sequences().before(None), part.positions[0] as usize);
                assert_eq!(part.sequences().before(Some(2)), 2.min(part.positions[0] as usize));
            }
        }
        assert!(batch.part(0, 13).unwrap_err().to_string().contains("12 tokens cannot be divided over 13"));
        assert!(batch.part(2, 2).is_err() && batch.part(0, 2).unwrap().part(0, 2).is_err());
        assert_eq!(batch.part(0, 1).unwrap(), batch);
    }

    #[test]
    fn a_sequence_that_crosses_a_boundary_is_a_piece_by_itself() {
        let batch = Batch::packed((0..12).collect(), vec![0, 3, 5, 8, 12]).unwrap();
        let pieces = |index, of| {
            let piece = |p: Piece| (p.tokens, p.cu_seqlens, p.began, p.goes_on);
            batch.part(index, of).unwrap().sequences().pieces().into_iter().map(piece).collect::<Vec<_>>()
        };
        assert_eq!(pieces(0, 2), [(0..5, vec![0, 3, 5], false, false), (5..6, vec![0, 1], false, true)]);
        assert_eq!(pieces(1, 2), [(0..2, vec![0, 2], true, false), (2..6, vec![0, 4], false, false)]);
        assert_eq!(pieces(0, 4), [(0..3, vec![0, 3], false, false)]);
        // Parts of one and two tokens: a sequence over three ranks, and a part inside it.
        assert_eq!(pieces(5, 6), [(0..2, vec![0, 2], true, false)]);
        assert_eq!(pieces(9, 12), [(0..1, vec![0, 1], true, true)]);
        let whole = batch.sequences().pieces();
        assert!(whole.len() == 1 && whole[0].cu_seqlens == batch.cu_seqlens);
    }

    #[test]
    fn a_part_needs_the_earlier_tokens_of_its_first_sequence() {
        let batch = Batch::packed((0..12).collect(), vec![0, 2, 12]).unwrap();
        let part = batch.part(3, 4).unwrap().part.unwrap();
        assert_eq!([0, 1, 2].map(|from| part.shared(from, 3, None)), [2..3, 0..3, 0..3]);
        assert_eq!([0, 1, 2].map(|from| part.shared(from, 3, Some(4)).len()), [0, 1, 3]);
        assert!(part.shared(0, 1, None) == (2..3) && part.shared(0, 1, Some(0)).is_empty());
    }

    #[test]
    fn targets_are_the_next_token_of_the_same_sequence() {
        let batch = Batch::packed(vec![5, 6, 7, 8, 9], vec![0, 3, 3, 5]).unwrap();
        assert_eq!(batch.targets, [6, 7, IGNORED, 9, IGNORED]);
        assert_eq!(batch.positions, [0, 1, 2, 0, 1]);
        assert_eq!(batch.counted(), 3);
    }

    #[test]
    fn padding_on_either_side_is_left_out() {
        let (ids, labels) = ([1, 2, 0, 0, 3, 4], [1, 2, 0, 0, 3, 4]);
        let mask = [true, true, false, false, true, true];
        let batch = Batch::padded(&ids, &labels, &mask, 3).unwrap();
        assert_eq!(batch, Batch::packed(vec![1, 2, 3, 4], vec![0, 2, 4]).unwrap());
    }

    #[test]
    fn a_mask_with_a_hole_is_refused() {
        let (ids, labels) = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]);
        let mask = [true, true, true, true, false, true];
        let error = Batch::padded(&ids, &labels, &mask, 3).unwrap_err().to_string();
        assert!(error.contains("row 1 is masked at column 1"), "{error}");
        let none = Batch::padded(&ids, &labels, &[false, true, false, false, false, false], 3).unwrap();
        assert_eq!(none.cu_seqlens, [0, 1, 1], "a row may be empty");
    }

    #[test]
    fn ids_outside_the_vocabulary_are_named() {
        let batch = Batch::packed(vec![5, 160], vec![0, 2]).unwrap();
        assert!(batch.check(160).unwrap_err().to_string().contains("token 1 has the id 160"));
        assert!(Batch::rows(vec![1, 2, 3], 2).is_err());
        assert!(Batch::packed(vec![1], vec![0, 2]).is_err());
    }
}
