//! Mixture-of-experts weights: one tensor per expert, or one for all.
//!
//! ```text
//! split   experts.{e}.gate_proj.weight, up_proj.weight [Im, H]    experts.{e}.down_proj.weight [H, Im]
//! fused   experts.gate_up_proj [E, 2*Im, H], gate rows first      experts.down_proj [E, H, Im]
//! ```

use std::collections::BTreeMap;

use ballast_files::{Error, Result};

use super::{Pool, is_carried};
use crate::view::View;

const GATE_UP: &str = ".experts.gate_up_proj";

pub(super) fn is_fused(name: &str) -> bool {
    name.ends_with(GATE_UP) && !is_carried(name)
}

/// Converts fused to split.
pub(super) fn split(views: Vec<View>) -> Result<Vec<View>> {
    let of = |v: &View| Some(format!("{}.experts.", v.name.strip_suffix(GATE_UP)?));
    let modules: Vec<String> = views.iter().filter(|v| !is_carried(&v.name)).filter_map(of).collect();
    let mut pool = Pool::new(views);
    let mut made = Vec::new();
    for module in modules {
        let gate_up = pool.take(&format!("{module}gate_up_proj"), &module)?;
        let down = pool.take(&format!("{module}down_proj"), &module)?;
        gate_up.require_elements()?;
        let (&[count, rows, hidden], &[down_count, out, inner]) = (&gate_up.shape[..], &down.shape[..])
        else {
            return Err(Error::tensor(gate_up.name, "fused experts must have three dimensions"));
        };
        if down_count != count || rows % 2 != 0 {
            let problem = format!("shape {:?} does not match down_proj's {:?}", gate_up.shape, down.shape);
            return Err(Error::tensor(gate_up.name, problem));
        }
        for e in 0..count {
            let both = gate_up.slice(0, e..e + 1)?.reshaped(&[rows, hidden])?;
            let down = down.slice(0, e..e + 1)?.reshaped(&[out, inner])?;
            made.push(both.slice(0, 0..rows / 2)?.renamed(format!("{module}{e}.gate_proj.weight")));
            made.push(both.slice(0, rows / 2..rows)?.renamed(format!("{module}{e}.up_proj.weight")));
            made.push(down.renamed(format!("{module}{e}.down_proj.weight")));
        }
    }
    Ok([pool.rest(), made].concat())
}

/// Converts split to fused.
pub(super) fn fuse(views: Vec<View>) -> Result<Vec<View>> {
    // Module -> number of experts, by the highest index.
    let mut modules: BTreeMap<String, u64> = BTreeMap::new();
    for view in views.iter().filter(|v| !is_carried(&v.name)) {
        if let Some((module, index)) = expert_index(&view.name) {
            let count = modules.entry(format!("{module}.experts.")).or_default();
            *count = (*count).max(index + 1);
        }
    }
    let mut pool = Pool::new(views);
    let mut made = Vec::new();
    for (module, count) in modules {
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for e in 0..count {
            let mut take = |leaf: &str| pool.take(&format!("{module}{e}.{leaf}.weight"), &module);
            let (gate, up, down_proj) = (take("gate_proj")?, take("up_proj")?, take("down_proj")?);
            gate.require_elements()?;
            if gate.shape != up.shape {
                let problem = format!("shape {:?} does not match up_proj's {:?}", gate.shape, up.shape);
                return Err(Error::tensor(gate.name, problem));
            }
            let both = View::concat(format!("{module}{e}.gate_up_proj"), 0, &[gate, up])?;
            for (view, list) in [(both, &mut gate_up), (down_proj, &mut down)] {
                let shape = [&[1], &view.shape[..]].concat();
                list.push(view.reshaped(&shape)?);
            }
        }
        made.push(View::concat(format!("{module}gate_up_proj"), 0, &gate_up)?);
        made.push(View::concat(format!("{module}down_proj"), 0, &down)?);
    }
    Ok([pool.rest(), made].concat())
}

/// Parses `X.experts.7.up_proj.weight` into (`X`, 7).
pub(super) fn expert_index(name: &str) -> Option<(&str, u64)> {
    let (module, rest) = name.rsplit_once(".experts.")?;
    let (index, leaf) = rest.split_once('.')?;
    matches!(leaf, "gate_proj.weight" | "up_proj.weight" | "down_proj.weight").then_some(())?;
    Some((module, index.parse().ok().filter(|&i| i < 1 << 20)?))
}
