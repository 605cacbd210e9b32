//! A whole model as one GGUF file.

use std::path::Path;
use std::sync::Arc;

use ballast_contract::Dtype;
use ballast_files::jobs::Observer;
use ballast_files::staging::Staging;
use ballast_files::{Error, Result};

use ballast_gguf::header::{Entry, Header, MAX_NAME_BYTES, Value};
use ballast_gguf::{ALIGNMENT, Config, EXTENSION, Family, parameters, tokenizer};

use super::tensors;
use crate::convert::{ConvertOptions, ConvertPlan, note_changes};
use crate::layout::{Layout, Naming, Ranks};
use crate::open::Checkpoint;
use crate::tied;
use crate::transfer::{Prepare, write_verified};
use crate::verify::{Verification, pairs_with_planned};
use crate::view::View;
use crate::write::{Output, WritePlan};

/// The content of a file to write.
pub(crate) struct GgufFile {
    pub(super) entries: Vec<Entry>,
    pub(super) outputs: Vec<Output>,
}

/// Returns true if `path` is a GGUF file by its name.
pub(super) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == EXTENSION)
}

/// Plans the file of a model.
pub(crate) fn plan(source: &Arc<Checkpoint>, options: &ConvertOptions) -> Result<ConvertPlan> {
    let config = Config::new(source.config.as_ref(), source.config_path())?;
    let family = Family::of(&config)?;
    let found = tensors::tensors(source, family, &config).map_err(|e| e.of(&source.root))?;
    let is_tied = source.config.as_ref().is_some_and(tied::is_tied);
    if !is_tied && !family.is_gemma() && !found.views.iter().any(|v| v.name == "output.weight") {
        return Err(Error::tensor(
            "lm_head.weight",
            "missing, and config.json does not tie it to the embedding",
        )
        .of(&source.root));
    }
    let rows = config.count("vocab_size")?;
    if let Some(embedding) =
        found.views.iter().find(|v| v.name == "token_embd.weight" && v.shape.first() != Some(&rows))
    {
        let problem = format!("its shape is {:?}, but `vocab_size` is {rows}", embedding.shape);
        return Err(Error::tensor("embed_tokens.weight", problem).of(&source.root));
    }
    let from = Layout::detect(source);
    let to = Layout { naming: Naming::Gguf, ranks: Ranks::ONE, ..from.clone() };
    let mut plan = ConvertPlan::empty(from, to);
    let mut entries = vec![
        entry("general.architecture", Value::String(family.name().into())),
        entry("general.type", Value::String("model".into())),
    ];
    if let Some(name) = model_name(source) {
        entries.push(entry("general.name", Value::String(name)));
    }
    let mut outputs = Vec::new();
    for view in found.views {
        let output = planned(view, options, &mut plan).map_err(|e| e.of(&source.root))?;
        plan.bytes += output.bytes();
        outputs.push(output);
    }
    entries.push(entry("general.file_type", Value::U32(file_type(&outputs))));
    entries.push(entry("general.quantization_version", Value::U32(2)));
    entries.extend(parameters::parameters(family, &config, found.predictors)?.list);
    let (tokens, notes) = tokenizer::entries(family, &config)?;
    entries.extend(tokens);
    plan.tensors = outputs.len();
    plan.notes.extend(notes);
    for (reason, names) in found.dropped {
        plan.notes.push(format!("not written ({reason}): {} tensors, first {}", names.len(), names[0]));
    }
    plan.gguf = Some(GgufFile { entries, outputs });
    Ok(plan)
}

fn entry(key: &str, value: Value) -> Entry {
    (key.to_string(), value)
}

/// Returns the name of the folder.
fn model_name(source: &Checkpoint) -> Option<String> {
    let root = source.root.canonicalize().ok()?;
    let folder = if source.is_single_file() { root.parent()? } else { &root };
    Some(folder.file_name()?.to_string_lossy().into_owned())
}

/// Tensors in F32 although they are matrices: llama.cpp's convolution needs it; scores that choose experts and
/// keys are small, and rounding them changes the choice.
const F32_MATRICES: [&str; 3] = ["ssm_conv1d.weight", "ffn_gate_inp.weight", "indexer.proj.weight"];

/// Decides the dtype of a tensor.
fn planned(view: View, options: &ConvertOptions, plan: &mut ConvertPlan) -> Result<Output> {
    if view.name.len() as u64 > MAX_NAME_BYTES {
        return Err(Error::tensor(
            view.name,
            format!("llama.cpp takes names of at most {MAX_NAME_BYTES} bytes"),
        ));
    }
    if !view.dtype.is_plain_float() {
        let problem = format!("stored in {}; only F16, BF16, F32 and F64 can be written as GGUF", view.dtype);
        return Err(Error::tensor(&view.name, problem));
    }
    let rule =
        view.sources().into_iter().find_map(|t| options.policy.rule_for(&t.name).map(|r| r.id.clone()));
    let is_f32_matrix = F32_MATRICES.iter().any(|name| view.name.ends_with(name));
    let own = if view.dtype == Dtype::F64 { Dtype::F32 } else { view.dtype };
    let wanted = options.dtype.unwrap_or(own);
    let is_whole = |(block, _): (u64, u64)| view.shape.last().is_some_and(|row| row.is_multiple_of(block));
    let (dtype, reason) = if let Some(rule) = rule {
        plan.protected.push(view.name.clone());
        (Dtype::F32, format!("protected by {rule} ({})", options.policy.name))
    } else if view.shape.len() < 2 || is_f32_matrix {
        plan.protected.push(view.name.clone());
        (Dtype::F32, "llama.cpp needs it in F32".to_string())
    } else if !wanted.block().is_none_or(is_whole) {
        (Dtype::F32, format!("its rows are not whole blocks of {wanted}"))
    } else if let Some(dtype) = options.dtype {
        (dtype, format!("--dtype {}", dtype.name().to_lowercase()))
    } else {
        (wanted, "GGUF has no F64 weights".to_string())
    };
    if view.dtype == Dtype::F64
        && dtype == Dtype::F32
        && plan.protected.last() == Some(&view.name)
        && !options.narrow_f64
    {
        let problem =
            "stored in F64 and needed in F32, which would lose bits; use --narrow-f64 to allow that";
        return Err(Error::tensor(&view.name, problem));
    }
    note_changes(&mut plan.dtype_changes, &view, dtype, reason);
    if view.shift != 0 {
        plan.shifted.push(view.name.clone());
    }
    Ok(Output { view, dtype })
}

/// Returns llama.cpp's number for the type of most weights.
fn file_type(outputs: &[Output]) -> u32 {
    let amount =
        |dtype: Dtype| outputs.iter().filter(|o| o.dtype == dtype).map(|o| o.view.elements()).sum::<u64>();
    let types = [(Dtype::F32, 0), (Dtype::F16, 1), (Dtype::Q8_0, 7), (Dtype::Bf16, 32)];
    types.into_iter().max_by_key(|(dtype, _)| amount(*dtype)).map_or(0, |(_, number)| number)
}

impl GgufFile {
    /// Plans every byte of the file.
    fn laid_out(self, path: &Path) -> WritePlan {
        let mut header = Header { entries: self.entries, tensors: Vec::new() };
        let mut begin = 0u64;
        for output in &self.outputs {
            header.tensors.push(output.info(begin));
            begin = (begin + output.bytes()).next_multiple_of(ALIGNMENT);
        }
        WritePlan::single(path.into(), header.to_bytes(), self.outputs, ALIGNMENT)
    }
}

/// Writes a file: stage, write, read back and compare, commit.
pub(crate) fn write(
    sources: &[&Arc<Checkpoint>],
    file: GgufFile,
    destination: &Path,
    force: bool,
    observer: &dyn Observer,
) -> Result<Verification> {
    if !is_gguf(destination) {
        return Err(Error::Refused(format!("{}: a GGUF file must end in .gguf", destination.display())));
    }
    let mut names = std::collections::HashSet::new();
    if let Some(twice) = file.outputs.iter().find(|o| !names.insert(o.view.name.clone())) {
        return Err(Error::tensor(&twice.view.name, "two tensors would have this name in the destination"));
    }
    let paths: Vec<_> = sources.iter().flat_map(|source| source.paths()).collect();
    let staging = Staging::new(destination, true, force, &paths)?;
    let views: Vec<View> = file.outputs.iter().map(|output| output.view.clone()).collect();
    let plan = file.laid_out(&staging.staged());
    staging.check_space(plan.file_bytes())?;
    let pairs = || pairs_with_planned(vec![views.clone()], &staging.staged());
    let verification = write_verified(&plan, Prepare::Early, pairs, observer)?;
    for file in sources.iter().flat_map(|source| &source.files) {
        file.check_unchanged()?;
    }
    staging.commit(observer)?;
    Ok(verification)
}
