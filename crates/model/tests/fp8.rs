//! Models whose weights are stored in FP8 with a scale per block.

use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::convert::{ConvertOptions, execute, plan};
use ballast_checkpoint::{Checkpoint, fp8};
use ballast_contract::{Dtype, Registry};
use ballast_files::jobs::Silent;
use ballast_model::{Model, Precision};

use crate::common::{folder, ids};

fn write(source: &Arc<Checkpoint>, target: &Path, dtype: Dtype) {
    let registry = Registry::builtin();
    let policy = registry.policy("strict").unwrap();
    let policy = policy.for_architecture(&source.architecture(registry).unwrap());
    let options = ConvertOptions { dtype: Some(dtype), ..ConvertOptions::new(policy) };
    execute(source, plan(source, &options).unwrap(), target, &options, &Silent).unwrap();
}

#[test]
fn an_fp8_checkpoint_loads_as_its_dequantized_copy_and_saves_without_fp8() {
    for name in ["qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v32"] {
        let work = tempfile::tempdir().unwrap();
        let [quantized, wide, saved] = ["fp8", "f32", "saved"].map(|part| work.path().join(part));
        let original = Arc::new(Checkpoint::open(&folder(name)).unwrap());
        let policy = Registry::builtin().policy("strict").unwrap();
        write(&fp8::quantized(&original, &policy).unwrap(), &quantized, Dtype::Bf16);
        let stored = Arc::new(Checkpoint::open(&quantized).unwrap());
        assert!(fp8::has_weights(&stored));
        write(&fp8::dequantized(&stored).unwrap(), &wide, Dtype::F32);
        for preset in ["f32", "bf16"] {
            let load = |path: &Path| Model::load(path, |config| Precision::preset(preset, config)).unwrap();
            let logits = |model: &Model| model.session(1).advance(&[&ids(name)]).unwrap();
            let (direct, copy) = (load(&quantized), load(&wide));
            assert_eq!(logits(&direct), logits(&copy), "{name} {preset}");
        }
        let model = Model::load(&quantized, |_| Ok(Precision::f32())).unwrap();
        model.save(&saved, false, &Silent).unwrap();
        let saved = Arc::new(Checkpoint::open(&saved).unwrap());
        assert!(!fp8::has_weights(&saved), "{name}");
        assert!(saved.config.as_ref().unwrap().get("quantization_config").is_none(), "{name}");
    }
}
