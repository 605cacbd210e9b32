//! `ballast trace`: one forward, and backward if asked for, with every tensor that somebody wants to see.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ballast_checkpoint::layout::Form;
use ballast_checkpoint::tensor_file::{Array, Named, TensorFile, write_f32};
use ballast_files::Error::Interrupted;
use ballast_model::probe::Recorder;
use ballast_model::{
    Batch, Error, LossOptions, Model, Plan, Precision, Probe, Recompute, Step, Ties, memory,
};
use clap::{Args, ValueEnum};
use serde_json::json;

use super::Global;
use crate::compare::{Comparison, non_finite_text};
use crate::exit::Outcome;
use crate::output;

/// Run a model on given tokens and compare logits, loss, gradients and activations with another
/// framework's.
#[derive(Args)]
pub(crate) struct TraceArgs {
    /// The checkpoint, in any layout, with its config.json; or hf://ORG/NAME.
    model: PathBuf,
    /// Input: `input_ids` [B, T] (I32 or I64), optionally `labels` [B, T], and `attention_mask` [B, T]
    /// (padding on either side) or `cu_seqlens` with B = 1.
    #[arg(long, value_name = "IN.safetensors")]
    ids: PathBuf,
    /// Output file for logits, loss, `grad.<name in the checkpoint>` and the chosen sites.
    #[arg(long, value_name = "OUT.safetensors")]
    out: Option<PathBuf>,
    /// Also run the backward pass.
    #[arg(long)]
    grads: bool,
    /// Sites to record, separated by commas, `*` for any characters: `layers.*.linear_attn.g,logits`. The
    /// gradient of a site has the prefix `d.`; `layers.N.self_attn.logits` are computed only if recorded.
    #[arg(long, value_name = "GLOB")]
    sites: Option<String>,
    /// Precision preset: f32, bf16, megatron, nemo, maxtext-default or hf-bf16.
    #[arg(long, default_value = "f32", value_name = "P")]
    precision: String,
    /// Form of the experts' gradients [default: the checkpoint's].
    #[arg(long)]
    experts: Option<Experts>,
    /// Choice among equal scores of DeepSeek's indexer: `torch`, as torch.topk on a CPU, to compare with
    /// transformers; or `earliest`, the first key, as all other commands do.
    #[arg(long, default_value = "torch")]
    topk_ties: TopkTies,
    /// File to compare with, tensor by tensor of the same name.
    #[arg(long, value_name = "GOLDEN.safetensors")]
    expect: Option<PathBuf>,
    /// Largest RMS(a-b)/(RMS(b)+1e-8) that passes [default: 1e-4 in f32, 0.1 in bf16].
    #[arg(long, value_name = "X")]
    tolerance: Option<f64>,
    /// Replace an existing output file.
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Experts {
    /// One tensor per expert.
    Split,
    /// One tensor for all experts.
    Fused,
}

#[derive(Clone, Copy, ValueEnum)]
enum TopkTies {
    Torch,
    Earliest,
}

/// Results by name.
type Results = BTreeMap<String, Array<f32>>;

pub(crate) fn run(mut args: TraceArgs, global: &Global) -> anyhow::Result<Outcome> {
    args.model = super::local(&args.model, global)?;
    let input = TensorFile::open(&args.ids)?;
    let expected = args.expect.as_ref().map(|path| TensorFile::open(path)).transpose()?;
    global.warnings.check_config(&*super::open(&args.model)?);
    let mut model = Model::load(&args.model, |config| Precision::preset(&args.precision, config))?;
    global.warnings.add_all(&model.warnings);
    model.set_ties(match args.topk_ties {
        TopkTies::Torch => Ties::Torch,
        TopkTies::Earliest => Ties::Earliest,
    });
    let (batch, rows) = read_batch(&input)?;
    let longest = batch.cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
    global.warnings.check_length("a sequence", longest, model.config.max_positions);
    let results = trace(&args, &model, &batch, &rows)?;
    // In `ballast` itself, a signal ends this command at once.
    if global.caller.as_ref().is_some_and(|caller| !caller.observer.may_publish()) {
        return Err(Interrupted.into());
    }
    if let Some(out) = &args.out {
        let named = results.iter().map(|(name, array)| (name.as_str(), &array.shape[..], &array.values[..]));
        let tensors: Vec<Named<'_>> = named.collect();
        let metadata = [("precision".to_string(), args.precision.clone())];
        write_f32(out, &tensors, &metadata, args.force)?;
    }
    let tolerance = args.tolerance.unwrap_or(if args.precision == "f32" { 1e-4 } else { 0.1 });
    let mut comparison = Comparison::new(tolerance);
    for (name, result) in &results {
        let expected = match &expected {
            Some(file) if file.has(name) => Some(same_size(file, name, result)?),
            _ => None,
        };
        comparison.add(name, result, expected.as_ref());
    }
    if let Some(result) = comparison.non_finite() {
        let first = first_non_finite(&model, &batch)?.unwrap_or_else(|| result.to_string());
        return Err(Error::NotFinite(first).into());
    }
    if let Some(file) = &expected {
        let wanted = |name: &&str| args.grads && name.starts_with("grad.") && !results.contains_key(*name);
        for name in file.names().filter(wanted) {
            comparison.add_missing(name, &file.f32(name)?.shape);
        }
        if comparison.compared() == 0 {
            let problem = "no tensor to compare: logits, loss, grad.<name> (with --grads) or sites (with --sites) expected";
            return Err(file.error("logits", problem).into());
        }
    }
    let notes = json!({
        "model_type": model.config.model_type,
        "precision": args.precision,
        "tokens": batch.tokens(),
        "sequences": batch.cu_seqlens.len() - 1,
        "parameter_bytes": model.params.bytes(),
        "loss": results["loss"].values[0],
    });
    if !global.json {
        output::print(&format!(
            "{}: {} tokens in {}, {}, loss {:.6}\n",
            model.config.model_type,
            batch.tokens(),
            output::plural(batch.cu_seqlens.len() - 1, "sequence"),
            args.precision,
            results["loss"].values[0]
        ));
    }
    Ok(comparison.report("trace", notes, global))
}

/// The positions of a batch's tokens in the file's [B, T].
pub(super) struct Rows {
    shape: [usize; 2],
    /// Index in the B * T positions, by token of the batch.
    places: Vec<usize>,
}

impl Rows {
    /// Expands a tensor [tokens, ...] of the batch to [B, T, ...]; padding is zero.
    fn spread(&self, values: &[f32]) -> Array<f32> {
        let width = values.len() / self.places.len().max(1);
        let mut all = vec![0.0; self.shape[0] * self.shape[1] * width];
        for (row, place) in values.chunks(width.max(1)).zip(&self.places) {
            all[place * width..(place + 1) * width].copy_from_slice(row);
        }
        Array { shape: vec![self.shape[0], self.shape[1], width], values: all }
    }
}

pub(super) fn read_batch(input: &TensorFile) -> anyhow::Result<(Batch, Rows)> {
    let ids = input.integers("input_ids")?;
    let &[rows, columns] = &ids.shape[..] else {
        return Err(input.error("input_ids", format!("shape must be [B, T], got {:?}", ids.shape)).into());
    };
    if rows * columns == 0 {
        return Err(input.error("input_ids", "no tokens").into());
    }
    let tokens: Option<Vec<u32>> = ids.values.iter().map(|id| u32::try_from(*id).ok()).collect();
    let Some(tokens) = tokens else {
        let bad = ids.values.iter().position(|id| u32::try_from(*id).is_err()).unwrap_or(0);
        let problem = format!("token id at [{}, {}] is {}", bad / columns, bad % columns, ids.values[bad]);
        return Err(input.error("input_ids", problem).into());
    };
    let same_shape = |name: &str| -> anyhow::Result<Option<Vec<i64>>> {
        if !input.has(name) {
            return Ok(None);
        }
        let array = input.integers(name)?;
        if array.shape != ids.shape {
            let problem = format!("shape must be {:?} as for input_ids, got {:?}", ids.shape, array.shape);
            return Err(input.error(name, problem).into());
        }
        Ok(Some(array.values))
    };
    for name in ["position_ids", "token_type_ids", "inputs_embeds"] {
        if input.has(name) {
            return Err(input
                .error(name, "is not supported; positions are derived from the sequences")
                .into());
        }
    }
    let labels = same_shape("labels")?.unwrap_or(ids.values.clone());
    let shape = [rows, columns];
    if let Some(mask) = same_shape("attention_mask")? {
        if input.has("cu_seqlens") {
            let problem = "cannot be combined with cu_seqlens; use attention_mask for padded rows, cu_seqlens for packed sequences";
            return Err(input.error("attention_mask", problem).into());
        }
        if let Some(bad) = mask.iter().position(|m| ![0, 1].contains(m)) {
            let problem =
                format!("must be 0 or 1, got {} at [{}, {}]", mask[bad], bad / columns, bad % columns);
            return Err(input.error("attention_mask", problem).into());
        }
        let mask: Vec<bool> = mask.iter().map(|m| *m != 0).collect();
        let batch = Batch::padded(&tokens, &labels, &mask, columns);
        let batch = batch.map_err(|error| input.error("attention_mask", error.to_string()))?;
        let places = (0..mask.len()).filter(|place| mask[*place]).collect();
        return Ok((batch, Rows { shape, places }));
    }
    let ends = super::sequences(input, rows, columns)?;
    let places = (0..tokens.len()).collect();
    Ok((Batch::with_labels(tokens, &labels, ends)?, Rows { shape, places }))
}

fn trace(args: &TraceArgs, model: &Model, batch: &Batch, rows: &Rows) -> Result<Results, Error> {
    let mut results = Results::new();
    let logits = 2 * 4 * (batch.tokens() * model.config.vocabulary) as u64;
    let step = if args.grads {
        let plan =
            Plan::new(&model.config, model.precision(), &Step::new(&batch.cu_seqlens, Recompute::None))?;
        (plan.total() - plan.parameters + plan.gradients) as u64
    } else {
        0
    };
    memory::check("the trace of this input", logits + step)?;
    let logits = rows.spread(&model.logits(batch, None)?);
    results.insert("logits".into(), logits);
    let mut recorder = Recorder { pattern: args.sites.clone(), ..Recorder::default() };
    let probe = args.sites.as_ref().map(|_| &mut recorder as &mut dyn Probe);
    let options = LossOptions::default();
    let loss = if args.grads {
        let mut grads = model.grads();
        let loss = model.forward_backward(&mut grads, batch, &options, Recompute::None, probe)?;
        let form = args.experts.map(|experts| match experts {
            Experts::Split => Form::Split,
            Experts::Fused => Form::Fused,
        });
        for tensor in model.named_grads(&grads, form)? {
            let array = Array { shape: tensor.shape, values: tensor.values };
            results.insert(format!("grad.{}", tensor.name), array);
        }
        loss.language
    } else {
        model.loss(batch, &options, probe)?
    };
    let mean = (loss.sum / loss.tokens.max(1) as f64) as f32;
    results.insert("loss".into(), Array { shape: vec![], values: vec![mean] });
    for seen in recorder.seen {
        let by_token = seen.shape.len() == 2 && seen.shape[0] == batch.tokens();
        let array = if by_token {
            rows.spread(&seen.values)
        } else {
            Array { shape: seen.shape, values: seen.values }
        };
        results.insert(seen.site, array);
    }
    Ok(results)
}

/// Describes the first non-finite tensor of a forward pass.
fn first_non_finite(model: &Model, batch: &Batch) -> Result<Option<String>, Error> {
    let mut finder = Finder::default();
    model.loss(batch, &LossOptions::default(), Some(&mut finder))?;
    Ok(finder.found)
}

/// Finds the first non-finite tensor.
#[derive(Default)]
struct Finder {
    found: Option<String>,
}

impl Probe for Finder {
    fn wants(&self, site: &str) -> bool {
        // The embedding is covered by `embed`; square tensors are too large, and their results are checked.
        let left_out = site == "param.embed_tokens.weight" || site.ends_with("self_attn.logits");
        self.found.is_none() && !left_out && !site.ends_with("indexer.scores")
    }

    fn see(&mut self, site: &str, _dtype: &'static str, _shape: &[usize], values: &[f32]) {
        if self.found.is_none() {
            self.found = non_finite_text(site, values);
        }
    }
}

/// Returns the expected tensor, which must have as many elements as the result; dimensions may be grouped
/// otherwise.
fn same_size(file: &TensorFile, name: &str, result: &Array<f32>) -> anyhow::Result<Array<f32>> {
    let expected = file.f32(name)?;
    if expected.values.len() != result.values.len() {
        let problem = format!("shape must be {:?}, got {:?}", result.shape, expected.shape);
        return Err(file.error(name, problem).into());
    }
    Ok(expected)
}
