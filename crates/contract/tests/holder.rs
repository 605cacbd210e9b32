//! The `_fp32_params` helpers: a table of every edge case, and properties over arbitrary keys.

use std::borrow::Cow;

use ballast_contract::Dtype;
use ballast_contract::holder::*;
use proptest::prelude::*;
use serde_json::json;

#[test]
fn the_contract_is_recognised_by_architecture_at_the_top_or_in_text_config() {
    for (config, expected) in [
        (json!({"architectures": ["Qwen3NextForCausalLM"]}), true),
        (json!({"architectures": ["Qwen3_5ForCausalLM"]}), true),
        (json!({"architectures": ["Qwen3_5ForConditionalGeneration"]}), true),
        (json!({"architectures": ["Qwen3_5MoeForCausalLM"]}), true),
        (json!({"architectures": ["Qwen3_5MoeForConditionalGeneration"]}), true),
        (json!({"architectures": ["LlamaForCausalLM", "Qwen3NextForCausalLM"]}), true),
        (json!({"text_config": {"architectures": ["Qwen3_5ForCausalLM"]}}), true),
        (json!({"architectures": ["LlamaForCausalLM"]}), false),
        (json!({"architectures": []}), false),
        (json!({"architectures": null}), false),
        (json!({"architectures": "Qwen3NextForCausalLM"}), false),
        (json!({}), false),
        (json!(null), false),
    ] {
        assert_eq!(has_gated_delta_net_fp32_checkpoint_contract(&config), expected, "{config}");
    }
}

#[test]
fn keys_are_tracked_routed_and_stripped_as_the_table_says() {
    // key, tracked, routed, stripped
    for (key, tracked, routed, stripped) in [
        (
            "m.layers.0.linear_attn.A_log",
            true,
            "m.layers.0.linear_attn._fp32_params.A_log",
            "m.layers.0.linear_attn.A_log",
        ),
        (
            "m.layers.0.linear_attn.dt_bias",
            true,
            "m.layers.0.linear_attn._fp32_params.dt_bias",
            "m.layers.0.linear_attn.dt_bias",
        ),
        // routed already
        ("m.linear_attn._fp32_params.A_log", true, "m.linear_attn._fp32_params.A_log", "m.linear_attn.A_log"),
        // two linear_attn: the last one counts
        (
            "a.linear_attn.b.linear_attn.A_log",
            true,
            "a.linear_attn.b.linear_attn._fp32_params.A_log",
            "a.linear_attn.b.linear_attn.A_log",
        ),
        // not a path segment of that name
        ("m.linear_attn.my_A_log", false, "m.linear_attn.my_A_log", "m.linear_attn.my_A_log"),
        ("m.linear_attn.norm.weight", false, "m.linear_attn.norm.weight", "m.linear_attn.norm.weight"),
        // not below linear_attn
        ("m.mixer.A_log", false, "m.mixer.A_log", "m.mixer.A_log"),
        ("m.xlinear_attn.A_log", false, "m.xlinear_attn.A_log", "m.xlinear_attn.A_log"),
        ("linear_attn.A_log", false, "linear_attn.A_log", "linear_attn.A_log"),
        ("A_log", false, "A_log", "A_log"),
        ("", false, "", ""),
        // LoRA
        (
            "m.linear_attn.A_log.lora_A.weight",
            false,
            "m.linear_attn.A_log.lora_A.weight",
            "m.linear_attn.A_log.lora_A.weight",
        ),
        // a holder elsewhere is not tracked
        (
            "m.self_attn._fp32_params.A_log",
            false,
            "m.self_attn._fp32_params.A_log",
            "m.self_attn._fp32_params.A_log",
        ),
        // every occurrence is removed
        (
            "a.linear_attn._fp32_params.b.linear_attn._fp32_params.A_log",
            true,
            "a.linear_attn._fp32_params.b.linear_attn._fp32_params.A_log",
            "a.linear_attn.b.linear_attn.A_log",
        ),
        (
            "a.linear_attn._fp32_params._fp32_params.A_log",
            true,
            "a.linear_attn._fp32_params._fp32_params.A_log",
            "a.linear_attn.A_log",
        ),
    ] {
        assert_eq!(is_gated_delta_net_fp32_param_key(key), tracked, "tracked: {key}");
        assert_eq!(route_fp32_holder_key(key), routed, "route: {key}");
        assert_eq!(strip_fp32_holder_key(key), stripped, "strip: {key}");
    }
}

#[test]
fn other_parameters_can_be_tracked_by_their_last_path_segments() {
    let names = ["norm.weight", "D"];
    for (key, routed) in [
        ("m.linear_attn.norm.weight", "m.linear_attn._fp32_params.norm.weight"),
        ("m.linear_attn.D", "m.linear_attn._fp32_params.D"),
        ("m.linear_attn._fp32_params.D", "m.linear_attn._fp32_params.D"),
    ] {
        assert!(is_param_key(key, &names), "{key}");
        assert_eq!(route_param_key(key, &names), routed);
    }
    for key in ["m.linear_attn.A_log", "m.linear_attn.q_norm.weight", "m.mixer.D"] {
        assert!(!is_param_key(key, &names), "{key}");
        assert_eq!(route_param_key(key, &names), key);
    }
    assert!(!is_param_key("m.linear_attn.A_log", &[] as &[&str]));
}

#[test]
fn a_bare_and_a_routed_key_for_one_tensor_collide() {
    let keys = ["m.linear_attn.A_log", "m.linear_attn.dt_bias", "m.linear_attn._fp32_params.A_log"];
    let expected = Some(("m.linear_attn._fp32_params.A_log", "m.linear_attn.A_log".to_string()));
    assert_eq!(find_holder_collision(keys), expected);
    assert_eq!(find_holder_collision(keys[..2].iter().copied()), None);
}

fn tensor(dtype: Dtype, data: &[u8]) -> StateTensor<'_> {
    let elements = data.len() as u64 * 8 / dtype.bits();
    StateTensor { dtype, shape: vec![elements], data: Cow::Borrowed(data) }
}

#[test]
fn a_tracked_float_is_upcast_exactly_and_an_f32_one_is_not_even_copied() {
    let key = "m.linear_attn.A_log";
    let bf16 = [0x80, 0x3f, 0x49, 0xc0]; // 1.0, -3.140625
    let up = upcast_gated_delta_net_fp32_state_tensor(key, tensor(Dtype::Bf16, &bf16)).unwrap();
    assert_eq!((up.dtype, up.shape.as_slice()), (Dtype::F32, &[2u64][..]));
    assert_eq!(up.data.as_ref(), [1.0f32.to_le_bytes(), (-3.140625f32).to_le_bytes()].concat());

    let f16 = [0x00, 0x3c]; // 1.0
    let up = upcast_gated_delta_net_fp32_state_tensor(key, tensor(Dtype::F16, &f16)).unwrap();
    assert_eq!(up.data.as_ref(), 1.0f32.to_le_bytes());

    let f32 = 0.1f32.to_le_bytes();
    let same = upcast_gated_delta_net_fp32_state_tensor(key, tensor(Dtype::F32, &f32)).unwrap();
    assert!(matches!(same.data, Cow::Borrowed(data) if std::ptr::eq(data, &f32[..])));
}

#[test]
fn integers_and_untracked_keys_are_untouched() {
    let data = [1, 2, 3, 4];
    for (key, dtype) in [
        ("m.linear_attn.A_log", Dtype::I32),
        ("m.linear_attn.A_log", Dtype::Bool),
        ("m.linear_attn.norm.weight", Dtype::Bf16),
        ("m.linear_attn.A_log.lora_A.weight", Dtype::F16),
        ("m.mlp.up_proj.weight", Dtype::F8E4M3),
    ] {
        let given = tensor(dtype, &data);
        assert_eq!(upcast_gated_delta_net_fp32_state_tensor(key, given.clone()).unwrap(), given);
    }
}

#[test]
fn f64_and_fp8_are_refused_not_cast() {
    let key = "m.linear_attn.dt_bias";
    let data = [0; 8];
    let upcast = |dtype| upcast_gated_delta_net_fp32_state_tensor(key, tensor(dtype, &data)).unwrap_err();
    assert_eq!(upcast(Dtype::F64), UpcastError::Narrowing { key: key.into() });
    for dtype in Dtype::all().filter(|d| d.is_scaled_float()) {
        assert_eq!(upcast(dtype), UpcastError::Scaled { key: key.into(), dtype });
    }
}

#[test]
fn export_is_forced_to_f32_for_tracked_floats_only() {
    let state = [
        ("m.linear_attn.A_log", Dtype::Bf16),
        ("m.linear_attn._fp32_params.dt_bias", Dtype::F32),
        ("m.linear_attn.dt_bias", Dtype::I64),
        ("m.linear_attn.norm.weight", Dtype::F32),
        ("m.mlp.up_proj.weight", Dtype::Bf16),
    ];
    let forced = forced_gated_delta_net_fp32_dtype_mapping(state);
    let expected = [("m.linear_attn.A_log", Dtype::F32), ("m.linear_attn._fp32_params.dt_bias", Dtype::F32)];
    assert_eq!(forced, expected.into_iter().collect());
}

/// Keys made of the words that matter, in any order, so that edge cases are common.
fn key() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        Just("linear_attn"),
        Just("A_log"),
        Just("dt_bias"),
        Just("my_A_log"),
        Just("_fp32_params"),
        Just("lora_A"),
        Just("weight"),
        Just("layers"),
        Just("0"),
        Just(""),
    ];
    prop::collection::vec(word, 1..7).prop_map(|words| words.join("."))
}

proptest! {
    #[test]
    fn strip_undoes_route(key in key()) {
        // A key without a holder is a bare key; for the others, strip gives the answer.
        let bare = strip_fp32_holder_key(&key).into_owned();
        let routed = route_fp32_holder_key(&bare).into_owned();
        prop_assert_eq!(strip_fp32_holder_key(&routed), bare.as_str());
    }

    #[test]
    fn route_and_strip_are_idempotent(key in key()) {
        let routed = route_fp32_holder_key(&key).into_owned();
        prop_assert_eq!(route_fp32_holder_key(&routed), routed.as_str());
        let stripped = strip_fp32_holder_key(&key).into_owned();
        prop_assert_eq!(strip_fp32_holder_key(&stripped), stripped.as_str());
    }

    #[test]
    fn nothing_outside_linear_attn_changes(key in key()) {
        if !key.contains(".linear_attn.") {
            prop_assert!(!is_gated_delta_net_fp32_param_key(&key));
            prop_assert_eq!(route_fp32_holder_key(&key), key.as_str());
            prop_assert_eq!(strip_fp32_holder_key(&key), key.as_str());
        }
    }

    #[test]
    fn lora_keys_are_never_tracked(key in key(), lora in prop_oneof![Just("lora_A"), Just("lora_B")]) {
        let key = format!("{key}.{lora}.weight");
        prop_assert!(!is_gated_delta_net_fp32_param_key(&key));
        prop_assert_eq!(route_fp32_holder_key(&key), key.as_str());
    }

    #[test]
    fn routing_keeps_a_key_tracked(key in key()) {
        let tracked = is_gated_delta_net_fp32_param_key(&key);
        prop_assert_eq!(is_gated_delta_net_fp32_param_key(&route_fp32_holder_key(&key)), tracked);
        prop_assert_eq!(route_fp32_holder_key(&key).contains("_fp32_params"), tracked || key.contains("_fp32_params"));
    }

    #[test]
    fn arbitrary_text_never_panics(key in ".*") {
        let routed = route_fp32_holder_key(&key).into_owned();
        strip_fp32_holder_key(&routed);
    }
}
