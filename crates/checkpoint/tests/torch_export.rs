//! Checkpoints written in torch's formats, read back by this crate and by an independent zip reader.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::FileFormat;
use ballast_checkpoint::convert::{ConvertOptions, execute, plan};
use ballast_checkpoint::layout::{LayoutRequest, Naming};
use ballast_contract::Dtype;
use ballast_files::jobs::Silent;

use crate::common::{convert, fixture, open, options, read_folder};

fn request(
    source: &Arc<Checkpoint>,
    format: FileFormat,
    naming: Naming,
    ranks: Option<usize>,
) -> ConvertOptions {
    let layout = LayoutRequest { naming: Some(naming), ranks, ..LayoutRequest::default() };
    ConvertOptions { layout, format, ..options(source, "strict") }
}

/// All files below a folder with this ending.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(files(&entry, ending));
        } else if entry.to_string_lossy().ends_with(ending) {
            found.push(entry);
        }
    }
    found.sort();
    found
}

/// Reads every entry of a zip file, which compares its checksum.
fn check_zip(path: &Path) -> usize {
    let mut zip = zip::ZipArchive::new(File::open(path).unwrap()).unwrap();
    for index in 0..zip.len() {
        let mut entry = zip.by_index(index).unwrap();
        assert_eq!(entry.data_start().unwrap() % 64, 0);
        entry.read_to_end(&mut Vec::new()).unwrap();
    }
    zip.len()
}

#[test]
fn every_format_goes_back_to_the_same_bits() {
    for model in ["qwen3_5", "qwen3_5_moe", "qwen3_next"] {
        for (format, naming, ranks) in [
            (FileFormat::TorchDist, Naming::Megatron, None),
            (FileFormat::Torch, Naming::Megatron, None),
            (FileFormat::Torch, Naming::Megatron, Some(2)),
            (FileFormat::Dcp, Naming::Hf, None),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let source = open(&fixture(&format!("models/{model}")));
            let there = folder.path().join("there");
            convert(&source, &there, &request(&source, format, naming, ranks));
            let written = open(&there);
            assert_eq!(written.config, source.config, "{model} {format:?}");
            assert_eq!(written.ranks, ranks.unwrap_or(1));
            let back = folder.path().join("back");
            let again = LayoutRequest {
                naming: Some(Naming::Hf),
                experts: ballast_checkpoint::layout::Layout::detect(&source).experts,
                projections: ballast_checkpoint::layout::Layout::detect(&source).projections,
                ..LayoutRequest::default()
            };
            convert(&written, &back, &ConvertOptions { layout: again, ..options(&written, "strict") });
            let expected = read_folder(&fixture(&format!("models/{model}")));
            let got = read_folder(&back);
            for tensor in &source.tensors {
                assert_eq!(got[&tensor.name], expected[&tensor.name], "{model} {format:?} {}", tensor.name);
            }
            assert_eq!(got.len(), source.tensors.len(), "{model} {format:?}");
        }
    }
}

#[test]
fn zip_files_have_checksums_and_aligned_data() {
    let folder = tempfile::tempdir().unwrap();
    let source = open(&fixture("models/qwen3_5"));
    let target = folder.path().join("ranks");
    convert(&source, &target, &request(&source, FileFormat::Torch, Naming::Megatron, Some(2)));
    let ranks = files(&target, "model_optim_rng.pt");
    assert_eq!(ranks.len(), 2);
    assert!(ranks.iter().all(|path| check_zip(path) > 40));
    let target = folder.path().join("dist");
    convert(&source, &target, &request(&source, FileFormat::TorchDist, Naming::Megatron, None));
    assert_eq!(check_zip(&target.join("release/common.pt")), 3);
    assert_eq!(std::fs::read_to_string(target.join("latest_checkpointed_iteration.txt")).unwrap(), "release");
}

#[test]
fn a_small_shard_size_gives_several_files_and_protected_tensors_stay_f32() {
    let folder = tempfile::tempdir().unwrap();
    let source = open(&fixture("models/qwen3_5"));
    let target = folder.path().join("dist");
    let options = ConvertOptions {
        dtype: Some(Dtype::Bf16),
        max_shard_bytes: 100_000,
        ..request(&source, FileFormat::TorchDist, Naming::Megatron, None)
    };
    convert(&source, &target, &options);
    assert!(files(&target, ".distcp").len() > 2);
    let written = open(&target);
    let dtype = |end: &str| {
        let mut all: Vec<Dtype> =
            written.tensors.iter().filter(|t| t.name.ends_with(end)).map(|t| t.dtype).collect();
        all.dedup();
        all
    };
    assert_eq!(dtype("A_log"), [Dtype::F32]);
    assert_eq!(dtype("out_norm.weight"), [Dtype::F32]);
    assert_eq!(dtype("in_proj.weight"), [Dtype::Bf16]);
}

#[test]
fn the_geometry_is_in_the_arguments_too() {
    let folder = tempfile::tempdir().unwrap();
    let source = open(&fixture("models/qwen3_5"));
    for (format, name) in [(FileFormat::TorchDist, "dist"), (FileFormat::Torch, "torch")] {
        let target = folder.path().join(name);
        convert(&source, &target, &request(&source, format, Naming::Megatron, None));
        std::fs::remove_file(target.join("release/config.json")).unwrap();
        let config = open(&target).config.clone().unwrap();
        let expected = source.config.as_ref().unwrap();
        for key in
            ["hidden_size", "num_hidden_layers", "layer_types", "vocab_size", "head_dim", "rms_norm_eps"]
        {
            assert_eq!(config[key], expected[key], "{name} {key}");
        }
    }
}

#[test]
fn files_of_expert_parallel_ranks_say_how_they_are_divided_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let source = open(&fixture("models/qwen3_next"));
    let there = folder.path().join("there");
    let mut options = request(&source, FileFormat::Torch, Naming::Megatron, Some(2));
    options.layout.expert_ranks = Some(4);
    convert(&source, &there, &options);
    let ranks = files(&there, "model_optim_rng.pt");
    assert_eq!(ranks.len(), 8);
    assert!(ranks[7].ends_with("release/mp_rank_01_003/model_optim_rng.pt"));
    let written = open(&there);
    assert_eq!((written.ranks, written.expert_ranks), (8, 4));
    let back = folder.path().join("back");
    convert(&written, &back, &request(&written, FileFormat::Safetensors, Naming::Hf, None));
    let (got, expected) = (read_folder(&back), read_folder(&fixture("models/qwen3_next")));
    for tensor in &source.tensors {
        assert_eq!(got[&tensor.name], expected[&tensor.name], "{}", tensor.name);
    }
    assert_eq!(got.len(), source.tensors.len());

    std::fs::remove_dir_all(ranks[5].parent().unwrap()).unwrap();
    let problem = Checkpoint::open(&there).unwrap_err().to_string();
    assert!(problem.contains("mp_rank_01_001 is not there"), "{problem}");
}

#[test]
fn files_divided_by_layers_or_with_other_ranks_for_experts_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = open(&fixture("models/qwen3_next"));
    for (name, argument, value, word) in [
        ("pipeline", "pipeline_model_parallel_size", 2, "pipeline-parallel ranks are not supported"),
        ("experts", "expert_tensor_parallel_size", 1, "experts are divided among 1 tensor-parallel ranks"),
    ] {
        let there = folder.path().join(name);
        convert(&source, &there, &request(&source, FileFormat::Torch, Naming::Megatron, Some(2)));
        for path in files(&there, "model_optim_rng.pt") {
            let mut bytes = std::fs::read(&path).unwrap();
            // The number follows the name, in four bytes after a `J`.
            let at = bytes.windows(argument.len()).position(|part| part == argument.as_bytes()).unwrap();
            let at = at + argument.len();
            let number = at + bytes[at..].iter().position(|byte| *byte == b'J').unwrap() + 1;
            bytes[number] = value;
            std::fs::write(&path, bytes).unwrap();
        }
        let problem = Checkpoint::open(&there).unwrap_err().to_string();
        assert!(problem.contains(word), "{problem}");
        assert!(problem.contains("torch_dist"), "{problem}");
    }
}

#[test]
fn a_checkpoint_in_one_of_torchs_formats_is_replaced_with_force_only() {
    let folder = tempfile::tempdir().unwrap();
    let source = open(&fixture("models/qwen3_5"));
    for (format, naming) in [
        (FileFormat::TorchDist, Naming::Megatron),
        (FileFormat::Torch, Naming::Megatron),
        (FileFormat::Dcp, Naming::Hf),
    ] {
        let target = folder.path().join(format!("{format:?}"));
        let mut options = request(&source, format, naming, None);
        convert(&source, &target, &options);
        let count = open(&target).tensors.len();
        let again = |options: &ConvertOptions| {
            let plan = plan(&source, options).unwrap();
            execute(&source, plan, &target, options, &Silent).map(|report| report.files)
        };
        assert!(again(&options).unwrap_err().to_string().contains("add --force to replace it"));
        options.force = true;
        assert_eq!(again(&options).unwrap(), 1, "{format:?}");
        assert_eq!(open(&target).tensors.len(), count, "{format:?}");
        std::fs::create_dir_all(target.join("iter_0000001")).unwrap();
        assert!(again(&options).unwrap_err().to_string().contains("iter_0000001"));
    }
}

#[test]
fn formats_that_do_not_fit_the_layout_are_refused() {
    let source = open(&fixture("models/qwen3_5"));
    let refused = |options: &ConvertOptions| plan(&source, options).err().unwrap().to_string();
    let dist = refused(&request(&source, FileFormat::TorchDist, Naming::Hf, None));
    assert!(dist.contains("use --layout megatron"), "{dist}");
    let ranks = refused(&request(&source, FileFormat::TorchDist, Naming::Megatron, Some(2)));
    assert!(ranks.contains("leave out --tp and --ep"), "{ranks}");
    let dcp = refused(&request(&source, FileFormat::Dcp, Naming::Megatron, None));
    assert!(dcp.contains("use --layout hf"), "{dcp}");
    let mut gamma = request(&source, FileFormat::Torch, Naming::Megatron, None);
    gamma.layout.zero_centered_gamma = Some(false);
    assert!(refused(&gamma).contains("--zero-centered-gamma true"));
}
