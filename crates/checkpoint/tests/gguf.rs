//! GGUF files of every architecture and dtype, read back and compared with the source through the inverse of every
//! transform, which is written here again, element by element.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::audit::audit;
use ballast_checkpoint::gguf::{AdapterOptions, convert_adapter};
use ballast_checkpoint::layout::{Form, LayoutRequest, Naming};
use ballast_contract::{Dtype, Registry};
use ballast_files::cast::{self, Buffer};
use ballast_files::jobs::Silent;
use ballast_files::q8_0;
use ballast_gguf::header::{Header, Value};
use serde_json::{Value as Json, json};

use crate::common::*;

/// Values and shape of a tensor.
type Array = (Vec<u64>, Vec<f32>);

/// Reads all tensors of a checkpoint as f32.
fn arrays(checkpoint: &Checkpoint) -> BTreeMap<String, Array> {
    let read = |t: &ballast_checkpoint::StoredTensor| {
        let mut stored = Buffer::default();
        checkpoint.files[t.file].read_at(stored.resize(t.bytes as usize), t.begin).unwrap();
        let mut wide = vec![0f32; t.elements() as usize];
        match t.dtype {
            Dtype::Q8_0 => q8_0::dequantize(stored.as_ref(), &mut wide),
            dtype => {
                let mut out = Buffer::default();
                cast::convert(stored.as_ref(), dtype, out.resize(4 * wide.len()), Dtype::F32);
                wide = f32_values(out.as_ref());
            }
        }
        (t.name.clone(), (t.shape.clone(), wide))
    };
    checkpoint.tensors.iter().map(read).collect()
}

/// A fixture's config with other fields, and its tensors in shapes that follow from them, with new values.
struct Model {
    config: Json,
    tensors: Vec<(String, Vec<usize>)>,
}

impl Model {
    fn of(fixture_name: &str, fields: Json) -> Model {
        let source = open(&fixture(fixture_name));
        let mut config = source.config.clone().unwrap();
        for (key, value) in fields.as_object().unwrap() {
            config[key] = value.clone();
        }
        let shaped = |t: &ballast_checkpoint::StoredTensor| {
            (t.name.clone(), t.shape.iter().map(|dim| *dim as usize).collect())
        };
        Model { config, tensors: source.tensors.iter().map(shaped).collect() }
    }

    /// Gives linear attention other heads.
    fn with_linear_heads(mut self, key_heads: usize, value_heads: usize, width: usize) -> Model {
        self.config["linear_num_key_heads"] = key_heads.into();
        self.config["linear_num_value_heads"] = value_heads.into();
        self.config["linear_key_head_dim"] = width.into();
        self.config["linear_value_head_dim"] = width.into();
        let (kd, vd) = (key_heads * width, value_heads * width);
        for (name, shape) in self.tensors.iter_mut().filter(|t| t.0.contains("linear_attn")) {
            match name.rsplit("linear_attn.").next().unwrap() {
                "A_log" | "dt_bias" => shape[0] = value_heads,
                "in_proj_a.weight" | "in_proj_b.weight" => shape[0] = value_heads,
                "in_proj_ba.weight" => shape[0] = 2 * value_heads,
                "in_proj_qkv.weight" | "conv1d.weight" => shape[0] = 2 * kd + vd,
                "in_proj_qkvz.weight" => shape[0] = 2 * kd + 2 * vd,
                "in_proj_z.weight" => shape[0] = vd,
                "norm.weight" => shape[0] = width,
                "out_proj.weight" => shape[1] = vd,
                other => panic!("{other}"),
            }
        }
        self
    }

    /// Removes tensors whose name contains `part`, and adds copies of layer `like`'s for layer `layer`.
    fn with_experts_in(mut self, layer: usize, like: usize) -> Model {
        let at = |layer: usize| format!("model.layers.{layer}.mlp.");
        self.tensors.retain(|(name, _)| !name.starts_with(&at(layer)));
        let copies: Vec<_> = self
            .tensors
            .iter()
            .filter(|(name, _)| name.starts_with(&at(like)))
            .map(|(name, shape)| (name.replace(&at(like), &at(layer)), shape.clone()))
            .collect();
        self.tensors.extend(copies);
        self
    }

    /// Writes the model to the folder `source` in `folder`.
    fn write(&self, folder: &Path) -> Arc<Checkpoint> {
        let folder = &folder.join("source");
        std::fs::create_dir_all(folder).unwrap();
        let tensors: Vec<Tensor> = self
            .tensors
            .iter()
            .enumerate()
            .map(|(number, (name, shape))| {
                let value = |i: usize| ((i * 7919 + number * 104_729) % 2003) as f32 / 1001.0 - 1.0;
                let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
                f32_tensor(name, shape, &values)
            })
            .collect();
        std::fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        write_file(&folder.join("model.safetensors"), &tensors);
        open(folder)
    }
}

fn models() -> Vec<(&'static str, Model)> {
    let wide_index = |mut model: Model| {
        for (name, shape) in &mut model.tensors {
            match name.rsplit("indexer.").next().unwrap() {
                "k_norm.weight" | "k_norm.bias" | "wk.weight" => shape[0] = 64,
                "wq_b.weight" => shape[0] = 4 * 64,
                _ => {}
            }
        }
        model
    };
    vec![
        ("qwen35", Model::of("models/qwen3_5", json!({})).with_linear_heads(2, 6, 16)),
        ("qwen35moe", Model::of("models/qwen3_5_moe", json!({})).with_linear_heads(2, 4, 32)),
        (
            "qwen3next",
            Model::of("models/qwen3_next", json!({"mlp_only_layers": []}))
                .with_linear_heads(2, 4, 16)
                .with_experts_in(1, 0),
        ),
        ("gemma2", Model::of("models/gemma2", json!({}))),
        ("gemma3", Model::of("models/gemma3", json!({"query_pre_attn_scalar": 16}))),
        ("gemma4", Model::of("models/gemma4_dense", json!({}))),
        ("gemma4", Model::of("models/gemma4_moe", json!({}))),
        ("gemma4", Model::of("models/gemma4_ple", json!({}))),
        ("deepseek32", wide_index(Model::of("models/deepseek_v32", json!({"index_head_dim": 64})))),
    ]
}

/// The tensors of a model in hf form, restored from a GGUF file.
struct Restored<'a> {
    file: &'a BTreeMap<String, Array>,
    config: &'a Json,
    architecture: &'a str,
}

impl Restored<'_> {
    fn count(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    fn values(&self, name: &str) -> Vec<f32> {
        self.file.get(name).unwrap_or_else(|| panic!("{name} is not in the file")).1.clone()
    }

    /// Restores grouped value heads from tiled ones: rows of `columns`, `width` rows for each head.
    fn grouped(&self, tiled: &[f32], width: usize, columns: usize) -> Vec<f32> {
        if self.architecture == "qwen3next" {
            return tiled.to_vec();
        }
        let (keys, values) = (self.count("linear_num_key_heads"), self.count("linear_num_value_heads"));
        let size = values / keys;
        let mut out = vec![0.0; tiled.len()];
        for key in 0..keys {
            for v in 0..size {
                for i in 0..width * columns {
                    out[(key * size + v) * width * columns + i] =
                        tiled[(v * keys + key) * width * columns + i];
                }
            }
        }
        out
    }

    /// Returns the hf tensor `name` of shape `shape`.
    fn tensor(&self, name: &str, shape: &[u64]) -> Vec<f32> {
        let columns = *shape.last().unwrap() as usize;
        let bare = name.strip_prefix("model.").unwrap();
        let is_shifted = bare.ends_with("norm.weight")
            && !bare.contains("linear_attn")
            && !["gemma4", "deepseek32"].contains(&self.architecture);
        let less_one = |values: Vec<f32>| match is_shifted {
            true => values.into_iter().map(|x| x - 1.0).collect(),
            false => values,
        };
        let Some((layer, module)) = bare.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else {
            let file_name = match bare {
                "embed_tokens.weight" => "token_embd.weight",
                "norm.weight" => "output_norm.weight",
                "embed_tokens_per_layer.weight" => "per_layer_token_embd.weight",
                "per_layer_model_projection.weight" => "per_layer_model_proj.weight",
                "per_layer_projection_norm.weight" => "per_layer_proj_norm.weight",
                other => panic!("{other}"),
            };
            return less_one(self.values(file_name));
        };
        let block = |name: &str| self.values(&format!("blk.{layer}.{name}"));
        let width = self.config["linear_value_head_dim"].as_u64().unwrap_or(0) as usize;
        match module {
            "linear_attn.A_log" => {
                self.grouped(&block("ssm_a"), 1, 1).into_iter().map(|x| (-x).ln()).collect()
            }
            "linear_attn.dt_bias" => self.grouped(&block("ssm_dt.bias"), 1, 1),
            "linear_attn.norm.weight" => block("ssm_norm.weight"),
            "linear_attn.in_proj_a.weight" => self.grouped(&block("ssm_alpha.weight"), 1, columns),
            "linear_attn.in_proj_b.weight" => self.grouped(&block("ssm_beta.weight"), 1, columns),
            "linear_attn.in_proj_ba.weight" => block("ssm_ba.weight"),
            "linear_attn.in_proj_z.weight" => self.grouped(&block("attn_gate.weight"), width, columns),
            "linear_attn.in_proj_qkv.weight" => self.values_last(&block("attn_qkv.weight"), width, columns),
            "linear_attn.conv1d.weight" => self.values_last(&block("ssm_conv1d.weight"), width, columns),
            "linear_attn.in_proj_qkvz.weight" => {
                self.interleaved(&block("attn_qkv.weight"), &block("attn_gate.weight"), columns)
            }
            "linear_attn.out_proj.weight" => {
                let rows = block("ssm_out.weight");
                rows.chunks(columns).flat_map(|row| self.grouped(row, width, 1)).collect()
            }
            "self_attn.kv_b_proj.weight" => self.joined(&block("attn_k_b.weight"), &block("attn_v_b.weight")),
            _ => match module.strip_prefix("mlp.experts.").and_then(|rest| rest.split_once('.')) {
                Some((expert, part)) => {
                    let part = part.strip_suffix("_proj.weight").unwrap();
                    let all = block(&format!("ffn_{part}_exps.weight"));
                    let size: u64 = shape.iter().product();
                    let first = expert.parse::<usize>().unwrap() * size as usize;
                    all[first..first + size as usize].to_vec()
                }
                None => less_one(block(&self.plain_name(module))),
            },
        }
    }

    /// Names of tensors that are only renamed.
    fn plain_name(&self, module: &str) -> String {
        let is_deepseek = self.architecture == "deepseek32";
        let name = match module {
            "layer_scalar" => return "layer_output_scale.weight".into(),
            "router.scale" => return "ffn_gate_inp.scale".into(),
            "router.per_expert_scale" => return "ffn_down_exps.scale".into(),
            "experts.gate_up_proj" => return "ffn_gate_up_exps.weight".into(),
            "experts.down_proj" => return "ffn_down_exps.weight".into(),
            "mlp.gate.e_score_correction_bias" => return "exp_probs_b.bias".into(),
            "self_attn.indexer.k_norm.bias" => return "indexer.k_norm.bias".into(),
            _ => module.strip_suffix(".weight").unwrap(),
        };
        let name = match name {
            "input_layernorm" => "attn_norm",
            "post_attention_layernorm" if is_deepseek => "ffn_norm",
            "post_attention_layernorm" => "post_attention_norm",
            "pre_feedforward_layernorm" => "ffn_norm",
            "post_feedforward_layernorm" => "post_ffw_norm",
            "post_feedforward_layernorm_1" => "post_ffw_norm_1",
            "post_feedforward_layernorm_2" => "post_ffw_norm_2",
            "pre_feedforward_layernorm_2" => "pre_ffw_norm_2",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "self_attn.q_a_proj" => "attn_q_a",
            "self_attn.q_b_proj" => "attn_q_b",
            "self_attn.q_a_layernorm" => "attn_q_a_norm",
            "self_attn.kv_a_layernorm" => "attn_kv_a_norm",
            "self_attn.kv_a_proj_with_mqa" => "attn_kv_a_mqa",
            "self_attn.indexer.wq_b" => "indexer.attn_q_b",
            "self_attn.indexer.wk" => "indexer.attn_k",
            "self_attn.indexer.k_norm" => "indexer.k_norm",
            "self_attn.indexer.weights_proj" => "indexer.proj",
            "mlp.gate" | "router.proj" => "ffn_gate_inp",
            "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
            "per_layer_input_gate" => "inp_gate",
            "per_layer_projection" => "proj",
            "post_per_layer_input_norm" => "post_norm",
            other => {
                let part = other.strip_suffix("_proj").unwrap_or_else(|| panic!("{other}"));
                let (module, part) = part.rsplit_once('.').unwrap();
                let ending = if module == "mlp" { "" } else { "_shexp" };
                return format!("ffn_{part}{ending}.weight");
            }
        };
        format!("{name}.weight")
    }

    /// Restores rows of q, k and v, of which v is tiled.
    fn values_last(&self, rows: &[f32], width: usize, columns: usize) -> Vec<f32> {
        let front = 2 * self.count("linear_num_key_heads") * self.count("linear_key_head_dim") * columns;
        [&rows[..front], &self.grouped(&rows[front..], width, columns)].concat()
    }

    /// Restores Qwen3-Next's rows: per key head q, k, v, z.
    fn interleaved(&self, qkv: &[f32], z: &[f32], columns: usize) -> Vec<f32> {
        let (heads, width) =
            (self.count("linear_num_key_heads"), self.count("linear_key_head_dim") * columns);
        let v_width =
            self.count("linear_num_value_heads") / heads * self.count("linear_value_head_dim") * columns;
        let mut out = Vec::new();
        for head in 0..heads {
            out.extend(&qkv[head * width..(head + 1) * width]);
            out.extend(&qkv[(heads + head) * width..(heads + head + 1) * width]);
            let v = 2 * heads * width + head * v_width;
            out.extend(&qkv[v..v + v_width]);
            out.extend(&z[head * v_width..(head + 1) * v_width]);
        }
        out
    }

    /// Restores kv_b_proj from transposed keys and values.
    fn joined(&self, k: &[f32], v: &[f32]) -> Vec<f32> {
        let (heads, nope) = (self.count("num_attention_heads"), self.count("qk_nope_head_dim"));
        let (value, rank) = (self.count("v_head_dim"), self.count("kv_lora_rank"));
        let mut out = Vec::new();
        for head in 0..heads {
            for row in 0..nope {
                out.extend((0..rank).map(|column| k[(head * rank + column) * nope + row]));
            }
            out.extend(&v[head * value * rank..(head + 1) * value * rank]);
        }
        out
    }
}

fn to_gguf(source: &Arc<Checkpoint>, destination: &Path, dtype: Option<Dtype>) {
    let mut options = options(source, "strict");
    options.layout = LayoutRequest { naming: Some(Naming::Gguf), ..LayoutRequest::default() };
    options.dtype = dtype;
    convert(source, destination, &options);
}

/// Returns the largest error of a value in a dtype; `largest` is the largest in the tensor.
fn tolerance(dtype: Dtype, x: f32, largest: f32) -> f32 {
    match dtype {
        Dtype::F32 => 3e-7 * (1.0 + x.abs()),
        Dtype::F16 => x.abs() / 2048.0 + 1e-7,
        Dtype::Bf16 => x.abs() / 256.0,
        _ => 0.5 * largest / 127.0 + x.abs() / 1024.0 + 1e-6,
    }
}

#[test]
fn every_architecture_reads_back_through_the_inverse_transforms_in_every_dtype() {
    for (architecture, model) in models() {
        let folder = tempfile::tempdir().unwrap();
        let source = model.write(folder.path());
        let originals = arrays(&source);
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Q8_0] {
            let path = folder.path().join(format!("{dtype}.gguf"));
            to_gguf(&source, &path, Some(dtype));
            let written = open(&path);
            assert_eq!(written.metadata_value("general.architecture"), Some(architecture));
            let file = arrays(&written);
            let restored = Restored { file: &file, config: &model.config, architecture };
            for (name, (shape, values)) in &originals {
                let back = match name.as_str() {
                    "lm_head.weight" => restored.values("output.weight"),
                    _ => restored.tensor(name, shape),
                };
                assert_eq!(back.len(), values.len(), "{architecture} {name}");
                let largest = values.iter().fold(0f32, |m, x| m.max(x.abs()));
                for (i, (x, y)) in values.iter().zip(&back).enumerate() {
                    let limit = tolerance(dtype, *x, largest);
                    assert!((x - y).abs() <= limit, "{architecture} {dtype} {name}[{i}]: {x} {y}");
                }
            }
            let f32_only = |t: &&ballast_checkpoint::StoredTensor| {
                t.shape.len() < 2
                    || ["ssm_conv1d", "ffn_gate_inp.", "indexer.proj"].iter().any(|n| t.name.contains(n))
            };
            for t in written.tensors.iter().filter(f32_only) {
                assert_eq!(t.dtype, Dtype::F32, "{architecture} {}", t.name);
            }
            assert!(written.tensors.iter().any(|t| t.dtype == dtype), "{architecture} has no {dtype}");
        }
    }
}

#[test]
fn the_audit_passes_what_is_written_and_finds_a_vector_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let source = models().remove(0).1.write(folder.path());
    let path = folder.path().join("model.gguf");
    to_gguf(&source, &path, Some(Dtype::Q8_0));
    let run = |path: &Path| {
        let registry = Registry::builtin();
        audit(&open(path), registry, &policy("strict"), &Silent).unwrap()
    };
    let report = run(&path);
    assert!(report.passed && report.protected > 8, "{:?}", report.findings);
    // The same file with two tensors in BF16.
    let tensor = |name: &str, begin| ballast_files::header::TensorInfo {
        name: name.into(),
        dtype: Dtype::Bf16,
        shape: vec![4],
        begin,
        bytes: 8,
    };
    let header = Header {
        entries: vec![("general.architecture".into(), Value::String("qwen35".into()))],
        tensors: vec![tensor("output_norm.weight", 0), tensor("blk.0.ssm_a", 32)],
    };
    let mut bytes = header.to_bytes();
    bytes.resize(bytes.len() + 40, 0);
    std::fs::write(&path, bytes).unwrap();
    let report = run(&path);
    let kinds: Vec<&str> = report.findings.iter().map(|f| f.kind).collect();
    assert!(!report.passed && kinds.contains(&"gguf-vector-not-f32"), "{kinds:?}");
}

#[test]
fn q8_0_is_the_definition_on_every_block() {
    let folder = tempfile::tempdir().unwrap();
    let source = models().remove(1).1.write(folder.path());
    let path = folder.path().join("model.gguf");
    to_gguf(&source, &path, Some(Dtype::Q8_0));
    let written = open(&path);
    let t = written.tensors.iter().find(|t| t.name == "blk.0.ssm_out.weight").unwrap();
    assert_eq!(t.dtype, Dtype::Q8_0);
    let mut stored = vec![0; t.bytes as usize];
    written.files[t.file].read_at(&mut stored, t.begin).unwrap();
    let f32_path = folder.path().join("f32.gguf");
    to_gguf(&source, &f32_path, Some(Dtype::F32));
    let (_, values) = arrays(&open(&f32_path)).remove("blk.0.ssm_out.weight").unwrap();
    for (block, values) in stored.chunks(34).zip(values.chunks(32)) {
        let largest = values.iter().fold(0f32, |m, x| m.max(x.abs()));
        let scale = largest / 127.0;
        assert_eq!(block[..2], half::f16::from_f32(scale).to_le_bytes());
        for (q, x) in block[2..].iter().zip(values) {
            let exact = *x as f64 / scale as f64;
            assert!((exact - (*q as i8) as f64).abs() <= 0.5 + 1e-5, "{exact} {}", *q as i8);
        }
    }
}

#[test]
fn split_and_fused_sources_give_the_same_file() {
    for number in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let source = models().remove(number).1.write(folder.path());
        let direct = folder.path().join("direct.gguf");
        to_gguf(&source, &direct, None);
        let other = folder.path().join("other");
        let mut options = options(&source, "strict");
        options.layout.experts = Some(Form::Fused);
        options.layout.projections = Some(if number == 2 { Form::Split } else { Form::Fused });
        convert(&source, &other, &options);
        let again = folder.path().join("again.gguf");
        to_gguf(&open(&other), &again, None);
        let (a, b) = (arrays(&open(&direct)), arrays(&open(&again)));
        assert_eq!(a, b);
    }
}

#[test]
fn what_llama_cpp_cannot_express_is_refused_by_name() {
    let cases: [(&str, Json, &str); 12] = [
        ("models/qwen3_5", json!({}), "linear_value_head_dim is 24"),
        ("models/qwen3_next", json!({"linear_value_head_dim": 16}), "missing"),
        ("models/gemma3", json!({}), "query_pre_attn_scalar is 12"),
        ("models/gemma2", json!({"query_pre_attn_scalar": 144}), "query_pre_attn_scalar is 144"),
        ("models/gemma2", json!({"attn_logit_softcapping": null}), "attn_logit_softcapping"),
        ("models/gemma2", json!({"tie_word_embeddings": false}), "tie_word_embeddings"),
        ("models/gemma2", json!({"hidden_activation": "relu"}), "hidden_activation"),
        ("models/gemma4_dense", json!({"layer_types": vec!["sliding_attention"; 6]}), "layer 5 differs"),
        ("models/deepseek_v32", json!({}), "index_head_dim is 16"),
        ("models/deepseek_v32_yarn", json!({"index_head_dim": 64}), "kv_a_proj_with_mqa.bias"),
        ("models/gemma2", json!({"model_type": "llama"}), "model type \"llama\""),
        ("models/gemma2", json!({"layer_types": ["sliding_attention", "other", "x", "y"]}), "\"other\""),
    ];
    for (name, fields, words) in cases {
        let folder = tempfile::tempdir().unwrap();
        let mut model = Model::of(name, fields);
        if name == "models/qwen3_next" {
            model.tensors.retain(|t| t.0 != "model.layers.0.linear_attn.in_proj_ba.weight");
        }
        let source = model.write(folder.path());
        let mut options = options(&source, "strict");
        options.layout.naming = Some(Naming::Gguf);
        let error = ballast_checkpoint::convert::plan(&source, &options).err().unwrap().to_string();
        assert!(error.contains(words), "{name}: {error}");
    }
}

#[test]
fn a_gguf_file_is_not_converted_back() {
    let folder = tempfile::tempdir().unwrap();
    let source = models().remove(3).1.write(folder.path());
    let path = folder.path().join("model.gguf");
    to_gguf(&source, &path, None);
    let written = open(&path);
    let mut options = options(&written, "strict");
    options.layout.naming = Some(Naming::Hf);
    let error = ballast_checkpoint::convert::plan(&written, &options).err().unwrap().to_string();
    assert!(error.contains("cannot be converted back"), "{error}");
}

#[test]
fn force_replaces_a_gguf_file_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let source = models().remove(3).1.write(folder.path());
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, "old").unwrap();
    let run = |force: bool, path: &Path| {
        let mut options = options(&source, "strict");
        options.layout.naming = Some(Naming::Gguf);
        options.force = force;
        let plan = ballast_checkpoint::convert::plan(&source, &options).unwrap();
        ballast_checkpoint::convert::execute(&source, plan, path, &options, &Silent).map(|_| ())
    };
    assert!(run(false, &path).unwrap_err().to_string().contains("--force"));
    run(true, &path).unwrap();
    assert_eq!(open(&path).metadata_value("general.architecture"), Some("gemma2"));
    assert!(run(true, &folder.path().join("model.bin")).unwrap_err().to_string().contains(".gguf"));
}

fn entry<'a>(header: &'a Header, key: &str) -> &'a Value {
    header.entry(key).unwrap_or_else(|| panic!("{key} is missing"))
}

#[test]
fn layers_windows_and_heads_are_in_the_entries() {
    let folder = tempfile::tempdir().unwrap();
    let header_of = |number: usize, change: &dyn Fn(&mut Json)| {
        let mut model = models().remove(number).1;
        change(&mut model.config);
        let source = model.write(folder.path());
        let path = folder.path().join("model.gguf");
        let _ = std::fs::remove_file(&path);
        to_gguf(&source, &path, None);
        Header::parse(&path, std::fs::read(&path).unwrap()).unwrap()
    };
    let qwen = header_of(0, &|_| {});
    assert_eq!(entry(&qwen, "qwen35.ssm.time_step_rank"), &Value::U32(6));
    assert_eq!(entry(&qwen, "qwen35.full_attention_interval"), &Value::U32(4));
    let gemma3 = header_of(4, &|_| {});
    assert_eq!(entry(&gemma3, "gemma3.attention.sliding_window"), &Value::U32(8));
    assert!(gemma3.entry("gemma3.attention.sliding_window_pattern").is_none());
    let other = |pattern: &[usize]| -> Json {
        (0..6).map(|i| if pattern.contains(&i) { "full_attention" } else { "sliding_attention" }).collect()
    };
    let every_third = header_of(4, &|c| c["layer_types"] = other(&[2, 5]));
    assert_eq!(entry(&every_third, "gemma3.attention.sliding_window_pattern"), &Value::U32(3));
    let uneven = header_of(4, &|c| c["layer_types"] = other(&[0, 5]));
    let flags = [false, true, true, true, true, false].map(Value::Bool).to_vec();
    assert_eq!(entry(&uneven, "gemma3.attention.sliding_window_pattern").elements(), Some(&flags[..]));
    let ple = header_of(7, &|_| {});
    let widths = entry(&ple, "gemma4.feed_forward_length").elements().unwrap();
    assert_eq!((&widths[5], &widths[6]), (&Value::U32(96), &Value::U32(192)));
    let padded = json!({"05": {"head_dim": 32}, "09": {"head_dim": 32}});
    let padded = header_of(7, &|c| c["per_layer_config"] = padded.clone());
    assert_eq!(padded.entries, ple.entries, "keys of models with more than 10 layers are padded");
    let deepseek = header_of(8, &|_| {});
    assert_eq!(entry(&deepseek, "deepseek32.expert_gating_func"), &Value::U32(2));
    assert_eq!(entry(&deepseek, "deepseek32.attention.key_length"), &Value::U32(24));
}

#[test]
fn an_adapter_has_the_transforms_of_its_weight() {
    let folder = tempfile::tempdir().unwrap();
    let model = models().remove(0).1;
    let source = model.write(folder.path());
    let base = arrays(&source);
    let modules = ["linear_attn.out_proj", "linear_attn.in_proj_qkv", "linear_attn.in_proj_a", "mlp.up_proj"];
    let adapter = tempfile::tempdir().unwrap();
    let mut tensors = Vec::new();
    for (number, module) in modules.iter().enumerate() {
        let (shape, _) = &base[&format!("model.layers.0.{module}.weight")];
        let (rows, columns) = (shape[0] as usize, shape[1] as usize);
        let values =
            |n: usize| -> Vec<f32> { (0..n).map(|i| ((i * 37 + number) % 101) as f32 - 50.0).collect() };
        let name = |part: &str| format!("base_model.model.model.layers.0.{module}.lora_{part}.weight");
        tensors.push(f32_tensor(&name("A"), &[4, columns], &values(4 * columns)));
        tensors.push(f32_tensor(&name("B"), &[rows, 4], &values(4 * rows)));
    }
    write_file(&adapter.path().join("adapter_model.safetensors"), &tensors);
    let destination = folder.path().join("adapter.gguf");
    let options = AdapterOptions { rank: 4, scale: 0.5, dtype: None, force: false };
    let adapter = open(adapter.path());
    let report = convert_adapter(&adapter, &source, &options, &destination, &Silent).unwrap();
    assert_eq!((report.modules, report.architecture), (4, "qwen35"));
    let header = Header::parse(&destination, std::fs::read(&destination).unwrap()).unwrap();
    assert_eq!(entry(&header, "adapter.lora.alpha"), &Value::F32(2.0));
    assert_eq!(entry(&header, "general.type").text(), Some("adapter"));

    let (written, original) = (arrays(&open(&destination)), arrays(&adapter));
    let restored = Restored { file: &written, config: &model.config, architecture: "qwen35" };
    let stored = |module: &str, part: &str| {
        &original[&format!("base_model.model.model.layers.0.{module}.lora_{part}.weight")].1
    };
    // Columns of A for out_proj, rows of B elsewhere.
    let a = restored.values("blk.0.ssm_out.weight.lora_a");
    let columns: Vec<f32> = a.chunks(96).flat_map(|row| restored.grouped(row, 16, 1)).collect();
    assert_eq!(&columns, stored("linear_attn.out_proj", "A"));
    assert_eq!(&restored.values("blk.0.ssm_out.weight.lora_b"), stored("linear_attn.out_proj", "B"));
    let b = restored.values_last(&restored.values("blk.0.attn_qkv.weight.lora_b"), 16, 4);
    assert_eq!(&b, stored("linear_attn.in_proj_qkv", "B"));
    let b = restored.grouped(&restored.values("blk.0.ssm_alpha.weight.lora_b"), 1, 4);
    assert_eq!(&b, stored("linear_attn.in_proj_a", "B"));
    assert_eq!(&restored.values("blk.0.ffn_up.weight.lora_a"), stored("mlp.up_proj", "A"));
}

#[test]
fn adapters_that_llama_cpp_would_ignore_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = models().remove(8).1.write(folder.path());
    let adapter = tempfile::tempdir().unwrap();
    let name = |part: &str| format!("base_model.model.model.layers.0.self_attn.q_a_proj.lora_{part}.weight");
    let tensors =
        [f32_tensor(&name("A"), &[2, 48], &[1.0; 96]), f32_tensor(&name("B"), &[24, 2], &[1.0; 48])];
    write_file(&adapter.path().join("adapter_model.safetensors"), &tensors);
    let adapter = open(adapter.path());
    let run = |scale: f32| {
        let options = AdapterOptions { rank: 2, scale, dtype: None, force: false };
        let destination = folder.path().join("adapter.gguf");
        convert_adapter(&adapter, &source, &options, &destination, &Silent).unwrap_err().to_string()
    };
    assert!(run(1.0).contains("does not apply adapters"), "{}", run(1.0));
    assert!(run(0.0).contains("scale is 0"), "{}", run(0.0));
}
