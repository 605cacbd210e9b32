//! FP8 weights with a scale per block, compared with transformers and torch.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::audit::audit;
use ballast_checkpoint::convert::{ConvertOptions, execute, plan};
use ballast_checkpoint::{Checkpoint, View, fp8};
use ballast_contract::{Dtype, Registry};
use ballast_files::cast::{self, Buffer};
use ballast_files::jobs::Silent;
use proptest::prelude::*;
use safetensors::tensor::Dtype as FileDtype;

use crate::common::{
    self, Tensor, convert, f32_tensor, f32_values, fixture, open, options, read_file, write_file,
};

fn golden() -> BTreeMap<String, (FileDtype, Vec<usize>, Vec<u8>)> {
    read_file(&fixture("fp8/blocks.safetensors"))
}

fn tensor(name: &str, dtype: FileDtype, shape: &[usize], data: &[u8]) -> Tensor {
    Tensor { name: name.into(), dtype, shape: shape.to_vec(), data: data.to_vec() }
}

/// Writes a checkpoint with a configuration.
fn checkpoint(folder: &Path, tensors: &[Tensor], config: &str) -> Arc<Checkpoint> {
    std::fs::create_dir_all(folder).unwrap();
    write_file(&folder.join("model.safetensors"), tensors);
    std::fs::write(folder.join("config.json"), config).unwrap();
    open(folder)
}

/// All values of a tensor in f32.
fn values(checkpoint: &Arc<Checkpoint>, name: &str) -> Vec<f32> {
    let index = checkpoint.tensors.iter().position(|t| t.name == name).unwrap();
    let view = View::stored(checkpoint, index);
    let (mut buffer, mut wide) = (Buffer::default(), Buffer::default());
    view.read(0..view.units(), &mut buffer, &mut Buffer::default()).unwrap();
    cast::convert(buffer.as_ref(), view.dtype, wide.resize(4 * view.elements() as usize), Dtype::F32);
    f32_values(wide.as_ref())
}

const PLAIN: &str = r#"{"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}"#;

#[test]
fn every_code_and_every_rounding_is_torchs() {
    let golden = golden();
    let decoded = f32_values(&golden["codes.f32"].2);
    for (code, expected) in decoded.iter().enumerate() {
        let value = fp8::decode(code as u8);
        assert!(value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(), "{code}");
    }
    let values = f32_values(&golden["values"].2);
    assert!(values.len() > 2000);
    for (x, expected) in values.iter().zip(&golden["values.codes"].2) {
        assert_eq!(fp8::encode(*x), *expected, "{x}");
    }
    assert_eq!((fp8::encode(f32::NAN), fp8::encode(f32::INFINITY), fp8::encode(-1e30)), (0x7f, 0x7e, 0xfe));
}

#[test]
fn dequantized_weights_have_the_bits_of_transformers() {
    let golden = golden();
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = Vec::new();
    for name in ["matrix", "experts", "zeros"] {
        let (_, shape, codes) = &golden[&format!("{name}.codes")];
        let (_, grid, scales) = &golden[&format!("{name}.scales")];
        let weight = format!("model.layers.0.mlp.{name}.weight");
        tensors.push(tensor(&weight, FileDtype::F8_E4M3, shape, codes));
        tensors.push(tensor(&fp8::scale_name(&weight), FileDtype::F32, grid, scales));
    }
    let stored = checkpoint(&folder.path().join("fp8"), &tensors, PLAIN);
    let source = fp8::dequantized(&stored).unwrap();
    assert_eq!(source.tensors.len(), 3, "scales are used up");
    for (dtype, suffix) in [(Dtype::F32, "f32"), (Dtype::Bf16, "bf16")] {
        let target = folder.path().join(suffix);
        let options = ConvertOptions { dtype: Some(dtype), ..options(&source, "strict") };
        convert(&source, &target, &options);
        let written = read_file(&target.join("model.safetensors"));
        assert_eq!(written.len(), 3);
        for name in ["matrix", "experts", "zeros"] {
            let (_, shape, data) = &written[&format!("model.layers.0.mlp.{name}.weight")];
            let (_, expected_shape, expected) = &golden[&format!("{name}.{suffix}")];
            assert_eq!((shape, data), (expected_shape, expected), "{name} {suffix}");
        }
    }
}

#[test]
fn quantized_weights_have_the_codes_and_scales_of_transformers() {
    let golden = golden();
    let folder = tempfile::tempdir().unwrap();
    let weights = [
        ("matrix", "model.layers.0.mlp.up_proj.weight"),
        ("zeros", "model.layers.0.mlp.down_proj.weight"),
        ("experts", "model.layers.1.mlp.experts.gate_up_proj"),
    ];
    let stored: Vec<Tensor> = weights
        .iter()
        .map(|(name, weight)| tensor(weight, FileDtype::F32, &golden[*name].1, &golden[*name].2))
        .collect();
    let stored = checkpoint(&folder.path().join("f32"), &stored, PLAIN);
    let options = options(&stored, "strict");
    let source = fp8::quantized(&stored, &options.policy).unwrap();
    convert(&source, &folder.path().join("fp8"), &options);
    let written = read_file(&folder.path().join("fp8/model.safetensors"));
    assert_eq!(written.len(), 6);
    for (name, weight) in weights {
        let (dtype, shape, codes) = &written[weight];
        assert_eq!(*dtype, FileDtype::F8_E4M3);
        assert_eq!(
            (shape, codes),
            (&golden[&format!("{name}.codes")].1, &golden[&format!("{name}.codes")].2)
        );
        let (_, grid, scales) = &written[&fp8::scale_name(weight)];
        let (_, expected_grid, expected) = &golden[&format!("{name}.scales")];
        assert_eq!((grid, f32_values(scales)), (expected_grid, f32_values(expected)), "{name}");
    }
}

#[test]
fn a_model_goes_to_fp8_and_back_with_its_protected_tensors_untouched() {
    for (family, kept) in [
        ("qwen3_5", "linear_attn.in_proj_a.weight"),
        ("qwen3_5_moe", "mlp.gate.weight"),
        ("qwen3_next", "linear_attn.in_proj_ba.weight"),
        ("deepseek_v32", "indexer.weights_proj.weight"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let original = open(&fixture(&format!("models/{family}")));
        let options = ConvertOptions { dtype: Some(Dtype::Bf16), ..options(&original, "strict") };
        let quantized = folder.path().join("fp8");
        convert(&fp8::quantized(&original, &options.policy).unwrap(), &quantized, &options);
        let written = open(&quantized);
        let dtype = |checkpoint: &Checkpoint, end: &str| {
            let all: Vec<Dtype> =
                checkpoint.tensors.iter().filter(|t| t.name.ends_with(end)).map(|t| t.dtype).collect();
            assert!(!all.is_empty(), "{family} {end}");
            all
        };
        assert!(dtype(&written, kept).iter().all(|d| *d != Dtype::F8E4M3), "{family}");
        let count = written.tensors.iter().filter(|t| t.dtype == Dtype::F8E4M3).count();
        assert!(count > 8, "{family}: {count}");
        let settings = &written.config.as_ref().unwrap()["quantization_config"];
        assert_eq!(settings["quant_method"], "fp8");
        let unconverted = settings["modules_to_not_convert"].as_array().unwrap();
        let module = kept.strip_suffix(".weight").unwrap();
        assert!(unconverted.iter().any(|m| m.as_str().unwrap().ends_with(module)), "{unconverted:?}");
        for t in &original.tensors {
            if options.policy.rule_for(&t.name).is_some() {
                let again = written.tensors.iter().find(|w| w.name == t.name).unwrap();
                assert_eq!(again.dtype, Dtype::F32, "{}", t.name);
                assert_eq!(values(&original, &t.name), values(&written, &t.name), "{}", t.name);
            }
        }
        let report = audit(&written, Registry::builtin(), &common::policy("strict"), &Silent).unwrap();
        assert!(report.findings.iter().all(|f| !f.kind.starts_with("fp8")), "{family}");

        let back = folder.path().join("bf16");
        let source = fp8::dequantized(&written).unwrap();
        convert(&source, &back, &options);
        let back = open(&back);
        assert!(back.config.as_ref().unwrap().get("quantization_config").is_none());
        let mut names: [Vec<&str>; 2] =
            [&original, &back].map(|checkpoint| checkpoint.tensors.iter().map(|t| t.name.as_str()).collect());
        names.iter_mut().for_each(|names| names.sort_unstable());
        assert_eq!(names[0], names[1]);
        for t in &original.tensors {
            let (before, after) = (values(&original, &t.name), values(&back, &t.name));
            let largest = before.iter().fold(0f32, |a, b| a.max(b.abs()));
            for (a, b) in before.iter().zip(&after) {
                // Half a step of three bits, or of the smallest codes; then half a step of bf16.
                let limit = (a.abs() / 16.0).max(largest / 448.0 * 2f32.powi(-10)) + a.abs() / 200.0;
                assert!((a - b).abs() <= limit, "{family} {}: {a} {b}", t.name);
            }
        }
    }
}

fn audited(tensors: &[Tensor]) -> Vec<(String, String)> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(&folder.path().join("c"), tensors, PLAIN);
    let report = audit(&checkpoint, Registry::builtin(), &common::policy("strict"), &Silent).unwrap();
    let refused = fp8::dequantized(&checkpoint).map(|source| {
        let target = folder.path().join("d");
        let options = options(&source, "strict");
        let plan = plan(&source, &options).unwrap();
        execute(&source, plan, &target, &options, &Silent).map(|_| ())
    });
    let refused = refused.and_then(|written| written).unwrap_err().to_string();
    assert!(!folder.path().join("d").exists());
    let kinds = report.findings.iter().filter(|f| f.kind.starts_with("fp8"));
    kinds.map(|f| (f.kind.to_string(), refused.clone())).collect()
}

#[test]
fn audit_finds_scales_that_are_missing_or_do_not_fit_and_conversion_refuses_them() {
    let weight = || tensor("model.layers.0.mlp.up_proj.weight", FileDtype::F8_E4M3, &[130, 4], &[0x38; 520]);
    let name = "model.layers.0.mlp.up_proj.weight_scale_inv";
    let missing = audited(&[weight()]);
    assert_eq!(missing.len(), 1);
    assert_eq!(missing[0].0, "fp8-scale-missing");
    assert!(missing[0].1.contains("up_proj.weight_scale_inv not found"), "{}", missing[0].1);

    let misshapen = audited(&[weight(), f32_tensor(name, &[1, 1], &[1.0])]);
    assert_eq!(misshapen[0].0, "fp8-scale-shape");
    assert!(misshapen[0].1.contains("F32 [2, 1] fits [130, 4] in blocks of 128 x 128"), "{}", misshapen[0].1);

    let integers = audited(&[weight(), tensor(name, FileDtype::I32, &[2, 1], &[0; 8])]);
    assert_eq!(integers[0].0, "fp8-scale-shape");

    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let found = audited(&[weight(), f32_tensor(name, &[2, 1], &[1.0, bad])]);
        assert_eq!(found[0].0, "fp8-scale-value", "{bad}");
        assert!(found[0].1.contains("scale 1 is "), "{}", found[0].1);
    }
}

#[test]
fn e5m2_weights_are_multiplied_by_their_scales() {
    let folder = tempfile::tempdir().unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    let codes: Vec<u8> = (0..=255).collect();
    let weight = tensor(name, FileDtype::F8_E5M2, &[2, 128], &codes);
    let scales = f32_tensor(&fp8::scale_name(name), &[1, 1], &[3.0]);
    let config = PLAIN.replacen('{', r#"{"quantization_config": {"fmt": "e5m2"}, "#, 1);
    let stored = checkpoint(&folder.path().join("a"), &[weight, scales], &config);
    let source = fp8::dequantized(&stored).unwrap();
    let found = values(&source, name);
    // Five bits of exponent and two of fraction.
    for (code, x) in codes.iter().zip(&found) {
        let (exponent, fraction) = (((code >> 2) & 31) as i32, (code & 3) as f32);
        let magnitude = match exponent {
            31 if fraction > 0.0 => f32::NAN,
            31 => f32::INFINITY,
            0 => fraction * 2f32.powi(-16),
            _ => (4.0 + fraction) * 2f32.powi(exponent - 17),
        };
        let expected = if *code < 128 { magnitude } else { -magnitude } * 3.0;
        assert!(x.to_bits() == expected.to_bits() || x.is_nan() && expected.is_nan(), "{code}: {x}");
    }
    assert_eq!(source.tensors.len(), 1);
    assert!(source.config.as_ref().unwrap().get("quantization_config").is_none());
}

#[test]
fn codes_and_scales_that_cannot_be_dequantized_are_refused_and_named_by_audit() {
    let name = "model.layers.0.mlp.up_proj.weight";
    let scale = |end: &str| f32_tensor(&format!("model.layers.0.mlp.up_proj.{end}"), &[1, 1], &[2.0]);
    let plain = || f32_tensor(name, &[1, 2], &[1.0, 2.5]);
    let fp8 = || tensor(name, FileDtype::F8_E4M3, &[1, 2], &[0x38; 2]);
    let config = PLAIN.replacen('{', r#"{"quantization_config": {}, "#, 1);
    for (tensors, config, kind, problem) in [
        (vec![plain(), scale("weight_scale_inv")], &config, Some("scale-without-codes"), "weight_scale_inv"),
        (vec![plain(), scale("input_scale")], &config, Some("scale-without-codes"), "input_scale"),
        (vec![scale("weight_scale")], &config, Some("scale-without-codes"), "weight_scale"),
        (vec![fp8(), scale("weight_scale_inv"), scale("input_scale")], &config, None, "input_scale"),
        (
            vec![tensor(name, FileDtype::I8, &[1, 2], &[1, 2]), scale("weight_scale")],
            &config,
            None,
            "up_proj.weight_scale",
        ),
        (
            vec![tensor(name, FileDtype::F8_E8M0, &[1, 2], &[1, 2]), fp8_codes_of_another_type()],
            &PLAIN.to_string(),
            Some("quantization-config-missing"),
            "stored in F4, which cannot be dequantized",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(&folder.path().join("a"), &tensors, config);
        let error = fp8::dequantized(&checkpoint).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
        let report = audit(&checkpoint, Registry::builtin(), &common::policy("strict"), &Silent).unwrap();
        let kinds: Vec<&str> = report.findings.iter().map(|f| f.kind).collect();
        assert!(kind.is_none_or(|kind| kinds.contains(&kind) && !report.passed), "{kind:?}: {kinds:?}");
        assert!(kind.is_some() || !kinds.contains(&"scale-without-codes"), "{kinds:?}");
    }
}

fn fp8_codes_of_another_type() -> Tensor {
    tensor("model.layers.0.mlp.down_proj.weight", FileDtype::F4, &[2, 2], &[1, 2])
}

#[test]
fn codes_without_a_configuration_fail_the_audit() {
    let folder = tempfile::tempdir().unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    for (config, fails) in [
        (PLAIN.to_string(), true),
        (PLAIN.replacen('{', r#"{"quantization_config": {}, "#, 1), false),
        (PLAIN.replacen('{', r#"{"text_config": {"quantization_config": {}}, "#, 1), false),
    ] {
        let weight = tensor(name, FileDtype::F8_E5M2, &[1, 2], &[0x38; 2]);
        let scales = f32_tensor(&fp8::scale_name(name), &[1, 1], &[2.0]);
        let checkpoint = checkpoint(&folder.path().join("a"), &[weight, scales], &config);
        let report = audit(&checkpoint, Registry::builtin(), &common::policy("strict"), &Silent).unwrap();
        assert_eq!(
            report.findings.iter().any(|f| f.kind == "quantization-config-missing"),
            fails,
            "{config}"
        );
        assert_eq!(report.passed, !fails);
    }
}

#[test]
fn the_block_size_of_the_configuration_counts() {
    let folder = tempfile::tempdir().unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    let weight = tensor(name, FileDtype::F8_E4M3, &[4, 4], &[0x38; 16]);
    let scales = f32_tensor(&fp8::scale_name(name), &[2, 1], &[2.0, 3.0]);
    let config = PLAIN.replacen('{', r#"{"quantization_config": {"weight_block_size": [2, 4]}, "#, 1);
    let stored = checkpoint(&folder.path().join("a"), &[weight, scales], &config);
    let source = fp8::dequantized(&stored).unwrap();
    assert_eq!(values(&source, name), [[2.0f32; 8], [3.0; 8]].concat());
    let config = config.replace("[2, 4]", "[0, 4]");
    std::fs::write(folder.path().join("a/config.json"), config).unwrap();
    let error = fp8::dequantized(&open(&folder.path().join("a"))).unwrap_err().to_string();
    assert!(error.contains("weight_block_size` must be two positive numbers, got [0,4]"), "{error}");
}

#[test]
fn non_finite_weights_are_not_quantized() {
    let folder = tempfile::tempdir().unwrap();
    let weight = f32_tensor("model.layers.0.mlp.up_proj.weight", &[1, 2], &[1.0, f32::NAN]);
    let stored = checkpoint(&folder.path().join("a"), &[weight], PLAIN);
    let options = options(&stored, "strict");
    let source = fp8::quantized(&stored, &options.policy).unwrap();
    let plan = plan(&source, &options).unwrap();
    let target = folder.path().join("b");
    let result = execute(&source, plan, &target, &options, &Silent);
    let error = result.err().unwrap().to_string();
    assert!(error.contains("value 1 is NaN, which has no FP8 scale"), "{error}");
    assert!(!target.exists());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Any range of any shape equals the definition, element by element.
    #[test]
    fn every_range_equals_the_definition(
        matrices in 1usize..3, rows in 1usize..300, columns in 1usize..300, from in 0.0..1.0f64, to in 0.0..1.0f64,
        seed in any::<u32>(), exponents in any::<bool>(),
    ) {
        let grid = [rows.div_ceil(128), columns.div_ceil(128)];
        let mut state = seed;
        let mut next = || { state = state.wrapping_mul(1664525).wrapping_add(1013904223); (state >> 24) as u8 };
        let codes: Vec<u8> = (0..matrices * rows * columns).map(|_| next()).collect();
        let count = matrices * grid[0] * grid[1];
        let powers: Vec<u8> = (0..count).map(|_| 100 + next() % 50).collect();
        let scales: Vec<f32> = powers.iter().map(|p| 2f32.powi(*p as i32 - 127)).collect();
        let name = "model.layers.0.mlp.up_proj.weight";
        let shape = [matrices, rows, columns];
        let scale_shape = [matrices, grid[0], grid[1]];
        let scale_name = fp8::scale_name(name);
        let scale = match exponents {
            true => tensor(&scale_name, FileDtype::F8_E8M0, &scale_shape, &powers),
            false => f32_tensor(&scale_name, &scale_shape, &scales),
        };
        let folder = tempfile::tempdir().unwrap();
        let tensors = [tensor(name, FileDtype::F8_E4M3, &shape, &codes), scale];
        let source = fp8::dequantized(&checkpoint(&folder.path().join("a"), &tensors, PLAIN)).unwrap();
        let view = View::stored(&source, 0);
        let at = |x: f64| (x * codes.len() as f64) as u64;
        let (from, to) = (at(from.min(to)), at(from.max(to)));
        let mut read = Buffer::default();
        view.read(from..to, &mut read, &mut Buffer::default()).unwrap();
        for (x, element) in f32_values(read.as_ref()).iter().zip(from as usize..) {
            let (matrix, row, column) = (element / (rows * columns), element / columns % rows, element % columns);
            let block = (matrix * grid[0] + row / 128) * grid[1] + column / 128;
            let expected = fp8::decode(codes[element]) * scales[block];
            prop_assert!(x.to_bits() == expected.to_bits() || x.is_nan() && expected.is_nan(), "{element}");
        }
    }
}
