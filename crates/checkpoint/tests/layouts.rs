//! Layouts: every packed form against rows written by hand, and round trips through every layout on the
//! fixtures.

use std::path::Path;

use ballast_checkpoint::convert::{execute, plan};
use ballast_checkpoint::diff::{Verdict, diff};
use ballast_checkpoint::layout::{Form, Layout, LayoutRequest, Naming};
use ballast_contract::Dtype;
use ballast_files::jobs::Silent;
use serde_json::json;

use crate::common::{self, *};

/// Key heads 2, value heads 4 (two per key head), widths 1; 4 query heads in 2 groups, width 1; hidden 1.
/// Every row of every tensor has one value that says where it comes from.
fn write_coded_model(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let config = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 1, "linear_value_head_dim": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let t = |name: &str, rows: &[f32]| f32_tensor(name, &[rows.len(), 1], rows);
    let v = |name: &str, values: &[f32]| f32_tensor(name, &[values.len()], values);
    let l0 = |leaf: &str| format!("model.layers.0.{leaf}");
    let l1 = |leaf: &str| format!("model.layers.1.{leaf}");
    write_file(
        &folder.join("model.safetensors"),
        &[
            t("model.embed_tokens.weight", &[1., 2., 3., 4.]),
            v("model.norm.weight", &[5.]),
            t("lm_head.weight", &[6., 7., 8., 9.]),
            v(&l0("input_layernorm.weight"), &[10.]),
            v(&l0("post_attention_layernorm.weight"), &[11.]),
            // q0 q1 | k0 k1 | v0 v1 v2 v3
            t(&l0("linear_attn.in_proj_qkv.weight"), &[20., 21., 30., 31., 40., 41., 42., 43.]),
            t(&l0("linear_attn.in_proj_z.weight"), &[50., 51., 52., 53.]),
            t(&l0("linear_attn.in_proj_b.weight"), &[60., 61., 62., 63.]),
            t(&l0("linear_attn.in_proj_a.weight"), &[70., 71., 72., 73.]),
            f32_tensor(
                &l0("linear_attn.conv1d.weight"),
                &[8, 1, 1],
                &[120., 121., 130., 131., 140., 141., 142., 143.],
            ),
            v(&l0("linear_attn.A_log"), &[0.1, 0.2, 0.3, 0.4]),
            v(&l0("linear_attn.dt_bias"), &[0.5, 0.6, 0.7, 0.8]),
            v(&l0("linear_attn.norm.weight"), &[1.25]),
            f32_tensor(&l0("linear_attn.out_proj.weight"), &[1, 4], &[80., 81., 82., 83.]),
            t(&l0("mlp.gate_proj.weight"), &[90., 91.]),
            t(&l0("mlp.up_proj.weight"), &[92., 93.]),
            f32_tensor(&l0("mlp.down_proj.weight"), &[1, 2], &[94., 95.]),
            v(&l1("input_layernorm.weight"), &[12.]),
            v(&l1("post_attention_layernorm.weight"), &[13.]),
            // per head: query, gate
            t(&l1("self_attn.q_proj.weight"), &[200., 300., 201., 301., 202., 302., 203., 303.]),
            t(&l1("self_attn.k_proj.weight"), &[400., 401.]),
            t(&l1("self_attn.v_proj.weight"), &[500., 501.]),
            f32_tensor(&l1("self_attn.o_proj.weight"), &[1, 4], &[600., 601., 602., 603.]),
            v(&l1("self_attn.q_norm.weight"), &[14.]),
            v(&l1("self_attn.k_norm.weight"), &[15.]),
            t(&l1("mlp.gate.weight"), &[700., 701.]),
            t(&l1("mlp.experts.0.gate_proj.weight"), &[710., 711.]),
            t(&l1("mlp.experts.0.up_proj.weight"), &[712., 713.]),
            f32_tensor(&l1("mlp.experts.0.down_proj.weight"), &[1, 2], &[714., 715.]),
            t(&l1("mlp.experts.1.gate_proj.weight"), &[720., 721.]),
            t(&l1("mlp.experts.1.up_proj.weight"), &[722., 723.]),
            f32_tensor(&l1("mlp.experts.1.down_proj.weight"), &[1, 2], &[724., 725.]),
            t(&l1("mlp.shared_expert.gate_proj.weight"), &[730., 731.]),
            t(&l1("mlp.shared_expert.up_proj.weight"), &[732., 733.]),
            f32_tensor(&l1("mlp.shared_expert.down_proj.weight"), &[1, 2], &[734., 735.]),
            t(&l1("mlp.shared_expert_gate.weight"), &[736.]),
            t("mtp.fc.weight", &[800.]),
            t("model.visual.patch_embed.weight", &[801.]),
        ],
    );
}

fn layout(naming: Naming, ranks: usize) -> LayoutRequest {
    LayoutRequest { naming: Some(naming), ranks: Some(ranks), ..LayoutRequest::default() }
}

#[test]
fn fused_projections_and_experts_have_the_rows_of_the_specification() {
    let folder = tempfile::tempdir().unwrap();
    write_coded_model(&folder.path().join("split"));
    let source = open(&folder.path().join("split"));
    let mut options = options(&source, "strict");
    options.layout.projections = Some(Form::Fused);
    options.layout.experts = Some(Form::Fused);
    let destination = folder.path().join("fused");
    convert(&source, &destination, &options);
    let got = read_folder(&destination);
    let rows = |name: &str| f32_values(&got[name].2);
    // per key head: q | k | v v | z z, then b b | a a
    let qkvz = [20., 30., 40., 41., 50., 51., 21., 31., 42., 43., 52., 53.];
    assert_eq!(rows("model.layers.0.linear_attn.in_proj_qkvz.weight"), qkvz);
    assert_eq!(
        rows("model.layers.0.linear_attn.in_proj_ba.weight"),
        [60., 61., 70., 71., 62., 63., 72., 73.]
    );
    assert!(!got.contains_key("model.layers.0.linear_attn.in_proj_qkv.weight"));
    let (_, shape, data) = &got["model.layers.1.mlp.experts.gate_up_proj"];
    assert_eq!(
        (shape.as_slice(), f32_values(data)),
        (&[2, 4, 1][..], vec![710., 711., 712., 713., 720., 721., 722., 723.])
    );
    let (_, shape, data) = &got["model.layers.1.mlp.experts.down_proj"];
    assert_eq!((shape.as_slice(), f32_values(data)), (&[2, 1, 2][..], vec![714., 715., 724., 725.]));
}

#[test]
fn megatron_ranks_have_the_rows_of_the_specification() {
    let folder = tempfile::tempdir().unwrap();
    write_coded_model(&folder.path().join("hf"));
    let source = open(&folder.path().join("hf"));
    let mut options = options(&source, "strict");
    options.layout = layout(Naming::Megatron, 2);
    let destination = folder.path().join("megatron");
    let report = convert(&source, &destination, &options);
    assert_eq!(report.plan.carried, ["model.visual.patch_embed.weight", "mtp.fc.weight"]);
    let ranks = [read_folder(&destination.join("mp_rank_00")), read_folder(&destination.join("mp_rank_01"))];
    let l0 = |leaf: &str| format!("decoder.layers.0.{leaf}");
    let l1 = |leaf: &str| format!("decoder.layers.1.{leaf}");
    #[rustfmt::skip]
    let expected: Vec<(String, [Vec<f32>; 2])> = vec![
        ("embedding.word_embeddings.weight".into(), [vec![1., 2.], vec![3., 4.]]),
        ("output_layer.weight".into(), [vec![6., 7.], vec![8., 9.]]),
        ("decoder.final_layernorm.weight".into(), [vec![5.], vec![5.]]),
        // each rank: q | k | v | z | beta | alpha
        (l0("self_attention.in_proj.weight"), [
            vec![20., 30., 40., 41., 50., 51., 60., 61., 70., 71.],
            vec![21., 31., 42., 43., 52., 53., 62., 63., 72., 73.],
        ]),
        (l0("self_attention.in_proj.layer_norm_weight"), [vec![10.], vec![10.]]),
        // each rank: q | k | v, never divided across them
        (l0("self_attention.conv1d.weight"), [vec![120., 130., 140., 141.], vec![121., 131., 142., 143.]]),
        (l0("self_attention.A_log"), [vec![0.1, 0.2], vec![0.3, 0.4]]),
        (l0("self_attention.dt_bias"), [vec![0.5, 0.6], vec![0.7, 0.8]]),
        (l0("self_attention.out_norm.weight"), [vec![0.25], vec![0.25]]),
        (l0("self_attention.out_proj.weight"), [vec![80., 81.], vec![82., 83.]]),
        (l0("mlp.linear_fc1.layer_norm_weight"), [vec![11.], vec![11.]]),
        (l0("mlp.linear_fc1.weight"), [vec![90., 92.], vec![91., 93.]]),
        (l0("mlp.linear_fc2.weight"), [vec![94.], vec![95.]]),
        // each rank one group: queries, gates, key, value
        (l1("self_attention.linear_qkv.weight"), [
            vec![200., 201., 300., 301., 400., 500.],
            vec![202., 203., 302., 303., 401., 501.],
        ]),
        (l1("self_attention.linear_qkv.layer_norm_weight"), [vec![12.], vec![12.]]),
        (l1("self_attention.q_layernorm.weight"), [vec![14.], vec![14.]]),
        (l1("self_attention.k_layernorm.weight"), [vec![15.], vec![15.]]),
        (l1("self_attention.linear_proj.weight"), [vec![600., 601.], vec![602., 603.]]),
        (l1("pre_mlp_layernorm.weight"), [vec![13.], vec![13.]]),
        (l1("mlp.router.weight"), [vec![700., 701.], vec![700., 701.]]),
        (l1("mlp.experts.linear_fc1.weight0"), [vec![710., 712.], vec![711., 713.]]),
        (l1("mlp.experts.linear_fc2.weight0"), [vec![714.], vec![715.]]),
        (l1("mlp.experts.linear_fc1.weight1"), [vec![720., 722.], vec![721., 723.]]),
        (l1("mlp.experts.linear_fc2.weight1"), [vec![724.], vec![725.]]),
        (l1("mlp.shared_experts.linear_fc1.weight"), [vec![730., 732.], vec![731., 733.]]),
        (l1("mlp.shared_experts.linear_fc2.weight"), [vec![734.], vec![735.]]),
        (l1("mlp.shared_experts.gate_weight"), [vec![736.], vec![736.]]),
    ];
    for (name, values) in &expected {
        for (rank, values) in values.iter().enumerate() {
            assert_eq!(&f32_values(&ranks[rank][name].2), values, "{name} on rank {rank}");
        }
    }
    assert_eq!(ranks[0].len(), expected.len() + 2, "rank 0 also carries mtp and vision");
    assert_eq!(ranks[1].len(), expected.len());
}

/// A round trip through any layout keeps the bits of every tensor.
fn round_trips(name: &str, tensors: usize) {
    let source = open(&fixture(name));
    assert_eq!(source.tensors.len(), tensors);
    let own = Layout::detect(&source);
    let folder = tempfile::tempdir().unwrap();
    let mut requests =
        vec![layout(Naming::Nemo, 1), layout(Naming::Megatron, 1), layout(Naming::Megatron, 2)];
    for projections in [Form::Split, Form::Fused] {
        for experts in [Form::Split, Form::Fused] {
            let forms = LayoutRequest {
                projections: Some(projections),
                experts: Some(experts),
                ..layout(Naming::Hf, 1)
            };
            requests.push(forms);
        }
    }
    for (i, request) in requests.into_iter().enumerate() {
        let mut there = options(&source, "megatron");
        there.layout = request;
        let path = folder.path().join(format!("there{i}"));
        let report = convert(&source, &path, &there);
        assert_eq!(report.verification.same_bits, tensors, "{request:?}: {:?}", report.verification);
        let between = open(&path);
        assert_eq!(Layout::detect(&between), own.requested(&request).unwrap());
        // Across layouts, without converting back.
        let across = diff(&between, &source, &Silent).unwrap();
        assert!(across.tensors.iter().all(|t| t.verdict == Verdict::SameBits), "{request:?}");
        let mut back = options(&between, "megatron");
        back.layout =
            LayoutRequest { projections: own.projections, experts: own.experts, ..layout(Naming::Hf, 1) };
        let path = folder.path().join(format!("back{i}"));
        convert(&between, &path, &back);
        let home = diff(&open(&path), &source, &Silent).unwrap();
        assert_eq!(home.tensors.len(), tensors);
        assert!(home.tensors.iter().all(|t| t.verdict == Verdict::SameBits), "{request:?}");
        // Also through the independent reader.
        assert_eq!(read_folder(&path).len(), tensors);
        for (name, (dtype, shape, data)) in read_folder(&path) {
            let t = source.tensors.iter().find(|t| t.name == name).unwrap();
            let mut bytes = vec![0; t.bytes as usize];
            source.files[t.file].read_at(&mut bytes, t.begin).unwrap();
            let shape: Vec<u64> = shape.iter().map(|d| *d as u64).collect();
            assert_eq!(
                (dtype.to_string().as_str(), &shape, &data),
                (t.dtype.name(), &t.shape, &bytes),
                "{name}"
            );
        }
    }
}

#[test]
fn the_released_form_survives_every_layout() {
    round_trips("release/qwen3_5", 91);
}

#[test]
fn qwen3_next_with_fused_projections_and_a_dense_layer_survives_every_layout() {
    round_trips("models/qwen3_next", 128);
}

#[test]
fn qwen3_5_moe_survives_every_layout() {
    round_trips("models/qwen3_5_moe", 160);
}

#[test]
fn nemo_to_megatron_ranks_to_fused_to_hf_gives_the_same_bits() {
    let source = open(&fixture("release/qwen3_5"));
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoint = source.clone();
    let fused = LayoutRequest { projections: Some(Form::Fused), ..layout(Naming::Nemo, 1) };
    let split = LayoutRequest { projections: Some(Form::Split), ..layout(Naming::Hf, 1) };
    let steps =
        [layout(Naming::Nemo, 1), layout(Naming::Megatron, 2), layout(Naming::Megatron, 1), fused, split];
    for (i, step) in steps.into_iter().enumerate() {
        let mut options = options(&checkpoint, "megatron");
        options.layout = step;
        let path = folder.path().join(i.to_string());
        convert(&checkpoint, &path, &options);
        checkpoint = open(&path);
    }
    let report = diff(&checkpoint, &source, &Silent).unwrap();
    assert_eq!(report.tensors.iter().filter(|t| t.verdict == Verdict::SameBits).count(), 91);
}

#[test]
fn a_shift_that_moves_a_value_is_counted_and_listed_and_the_source_is_never_shifted_itself() {
    let folder = tempfile::tempdir().unwrap();
    let hf = folder.path().join("hf");
    write_coded_model(&hf);
    let mut tensors = read_folder(&hf);
    // 0.1 - 1 + 1 is not 0.1 in f32; 1.7 is exact.
    tensors.get_mut("model.layers.0.linear_attn.norm.weight").unwrap().2 =
        [0.1f32, 1.7].map(f32::to_le_bytes).concat();
    let rewritten: Vec<Tensor> = tensors
        .into_iter()
        .map(|(name, (dtype, mut shape, data))| {
            if name.ends_with("linear_attn.norm.weight") {
                shape = vec![2];
            }
            Tensor { name, dtype, shape, data }
        })
        .collect();
    write_file(&hf.join("model.safetensors"), &rewritten);
    let before = std::fs::read(hf.join("model.safetensors")).unwrap();
    let source = open(&hf);
    let mut options = options(&source, "megatron");
    options.layout = layout(Naming::Megatron, 1);
    for name in ["first", "second"] {
        let report = convert(&source, &folder.path().join(name), &options);
        let moved = &report.verification.moved;
        assert_eq!(moved.len(), 1);
        assert_eq!(
            (moved[0].tensor.as_str(), moved[0].values, moved[0].elements),
            ("model.layers.0.linear_attn.norm.weight", 1, 2)
        );
        assert!(moved[0].max_abs > 0.0 && moved[0].max_abs < 1e-7);
        // The same values on a second load of the same source.
        let rank = read_folder(&folder.path().join(name));
        assert_eq!(
            f32_values(&rank["decoder.layers.0.self_attention.out_norm.weight"].2),
            [0.1f32 - 1.0, 1.7 - 1.0]
        );
    }
    assert_eq!(std::fs::read(hf.join("model.safetensors")).unwrap(), before);
    // Without zero-centered gamma nothing changes.
    options.layout.zero_centered_gamma = Some(false);
    let report = convert(&source, &folder.path().join("plain"), &options);
    assert!(report.verification.moved.is_empty() && report.plan.shifted.is_empty());
}

#[test]
fn packing_parts_of_different_dtypes_widens_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let hf = folder.path().join("hf");
    write_coded_model(&hf);
    let rewritten: Vec<Tensor> = read_folder(&hf)
        .into_iter()
        .map(|(name, (dtype, shape, data))| {
            if !name.ends_with("in_proj_z.weight") {
                return Tensor { name, dtype, shape, data };
            }
            // The codes are small whole numbers: exact in bf16.
            let data =
                f32_values(&data).iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
            Tensor { name, dtype: safetensors::Dtype::BF16, shape, data }
        })
        .collect();
    write_file(&hf.join("model.safetensors"), &rewritten);
    let source = open(&hf);
    let mut options = options(&source, "megatron");
    options.layout = layout(Naming::Megatron, 2);
    let report = convert(&source, &folder.path().join("megatron"), &options);
    let [change] = report.plan.dtype_changes.as_slice() else { panic!("{:?}", report.plan.dtype_changes) };
    assert_eq!(
        (change.from, change.to, change.lossy, change.tensors.len()),
        (Dtype::Bf16, Dtype::F32, false, 2)
    );
    assert_eq!(report.verification.same_values, 1);
    let rank = read_folder(&folder.path().join("megatron/mp_rank_01"));
    let packed = f32_values(&rank["decoder.layers.0.self_attention.in_proj.weight"].2);
    assert_eq!(packed, [21., 31., 42., 43., 52., 53., 62., 63., 72., 73.]);
}

#[test]
fn ranks_that_disagree_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_coded_model(&folder.path().join("hf"));
    let source = open(&folder.path().join("hf"));
    let mut options = options(&source, "strict");
    options.layout = layout(Naming::Megatron, 2);
    let path = folder.path().join("megatron");
    convert(&source, &path, &options);
    let damage = |name: &str, change: &dyn Fn(&mut Tensor)| {
        let file = path.join("mp_rank_01/model.safetensors");
        let intact = std::fs::read(&file).unwrap();
        let mut tensors: Vec<Tensor> = read_file(&file)
            .into_iter()
            .map(|(name, (dtype, shape, data))| Tensor { name, dtype, shape, data })
            .collect();
        tensors.iter_mut().filter(|t| t.name == name).for_each(change);
        tensors.retain(|t| !t.shape.is_empty());
        write_file(&file, &tensors);
        let damaged = open(&path);
        let mut options = common::options(&damaged, "strict");
        options.layout = layout(Naming::Hf, 1);
        let error = ballast_checkpoint::convert::plan(&damaged, &options).err().expect("refused").to_string();
        std::fs::write(&file, intact).unwrap();
        error
    };
    let norm = "decoder.final_layernorm.weight";
    let error = damage(norm, &|t| t.data[0] ^= 1);
    assert!(error.contains(norm) && error.contains("between rank 0 and rank 1"), "{error}");
    let qkv = "decoder.layers.1.self_attention.linear_qkv.weight";
    let error = damage(qkv, &|t| t.shape.clear());
    assert!(error.contains(qkv) && error.contains("missing on rank 1"), "{error}");
    let error = damage(qkv, &|t| (t.shape, t.data) = (vec![3, 1], vec![0; 12]));
    assert!(error.contains(qkv) && error.contains("disagree"), "{error}");
    std::fs::rename(path.join("mp_rank_00"), path.join("mp_rank_07")).unwrap();
    let error = ballast_checkpoint::Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("is a rank missing"), "{error}");
}

#[test]
fn sizes_that_cannot_be_divided_or_packed_are_refused_with_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let hf = folder.path().join("hf");
    write_coded_model(&hf);
    let error_for = |request: LayoutRequest| {
        let source = open(&hf);
        let mut options = options(&source, "strict");
        options.layout = request;
        ballast_checkpoint::convert::plan(&source, &options).err().expect("refused").to_string()
    };
    assert!(error_for(layout(Naming::Megatron, 4)).contains("linear_num_key_heads is 2"));
    assert!(error_for(layout(Naming::Megatron, 0)).contains("must be 1 to 64"));
    assert!(error_for(layout(Naming::Hf, 2)).contains("--layout megatron"));
    let config = hf.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("linear_num_key_heads", "renamed")).unwrap();
    assert!(error_for(layout(Naming::Megatron, 1)).contains("`linear_num_key_heads`"));
    std::fs::write(&config, text.replace("\"head_dim\":1", "\"head_dim\":2")).unwrap();
    assert!(error_for(layout(Naming::Megatron, 1)).contains("by the head counts"));
    std::fs::write(&config, text.replace("\"head_dim\":1", "\"head_dim\":\"one\"")).unwrap();
    assert!(
        error_for(layout(Naming::Megatron, 1))
            .contains("`head_dim` must be a count from 1 to 16777215, got \"one\"")
    );
    std::fs::remove_file(&config).unwrap();
    assert!(error_for(layout(Naming::Megatron, 1)).contains("config.json"));
    // Renaming alone needs no config.json.
    let source = open(&hf);
    let mut options = options(&source, "strict");
    options.layout = layout(Naming::Nemo, 1);
    convert(&source, &folder.path().join("nemo"), &options);
}

#[test]
fn an_architecture_without_a_megatron_layout_is_named_with_those_that_have_one() {
    for (model, model_type) in [
        ("gemma2", "gemma2"),
        ("gemma3", "gemma3_text"),
        ("gemma4_dense", "gemma4_text"),
        ("deepseek_v32", "deepseek_v32"),
    ] {
        let source = open(&fixture("models").join(model));
        let mut options = options(&source, "none");
        options.layout = LayoutRequest { naming: Some(Naming::Megatron), ..LayoutRequest::default() };
        let error = plan(&source, &options).err().unwrap().to_string();
        assert!(error.contains(&format!("{model_type:?} has no Megatron layout")), "{error}");
        assert!(error.contains("Qwen3.5-MoE") && error.contains("config.json"), "{error}");
    }
}

#[test]
fn a_tensor_with_the_name_of_the_metadata_is_refused_with_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    // {"__metadata__": a tensor of one float}
    let mut pickle = b"\x80\x02}X\x0c\x00\x00\x00__metadata__ctorch._utils\n_rebuild_tensor_v2\n(".to_vec();
    pickle.extend(
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ",
    );
    pickle.extend(b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs.");
    let mut zip = zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, bytes) in [("x/data.pkl", &pickle[..]), ("x/data/0", &[0; 4])] {
        zip.start_file(name, stored).unwrap();
        std::io::Write::write_all(&mut zip, bytes).unwrap();
    }
    zip.finish().unwrap();
    let source = open(&path);
    let options = options(&source, "none");
    let destination = folder.path().join("out");
    let error =
        execute(&source, plan(&source, &options).unwrap(), &destination, &options, &Silent).err().unwrap();
    let error = error.to_string();
    assert!(error.contains("model.pt, tensor \"__metadata__\"") && error.contains("rename"), "{error}");
    assert!(!destination.exists());
}
