//! Policies of the lab that do not apply to a model.

use std::path::Path;

use crate::common::{self, ballast};

#[test]
fn a_lab_policy_that_rounds_nothing_in_the_model_is_a_usage_error() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/gemma4_moe");
    for policy in ["per_expert_scale", "state", "hf-bf16,A_log"] {
        let mut command = ballast(["lab", "--no-gradients", "--json", "--policies", policy]);
        let report = common::run(command.arg(&model).arg("--ids").arg(model.join("golden.safetensors")));
        assert_eq!(report.code, Some(2), "{policy}: {}", report.stderr);
        assert!(report.stderr.contains("tensors: router.proj, router.scale"), "{policy}: {}", report.stderr);
    }
}
