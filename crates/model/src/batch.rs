//! Batches: several sequences packed end to end, with their targets and positions.

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
}

impl Batch {
    /// Packs sequences with these boundaries. The target of a token is the next token; the last of a sequence
    /// has none.
    pub fn packed(ids: Vec<u32>, cu_seqlens: Vec<usize>) -> Result<Batch> {
        let labels: Vec<i64> = ids.iter().map(|id| *id as i64).collect();
        Batch::with_labels(ids, &labels, cu_seqlens)
    }

    /// Packs sequences with labels aligned to the ids, as in transformers: token t has the target label t + 1.
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
        Ok(Batch { ids, targets, cu_seqlens, positions })
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

#[cfg(test)]
mod tests {
    use super::*;

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
