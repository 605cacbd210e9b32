//! Tensors that cannot be converted as requested: dtypes that would lose bits, values out of range, colliding
//! names, shapes that do not match.

use crate::common::{A_LOG, HYBRID_CONFIG, Scratch, f32_bytes, read_tensors, valid_file};

/// A hybrid with these tensors.
fn hybrid(tensors: &[(&str, &str, &[u64], &[u8])]) -> Scratch {
    let scratch = Scratch::with_model(&valid_file(tensors));
    scratch.put("src/config.json", HYBRID_CONFIG);
    scratch
}

#[test]
fn a_protected_f64_tensor_is_not_narrowed_unasked() {
    let scratch = hybrid(&[(A_LOG, "F64", &[1], &1.5f64.to_le_bytes())]);
    scratch.convert_refuses(&[], 3, &["src", A_LOG, "stored in F64", "use --narrow-f64"]);
    scratch.converts(&["--narrow-f64"]);
    let tensors = read_tensors(&scratch.path("dst/model.safetensors"));
    assert_eq!(tensors[A_LOG], ("F32".into(), vec![1], f32_bytes(&[1.5])));
}

#[test]
fn a_protected_f64_value_beyond_f32_is_refused_even_when_narrowing() {
    let scratch = hybrid(&[(A_LOG, "F64", &[1], &1e300f64.to_le_bytes())]);
    let words = ["src", A_LOG, "values exceed the range of F32"];
    scratch.convert_refuses(&["--narrow-f64"], 3, &words);
}

#[test]
fn a_protected_fp8_tensor_is_never_cast() {
    let scratch = hybrid(&[(A_LOG, "F8_E4M3", &[4], &[1, 2, 3, 4])]);
    for flags in [&[][..], &["--dtype", "f32"], &["--narrow-f64"]] {
        scratch.convert_refuses(flags, 3, &["src", A_LOG, "stored in F8_E4M3", "without its scale"]);
    }
}

#[test]
fn a_value_beyond_f16_is_refused() {
    let scratch = hybrid(&[("model.norm.weight", "F32", &[2], &f32_bytes(&[1.0, 70000.0]))]);
    let words = ["src", "model.norm.weight", "values exceed the range of F16", "infinite"];
    scratch.convert_refuses(&["--dtype", "f16"], 3, &words);
    scratch.converts(&["--dtype", "bf16"]);
}

#[test]
fn an_infinity_that_was_there_before_is_carried_into_f16() {
    let scratch = hybrid(&[("model.norm.weight", "F32", &[2], &f32_bytes(&[1.0, f32::INFINITY]))]);
    scratch.converts(&["--dtype", "f16"]);
    let tensors = read_tensors(&scratch.path("dst/model.safetensors"));
    assert_eq!(tensors["model.norm.weight"].2, [0x00, 0x3c, 0x00, 0x7c]);
}

#[test]
fn one_tensor_under_its_bare_and_its_routed_key_is_refused() {
    let routed = "model.layers.0.linear_attn._fp32_params.A_log";
    let scratch =
        hybrid(&[(A_LOG, "F32", &[1], &f32_bytes(&[0.1])), (routed, "F32", &[1], &f32_bytes(&[0.2]))]);
    let words = ["src", A_LOG, "twice, bare and as", routed, "remove one of them"];
    for layout in ["hf", "nemo"] {
        scratch.convert_refuses(&["--layout", layout], 3, &words);
    }
    scratch.convert_refuses(&[], 3, &words);
    let report = scratch.run(&["audit", "src", "--json"]).exits(1).json();
    let kinds: Vec<&str> =
        report["findings"].as_array().unwrap().iter().filter_map(|f| f["kind"].as_str()).collect();
    assert!(kinds.contains(&"bare-and-routed"), "{kinds:?}");
}

#[test]
fn a_layout_that_needs_head_counts_is_refused_without_them() {
    let scratch = hybrid(&[("model.layers.0.linear_attn.in_proj_qkv.weight", "BF16", &[8, 2], &[0; 32])]);
    let words = ["src/config.json", "field `linear_num_key_heads` is missing"];
    scratch.convert_refuses(&["--layout", "megatron"], 3, &words);
}

const HEADS: &str = r#"{"architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 2, "linear_value_head_dim": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}"#;

#[test]
fn a_head_count_that_is_no_count_is_refused() {
    for bad in ["0", "-1", "1.5", "\"two\"", "null", "99999999999"] {
        let scratch = hybrid(&[("model.layers.0.linear_attn.in_proj_z.weight", "BF16", &[4, 2], &[0; 16])]);
        let config =
            HEADS.replace("\"linear_num_key_heads\": 1", &format!("\"linear_num_key_heads\": {bad}"));
        scratch.put("src/config.json", config);
        let words = ["src/config.json", "`linear_num_key_heads` must be a count", bad];
        scratch.convert_refuses(&["--layout", "megatron"], 3, &words);
    }
}

#[test]
fn a_tensor_that_does_not_have_the_shape_its_config_implies_is_refused() {
    let prefix = "model.layers.0.linear_attn.";
    let names = ["in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"]
        .map(|leaf| format!("{prefix}{leaf}"));
    // 2 q + 2 k + 4 v rows are expected.
    for rows in [7, 9] {
        let scratch = hybrid(&[
            (&names[0], "BF16", &[rows, 2], &vec![0; 4 * rows as usize]),
            (&names[1], "BF16", &[4, 2], &[0; 16]),
            (&names[2], "BF16", &[2, 2], &[0; 8]),
            (&names[3], "BF16", &[2, 2], &[0; 8]),
        ]);
        scratch.put("src/config.json", HEADS);
        let words = ["src", &names[0], &format!("{:?}", [rows, 2]), "must have 8 rows by the head counts"];
        scratch.convert_refuses(&["--projections", "fused"], 3, &words);
    }
}

#[test]
fn a_projection_without_its_sibling_is_refused() {
    let qkv = "model.layers.0.linear_attn.in_proj_qkv.weight";
    let scratch = hybrid(&[(qkv, "BF16", &[8, 2], &[0; 32])]);
    scratch.put("src/config.json", HEADS);
    let words = ["src", "model.layers.0.linear_attn.in_proj_z.weight", "missing", "in_proj_qkvz"];
    scratch.convert_refuses(&["--projections", "fused"], 3, &words);
}

/// Two experts of 2 x 2, except that the tensor called `name` has this shape.
fn experts_with(name: &str, shape: &[u64]) -> Scratch {
    let names: Vec<String> = (0..2)
        .flat_map(|e| ["gate", "up", "down"].map(|leaf| format!("m.mlp.experts.{e}.{leaf}_proj.weight")))
        .collect();
    let data = vec![0; 2 * shape.iter().product::<u64>() as usize];
    let mut tensors: Vec<(&str, &str, &[u64], &[u8])> = Vec::new();
    for n in &names {
        tensors.push(if n == name { (n, "BF16", shape, &data) } else { (n, "BF16", &[2, 2], &[0; 8]) });
    }
    hybrid(&tensors)
}

#[test]
fn an_expert_whose_gate_and_up_differ_in_rows_is_refused() {
    let scratch = experts_with("m.mlp.experts.1.up_proj.weight", &[3, 2]);
    let words = ["src", "m.mlp.experts.1.gate_proj.weight", "[2, 2] does not match up_proj's [3, 2]"];
    scratch.convert_refuses(&["--experts", "fused"], 3, &words);
}

#[test]
fn experts_of_different_shapes_are_refused() {
    let scratch = experts_with("m.mlp.experts.1.down_proj.weight", &[3, 2]);
    let words = ["src", "m.mlp.experts.down_proj", "[1, 3, 2]", "cannot be concatenated with [1, 2, 2]"];
    scratch.convert_refuses(&["--experts", "fused"], 3, &words);
}

#[test]
fn a_missing_expert_is_refused() {
    let scratch = hybrid(&[("m.mlp.experts.1.up_proj.weight", "BF16", &[2, 2], &[0; 8])]);
    let words = ["src", "m.mlp.experts.0.gate_proj.weight", "missing"];
    scratch.convert_refuses(&["--experts", "fused"], 3, &words);
}

#[test]
fn empty_experts_without_end_are_refused_when_they_are_split() {
    let [gate_up, down] =
        ["gate_up_proj", "down_proj"].map(|leaf| format!("model.layers.0.mlp.experts.{leaf}"));
    for shape in [[1 << 60, 2, 0], [1 << 40, 1 << 40, 0]] {
        let scratch = hybrid(&[(&gate_up, "BF16", &shape, b""), (&down, "BF16", &shape, b"")]);
        let words = ["src", &gate_up, "has no elements; an empty tensor cannot be sliced"];
        scratch.convert_refuses(&["--experts", "split"], 3, &words);
    }
}

#[test]
fn empty_experts_without_end_are_refused_when_they_are_joined() {
    let expert = |leaf: &str| format!("model.layers.0.mlp.experts.0.{leaf}_proj.weight");
    let names = ["gate", "up", "down"].map(expert);
    let empty = |name| -> (&str, &str, &[u64], &[u8]) { (name, "BF16", &[1 << 63, 0], b"") };
    let scratch = hybrid(&[empty(&names[0]), empty(&names[1]), empty(&names[2])]);
    let words = ["src", &names[0], "has no elements; an empty tensor cannot be sliced or concatenated"];
    scratch.convert_refuses(&["--experts", "fused"], 3, &words);
}

#[test]
fn an_audit_of_nan_and_infinite_values_fails_and_names_the_tensor() {
    let scratch = hybrid(&[("model.norm.weight", "F32", &[2], &f32_bytes(&[f32::NAN, f32::INFINITY]))]);
    let report = scratch.run(&["audit", "src", "--json"]).exits(1).json();
    assert_eq!(report["findings"][0]["kind"], "non-finite");
    assert_eq!(report["findings"][0]["tensors"][0], "model.norm.weight (2 of 2 values)");
}

#[test]
fn a_protected_integer_tensor_is_carried_as_it_is() {
    let scratch = hybrid(&[(A_LOG, "I32", &[1], &[1, 2, 3, 4])]);
    scratch.converts(&["--dtype", "bf16"]);
    let tensors = read_tensors(&scratch.path("dst/model.safetensors"));
    assert_eq!(tensors[A_LOG], ("I32".into(), vec![1], vec![1, 2, 3, 4]));
}
