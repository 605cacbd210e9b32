//! Checkpoints in torch's formats, planned: the tensors of a plan in the files of [`ballast_torch`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ballast_contract::Dtype;
use ballast_files::header::TensorInfo;
use ballast_files::ranks::{RELEASE, TRACKER, rank_folder};
use ballast_files::{Error, Result};
use ballast_torch::{METADATA, PACKED, RANK_FILE, export};
use serde_json::json;

use crate::layout::{Geometry, Ranks, is_extra_state};
use crate::open::Checkpoint;
use crate::view::View;
use crate::write::{Output, Shard, WritePlan, group};

/// File format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum FileFormat {
    /// Safetensors.
    #[default]
    Safetensors,
    /// Megatron's legacy format: one file of `torch.save` for each rank.
    Torch,
    /// Megatron's distributed format.
    TorchDist,
    /// torch.distributed.checkpoint with the names of transformers, for FSDP2.
    Dcp,
}

impl FileFormat {
    /// Returns the folder of config.json and other files in the folder of the checkpoint.
    pub(crate) fn folder(self, root: &Path) -> PathBuf {
        match self {
            FileFormat::Safetensors | FileFormat::Dcp => root.into(),
            FileFormat::Torch | FileFormat::TorchDist => root.join(RELEASE),
        }
    }
}

/// Plans the files in `folder` for these tensors, by rank; the configuration is that of `source`.
pub(crate) fn plan(
    format: FileFormat,
    folder: &Path,
    outputs: Vec<Vec<Output>>,
    ranks: Ranks,
    source: &Checkpoint,
    max_shard_bytes: u64,
) -> Result<WritePlan> {
    let mut outputs: Vec<Vec<Output>> = outputs.into_iter().map(without_empty_extra_state).collect();
    let content = format.folder(folder);
    let is_legacy = format == FileFormat::Torch;
    let ranks_of = (ranks.tensor, ranks.expert);
    let arguments = source.config.as_ref().map(|config| export::arguments(config, ranks_of, is_legacy));
    let mut files = Vec::new();
    if format != FileFormat::Dcp {
        files.push((folder.join(TRACKER), RELEASE.into()));
    }
    let shards = match format {
        FileFormat::Torch => {
            let path = |rank| content.join(rank_folder(rank, ranks.expert)).join(RANK_FILE);
            let file = |(rank, outputs): (usize, Vec<Output>)| {
                let frame = export::legacy_file(&described(&outputs), arguments.as_ref())?;
                Ok(Shard { path: path(rank), frame, outputs })
            };
            outputs.into_iter().enumerate().map(file).collect::<Result<Vec<Shard>>>()?
        }
        _ => {
            let outputs = outputs.pop().unwrap_or_default();
            let outputs = match format {
                FileFormat::TorchDist => by_part(outputs, source)?,
                _ => outputs,
            };
            let groups = group(outputs, max_shard_bytes);
            let tensors: Vec<_> = groups.iter().map(|outputs| described(outputs)).collect();
            let made = export::distributed_files(&tensors, format == FileFormat::TorchDist)?;
            let shard = |((name, frame), outputs)| Shard { path: content.join(name), frame, outputs };
            files.push((content.join(METADATA), made.metadata));
            if format == FileFormat::TorchDist {
                files.push((content.join("common.pt"), export::common_file(arguments.as_ref())));
                let backend = json!({
                    "sharded_backend": "torch_dist",
                    "sharded_backend_version": 1,
                    "common_backend": "torch",
                    "common_backend_version": 1,
                });
                files.push((content.join("metadata.json"), backend.to_string().into_bytes()));
            }
            made.files.into_iter().zip(groups).map(shard).collect()
        }
    };
    Ok(WritePlan::of_shards(shards, files))
}

fn without_empty_extra_state(outputs: Vec<Output>) -> Vec<Output> {
    outputs.into_iter().filter(|o| o.view.elements() > 0 || !is_extra_state(&o.view.name)).collect()
}

/// Returns the descriptions of tensors whose places are not known yet.
fn described(outputs: &[Output]) -> Vec<TensorInfo> {
    outputs.iter().map(|output| output.info(0)).collect()
}

/// Divides packed projections by part, and stacks experts: tensors that do not depend on the number of ranks.
fn by_part(outputs: Vec<Output>, source: &Checkpoint) -> Result<Vec<Output>> {
    let mut made = Vec::new();
    let mut experts: BTreeMap<(String, Dtype), Vec<(u64, View)>> = BTreeMap::new();
    for Output { view, dtype } in outputs {
        if let Some((_, parts)) = PACKED.iter().find(|(suffix, _)| view.name.ends_with(suffix)) {
            let g = Geometry::of(source)?;
            let rows = [g.qk_rows(), g.qk_rows(), g.v_rows(), g.v_rows(), g.value_heads, g.value_heads];
            let mut at = 0;
            for (part, rows) in parts.iter().zip(rows) {
                let slice = view.slice(0, at..at + rows)?.renamed(format!("{}.{part}", view.name));
                made.push(Output { view: slice, dtype });
                at += rows;
            }
            if at != view.shape[0] {
                let problem = format!("{} rows, but config.json describes {at}", view.shape[0]);
                return Err(Error::tensor(&view.name, problem));
            }
            continue;
        }
        let Some((name, number)) = expert_of(&view.name) else {
            made.push(Output { view, dtype });
            continue;
        };
        let shape = [&[1], view.shape.as_slice()].concat();
        let view = view.reshaped(&shape)?;
        experts.entry((name, dtype)).or_default().push((number, view));
    }
    for ((name, dtype), mut members) in experts {
        members.sort_by_key(|(number, _)| *number);
        let views: Vec<View> = members.into_iter().map(|(_, view)| view).collect();
        made.push(Output { view: View::concat(name, 0, &views)?, dtype });
    }
    Ok(made)
}

/// The stacked tensor of an expert's tensor, and the number of the expert.
fn expert_of(name: &str) -> Option<(String, u64)> {
    let (module, leaf) = name.split_once(".mlp.experts.linear_fc")?;
    let (layer, number) = leaf.split_once(".weight")?;
    Some((format!("{module}.mlp.experts.experts.linear_fc{layer}.weight"), number.parse().ok()?))
}
