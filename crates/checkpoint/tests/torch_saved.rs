//! Files that torch itself saved (fixtures/make_torch_files.py): every tensor has the bits that torch reads from them,
//! what is not a tensor is named and counted, and what cannot be represented is refused by name.

use std::path::{Path, PathBuf};

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::audit::audit;
use ballast_checkpoint::convert::plan;
use ballast_checkpoint::diff::{Verdict, diff};
use ballast_checkpoint::inspect::inspect;
use ballast_contract::Registry;
use ballast_files::jobs::Silent;
use ballast_files::left_out;

use crate::common::*;

fn saved(name: &str) -> PathBuf {
    fixture("torch/saved").join(name)
}

fn refusal(name: &str) -> String {
    Checkpoint::open(&saved(name)).unwrap_err().to_string()
}

/// Compares every tensor with what torch reads: the same names, shapes, types and bits.
fn assert_bits(path: &Path, truth: &Path) {
    let (checkpoint, truth) = (open(path), open(truth));
    let report = diff(&checkpoint, &truth, &Silent).unwrap();
    assert!(!report.tensors.is_empty() && report.tensors.len() == truth.tensors.len(), "{}", path.display());
    for tensor in &report.tensors {
        assert!(matches!(tensor.verdict, Verdict::SameBits), "{}: {tensor:?}", path.display());
        assert_eq!(tensor.a, tensor.b, "{}: {tensor:?}", path.display());
    }
}

fn assert_saved(name: &str) {
    assert_bits(&saved(&format!("{name}.pt")), &saved(&format!("{name}.safetensors")));
}

#[test]
fn files_of_torch_have_the_bits_that_torch_reads() {
    for name in ["zip", "parameters", "complex", "extras", "app", "beside"] {
        assert_saved(name);
    }
}

#[test]
fn files_from_before_torch_1_6_have_the_bits_that_torch_reads() {
    for name in ["legacy_2", "legacy_4", "legacy_5", "legacy_module", "legacy_storages", "legacy_extras"] {
        assert_saved(name);
    }
}

#[test]
fn arrays_of_numpy_and_raw_storages_are_tensors() {
    for name in ["arrays_2", "arrays_4", "arrays_5", "storages"] {
        assert_saved(name);
    }
}

#[test]
fn the_negative_and_the_conjugate_bit_are_refused_by_name() {
    let error = refusal("negative.pt");
    assert!(error.contains("tensor \"w\"") && error.contains("negative bit"), "{error}");
    assert!(error.contains("resolve_neg"), "{error}");
    let error = refusal("conjugate.pt");
    assert!(error.contains("tensor \"w\"") && error.contains("conjugate bit"), "{error}");
    assert!(error.contains("resolve_conj"), "{error}");
}

#[test]
fn a_weight_that_cannot_be_represented_is_refused_by_name() {
    let error = refusal("sparse.pt");
    assert!(error.contains("tensor \"w\"") && error.contains("it is sparse"), "{error}");
    let error = refusal("keys.pt");
    assert!(error.contains("tensor \"<tuple>\"") && error.contains("is a tuple"), "{error}");
    assert!(!error.contains("stored twice"), "{error}");
    let error = refusal("same_names.pt");
    assert!(error.contains("tensor \"1\"") && error.contains("two tensors would have this name"), "{error}");
}

#[test]
fn whole_modules_and_torchscript_are_refused_clearly() {
    let error = refusal("whole_module.pt");
    assert!(error.contains("Sequential") && error.contains("state_dict()"), "{error}");
    let error = refusal("script.pt");
    assert!(error.contains("TorchScript") && error.contains("torch.jit.load"), "{error}");
}

#[test]
fn two_dicts_that_may_be_the_model_are_an_error_that_names_both() {
    for name in ["two_models.pt", "dcp_two_models"] {
        let error = refusal(name);
        assert!(error.contains(r#"both "model" and "state_dict""#), "{name}: {error}");
    }
}

#[test]
fn names_lose_the_keys_that_lead_to_the_model_and_the_optimizer_is_beside_it() {
    for (name, state) in [("dcp_app", 1), ("dcp_state_dict", 0), ("app.pt", 1), ("beside.pt", 1)] {
        let checkpoint = Checkpoint::open(&saved(name)).unwrap();
        let names: Vec<&str> = checkpoint.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["layer.w"], "{name}");
        assert_eq!(checkpoint.state.len(), state, "{name}");
    }
    for name in ["dcp_app", "dcp_state_dict"] {
        assert_bits(&saved(name), &saved(&format!("{name}.safetensors")));
    }
}

#[test]
fn what_is_not_a_tensor_is_named_and_counted() {
    for name in ["extras.pt", "legacy_extras.pt"] {
        let checkpoint = Checkpoint::open(&saved(name)).unwrap();
        let count = |kind: &str| {
            let found = checkpoint.left_out.iter().find(|own| own.kind == kind);
            found.map_or((0, Vec::new()), |own| (own.count, own.names.clone()))
        };
        for (kind, key) in [
            ("set", "set"),
            ("frozenset", "frozenset"),
            ("collections.Counter", "counter"),
            ("collections.deque", "deque"),
            ("datetime.datetime", "datetime"),
            ("datetime.timedelta", "timedelta"),
            ("argparse.Namespace", "args"),
            ("complex", "complex"),
            ("decimal.Decimal", "decimal"),
            ("uuid.UUID", "uuid"),
            ("pathlib.PurePosixPath", "path"),
            ("torch.torch_version.TorchVersion", "version"),
            ("bytes", "bytes"),
            ("numpy.random._pickle.__randomstate_ctor", "generator"),
            ("unsupported tensors", "sparse"),
        ] {
            assert_eq!(count(kind), (1, vec![key.to_string()]), "{name}: {:?}", checkpoint.left_out);
        }
        let line = left_out::line(&checkpoint.left_out).unwrap();
        assert!(line.contains("1 uuid.UUID (uuid)"), "{line}");
        // The moments and steps of the optimizer, and tensors in other places, are counted beside the model.
        let state: Vec<&str> = checkpoint.state.iter().map(|t| t.name.as_str()).collect();
        assert!(state.contains(&"optimizer.state.0.exp_avg") && state.contains(&"complex64"), "{state:?}");
        assert!(state.contains(&"rng.1"), "{state:?}");
    }
    let parameters = Checkpoint::open(&saved("parameters.pt")).unwrap();
    let line = left_out::line(&parameters.left_out).unwrap();
    assert!(line.contains("1 attributes of a tensor (w)"), "{line}");
    // A plain state dict has nothing else, and the versions of its modules are no data.
    for name in ["zip.pt", "legacy_2.pt", "legacy_module.pt"] {
        assert_eq!(Checkpoint::open(&saved(name)).unwrap().left_out, [], "{name}");
    }
}

#[test]
fn inspect_audit_and_convert_say_what_is_left_out() {
    let source = open(&saved("extras.pt"));
    let (registry, strict) = (Registry::builtin(), policy("strict"));
    let report = inspect(&source, registry, &strict).unwrap();
    assert_eq!(report.left_out, source.left_out);
    let words = "beside the tensors, not part of the checkpoint: 1 set (set); 1 frozenset (frozenset)";
    let notes = audit(&source, registry, &strict, &Silent).unwrap().notes;
    assert!(notes.iter().any(|note| note.starts_with(words)), "{notes:?}");
    let notes = plan(&source, &options(&source, "none")).unwrap().notes;
    assert!(notes.iter().any(|note| note.starts_with(words)), "{notes:?}");
}
