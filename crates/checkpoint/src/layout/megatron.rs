//! The Megatron layout of the Qwen hybrids, in one piece or divided into tensor-parallel ranks.
//!
//! One table ([`recipes`]) lists, for every Megatron tensor, the rows of hf tensors it consists of, and how
//! ranks divide it. Both directions follow from the table. A tensor is a list of stripes, each a list of row
//! blocks; rank i of n takes the i-th of n equal parts of every stripe, so that the packed `in_proj` of a
//! rank is again q|k|v|z|b|a.
//!
//! ```text
//! linear attention   in_proj = q | k | v | z | beta | alpha      conv1d = q | k | v      out_norm = norm - 1
//! softmax attention  linear_qkv = per kv head: queries, their gates, key, value
//! mlp, experts       linear_fc1 = gate | up      linear_fc2 = down, divided by columns
//! mtp                eh_proj = fc, enorm and hnorm = pre_fc_norm_{embedding,hidden}, final_layernorm = norm
//! ```
//!
//! With more ranks than key/value heads, a rank has a part of the rows of one group, as in Megatron.
//! Expert-parallel ranks have the same tensors but for the experts: rank i of n has the i-th of n equal parts of
//! them, numbered from 0.

use std::collections::BTreeMap;

use ballast_contract::Dtype;
use ballast_files::cast::Buffer;
use ballast_files::jobs::{CHUNK_BYTES, pieces};
use ballast_files::{Error, Result};

use super::experts::expert_index;
use super::{Geometry, Layout, Pool, text_config};
use crate::open::Checkpoint;
use crate::view::View;

/// Returns an error if config.json is of an architecture without this layout. Without the name of one, the geometry
/// that is missing is the error.
pub(super) fn check_architecture(checkpoint: &Checkpoint) -> Result<()> {
    let config = text_config(checkpoint);
    let Some(model_type) = config.and_then(|config| config.get("model_type")?.as_str()) else {
        return Ok(());
    };
    if model_type == "qwen3_next" || model_type.starts_with("qwen3_5") {
        return Ok(());
    }
    let problem = format!(
        "model_type {model_type:?} has no Megatron layout here; those with one are Qwen3-Next, Qwen3.5 and Qwen3.5-MoE"
    );
    Err(Error::Config { file: checkpoint.config_path(), problem })
}

/// The division of a tensor among ranks.
#[derive(Clone, Copy, PartialEq)]
enum Cut {
    /// Every rank has the whole tensor.
    Replicated,
    /// Every stripe is divided by rows.
    Rows,
    /// Divided by columns (one stripe only).
    Columns,
}

/// Rows `from..from + rows` of the hf tensor `hf`.
struct Block {
    hf: String,
    from: u64,
    rows: u64,
}

enum Stripes {
    /// Whole hf tensors, all with the same number of rows.
    Whole(Vec<String>),
    Blocks(Vec<Vec<Block>>),
}

struct Recipe {
    megatron: String,
    /// The one expert-parallel rank that has the tensor; none if all have it.
    expert_rank: Option<usize>,
    stripes: Stripes,
    cut: Cut,
    /// Added to the hf tensor to give the Megatron tensor.
    shift: i8,
}

/// The parts of a decoder layer, by its tensor names.
#[derive(Default)]
struct LayerKind {
    linear: bool,
    experts: u64,
    router: bool,
    shared_expert: bool,
}

impl LayerKind {
    /// Notes a tensor of the layer, by its name in hf.
    fn see_hf(&mut self, rest: &str) {
        self.linear |= rest.starts_with("linear_attn.");
        self.router |= rest == "mlp.gate.weight";
        self.shared_expert |= rest.starts_with("mlp.shared_expert.");
        if let Some((_, index)) = expert_index(rest) {
            self.experts = self.experts.max(index + 1);
        }
    }

    /// Notes a tensor of the layer, by its name in Megatron.
    fn see_megatron(&mut self, rest: &str) {
        self.linear |= rest == "self_attention.in_proj.weight";
        self.router |= rest == "mlp.router.weight";
        self.shared_expert |= rest.starts_with("mlp.shared_experts.");
        if let Some(index) =
            rest.strip_prefix("mlp.experts.linear_fc1.weight").and_then(|i| i.parse::<u64>().ok())
        {
            self.experts = self.experts.max(index.min(1 << 20) + 1);
        }
    }
}

/// The layers of a model.
#[derive(Default)]
struct Layers {
    decoder: BTreeMap<u64, LayerKind>,
    /// The layer for multi-token prediction, if it is there with all that belongs to it.
    mtp: Option<LayerKind>,
}

const MTP_LAYER: &str = "mtp.layers.0.";
const MTP_INNER: &str = "mtp.layers.0.transformer_layer.";

/// Norms and projection around the layer for multi-token prediction: in Megatron, in hf, and their division.
const MTP_AROUND: [(&str, &str, Cut); 4] = [
    ("mtp.layers.0.enorm.weight", "mtp.pre_fc_norm_embedding.weight", Cut::Replicated),
    ("mtp.layers.0.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", Cut::Replicated),
    ("mtp.layers.0.eh_proj.weight", "mtp.fc.weight", Cut::Rows),
    ("mtp.layers.0.final_layernorm.weight", "mtp.norm.weight", Cut::Replicated),
];

impl Layers {
    fn of_hf(views: &[View], prefix: &str) -> Layers {
        let (mut layers, mut mtp) = (Layers::default(), LayerKind::default());
        let before = format!("{prefix}layers.");
        for view in views {
            if let Some((layer, rest)) = layer_of(&view.name, &before) {
                layers.decoder.entry(layer).or_default().see_hf(rest);
            } else if let Some(rest) = view.name.strip_prefix(MTP_LAYER) {
                mtp.see_hf(rest);
            }
        }
        let has = |name: &str| views.iter().any(|view| view.name == name);
        // Other forms have no place in Megatron and are carried along: several layers, fused experts.
        let whole = MTP_AROUND.iter().all(|(_, hf, _)| has(hf))
            && has("mtp.layers.0.self_attn.q_proj.weight")
            && !views.iter().any(|view| layer_of(&view.name, "mtp.layers.").is_some_and(|(n, _)| n > 0))
            && (mtp.experts > 0 || !mtp.router);
        layers.mtp = whole.then_some(mtp);
        layers
    }

    /// Returns the layers by the tensors of one of so many expert-parallel ranks.
    fn of_megatron(views: &[View], expert_ranks: usize) -> Layers {
        let (mut layers, mut mtp) = (Layers::default(), LayerKind::default());
        for view in views {
            if let Some((layer, rest)) = layer_of(&view.name, "decoder.layers.") {
                layers.decoder.entry(layer).or_default().see_megatron(rest);
            } else if let Some(rest) = view.name.strip_prefix(MTP_INNER) {
                mtp.see_megatron(rest);
            }
        }
        for kind in layers.decoder.values_mut().chain([&mut mtp]) {
            kind.experts *= expert_ranks as u64;
        }
        let has = |name: &str| views.iter().any(|view| view.name == name);
        layers.mtp = MTP_AROUND.iter().all(|(megatron, _, _)| has(megatron)).then_some(mtp);
        layers
    }

    /// Returns an error if the experts cannot be divided among so many ranks.
    fn check_expert_ranks(&self, ranks: usize) -> Result<()> {
        let refuse = |problem: String| Err(Error::Refused(format!("--ep {ranks}: {problem}")));
        let mut kinds = self.decoder.values().chain(&self.mtp).filter(|kind| kind.experts > 0);
        match kinds.clone().find(|kind| kind.experts % ranks as u64 != 0) {
            Some(kind) => refuse(format!("{} experts cannot be divided among {ranks} ranks", kind.experts)),
            None if ranks > 1 && kinds.next().is_none() => refuse("this model has no experts".into()),
            None => Ok(()),
        }
    }
}

/// Returns the usual name of a tensor that other versions and settings of Megatron call differently: experts
/// without grouped products, and the newer name of the layer for multi-token prediction.
pub(crate) fn usual_name(name: &str) -> String {
    let name = name.replace(".mtp_model_layer.", ".transformer_layer.");
    let grouped = name.split_once(".mlp.experts.local_experts.").and_then(|(layer, rest)| {
        let (expert, leaf) = rest.split_once('.')?;
        expert.parse::<u64>().ok()?;
        Some(format!("{layer}.mlp.experts.{leaf}{expert}"))
    });
    grouped.unwrap_or(name)
}

/// Converts hf (split projections, split experts) to Megatron, by rank. Tensors without a recipe go to rank
/// 0.
pub(super) fn from_hf(views: Vec<View>, to: &Layout, g: &Geometry) -> Result<Vec<Vec<View>>> {
    let layers = Layers::of_hf(&views, &to.prefix);
    if !layers.decoder.values().any(|k| k.linear) {
        return Err(Error::Refused(
            "the megatron layout is supported for Gated-DeltaNet hybrids only; this checkpoint has no linear_attn layers"
                .into(),
        ));
    }
    let count = to.ranks.tensor;
    let ranks = count as u64;
    let uneven = [
        ("linear_num_key_heads", g.key_heads, false),
        ("linear_num_value_heads", g.value_heads, false),
        ("num_attention_heads", g.heads, false),
        ("num_key_value_heads", g.kv_heads, ranks.is_multiple_of(g.kv_heads)),
    ];
    let uneven = uneven.into_iter().find(|(_, heads, shared)| heads % ranks != 0 && !shared);
    if let Some((field, heads, _)) = uneven {
        let message = format!("--tp {count}: {field} is {heads} and cannot be divided among {count} ranks");
        return Err(Error::Refused(message));
    }
    layers.check_expert_ranks(to.ranks.expert)?;
    let tied = !views.iter().any(|v| v.name == "lm_head.weight");
    let mut pool = Pool::new(views);
    let mut ranks = vec![Vec::new(); to.ranks.count()];
    for recipe in recipes(&layers, to, g, tied) {
        let mut whole: BTreeMap<&str, View> = BTreeMap::new();
        for hf in recipe.hf_names() {
            if !whole.contains_key(hf) {
                whole.insert(hf, pool.take(hf, &recipe.megatron)?);
            }
        }
        recipe.check_rows(&whole)?;
        let stripes: Vec<View> = match &recipe.stripes {
            Stripes::Whole(names) => names.iter().map(|n| whole[n.as_str()].clone()).collect(),
            Stripes::Blocks(stripes) => {
                let block = |b: &Block| whole[b.hf.as_str()].slice(0, b.from..b.from + b.rows);
                let stripe = |blocks: &Vec<Block>| {
                    View::concat(&recipe.megatron, 0, &blocks.iter().map(block).collect::<Result<Vec<_>>>()?)
                };
                stripes.iter().map(stripe).collect::<Result<_>>()?
            }
        };
        for (rank, of_rank) in ranks.chunks_mut(to.ranks.expert).enumerate() {
            let parts: Vec<View> =
                stripes.iter().map(|s| recipe.part(s, rank, count)).collect::<Result<_>>()?;
            let mut view = View::concat(&recipe.megatron, 0, &parts)?;
            if recipe.shift != 0 {
                // The shift is computed and stored in f32: a narrower type would round the result.
                view = f32_for_shift(view)?.shifted(recipe.shift);
            }
            match recipe.expert_rank {
                Some(owner) => of_rank[owner].push(view),
                None => of_rank.iter_mut().for_each(|out| out.push(view.clone())),
            }
        }
    }
    ranks[0].extend(pool.rest());
    Ok(ranks)
}

/// Converts Megatron, by rank, to hf (split projections, split experts).
pub(super) fn to_hf(ranks: Vec<Vec<View>>, from: &Layout, g: &Geometry) -> Result<Vec<View>> {
    let usual = |views: Vec<View>| -> Result<Vec<View>> {
        let named = |view: View| {
            let name = usual_name(&view.name);
            view.renamed(name)
        };
        Ok(without_extra_state(views)?.into_iter().map(named).collect())
    };
    let ranks: Vec<Vec<View>> = ranks.into_iter().map(usual).collect::<Result<_>>()?;
    let layers = Layers::of_megatron(&ranks[0], from.ranks.expert);
    let tied = !ranks[0].iter().any(|v| v.name == "output_layer.weight");
    let expert_ranks = from.ranks.expert;
    let mut pools: Vec<Pool> = ranks.into_iter().map(Pool::new).collect();
    let mut made = Vec::new();
    for recipe in recipes(&layers, from, g, tied) {
        // From every rank that has the tensor; the expert-parallel ranks that have it all have the same.
        let owners = recipe.expert_rank.map_or(0..expert_ranks, |owner| owner..owner + 1);
        let mut parts = Vec::new();
        for (tensor_rank, pools) in pools.chunks_mut(expert_ranks).enumerate() {
            for expert_rank in owners.clone() {
                let rank = tensor_rank * expert_ranks + expert_rank;
                let needed_for = format!("the whole tensor (missing on rank {rank})");
                parts.push(pools[expert_rank].take(&recipe.megatron, &needed_for)?);
            }
        }
        let first = &parts[0];
        if let Some(other) = parts.iter().find(|p| p.shape != first.shape || p.dtype != first.dtype) {
            let problem = format!(
                "the ranks disagree: {} {:?} and {} {:?}",
                first.dtype, first.shape, other.dtype, other.shape
            );
            return Err(Error::tensor(&recipe.megatron, problem));
        }
        let replicas = match recipe.cut {
            Cut::Replicated => parts.len(),
            Cut::Rows | Cut::Columns => owners.len(),
        };
        for (number, same) in parts.chunks(replicas).enumerate() {
            check_replicas(same, number * replicas)?;
        }
        let parts: Vec<View> = parts.into_iter().step_by(owners.len()).collect();
        let mut stripes = recipe.stripes_of(&parts)?;
        if recipe.shift != 0 {
            stripes = stripes
                .into_iter()
                .map(|s| Ok(f32_for_shift(s)?.shifted(-recipe.shift)))
                .collect::<Result<_>>()?;
        }
        made.extend(recipe.hf_tensors(stripes)?);
    }
    // Tensors without a recipe are on rank 0; on another rank they would be lost.
    for (rank, pool) in pools.into_iter().enumerate() {
        let rest = pool.rest();
        if rank == 0 {
            made.extend(rest);
        } else if let Some(view) = rest.first() {
            let problem =
                format!("unknown tensor on rank {rank}; unknown tensors are allowed on rank 0 only");
            return Err(Error::tensor(&view.name, problem));
        }
    }
    Ok(made)
}

/// Returns true for the name of the extra state of a Transformer Engine module.
pub(crate) fn is_extra_state(name: &str) -> bool {
    name.contains("._extra_state")
}

/// Removes the extra state of Transformer Engine's modules, which must be empty.
fn without_extra_state(views: Vec<View>) -> Result<Vec<View>> {
    let (extra, rest): (Vec<View>, Vec<View>) =
        views.into_iter().partition(|view| is_extra_state(&view.name));
    match extra.into_iter().find(|view| view.elements() > 0) {
        Some(view) => {
            let problem = format!(
                "{} bytes of extra state, of FP8 training perhaps, that no other layout can hold; train without it or \
                 remove it in Megatron",
                view.bytes()
            );
            Err(Error::tensor(&view.name, problem))
        }
        None => Ok(rest),
    }
}

/// Checks that a tensor is the same on every rank, from `first_rank` on.
fn check_replicas(replicas: &[View], first_rank: usize) -> Result<()> {
    let [first, others @ ..] = replicas else { return Ok(()) };
    let (mut expected, mut found, mut scratch) = (Buffer::default(), Buffer::default(), Buffer::default());
    for (number, other) in others.iter().enumerate() {
        for piece in pieces(first.units(), first.unit_bytes(), CHUNK_BYTES) {
            first.read(piece.clone(), &mut expected, &mut scratch)?;
            other.read(piece, &mut found, &mut scratch)?;
            if expected.as_ref() != found.as_ref() {
                let rank = first_rank + 1 + number;
                let problem = format!("replicated tensor differs between rank {first_rank} and rank {rank}");
                return Err(Error::tensor(&other.name, problem));
            }
        }
    }
    Ok(())
}

impl Recipe {
    fn hf_names(&self) -> Vec<&str> {
        match &self.stripes {
            Stripes::Whole(names) => names.iter().map(String::as_str).collect(),
            Stripes::Blocks(stripes) => stripes.iter().flatten().map(|b| b.hf.as_str()).collect(),
        }
    }

    /// Checks that blocks cover each hf tensor exactly, and that whole tensors have the same shape.
    fn check_rows(&self, whole: &BTreeMap<&str, View>) -> Result<()> {
        let Stripes::Blocks(stripes) = &self.stripes else {
            let mut shapes = whole.values().map(|v| (&v.name, &v.shape));
            let first = shapes.next();
            return match shapes.find(|(_, shape)| first.is_some_and(|(_, s)| s != *shape)) {
                Some((name, shape)) => {
                    Err(Error::tensor(name, format!("shape {shape:?} does not match {first:?}")))
                }
                None => Ok(()),
            };
        };
        for (hf, view) in whole {
            let expected: u64 = stripes.iter().flatten().filter(|b| b.hf == *hf).map(|b| b.rows).sum();
            if view.shape.first() != Some(&expected) {
                let problem = format!(
                    "must have {expected} rows by the head counts of config.json, got shape {:?}",
                    view.shape
                );
                return Err(Error::tensor(*hf, problem));
            }
        }
        Ok(())
    }

    fn part(&self, stripe: &View, rank: usize, ranks: usize) -> Result<View> {
        let dim = match self.cut {
            Cut::Replicated => return Ok(stripe.clone()),
            Cut::Rows => 0,
            Cut::Columns => 1,
        };
        let (rank, ranks) = (rank as u64, ranks as u64);
        let size = stripe.shape.get(dim).copied().unwrap_or(0);
        if size % ranks != 0 {
            let problem =
                format!("dimension {dim} of {:?} cannot be divided among {ranks} ranks", stripe.shape);
            return Err(Error::tensor(&self.megatron, problem));
        }
        stripe.slice(dim, rank * size / ranks..(rank + 1) * size / ranks)
    }

    /// Concatenates the parts of the tensor-parallel ranks, stripe by stripe.
    fn stripes_of(&self, parts: &[View]) -> Result<Vec<View>> {
        let (first, ranks) = (&parts[0], parts.len() as u64);
        let stripe_rows: Vec<u64> = match &self.stripes {
            Stripes::Whole(names) => vec![first.shape[0] / names.len() as u64; names.len()],
            Stripes::Blocks(stripes) => {
                stripes.iter().map(|blocks| blocks.iter().map(|b| b.rows).sum::<u64>() / ranks).collect()
            }
        };
        let total: u64 = stripe_rows.iter().sum();
        if total != first.shape[0] {
            let problem = format!("must have {total} rows per rank by config.json, got {}", first.shape[0]);
            return Err(Error::tensor(&self.megatron, problem));
        }
        let mut stripes = Vec::new();
        let mut at = 0;
        for rows in stripe_rows {
            stripes.push(match self.cut {
                Cut::Replicated => first.clone(),
                Cut::Columns => View::concat(&self.megatron, 1, parts)?,
                Cut::Rows => {
                    let pieces =
                        parts.iter().map(|p| p.slice(0, at..at + rows)).collect::<Result<Vec<_>>>()?;
                    View::concat(&self.megatron, 0, &pieces)?
                }
            });
            at += rows;
        }
        Ok(stripes)
    }

    /// The hf tensors of whole stripes.
    fn hf_tensors(&self, stripes: Vec<View>) -> Result<Vec<View>> {
        let blocks = match &self.stripes {
            Stripes::Whole(names) => {
                return Ok(stripes.into_iter().zip(names).map(|(s, name)| s.renamed(name)).collect());
            }
            Stripes::Blocks(blocks) => blocks,
        };
        let mut by_tensor: BTreeMap<&str, Vec<(u64, View)>> = BTreeMap::new();
        for (stripe, blocks) in stripes.iter().zip(blocks) {
            let mut at = 0;
            for block in blocks {
                let piece = stripe.slice(0, at..at + block.rows)?;
                by_tensor.entry(&block.hf).or_default().push((block.from, piece));
                at += block.rows;
            }
        }
        let joined = |(hf, mut pieces): (&str, Vec<(u64, View)>)| {
            pieces.sort_by_key(|(from, _)| *from);
            let pieces: Vec<View> = pieces.into_iter().map(|(_, piece)| piece).collect();
            View::concat(hf, 0, &pieces)
        };
        by_tensor.into_iter().map(joined).collect()
    }
}

fn whole(megatron: String, hf: &[String], cut: Cut) -> Recipe {
    Recipe { megatron, expert_rank: None, stripes: Stripes::Whole(hf.to_vec()), cut, shift: 0 }
}

/// Returns the recipes of all Megatron tensors, in the order of the network.
fn recipes(layers: &Layers, layout: &Layout, g: &Geometry, tied: bool) -> Vec<Recipe> {
    let p = &layout.prefix;
    let mut all = vec![whole(
        "embedding.word_embeddings.weight".into(),
        &[format!("{p}embed_tokens.weight")],
        Cut::Rows,
    )];
    for (layer, kind) in &layers.decoder {
        let (hf, megatron) = (format!("{p}layers.{layer}."), format!("decoder.layers.{layer}."));
        all.extend(layer_recipes(&hf, &megatron, kind, layout, g));
    }
    all.push(whole("decoder.final_layernorm.weight".into(), &[format!("{p}norm.weight")], Cut::Replicated));
    if let Some(kind) = &layers.mtp {
        let around =
            MTP_AROUND.iter().map(|(megatron, hf, cut)| whole((*megatron).into(), &[(*hf).into()], *cut));
        all.extend(around);
        all.extend(layer_recipes(MTP_LAYER, MTP_INNER, kind, layout, g));
    }
    if !tied {
        all.push(whole("output_layer.weight".into(), &["lm_head.weight".into()], Cut::Rows));
    }
    all
}

/// Returns the recipes of a layer, whose tensors have these prefixes.
fn layer_recipes(
    in_hf: &str,
    in_megatron: &str,
    kind: &LayerKind,
    layout: &Layout,
    g: &Geometry,
) -> Vec<Recipe> {
    let hf = |leaf: &str| format!("{in_hf}{leaf}");
    let mg = |leaf: &str| format!("{in_megatron}{leaf}");
    let one = |megatron: &str, leaf: &str, cut| whole(mg(megatron), &[hf(leaf)], cut);
    let mut all = match kind.linear {
        true => linear_attention(&hf, &mg, &one, layout, g),
        false => softmax_attention(&hf, &mg, &one, g),
    };
    let gated = |megatron: &str, module: &str| {
        let names = [hf(&format!("{module}.gate_proj.weight")), hf(&format!("{module}.up_proj.weight"))];
        whole(mg(megatron), &names, Cut::Rows)
    };
    if !kind.router {
        all.push(one("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", Cut::Replicated));
        all.push(gated("mlp.linear_fc1.weight", "mlp"));
        all.push(one("mlp.linear_fc2.weight", "mlp.down_proj.weight", Cut::Columns));
        return all;
    }
    all.push(one("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Cut::Replicated));
    all.push(one("mlp.router.weight", "mlp.gate.weight", Cut::Replicated));
    let on_a_rank = kind.experts / layout.ranks.expert as u64;
    for e in 0..kind.experts {
        let (expert_rank, local) = (Some((e / on_a_rank) as usize), e % on_a_rank);
        let fc1 = gated(&format!("mlp.experts.linear_fc1.weight{local}"), &format!("mlp.experts.{e}"));
        let down = format!("mlp.experts.{e}.down_proj.weight");
        let fc2 = one(&format!("mlp.experts.linear_fc2.weight{local}"), &down, Cut::Columns);
        all.extend([fc1, fc2].map(|recipe| Recipe { expert_rank, ..recipe }));
    }
    if kind.shared_expert {
        all.push(gated("mlp.shared_experts.linear_fc1.weight", "mlp.shared_expert"));
        let down = "mlp.shared_expert.down_proj.weight";
        all.push(one("mlp.shared_experts.linear_fc2.weight", down, Cut::Columns));
        all.push(one("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", Cut::Replicated));
    }
    all
}

type Names<'a> = &'a dyn Fn(&str) -> String;
type One<'a> = &'a dyn Fn(&str, &str, Cut) -> Recipe;

fn linear_attention(hf: Names, mg: Names, one: One, layout: &Layout, g: &Geometry) -> Vec<Recipe> {
    let (qk, v, heads) = (g.qk_rows(), g.v_rows(), g.value_heads);
    let stripe = |leaf: &str, from, rows| vec![Block { hf: hf(leaf), from, rows }];
    let (qkv, conv) = ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight");
    let in_proj = vec![
        stripe(qkv, 0, qk),
        stripe(qkv, qk, qk),
        stripe(qkv, 2 * qk, v),
        stripe("linear_attn.in_proj_z.weight", 0, v),
        stripe("linear_attn.in_proj_b.weight", 0, heads),
        stripe("linear_attn.in_proj_a.weight", 0, heads),
    ];
    let conv1d = vec![stripe(conv, 0, qk), stripe(conv, qk, qk), stripe(conv, 2 * qk, v)];
    let packed = |megatron: &str, stripes| Recipe {
        megatron: mg(megatron),
        expert_rank: None,
        stripes: Stripes::Blocks(stripes),
        cut: Cut::Rows,
        shift: 0,
    };
    let shift = if layout.zero_centered_gamma { -1 } else { 0 };
    vec![
        one("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight", Cut::Replicated),
        packed("self_attention.in_proj.weight", in_proj),
        packed("self_attention.conv1d.weight", conv1d),
        one("self_attention.A_log", "linear_attn.A_log", Cut::Rows),
        one("self_attention.dt_bias", "linear_attn.dt_bias", Cut::Rows),
        Recipe { shift, ..one("self_attention.out_norm.weight", "linear_attn.norm.weight", Cut::Replicated) },
        one("self_attention.out_proj.weight", "linear_attn.out_proj.weight", Cut::Columns),
    ]
}

fn softmax_attention(hf: Names, mg: Names, one: One, g: &Geometry) -> Vec<Recipe> {
    let (d, group) = (g.head_dim, g.heads / g.kv_heads);
    let mut blocks = Vec::new();
    for kv_head in 0..g.kv_heads {
        let heads = kv_head * group..(kv_head + 1) * group;
        let block = |leaf: &str, from| Block { hf: hf(leaf), from, rows: d };
        // hf has query and gate per head; Megatron has the queries of a group, then its gates.
        blocks.extend(heads.clone().map(|h| block("self_attn.q_proj.weight", h * 2 * d)));
        blocks.extend(heads.map(|h| block("self_attn.q_proj.weight", h * 2 * d + d)));
        blocks.push(block("self_attn.k_proj.weight", kv_head * d));
        blocks.push(block("self_attn.v_proj.weight", kv_head * d));
    }
    vec![
        one("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", Cut::Replicated),
        Recipe {
            megatron: mg("self_attention.linear_qkv.weight"),
            expert_rank: None,
            stripes: Stripes::Blocks(vec![blocks]),
            cut: Cut::Rows,
            shift: 0,
        },
        one("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", Cut::Replicated),
        one("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", Cut::Replicated),
        one("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Cut::Columns),
    ]
}

fn f32_for_shift(view: View) -> Result<View> {
    if !view.dtype.widens_exactly_to(Dtype::F32) {
        let problem = format!(
            "is {}; the shift to zero-centered gamma needs a dtype that f32 can represent",
            view.dtype
        );
        return Err(Error::tensor(view.name, problem));
    }
    Ok(view.widened(Dtype::F32))
}

/// Parses `<before>12.mlp.x` into (12, `mlp.x`).
fn layer_of<'a>(name: &'a str, before: &str) -> Option<(u64, &'a str)> {
    let (layer, rest) = name.strip_prefix(before)?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}
