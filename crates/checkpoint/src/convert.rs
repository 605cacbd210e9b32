//! Conversion of a checkpoint: layout, dtype, shards. The result is read back and compared with the source.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use ballast_contract::holder::strip_fp32_holder_key;
use ballast_contract::{Dtype, Policy, Role};
use ballast_files::jobs::Observer;
use ballast_files::staging::Staging;
use ballast_files::{Error, Result, left_out, look_at};
use serde::Serialize;
use serde_json::Value;

use crate::gguf::{self, GgufFile};
use crate::layout::{Form, Layout, LayoutRequest, Naming, Ranks, is_carried, metadata, relayout};
use crate::open::Checkpoint;
use crate::remote::with_readers;
use crate::torch::{self, FileFormat};
use crate::transfer::{Prepare, write_verified};
use crate::verify::{self, Verification};
use crate::view::View;
use crate::write::{DEFAULT_SHARD_BYTES, Output, WritePlan};

/// Options of a conversion.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Layout to write.
    pub layout: LayoutRequest,
    /// dtype of float tensors that are not protected; `None` keeps each dtype.
    pub dtype: Option<Dtype>,
    /// Policy that keeps tensors in F32 regardless of `dtype`, reduced to the checkpoint's architecture.
    pub policy: Policy,
    /// Allow protected F64 tensors to become F32.
    pub narrow_f64: bool,
    /// File format to write.
    pub format: FileFormat,
    /// Largest size of a shard in bytes.
    pub max_shard_bytes: u64,
    /// Replace an existing checkpoint at the destination.
    pub force: bool,
    /// Names and contents of more files to write beside the weights; they replace copied files of the same
    /// name.
    pub files: Vec<(String, Vec<u8>)>,
}

impl ConvertOptions {
    /// Creates options that change nothing but protect tensors by `policy`.
    pub fn new(policy: Policy) -> ConvertOptions {
        ConvertOptions {
            layout: LayoutRequest::default(),
            dtype: None,
            policy,
            narrow_f64: false,
            format: FileFormat::Safetensors,
            max_shard_bytes: DEFAULT_SHARD_BYTES,
            force: false,
            files: Vec::new(),
        }
    }
}

/// Tensors with the same change of dtype for the same reason.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct DtypeChange {
    /// dtype in the source.
    pub from: Dtype,
    /// dtype in the destination.
    pub to: Dtype,
    /// Reason.
    pub reason: String,
    /// True if the change can lose bits.
    pub lossy: bool,
    /// Names in the destination.
    pub tensors: Vec<String>,
}

/// The plan of a conversion.
#[derive(Serialize)]
#[non_exhaustive]
pub struct ConvertPlan {
    /// Layout of the source.
    pub from: Layout,
    /// Layout of the destination.
    pub to: Layout,
    /// Number of tensors in the destination, over all ranks.
    pub tensors: usize,
    /// Number of bytes of these tensors.
    pub bytes: u64,
    /// Tensors that the policy keeps in F32.
    pub protected: Vec<String>,
    /// Changes of dtype.
    pub dtype_changes: Vec<DtypeChange>,
    /// Tensors shifted by one in f32 (Megatron's zero-centered gamma).
    pub shifted: Vec<String>,
    /// Tensors that the change of layout does not affect; copied under their own names.
    pub carried: Vec<String>,
    /// Tensors that keep their dtype although another was requested, by reason.
    pub left_alone: BTreeMap<&'static str, Vec<String>>,
    /// Notes for the user.
    pub notes: Vec<String>,
    #[serde(skip)]
    outputs: Vec<Vec<Output>>,
    /// Content of the file, if the destination is GGUF.
    #[serde(skip)]
    pub(crate) gguf: Option<GgufFile>,
}

impl ConvertPlan {
    /// Creates a plan without tensors.
    pub(crate) fn empty(from: Layout, to: Layout) -> ConvertPlan {
        ConvertPlan {
            tensors: 0,
            bytes: 0,
            protected: Vec::new(),
            dtype_changes: Vec::new(),
            shifted: Vec::new(),
            carried: Vec::new(),
            left_alone: BTreeMap::new(),
            notes: Vec::new(),
            outputs: Vec::new(),
            gguf: None,
            from,
            to,
        }
    }
}

/// The result of a conversion.
#[derive(Serialize)]
#[non_exhaustive]
pub struct ConvertReport {
    /// Plan of the conversion.
    #[serde(flatten)]
    pub plan: ConvertPlan,
    /// Number of files with tensors written.
    pub files: usize,
    /// Number of other files copied.
    pub sidecars: usize,
    /// Comparison of the destination with the source.
    pub verification: Verification,
}

/// Plans a conversion without writing anything.
pub fn plan(source: &Arc<Checkpoint>, options: &ConvertOptions) -> Result<ConvertPlan> {
    if options.layout.naming == Some(Naming::Gguf) {
        let mut plan = gguf::plan(source, options)?;
        plan.notes.extend(left_out::line(&source.left_out));
        return Ok(plan);
    }
    if options.dtype.is_some_and(|dtype| dtype.block().is_some()) {
        return Err(Error::Refused("q8_0 is a type of GGUF; use a destination that ends in .gguf".into()));
    }
    let mut from = Layout::detect(source);
    if let (Naming::Megatron, Some(zero_centered)) = (from.naming, options.layout.zero_centered_gamma) {
        from.zero_centered_gamma = zero_centered;
    }
    let to = from.requested(&options.layout)?;
    check_format(options.format, &to)?;
    let ranks = relayout(source, &from, &to)?;
    let has_scaled = source.tensors.iter().any(|t| t.dtype.is_scaled_float());

    let mut plan = ConvertPlan::empty(from, to);
    plan.tensors = ranks.iter().map(Vec::len).sum();
    let mut changes: Vec<DtypeChange> = Vec::new();
    for views in ranks {
        let mut outputs = Vec::new();
        for view in views {
            let (dtype, reason) =
                decide_dtype(&view, options, has_scaled, &mut plan).map_err(|e| e.of(&source.root))?;
            note_changes(&mut changes, &view, dtype, reason);
            if view.shift != 0 {
                plan.shifted.push(view.name.clone());
            }
            let unknown =
                plan.to.naming != plan.from.naming && is_carried(&view.name) && view.is_stored_as(&view.name)
                    || Role::of(&view.name) == Role::Other;
            if unknown {
                plan.carried.push(view.name.clone());
            }
            let output = Output { view, dtype };
            plan.bytes += output.bytes();
            outputs.push(output);
        }
        plan.outputs.push(outputs);
    }
    plan.dtype_changes = changes;
    plan.notes.extend(form_notes(source, &plan));
    plan.notes.extend(left_out::line(&source.left_out));
    Ok(plan)
}

/// Returns an error if a file format does not go with a layout.
fn check_format(format: FileFormat, to: &Layout) -> Result<()> {
    let refuse = |problem: &str| Err(Error::Refused(problem.into()));
    match format {
        FileFormat::Safetensors => Ok(()),
        FileFormat::Dcp if to.naming != Naming::Hf => {
            refuse("--format dcp has the names of transformers; use --layout hf")
        }
        FileFormat::Dcp => Ok(()),
        _ if to.naming != Naming::Megatron => {
            refuse("--format torch and torch_dist are Megatron's; use --layout megatron")
        }
        FileFormat::TorchDist if to.ranks != Ranks::ONE => {
            refuse("--format torch_dist does not depend on the number of ranks; leave out --tp and --ep")
        }
        _ if !to.zero_centered_gamma => refuse(
            "torch's formats have no place to say that gammas are not zero-centered; use --zero-centered-gamma true",
        ),
        _ => Ok(()),
    }
}

/// Returns the dtype of a tensor in the destination, and the reason if it is not the view's own.
fn decide_dtype(
    view: &View,
    options: &ConvertOptions,
    has_scaled: bool,
    plan: &mut ConvertPlan,
) -> Result<(Dtype, String)> {
    if let Some(rule) = options.policy.rule_for(&view.name) {
        if view.dtype == Dtype::F64 && !options.narrow_f64 {
            let problem = "protected and stored in F64: F32 would lose bits; use --narrow-f64 to allow that";
            return Err(Error::tensor(&view.name, problem));
        }
        if view.dtype.is_scaled_float() {
            let problem =
                format!("protected, but stored in {}, which cannot be cast without its scale", view.dtype);
            return Err(Error::tensor(&view.name, problem));
        }
        if view.dtype.is_plain_float() {
            plan.protected.push(view.name.clone());
            return Ok((Dtype::F32, format!("protected by {} ({})", rule.id, options.policy.name)));
        }
        return Ok((view.dtype, String::new()));
    }
    let Some(dtype) = options.dtype else {
        return Ok((view.dtype, String::new()));
    };
    let mut leave = |why: &'static str| {
        plan.left_alone.entry(why).or_default().push(view.name.clone());
        Ok((view.dtype, String::new()))
    };
    let last = view.name.rsplit('.').next().unwrap_or_default();
    if view.dtype == dtype {
        Ok((dtype, String::new()))
    } else if view.dtype.is_scaled_float() {
        leave("quantized, with scales")
    } else if !view.dtype.is_plain_float() {
        leave("not a float")
    } else if has_scaled && last.contains("scale") {
        leave("scale of quantized weights")
    } else {
        Ok((dtype, format!("--dtype {}", dtype.name().to_lowercase())))
    }
}

/// Records the changes of dtype of the stored parts of `view`.
pub(crate) fn note_changes(changes: &mut Vec<DtypeChange>, view: &View, to: Dtype, reason: String) {
    let mut from: Vec<Dtype> = view.sources().iter().map(|t| t.dtype).collect();
    from.sort();
    from.dedup();
    for from in from.into_iter().filter(|from| *from != to) {
        let reason = if !reason.is_empty() {
            reason.clone()
        } else if view.shift != 0 {
            "shifted by one in f32".to_string()
        } else {
            "concatenated with a wider part".to_string()
        };
        match changes.iter_mut().find(|c| (c.from, c.to, &c.reason) == (from, to, &reason)) {
            Some(change) => change.tensors.push(view.name.clone()),
            None => {
                let lossy = !from.widens_exactly_to(to);
                changes.push(DtypeChange { from, to, reason, lossy, tensors: vec![view.name.clone()] });
            }
        }
    }
}

/// Returns notes about the form of the destination.
fn form_notes(source: &Checkpoint, plan: &ConvertPlan) -> Vec<String> {
    let (to, mut notes) = (&plan.to, Vec::new());
    let model_type = source.config.as_ref().and_then(|c| {
        c.get("text_config").unwrap_or(c).get("model_type").and_then(Value::as_str).map(str::to_owned)
    });
    let expected = match model_type.as_deref() {
        Some("qwen3_next") => Some(Form::Fused),
        Some(t) if t.starts_with("qwen3_5") => Some(Form::Split),
        _ => None,
    };
    if let (Some(expected), Some(form), true) = (expected, to.projections, to.naming != Naming::Megatron)
        && expected != form
    {
        let form = if expected == Form::Fused { "fused" } else { "split" };
        notes.push(format!(
            "transformers expects {form} projections for {}; this form is for other tools only",
            model_type.unwrap_or_default()
        ));
    }
    if to.naming == Naming::Nemo {
        let routed = |output: &Output| strip_fp32_holder_key(&output.view.name) != output.view.name;
        let note = match plan.outputs.iter().flatten().any(routed) {
            true => {
                "A_log and dt_bias are under _fp32_params: a run-time state dict, not a file for transformers"
            }
            false => {
                "this model has no linear attention, so nothing is under _fp32_params: the names are those of hf"
            }
        };
        notes.push(note.into());
    }
    notes
}

/// Executes a plan: stage, write, read back and compare, commit.
pub fn execute(
    source: &Arc<Checkpoint>,
    mut plan: ConvertPlan,
    destination: &Path,
    options: &ConvertOptions,
    observer: &dyn Observer,
) -> Result<ConvertReport> {
    if let Some(file) = plan.gguf.take() {
        let verification = gguf::write(&[source], file, destination, options.force, observer)
            .map_err(|e| e.of(&source.root))?;
        return Ok(ConvertReport { plan, files: 1, sidecars: 0, verification });
    }
    let single_file = destination.extension().is_some_and(|e| e == "safetensors");
    if single_file && plan.to.ranks.count() > 1 {
        return Err(Error::Refused(
            "several ranks cannot be written to one file; use a folder as destination".into(),
        ));
    }
    if let (true, Some((name, _))) = (single_file, options.files.first()) {
        return Err(Error::Refused(format!(
            "{name} cannot be written beside the single file {}; use a folder as destination",
            destination.display()
        )));
    }
    let staging = Staging::new(destination, single_file, options.force, &source.paths())?;
    let mut file_metadata: Vec<(String, String)> =
        source.metadata.iter().filter(|(k, _)| !metadata::ALL.contains(&k.as_str())).cloned().collect();
    file_metadata.extend(plan.to.describe());
    let outputs = std::mem::take(&mut plan.outputs);
    let limit = options.max_shard_bytes;
    let files = match options.format {
        FileFormat::Safetensors => {
            let expert_ranks = plan.to.ranks.expert;
            WritePlan::new(
                staging.folder(),
                staging.file_name(),
                outputs,
                expert_ranks,
                &file_metadata,
                limit,
            )
        }
        format => torch::plan(format, staging.folder(), outputs, plan.to.ranks, source, limit),
    }
    .map_err(|e| e.of(&source.root))?;
    let more_bytes: u64 = options.files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    staging.check_space(files.file_bytes() + source.sidecar_bytes()? + more_bytes)?;
    let folder = options.format.folder(staging.folder());
    fs::create_dir_all(&folder).map_err(Error::io(&folder, "create"))?;
    let sidecars = if single_file { 0 } else { copy_sidecars(source, &folder, options.dtype)? };
    for (name, bytes) in &options.files {
        write_flushed(&folder.join(name), bytes).map_err(Error::io(&destination.join(name), "write"))?;
    }
    let prepare = if plan.to.ranks.count() == 1 { Prepare::Early } else { Prepare::Late };
    let pairs = || verify::pairs_with_source(source, &plan.from, &staging.staged(), &plan.to);
    let work = || write_verified(&files, prepare, pairs, observer);
    let verification = with_readers(&[source], work).map_err(|e| e.of(&source.root))?;
    for file in &source.files {
        file.check_unchanged()?;
    }
    let count = files.file_count();
    staging.commit(observer)?;
    Ok(ConvertReport { plan, files: count, sidecars, verification })
}

/// Copies the files beside the weights and updates the dtype in config.json.
pub(crate) fn copy_sidecars(source: &Checkpoint, folder: &Path, dtype: Option<Dtype>) -> Result<usize> {
    for name in &source.sidecars {
        let (from, to) = (source.root.join(name), folder.join(name));
        if name.as_os_str() == "config.json"
            && let Some(config) = source.config.clone()
            && (dtype.is_some() || source.is_in_memory() || look_at(&from)?.is_none())
        {
            let config = match dtype {
                Some(dtype) => config_with_dtype(config, dtype),
                None => config,
            };
            fs::write(&to, format!("{config:#}\n")).map_err(Error::io(&to, "write"))?;
        } else {
            fs::copy(&from, &to).map_err(Error::io(&from, "copy"))?;
        }
        File::open(&to).and_then(|f| f.sync_all()).map_err(Error::io(&to, "flush"))?;
    }
    Ok(source.sidecars.len())
}

fn write_flushed(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Replaces every dtype in a config.json by `dtype`.
pub fn config_with_dtype(mut config: Value, dtype: Dtype) -> Value {
    let name = match dtype {
        Dtype::Bf16 => "bfloat16",
        Dtype::F16 => "float16",
        _ => "float32",
    };
    let set = |config: &mut Value| {
        for key in ["dtype", "torch_dtype"] {
            if let Some(value) = config.get_mut(key).filter(|v| v.is_string()) {
                *value = name.into();
            }
        }
    };
    set(&mut config);
    if let Some(text_config) = config.get_mut("text_config") {
        set(text_config);
    }
    config
}
