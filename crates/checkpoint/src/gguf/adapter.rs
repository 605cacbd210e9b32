//! LoRA adapters as GGUF files, beside a base model that was converted.
//!
//! W + scale B A has the transforms of W: a reordering of rows applies to B, one of columns to A. llama.cpp applies
//! an adapter only in products that it was told to look for one in; modules without it are refused, because their
//! adapters would be ignored.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ballast_contract::Dtype;
use ballast_files::jobs::Observer;
use ballast_files::{Error, Result};
use serde::Serialize;

use super::model::{GgufFile, write};
use super::tensors::{Shapes, bare_name, no_place};
use crate::layout::{Layout, Naming, Ranks, relayout};
use crate::open::Checkpoint;
use crate::verify::Verification;
use crate::view::View;
use crate::write::Output;
use ballast_gguf::header::Value;
use ballast_gguf::{Config, Family, names};

/// Prefix of PEFT's names.
const PREFIX: &str = "base_model.model.";

/// Options of an adapter's conversion.
#[derive(Clone, Copy, Debug)]
pub struct AdapterOptions {
    /// Number of rows of A and of columns of B.
    pub rank: u64,
    /// Factor of the product B A.
    pub scale: f32,
    /// dtype of A and B; `None` keeps each dtype.
    pub dtype: Option<Dtype>,
    /// Replace an existing file.
    pub force: bool,
}

/// The result of an adapter's conversion.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct AdapterReport {
    /// Architecture in llama.cpp.
    pub architecture: &'static str,
    /// Number of adapted modules in the file.
    pub modules: usize,
    /// Number of bytes of all tensors.
    pub bytes: u64,
    /// Comparison of the file with the source.
    pub verification: Verification,
}

/// Converts a PEFT adapter for the model `base`.
pub fn convert_adapter(
    adapter: &Arc<Checkpoint>,
    base: &Arc<Checkpoint>,
    options: &AdapterOptions,
    destination: &Path,
    observer: &dyn Observer,
) -> Result<AdapterReport> {
    let config = Config::new(base.config.as_ref(), base.config_path())?;
    let family = Family::of(&config)?;
    if options.scale == 0.0 || !options.scale.is_finite() {
        let problem = format!("the adapter's scale is {}: llama.cpp would take 1 instead", options.scale);
        return Err(Error::Refused(problem));
    }
    if options.dtype.is_some_and(|dtype| dtype.block().is_some()) {
        return Err(Error::Refused("adapters are written in f32, f16 or bf16".into()));
    }
    let mut views = Vec::new();
    for (module, pair) in pairs(adapter)? {
        let [a, b] = pair.map_err(|e| e.of(&adapter.root))?;
        let found = adapted(family, &config, base, &module, a, b, options.rank);
        views.extend(found.map_err(|e| e.of(&adapter.root))?);
    }
    if views.is_empty() {
        let problem = "no adapters (names ending in .lora_A.weight) in this file".into();
        return Err(Error::NoCheckpoint { path: adapter.root.clone(), problem });
    }
    let entry = |key: &str, value: Value| (key.to_string(), value);
    let entries = vec![
        entry("general.architecture", Value::String(family.name().into())),
        entry("general.type", Value::String("adapter".into())),
        entry("adapter.type", Value::String("lora".into())),
        // llama.cpp divides by the rank.
        entry("adapter.lora.alpha", Value::F32((options.scale as f64 * options.rank as f64) as f32)),
    ];
    let output = |view: View| Output { dtype: options.dtype.unwrap_or(view.dtype), view };
    let outputs: Vec<Output> = views.into_iter().map(output).collect();
    let (modules, bytes) = (outputs.len() / 2, outputs.iter().map(Output::bytes).sum());
    let file = GgufFile { entries, outputs };
    let verification = write(&[adapter, base], file, destination, options.force, observer)?;
    Ok(AdapterReport { architecture: family.name(), modules, bytes, verification })
}

/// Returns A and B of every module, by the module's hf name.
fn pairs(adapter: &Arc<Checkpoint>) -> Result<BTreeMap<String, Result<[View; 2]>>> {
    let mut found: BTreeMap<String, [Option<View>; 2]> = BTreeMap::new();
    for (i, t) in adapter.tensors.iter().enumerate() {
        let part = |suffix: &str| t.name.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(suffix));
        let (module, place) = match (part(".lora_A.weight"), part(".lora_B.weight")) {
            (Some(module), _) => (module, 0),
            (_, Some(module)) => (module, 1),
            _ => {
                let problem = "not a matrix of plain LoRA; only these are written as GGUF";
                return Err(Error::tensor(&t.name, problem).of(&adapter.root));
            }
        };
        if !matches!(t.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
            let problem = format!("stored in {}; F32, F16 and BF16 are written", t.dtype);
            return Err(Error::tensor(&t.name, problem).of(&adapter.root));
        }
        found.entry(module.to_string()).or_default()[place] = Some(View::stored(adapter, i));
    }
    let complete = |(module, pair): (String, [Option<View>; 2])| {
        let pair = match pair {
            [Some(a), Some(b)] => Ok([a, b]),
            _ => Err(Error::tensor(&module, "its A or its B is missing")),
        };
        (module, pair)
    };
    Ok(found.into_iter().map(complete).collect())
}

/// Returns A and B of a module under llama.cpp's name or names.
fn adapted(
    family: Family,
    config: &Config,
    base: &Arc<Checkpoint>,
    module: &str,
    a: View,
    b: View,
    rank: u64,
) -> Result<Vec<View>> {
    let from = Layout::detect(base);
    let bare = bare_name(module, &from.prefix);
    check_shapes(base, &from, module, &a, &b, rank)?;
    let pair = |name: &str, a: View, b: View| {
        vec![a.renamed(format!("{name}.weight.lora_a")), b.renamed(format!("{name}.weight.lora_b"))]
    };
    if bare == "lm_head" && family != Family::Deepseek32 && !family.is_gemma() {
        return Ok(pair("output", a, b));
    }
    let shapes = Shapes::of(base, family, config)?;
    let suffix = format!("{bare}.weight");
    let Some((block, suffix)) = shapes.block(&suffix) else {
        return Err(ignored(module));
    };
    let module_suffix = suffix.strip_suffix(".weight").unwrap_or(&suffix);
    if family == Family::Qwen3Next && module_suffix == "linear_attn.in_proj_qkvz" {
        let [qkv, z] = shapes.split_qkvz(&b)?;
        let mut out = pair(&format!("blk.{block}.attn_qkv"), a.clone(), qkv);
        out.extend(pair(&format!("blk.{block}.attn_gate"), a, z));
        return Ok(out);
    }
    let is_latent = family == Family::Deepseek32 && module_suffix.starts_with("self_attn.");
    if is_latent && module_suffix != "self_attn.o_proj"
        || module_suffix.contains("experts.") && !is_shared(module_suffix)
    {
        return Err(ignored(module));
    }
    let Some(name) = names::module(family, module_suffix) else { return Err(no_place(family, module)) };
    let name = format!("blk.{block}.{name}");
    if module_suffix == "linear_attn.out_proj" {
        return Ok(pair(&name, shapes.shaped(a, &suffix)?, b));
    }
    Ok(pair(&name, a, shapes.rows(b, &suffix)?))
}

fn is_shared(module: &str) -> bool {
    module.starts_with("mlp.shared_expert")
}

fn ignored(module: &str) -> Error {
    Error::tensor(module, "llama.cpp does not apply adapters to this module; merge it: ballast merge")
}

/// Checks A and B against the module's weight in the base model.
fn check_shapes(
    base: &Arc<Checkpoint>,
    from: &Layout,
    module: &str,
    a: &View,
    b: &View,
    rank: u64,
) -> Result<()> {
    let to = Layout { naming: Naming::Hf, ranks: Ranks::ONE, ..from.clone() };
    let name = format!("{module}.weight");
    let weight = relayout(base, from, &to)?.into_iter().flatten().find(|view| view.name == name);
    let Some(weight) = weight else {
        return Err(Error::tensor(module, format!("{} has no weight of this name", base.root.display())));
    };
    let &[rows, columns] = &weight.shape[..] else {
        return Err(Error::tensor(module, format!("its weight is not a matrix: {:?}", weight.shape)));
    };
    if a.shape[..] == [rank, columns] && b.shape[..] == [rows, rank] {
        return Ok(());
    }
    let problem = format!(
        "A {:?} and B {:?} of rank {rank} do not fit a weight of {:?}",
        a.shape, b.shape, weight.shape
    );
    Err(Error::tensor(module, problem))
}
