//! Input projections of linear attention: four tensors in Qwen3.5, two in Qwen3-Next.
//!
//! ```text
//! split   in_proj_qkv [2*kd+vd, H] = all q | all k | all v     in_proj_z [vd, H]     in_proj_b, in_proj_a [Nv, H]
//! fused   in_proj_qkvz: per key head  q dk | k dk | v r*dv | z r*dv      in_proj_ba: per key head  b r | a r
//! kd = Nk*dk, vd = Nv*dv, r = Nv/Nk
//! ```

use ballast_files::{Error, Result};

use super::{Geometry, Pool, is_carried};
use crate::view::View;

const QKVZ: &str = ".linear_attn.in_proj_qkvz.weight";
const QKV: &str = ".linear_attn.in_proj_qkv.weight";

pub(super) fn is_fused(name: &str) -> bool {
    name.ends_with(QKVZ) && !is_carried(name)
}

/// Returns true for a tensor of the input projections.
pub(super) fn is_projection(name: &str) -> bool {
    name.contains(".linear_attn.in_proj_") && !is_carried(name)
}

/// Returns the modules (paths ending in `linear_attn.`) that have a projection ending in `suffix`.
fn modules(views: &[View], suffix: &str) -> Vec<String> {
    let of = |v: &View| Some(format!("{}.linear_attn.", v.name.strip_suffix(suffix)?));
    views.iter().filter(|v| !is_carried(&v.name)).filter_map(of).collect()
}

/// Converts fused to split.
pub(super) fn split(views: Vec<View>, g: &Geometry) -> Result<Vec<View>> {
    let modules = modules(&views, QKVZ);
    let mut pool = Pool::new(views);
    let mut made = Vec::new();
    let group = g.value_heads / g.key_heads;
    for module in modules {
        let name = |leaf: &str| format!("{module}{leaf}.weight");
        let qkvz = pool.take(&name("in_proj_qkvz"), &name("in_proj_qkv"))?;
        let ba = pool.take(&name("in_proj_ba"), &name("in_proj_b"))?;
        let v = group * g.value_dim;
        let [q, k, v, z] = sections(&qkvz, g.key_heads, [g.key_dim, g.key_dim, v, v])?;
        let [b, a] = sections(&ba, g.key_heads, [group, group])?;
        made.push(View::concat(name("in_proj_qkv"), 0, &[q, k, v].concat())?);
        made.push(View::concat(name("in_proj_z"), 0, &z)?);
        made.push(View::concat(name("in_proj_b"), 0, &b)?);
        made.push(View::concat(name("in_proj_a"), 0, &a)?);
    }
    Ok([pool.rest(), made].concat())
}

/// Converts split to fused.
pub(super) fn fuse(views: Vec<View>, g: &Geometry) -> Result<Vec<View>> {
    let modules = modules(&views, QKV);
    let mut pool = Pool::new(views);
    let mut made = Vec::new();
    let group = g.value_heads / g.key_heads;
    for module in modules {
        let name = |leaf: &str| format!("{module}{leaf}.weight");
        let qkv = pool.take(&name("in_proj_qkv"), &name("in_proj_qkvz"))?;
        let z = pool.take(&name("in_proj_z"), &name("in_proj_qkvz"))?;
        let b = pool.take(&name("in_proj_b"), &name("in_proj_ba"))?;
        let a = pool.take(&name("in_proj_a"), &name("in_proj_ba"))?;
        let (qk_rows, v_rows) = (g.qk_rows(), g.v_rows());
        for (view, rows) in
            [(&qkv, 2 * qk_rows + v_rows), (&z, v_rows), (&b, g.value_heads), (&a, g.value_heads)]
        {
            check_rows(view, rows)?;
        }
        let q = qkv.slice(0, 0..qk_rows)?;
        let k = qkv.slice(0, qk_rows..2 * qk_rows)?;
        let v = qkv.slice(0, 2 * qk_rows..2 * qk_rows + v_rows)?;
        let (mut qkvz, mut ba) = (Vec::new(), Vec::new());
        for head in 0..g.key_heads {
            let rows = |per_head: u64| head * per_head..(head + 1) * per_head;
            qkvz.push(q.slice(0, rows(g.key_dim))?);
            qkvz.push(k.slice(0, rows(g.key_dim))?);
            qkvz.push(v.slice(0, rows(group * g.value_dim))?);
            qkvz.push(z.slice(0, rows(group * g.value_dim))?);
            ba.push(b.slice(0, rows(group))?);
            ba.push(a.slice(0, rows(group))?);
        }
        made.push(View::concat(name("in_proj_qkvz"), 0, &qkvz)?);
        made.push(View::concat(name("in_proj_ba"), 0, &ba)?);
    }
    Ok([pool.rest(), made].concat())
}

/// Splits a tensor whose rows repeat a pattern of `N` sections `heads` times. Returns the pieces of each
/// section, head by head.
fn sections<const N: usize>(view: &View, heads: u64, rows: [u64; N]) -> Result<[Vec<View>; N]> {
    check_rows(view, heads * rows.iter().sum::<u64>())?;
    let mut pieces = [const { Vec::new() }; N];
    let mut at = 0;
    for _ in 0..heads {
        for (section, rows) in pieces.iter_mut().zip(rows) {
            section.push(view.slice(0, at..at + rows)?);
            at += rows;
        }
    }
    Ok(pieces)
}

fn check_rows(view: &View, rows: u64) -> Result<()> {
    view.require_elements()?;
    if view.shape.first() == Some(&rows) {
        return Ok(());
    }
    let problem =
        format!("must have {rows} rows by the head counts of config.json, got shape {:?}", view.shape);
    Err(Error::tensor(&view.name, problem))
}
