//! Synthetic checkpoints for the demo, the tests and the benchmarks.
//!
//! A Qwen3.5-style hybrid (three linear-attention layers, then one with full attention) in the hf layout,
//! with the names and shapes of a released model, protected tensors in F32, and reproducible values. Large
//! matrices repeat a block of random values; reading, comparing and converting them costs as much as for real
//! ones.

use std::fs::{self, File};
use std::io::{BufWriter, Seek, Write};
use std::path::Path;

use ballast_contract::Dtype;
use ballast_files::header::{Header, TensorInfo, elements};
use ballast_files::index::Index;
use ballast_files::{Error, Result, cast};
use serde_json::json;

/// The shape of a synthetic hybrid.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the fields are named as in config.json
pub struct SyntheticModel {
    pub layers: u64,
    pub hidden_size: u64,
    pub intermediate_size: u64,
    pub vocab_size: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub linear_key_heads: u64,
    pub linear_value_heads: u64,
    pub linear_head_dim: u64,
    /// dtype of tensors that are not protected: F32 or BF16.
    pub dtype: Dtype,
    /// Random seed.
    pub seed: u64,
}

impl SyntheticModel {
    /// Returns a model of a few hundred kilobytes.
    pub fn tiny() -> SyntheticModel {
        SyntheticModel {
            layers: 4,
            hidden_size: 64,
            intermediate_size: 128,
            vocab_size: 256,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            linear_key_heads: 2,
            linear_value_heads: 4,
            linear_head_dim: 16,
            dtype: Dtype::Bf16,
            seed: 1,
        }
    }

    fn config(&self) -> serde_json::Value {
        let layer_type = |i| if self.is_linear(i) { "linear_attention" } else { "full_attention" };
        json!({
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.linear_key_heads,
            "linear_num_value_heads": self.linear_value_heads,
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": self.linear_head_dim,
            "linear_conv_kernel_dim": 4,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": true,
            "layer_types": (0..self.layers).map(layer_type).collect::<Vec<_>>(),
            "rope_parameters": { "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25 },
            "dtype": if self.dtype == Dtype::Bf16 { "bfloat16" } else { "float32" },
        })
    }

    fn is_linear(&self, layer: u64) -> bool {
        !(layer + 1).is_multiple_of(4)
    }

    /// Returns name, dtype and shape of every tensor.
    fn tensors(&self) -> Vec<(String, Dtype, Vec<u64>)> {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        let (kd, vd) =
            (self.linear_key_heads * self.linear_head_dim, self.linear_value_heads * self.linear_head_dim);
        let mut all = vec![("model.embed_tokens.weight".to_string(), self.dtype, vec![self.vocab_size, h])];
        for layer in 0..self.layers {
            let mut add = |leaf: &str, dtype, shape: &[u64]| {
                all.push((format!("model.layers.{layer}.{leaf}"), dtype, shape.to_vec()))
            };
            add("input_layernorm.weight", self.dtype, &[h]);
            add("post_attention_layernorm.weight", self.dtype, &[h]);
            if self.is_linear(layer) {
                add("linear_attn.in_proj_qkv.weight", self.dtype, &[2 * kd + vd, h]);
                add("linear_attn.in_proj_z.weight", self.dtype, &[vd, h]);
                add("linear_attn.in_proj_b.weight", self.dtype, &[self.linear_value_heads, h]);
                add("linear_attn.in_proj_a.weight", self.dtype, &[self.linear_value_heads, h]);
                add("linear_attn.conv1d.weight", self.dtype, &[2 * kd + vd, 1, 4]);
                add("linear_attn.A_log", Dtype::F32, &[self.linear_value_heads]);
                add("linear_attn.dt_bias", Dtype::F32, &[self.linear_value_heads]);
                add("linear_attn.norm.weight", Dtype::F32, &[self.linear_head_dim]);
                add("linear_attn.out_proj.weight", self.dtype, &[h, vd]);
            } else {
                let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
                add("self_attn.q_proj.weight", self.dtype, &[2 * q, h]);
                add("self_attn.k_proj.weight", self.dtype, &[kv, h]);
                add("self_attn.v_proj.weight", self.dtype, &[kv, h]);
                add("self_attn.o_proj.weight", self.dtype, &[h, q]);
                add("self_attn.q_norm.weight", self.dtype, &[self.head_dim]);
                add("self_attn.k_norm.weight", self.dtype, &[self.head_dim]);
            }
            add("mlp.gate_proj.weight", self.dtype, &[i, h]);
            add("mlp.up_proj.weight", self.dtype, &[i, h]);
            add("mlp.down_proj.weight", self.dtype, &[h, i]);
        }
        all.push(("model.norm.weight".to_string(), self.dtype, vec![h]));
        all
    }

    /// Writes the checkpoint into the new folder `folder`, in shards of at most `shard_bytes`.
    pub fn write(&self, folder: &Path, shard_bytes: u64) -> Result<()> {
        self.write_shards(folder, shard_bytes, false)
    }

    /// Writes the checkpoint like [`SyntheticModel::write`], but with holes in place of all tensors that are not
    /// F32: a model of any size takes the disk space of its protected tensors. dt_bias has the dtype of the
    /// matrices, as in the release of Qwen3.5, and lies among them.
    pub fn write_sparse(&self, folder: &Path, shard_bytes: u64) -> Result<()> {
        self.write_shards(folder, shard_bytes, true)
    }

    fn write_shards(&self, folder: &Path, shard_bytes: u64, sparse: bool) -> Result<()> {
        fs::create_dir(folder).map_err(Error::io(folder, "create"))?;
        let put = |name: &str, text: String| {
            let path = folder.join(name);
            fs::write(&path, text).map_err(Error::io(&path, "write"))
        };
        put("config.json", format!("{:#}\n", self.config()))?;
        let mut shards: Vec<Vec<TensorInfo>> = vec![Vec::new()];
        let mut begin = 0;
        for (name, dtype, shape) in self.tensors() {
            let dtype = if sparse && name.ends_with("dt_bias") { self.dtype } else { dtype };
            let bytes = elements(&shape)
                .and_then(|n| dtype.bytes_for(n))
                .ok_or_else(|| Error::tensor(&name, "too large"))?;
            if begin > 0 && begin + bytes > shard_bytes {
                shards.push(Vec::new());
                begin = 0;
            }
            shards.last_mut().expect("never empty").push(TensorInfo { name, dtype, shape, begin, bytes });
            begin += bytes;
        }
        let count = shards.len();
        let mut weight_map = Vec::new();
        let mut total = 0;
        for (i, mut tensors) in shards.into_iter().enumerate() {
            let shard = if count == 1 {
                "model.safetensors".into()
            } else {
                format!("model-{:05}-of-{count:05}.safetensors", i + 1)
            };
            tensors.sort_by(|a, b| b.dtype.bits().cmp(&a.dtype.bits()).then_with(|| a.name.cmp(&b.name)));
            let mut begin = 0;
            for t in &mut tensors {
                (t.begin, begin) = (begin, begin + t.bytes);
                weight_map.push((t.name.clone(), shard.clone()));
            }
            total += begin;
            let header = Header { metadata: vec![("format".into(), "pt".into())], tensors };
            self.write_shard(&folder.join(&shard), &header, sparse)?;
        }
        if count > 1 {
            put("model.safetensors.index.json", Index { total_size: Some(total), weight_map }.to_text())?;
        }
        Ok(())
    }

    fn write_shard(&self, path: &Path, header: &Header, sparse: bool) -> Result<()> {
        let fail = |e| Error::io(path, "write")(e);
        let mut file = BufWriter::with_capacity(1 << 20, File::create_new(path).map_err(fail)?);
        file.write_all(&header.to_bytes()).map_err(fail)?;
        for (i, t) in header.tensors.iter().enumerate() {
            if sparse && t.dtype != Dtype::F32 {
                file.seek_relative(t.bytes as i64).map_err(fail)?;
                continue;
            }
            let mut random = Random(self.seed ^ (t.name.len() as u64) << 32 ^ (i as u64) << 8 ^ t.bytes);
            const BLOCK: u64 = 1 << 18;
            let n = elements(&t.shape).unwrap_or(0);
            let values: Vec<f32> = (0..n.min(BLOCK)).map(|_| value_for(&t.name, &mut random)).collect();
            let block: Vec<u8> = match t.dtype {
                Dtype::Bf16 => {
                    values.iter().flat_map(|x| cast::bf16_bits(x.to_bits()).to_le_bytes()).collect()
                }
                _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            let mut left = t.bytes as usize;
            while left > 0 {
                let piece = left.min(block.len());
                file.write_all(&block[..piece]).map_err(fail)?;
                left -= piece;
            }
        }
        let end = file.stream_position().map_err(fail)?;
        let file = file.into_inner().map_err(|e| fail(e.into_error()))?;
        file.set_len(end).and_then(|()| file.sync_all()).map_err(fail)
    }
}

/// Returns initial values: A in U(0.01, 16), steps log-uniform in (0.001, 0.1), gammas around their neutral
/// value, small matrices.
fn value_for(name: &str, random: &mut Random) -> f32 {
    let u = random.uniform();
    if name.ends_with("A_log") {
        ((0.01 + u * 15.99) as f32).ln()
    } else if name.ends_with("dt_bias") {
        let dt = (0.001f64.ln() + u * (0.1f64.ln() - 0.001f64.ln())).exp();
        (dt + (-(-dt).exp_m1()).ln()) as f32
    } else if name.ends_with("linear_attn.norm.weight") {
        (1.0 + 0.2 * (u - 0.5)) as f32
    } else if name.ends_with("norm.weight") {
        (0.1 * (u - 0.5)) as f32
    } else {
        (0.07 * (u - 0.5)) as f32
    }
}

/// Generates random numbers by splitmix64, which is good enough for synthetic weights.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
