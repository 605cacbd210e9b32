//! Summary of a checkpoint from its headers.

use std::collections::{BTreeMap, HashMap};

use ballast_contract::{Architecture, Dtype, Policy, Registry, Role};
use ballast_files::Result;
use ballast_files::left_out::LeftOut;
use ballast_hub::RemoteSummary;
use serde::Serialize;

use crate::layout::Layout;
use crate::open::Checkpoint;

/// Number of tensors, parameters and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Amount {
    /// Number of tensors.
    pub tensors: u64,
    /// Number of elements.
    pub parameters: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// One safetensors file.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct FileSummary {
    /// Path relative to the checkpoint.
    pub file: String,
    /// Size on disk in bytes.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
}

/// One tensor.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct TensorSummary {
    /// Name.
    pub name: String,
    /// dtype.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Number of bytes.
    pub bytes: u64,
    /// Role.
    pub role: Role,
    /// File that holds it.
    pub file: String,
    /// Rule that protects it.
    pub rule: Option<String>,
}

/// Tensors that one rule protects.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct ProtectedSummary {
    /// The rule.
    pub rule: String,
    /// Number of tensors by dtype.
    pub stored: BTreeMap<Dtype, u64>,
    /// First tensor.
    pub first: String,
}

/// The summary of a checkpoint.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct InspectReport {
    /// Architecture.
    pub architecture: Architecture,
    /// Layout.
    pub layout: Layout,
    /// Files.
    pub files: Vec<FileSummary>,
    /// Total.
    pub total: Amount,
    /// Amounts by dtype.
    pub by_dtype: BTreeMap<Dtype, Amount>,
    /// Amounts by role and dtype.
    pub by_role: Vec<(Role, Dtype, Amount)>,
    /// Protected tensors by rule.
    pub protected: Vec<ProtectedSummary>,
    /// `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// Other files of the checkpoint.
    pub sidecars: Vec<String>,
    /// Disagreements between index and shards.
    pub issues: Vec<String>,
    /// Optimizer state beside the model, in torch's formats, by dtype.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub state: BTreeMap<Dtype, Amount>,
    /// Values beside tensors in files of torch's formats, by kind.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    /// Bytes and requests that a server was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteSummary>,
    /// All tensors.
    pub tensors: Vec<TensorSummary>,
}

/// Summarizes a checkpoint; reads headers only.
pub fn inspect(checkpoint: &Checkpoint, registry: &Registry, policy: &Policy) -> Result<InspectReport> {
    let (architecture, policy) = checkpoint.contract(registry, policy)?;
    let file_names: Vec<String> = checkpoint.files.iter().map(|f| checkpoint.shown_path(&f.path)).collect();
    let mut files: Vec<FileSummary> = checkpoint
        .files
        .iter()
        .zip(&file_names)
        .filter(|(f, _)| !f.is_assembled())
        .map(|(f, name)| FileSummary { file: name.clone(), bytes: f.bytes, tensors: 0 })
        .collect();
    // A tensor in parts counts where its first part lies.
    let numbers: HashMap<&str, usize> =
        file_names.iter().zip(0..files.len()).map(|(name, number)| (name.as_str(), number)).collect();
    let mut total = Amount::default();
    let mut by_dtype: BTreeMap<Dtype, Amount> = BTreeMap::new();
    let mut by_role: BTreeMap<(Role, Dtype), Amount> = BTreeMap::new();
    let mut protected: Vec<ProtectedSummary> = Vec::new();
    let mut tensors = Vec::new();
    for t in &checkpoint.tensors {
        let role = Role::of(&t.name);
        if let Some(number) = numbers.get(file_names[t.file].as_str()) {
            files[*number].tensors += 1;
        }
        for amount in
            [&mut total, by_dtype.entry(t.dtype).or_default(), by_role.entry((role, t.dtype)).or_default()]
        {
            amount.tensors += 1;
            amount.parameters += t.elements();
            amount.bytes += t.bytes;
        }
        let rule = policy.rule_for(&t.name).map(|r| r.id.clone());
        if let Some(rule) = &rule {
            let place = protected.iter().position(|p| &p.rule == rule).unwrap_or_else(|| {
                let (stored, first) = (BTreeMap::new(), t.name.clone());
                protected.push(ProtectedSummary { rule: rule.clone(), stored, first });
                protected.len() - 1
            });
            *protected[place].stored.entry(t.dtype).or_default() += 1;
        }
        tensors.push(TensorSummary {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            bytes: t.bytes,
            role,
            file: file_names[t.file].clone(),
            rule,
        });
    }
    let mut state: BTreeMap<Dtype, Amount> = BTreeMap::new();
    for t in &checkpoint.state {
        let amount = state.entry(t.dtype).or_default();
        amount.tensors += 1;
        amount.parameters += t.elements();
        amount.bytes += t.bytes;
    }
    Ok(InspectReport {
        architecture,
        layout: Layout::detect(checkpoint),
        files,
        total,
        by_dtype,
        by_role: by_role.into_iter().map(|((role, dtype), amount)| (role, dtype, amount)).collect(),
        protected,
        metadata: checkpoint.metadata.iter().cloned().collect(),
        sidecars: checkpoint.sidecars.iter().map(|p| p.to_string_lossy().into_owned()).collect(),
        issues: checkpoint.issues.iter().map(ToString::to_string).collect(),
        state,
        left_out: checkpoint.left_out.clone(),
        remote: checkpoint.remote.as_ref().map(|remote| remote.summary()),
        tensors,
    })
}
