//! `ballast oracle indexer`

use ballast_checkpoint::tensor_file::{Array, TensorFile};
use ballast_kernels::indexer::{Dims, Input, Options, indexer_scores, indexer_topk};
use ballast_kernels::{Element, Scratch};
use clap::Args;

use super::{
    Common, Results, Site, Storage, check_memory, check_nonzero, expect, finish, metadata_number, sequences,
};
use crate::commands::Global;
use crate::exit::Outcome;

#[derive(Args)]
pub(crate) struct IndexerArgs {
    #[command(flatten)]
    common: Common,
    /// Number of keys selected per query [default: the file's `topk`].
    #[arg(long, value_name = "K")]
    topk: Option<usize>,
    /// Rounding of q.k before the relu.
    #[arg(long, default_value = "f32")]
    logits: Site,
}

pub(super) fn run(args: IndexerArgs, global: &Global) -> anyhow::Result<Outcome> {
    let file = TensorFile::open(&args.common.input)?;
    let q = file.f32("q")?;
    let &[b, t, heads, dim] = &q.shape[..] else {
        return Err(file.error("q", format!("shape must be [B,T,heads,d], got {:?}", q.shape)).into());
    };
    check_nonzero(&file, "q", &q)?;
    let dims = Dims { heads, dim };
    let (k, w) = (expect(&file, "k", &[b, t, dim])?, expect(&file, "w", &[b, t, heads])?);
    let topk = args.topk.map_or_else(|| metadata_number(&file, "topk"), |k| Ok(Some(k)))?;
    let Some(topk) = topk else {
        return Err(file.error("q", "metadata `topk` is missing; give --topk").into());
    };
    let options = Options { logits: args.logits.into(), ..Options::default() };
    let cu_seqlens = sequences(&file, b, t)?;
    let solve = match args.common.storage {
        Storage::F32 => solve::<f32>,
        Storage::Bf16 => solve::<half::bf16>,
    };
    let results = solve(&q, &k, &w, &cu_seqlens, dims, &options, topk)?;
    finish(&args.common, &file, results, serde_json::json!({ "topk": topk }), global)
}

/// Returns scores [B, T, T], zero for keys that a query does not see, and the selected keys [B, T, topk], -1
/// in unused places.
fn solve<T: Element>(
    q: &Array<f32>,
    k: &Array<f32>,
    w: &Array<f32>,
    cu_seqlens: &[usize],
    dims: Dims,
    options: &Options,
    topk: usize,
) -> anyhow::Result<Results> {
    let stored = |x: &Array<f32>| -> Vec<T> { x.values.iter().map(|x| T::from_f32(*x)).collect() };
    let (b, t) = (q.shape[0], q.shape[1]);
    let (q, k) = (stored(q), stored(k));
    let input = Input { q: &q, k: &k, w: &w.values, before: 0, cu_seqlens };
    let longest = cu_seqlens.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
    check_memory(&[&[3, b, t, topk], &[b, t, t], &[longest, longest]])?;
    // Grows as the kernels need it, after they have checked the sizes.
    let scratch = Scratch::new(0);
    let mut selected = vec![0; b * t * topk];
    indexer_topk(&mut selected, &input, dims, options, topk, &scratch)?;
    let mut scores = vec![0.0; b * t * t];
    for (sequence, w) in cu_seqlens.windows(2).enumerate() {
        let length = w[1] - w[0];
        let mut own = vec![0.0; length * length];
        indexer_scores(&mut own, &input, dims, options, sequence, 0..length, &scratch)?;
        for (i, row) in own.chunks(length.max(1)).enumerate() {
            // Keys are numbered from the start of the sequence.
            scores[(w[0] + i) * t..][..=i].copy_from_slice(&row[..=i]);
        }
    }
    let position = |key: &u32| if *key == u32::MAX { -1.0 } else { *key as f32 };
    let chosen = selected
        .chunks(topk.max(1))
        .flat_map(|row| {
            // Ascending keys, unused places last.
            let mut row = row.to_vec();
            row.sort_unstable();
            row
        })
        .map(|key| position(&key))
        .collect();
    Ok(vec![
        ("scores", Array { shape: vec![b, t, t], values: scores }),
        ("selected", Array { shape: vec![b, t, topk], values: chosen }),
    ])
}
