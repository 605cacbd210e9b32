//! Checkpoints that torch and megatron-core wrote, converted to the hf layout and compared with the truth that
//! was saved beside them; malformed ones, one test each.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::diff::{Verdict, diff};
use ballast_checkpoint::inspect::inspect;
use ballast_checkpoint::layout::{LayoutRequest, Naming};
use ballast_contract::{Dtype, Registry};
use ballast_files::jobs::Silent;

use crate::common::*;

/// Converts to hf and compares every tensor with the truth: the same names, shapes, types and bits.
fn assert_truth(source: &Path, truth: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let source = open(source);
    let mut options = options(&source, "none");
    options.layout = LayoutRequest { naming: Some(Naming::Hf), ..LayoutRequest::default() };
    let destination = folder.path().join("hf");
    convert(&source, &destination, &options);
    let report = diff(&open(&destination), &open(truth), &Silent).unwrap();
    assert!(report.tensors.len() > 20, "{}", report.tensors.len());
    for tensor in &report.tensors {
        assert!(matches!(tensor.verdict, Verdict::SameBits), "{tensor:?}");
        assert_eq!(tensor.a, tensor.b, "{tensor:?}");
    }
}

#[test]
fn torch_dist_of_megatron_has_the_truths_bits() {
    let sample = fixture("torch/torch_dist_tp2");
    let truth = sample.join("truth/truth.hf.safetensors");
    assert_truth(&sample, &truth);
    assert_truth(&sample.join("iter_0000007"), &truth);
}

#[test]
fn legacy_megatron_has_the_truths_bits() {
    let sample = fixture("torch/legacy_tp2");
    assert_truth(&sample, &sample.join("truth/truth.hf.safetensors"));
    assert_truth(&sample.join("iter_0000007"), &sample.join("truth/truth.hf.safetensors"));
}

#[test]
fn fsdp2_and_pieces_of_safetensors_have_the_truths_bits() {
    let sample = fixture("torch/dcp_fsdp2");
    let truth = sample.join("truth/truth.hf.safetensors");
    assert_truth(&sample.join("model"), &truth);
    assert_truth(&sample.join("model_hf_sharded"), &truth);
}

/// Copies a sample without its config.json.
fn without_config(sample: &str, to: &Path) -> PathBuf {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(fixture(sample)).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            std::fs::create_dir_all(&target).unwrap();
            for inner in std::fs::read_dir(entry.path()).unwrap() {
                let inner = inner.unwrap();
                std::fs::copy(inner.path(), target.join(inner.file_name())).unwrap();
            }
        } else if entry.file_name() != "config.json" {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
    to.to_path_buf()
}

#[test]
fn the_geometry_comes_from_megatrons_arguments_where_there_is_no_config() {
    for (sample, truth) in [("torch_dist_tp2", "torch_dist_tp2"), ("legacy_tp2", "legacy_tp2")] {
        let folder = tempfile::tempdir().unwrap();
        let path = without_config(&format!("torch/{sample}/iter_0000007"), &folder.path().join("iter"));
        let checkpoint = Checkpoint::open(&path).unwrap();
        let config = checkpoint.config.as_ref().unwrap();
        let written = fixture(&format!("torch/{sample}/iter_0000007/config.json"));
        let written: serde_json::Value = serde_json::from_slice(&std::fs::read(written).unwrap()).unwrap();
        for key in [
            "architectures",
            "hidden_size",
            "intermediate_size",
            "layer_types",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_value_head_dim",
            "model_type",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "tie_word_embeddings",
            "vocab_size",
            "hidden_act",
        ] {
            assert_eq!(config[key], written[key], "{key}");
        }
        let rope = &config["rope_parameters"];
        assert_eq!(
            (rope["rope_theta"].as_f64(), rope["partial_rotary_factor"].as_f64()),
            (Some(10000.0), Some(0.5))
        );
        assert_truth(&path, &fixture(&format!("torch/{truth}/truth/truth.hf.safetensors")));
    }
}

#[test]
fn optimizer_state_is_counted_beside_the_model() {
    let registry = Registry::builtin();
    // exp_avg, exp_avg_sq and fp32_param of 19 tensors; in the legacy format by rank, and with a step each.
    for (sample, tensors, elements) in [("torch_dist_tp2", 57, 66_588), ("legacy_tp2", 152, 67_154)] {
        let checkpoint = Checkpoint::open(&fixture("torch").join(sample)).unwrap();
        let report = inspect(&checkpoint, registry, &policy("strict")).unwrap();
        assert!(report.tensors.iter().all(|t| !t.name.contains("optimizer")), "{sample}");
        let f32 = report.state[&Dtype::F32];
        assert_eq!((f32.tensors, f32.parameters), (tensors, elements), "{sample}");
        let counted: usize = report.files.iter().map(|f| f.tensors).sum();
        assert_eq!(counted, report.tensors.len(), "{sample}");
    }
}

/// A pickle in a zip as torch.save writes it.
fn torch_file(path: &Path, pickle: &[u8], data: &[(&str, &[u8])]) {
    use std::io::Write;
    let mut zip = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    zip.start_file("x/data.pkl", stored).unwrap();
    zip.write_all(pickle).unwrap();
    for (name, bytes) in data {
        zip.start_file(format!("x/{name}"), stored).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap();
}

fn refusal(pickle: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    torch_file(&path, pickle, &[("data/0", &[0; 16])]);
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("model.pt"), "{error}");
    error
}

#[test]
fn functions_that_are_not_of_tensors_are_refused_by_name_and_byte() {
    let byte = |error: &str| error.contains(", byte ");
    for (pickle, name) in [
        (&b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R."[..], "os.system"),
        (b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", "builtins.eval"),
        (b"\x80\x02cposix\nsystem\n.", "posix.system"),
        // By name from the stack, as protocol 4 does.
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        // An allowed module, another function of it.
        (b"\x80\x02ctorch\nload\n.", "torch.load"),
        (b"\x80\x02ctorch.serialization\nload\n.", "torch.serialization.load"),
        (b"\x80\x02c_codecs\ndecode\n.", "_codecs.decode"),
        // Nested in a dict that looks like a state dict.
        (b"\x80\x02}X\x01\x00\x00\x00wcsubprocess\nPopen\n)Rs.", "subprocess.Popen"),
    ] {
        let error = refusal(pickle);
        assert!(error.contains(&format!("names {name},")) && byte(&error), "{error}");
        assert!(error.contains("nothing was executed"), "{error}");
    }
}

#[test]
fn opcodes_that_torch_does_not_write_are_refused() {
    for (pickle, opcode) in [
        (&b"(cos\nsystem\no."[..], "os.system"),
        (b"(S'id'\nios\nsystem\n.", "0x53"),
        (b"(ios\nsystem\n.", "0x69"),
        (b"\x80\x02\x82\x01.", "0x82"),
        (b"\x80\x04\x92.", "0x92"),
        (b"P0\n.", "0x50"),
    ] {
        assert!(refusal(pickle).contains(opcode), "{opcode}: {}", refusal(pickle));
    }
}

#[test]
fn pickles_that_do_not_add_up_are_refused() {
    for (pickle, problem) in [
        (&b""[..], "truncated"),
        (b"\x80\x02X\xff\xff\xff\x7fab", "truncated"),
        (b"\x80\x09.", "protocol 9"),
        (b"\x80\x02.", "the stack has none"),
        (b"\x80\x02h\x05.", "value 5 is used before it is stored"),
        (b"\x80\x02)R.", "the stack has none"),
        (b"\x80\x02K\x01)R.", "not a named function or class"),
        (b"\x80\x02ccollections\nOrderedDict\nK\x01R.", "arguments are not a tuple"),
        (b"\x80\x02K\x01K\x02a.", "not a list"),
        (b"\x80\x02K\x01K\x02K\x03s.", "not a dict"),
        (b"\x80\x02K\x01}b.", "not an object"),
        (b"\x80\x02}(K\x01u.", "without a value"),
        (b"\x80\x02e.", "needs a mark"),
        (b"\x80\x02X\x02\x00\x00\x00\xff\xfe.", "not UTF-8"),
        (b"\x80\x02K\x01.", "expected a dict of tensors"),
    ] {
        let error = refusal(pickle);
        assert!(error.contains(problem), "{problem}: {error}");
    }
}

/// `{"w": tensor}` with this offset, shape and stride, over a storage of four floats.
fn one_tensor(offset: u8, shape: u8, stride: u8, elements: u8) -> Vec<u8> {
    let mut pickle =
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage".to_vec();
    pickle.extend(b"ctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu");
    pickle.extend([b'K', elements, b't', b'Q', b'K', offset, b'K', shape, 0x85, b'K', stride, 0x85, 0x89]);
    pickle.extend(b"ccollections\nOrderedDict\n)RtRs.");
    pickle
}

#[test]
fn tensors_are_read_by_offset_and_stride_and_only_within_their_storage() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    let values: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let read = |pickle: &[u8]| -> Result<Vec<f32>, String> {
        torch_file(&path, pickle, &[("data/0", &values)]);
        let checkpoint = Checkpoint::open(&path).map_err(|e| e.to_string())?;
        let tensor = &checkpoint.tensors[0];
        let mut bytes = vec![0; tensor.bytes as usize];
        checkpoint.files[tensor.file].read_at(&mut bytes, tensor.begin).unwrap();
        Ok(bytes.chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect())
    };
    assert_eq!(read(&one_tensor(0, 4, 1, 4)).unwrap(), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(read(&one_tensor(1, 2, 1, 4)).unwrap(), [2.0, 3.0]);
    assert_eq!(read(&one_tensor(0, 2, 3, 4)).unwrap(), [1.0, 4.0]);
    assert_eq!(read(&one_tensor(3, 3, 0, 4)).unwrap(), [4.0, 4.0, 4.0], "an expanded tensor");
    assert_eq!(read(&one_tensor(9, 0, 1, 4)).unwrap(), [0f32; 0]);
    for (pickle, problem) in [
        (one_tensor(1, 4, 1, 4), "reaches past its storage"),
        (one_tensor(0, 3, 2, 4), "reaches past its storage"),
        (one_tensor(0, 4, 1, 5), "has 16 bytes, expected 5 elements"),
    ] {
        let error = read(&pickle).unwrap_err();
        assert!(error.contains(problem) && error.contains("\"w\""), "{error}");
    }
    torch_file(&path, &one_tensor(0, 4, 1, 4), &[]);
    assert!(Checkpoint::open(&path).unwrap_err().to_string().contains("no entry data/0"));
}

/// A dict of dicts of dicts..., each used twice: 2^40 paths to the innermost value.
#[test]
fn values_that_are_used_again_and_again_are_not_followed_forever() {
    let mut pickle = b"\x80\x02}q\x00".to_vec();
    for level in 0..40u8 {
        pickle.extend([b'}', b'q', level + 1, b'(']);
        pickle.extend(b"X\x01\x00\x00\x00a");
        pickle.extend([b'h', level]);
        pickle.extend(b"X\x01\x00\x00\x00b");
        pickle.extend([b'h', level, b'u']);
    }
    pickle.push(b'.');
    // What is left on the stack below the last dict does not matter.
    assert!(refusal(&pickle).contains("not a checkpoint"));
    // A dict that contains itself.
    assert!(refusal(b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.").contains("not a checkpoint"));
}

#[test]
fn zip_files_that_torch_does_not_write_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    let error = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    std::fs::write(&path, b"\x80\x02}.").unwrap();
    assert!(error(&path).contains("not a readable zip file"), "{}", error(&path));
    let mut zip = zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
    zip.start_file("x/other", zip::write::SimpleFileOptions::default()).unwrap();
    zip.finish().unwrap();
    assert!(error(&path).contains("no data.pkl"), "{}", error(&path));

    torch_file(&path, &one_tensor(0, 4, 1, 4), &[("data/0", &[7; 16]), ("byteorder", b"big")]);
    assert!(error(&path).contains("big-endian"), "{}", error(&path));

    // The directory says that data/0 is where data.pkl is.
    torch_file(&path, &one_tensor(0, 4, 1, 4), &[("data/0", &[7; 16])]);
    let whole = std::fs::read(&path).unwrap();
    let entries: Vec<usize> =
        (0..whole.len() - 4).filter(|at| whole[*at..].starts_with(b"PK\x01\x02")).collect();
    let mut moved = whole.clone();
    moved[entries[1] + 42..entries[1] + 46].copy_from_slice(&whole[entries[0] + 42..entries[0] + 46]);
    std::fs::write(&path, &moved).unwrap();
    assert!(
        error(&path).contains("overlaps") || error(&path).contains("not a readable zip"),
        "{}",
        error(&path)
    );

    // Sizes beyond the end of the file.
    let mut long = whole.clone();
    for at in [20, 24] {
        long[entries[1] + at..entries[1] + at + 4].copy_from_slice(&0x7fff_fff0u32.to_le_bytes());
    }
    std::fs::write(&path, &long).unwrap();
    assert!(
        error(&path).contains("truncated") || error(&path).contains("not a readable zip"),
        "{}",
        error(&path)
    );
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    assert!(error(&path).contains("not a readable zip file"), "{}", error(&path));
}

#[test]
fn a_distributed_checkpoint_with_a_missing_or_short_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = without_config("torch/dcp_fsdp2/model", &folder.path().join("model"));
    assert!(Checkpoint::open(&path).is_ok());
    let shard = path.join("__1_0.distcp");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 100]).unwrap();
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("__1_0.distcp") && error.contains("truncated"), "{error}");
    std::fs::remove_file(&shard).unwrap();
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("__1_0.distcp"), "{error}");
}

#[test]
fn metadata_that_leads_out_of_the_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = without_config("torch/dcp_fsdp2/model", &folder.path().join("model"));
    let metadata = path.join(".metadata");
    let mut bytes = std::fs::read(&metadata).unwrap();
    let at = bytes.windows(12).position(|window| window == b"__0_0.distcp").unwrap();
    bytes[at..at + 12].copy_from_slice(b"../../x.dist");
    std::fs::write(&metadata, bytes).unwrap();
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("outside of the folder"), "{error}");
}

#[test]
fn a_missing_piece_of_safetensors_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = without_config("torch/dcp_fsdp2/model_hf_sharded", &folder.path().join("model"));
    std::fs::remove_file(path.join("shard-00001-model-00001-of-00001.safetensors")).unwrap();
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("parts are missing"), "{error}");
}

#[test]
fn a_file_that_changes_after_opening_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = without_config("torch/dcp_fsdp2/model", &folder.path().join("model"));
    let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());
    std::fs::write(path.join("__0_0.distcp"), b"short").unwrap();
    assert!(checkpoint.files.iter().any(|file| file.check_unchanged().is_err()));
}

/// Magic number, protocol and system as torch wrote them before 1.6, the pickle, and what follows it.
fn legacy_file(system: &[u8], pickle: &[u8], rest: &[u8]) -> Vec<u8> {
    let magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";
    [magic, system, pickle, rest].concat()
}

const LITTLE: &[u8] = b"\x80\x02}X\x0d\x00\x00\x00little_endian\x88s.";

/// [`one_tensor`] over the storage `0` of four floats, in the form before torch 1.6.
fn legacy_tensor() -> Vec<u8> {
    let pickle = one_tensor(0, 4, 1, 4);
    // The storage is not a view of another one.
    let at = pickle.windows(4).position(|window| window == b"K\x04tQ").unwrap();
    [&pickle[..at + 2], b"N", &pickle[at + 2..]].concat()
}

#[test]
fn files_from_before_torch_1_6_that_do_not_add_up_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    let opened = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Checkpoint::open(&path).map_err(|e| e.to_string())
    };
    let keys = b"\x80\x02]X\x01\x00\x00\x000a.";
    let storage = [&4u64.to_le_bytes()[..], &[7; 16]].concat();
    let rest = [&keys[..], &storage].concat();
    let whole = legacy_file(LITTLE, &legacy_tensor(), &rest);
    assert_eq!(opened(&whole).unwrap().tensors[0].shape, [4]);
    let view = {
        let pickle = legacy_tensor();
        let at = pickle.windows(5).position(|window| window == b"K\x04NtQ").unwrap();
        [&pickle[..at + 2], b"X\x01\x00\x00\x001K\x00K\x04\x87", &pickle[at + 3..]].concat()
    };
    for (bytes, problem) in [
        (whole[..whole.len() - 1].to_vec(), "reaches past the end"),
        (whole[..60].to_vec(), "does not end within"),
        ([&whole[..], b"x"].concat(), "1 bytes after the last storage"),
        (legacy_file(b"\x80\x02}.", &legacy_tensor(), &rest), "little-endian"),
        (legacy_file(LITTLE, &view, &rest), "is a view of another one"),
        (legacy_file(LITTLE, &legacy_tensor(), b"\x80\x02]X\x01\x00\x00\x001a."), "belongs to no tensor"),
        (legacy_file(LITTLE, &legacy_tensor(), b"\x80\x02K\x01."), "expected the list"),
        (legacy_file(LITTLE, &legacy_tensor(), b"\x80\x02]."), "no entry data/0"),
        (legacy_file(LITTLE, b"\x80\x02cos\nsystem\n.", &rest), "names os.system,"),
    ] {
        let error = opened(&bytes).unwrap_err();
        assert!(error.contains(problem) && error.contains("model.pt"), "{problem}: {error}");
    }
    // Another protocol of torch.save.
    let mut other = whole.clone();
    other[18] = 0xea;
    assert!(opened(&other).unwrap_err().contains("other than 1001"), "{}", opened(&other).unwrap_err());
    // Fewer elements than the tensor's storage has.
    let short = [&keys[..], &3u64.to_le_bytes(), &[7; 12]].concat();
    let error = opened(&legacy_file(LITTLE, &legacy_tensor(), &short)).unwrap_err();
    assert!(error.contains("has 12 bytes, expected 4 elements"), "{error}");
    // A module of torch, not its state dict.
    let module = b"\x80\x02(X\x06\x00\x00\x00modulectorch.nn.modules.linear\nLinear\nX\x01\x00\x00\x00fX\x01\x00\x00\x00stQ)\x81.";
    let error = opened(&legacy_file(LITTLE, module, b"\x80\x02].")).unwrap_err();
    assert!(error.contains("got a torch.nn.modules.linear.Linear"), "{error}");
}

#[test]
fn the_order_of_bytes_is_read_only_if_it_is_short() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    torch_file(&path, &one_tensor(0, 4, 1, 4), &[("data/0", &[7; 16]), ("byteorder", &[b'x'; 100_000])]);
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("\"byteorder\" has 100000 bytes"), "{error}");
}

/// `{"w": tensor}` whose functions take these arguments after the strides.
fn tensor_of(function: &str, rest: &[u8]) -> Vec<u8> {
    let pickle = one_tensor(0, 4, 1, 4);
    let at = pickle.windows(2).position(|window| window == b"\x89c").unwrap();
    let pickle = [&pickle[..at], rest, b"tRs."].concat();
    let name = b"_rebuild_tensor_v2";
    let at = pickle.windows(name.len()).position(|window| window == name).unwrap();
    [&pickle[..at], function.as_bytes(), &pickle[at + name.len()..]].concat()
}

#[test]
fn every_argument_of_the_functions_that_rebuild_a_tensor_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    let opened = |pickle: &[u8]| {
        torch_file(&path, pickle, &[("data/0", &[7; 16])]);
        Checkpoint::open(&path).map(|_| ()).map_err(|e| e.to_string())
    };
    const HOOKS: &[u8] = b"ccollections\nOrderedDict\n)R";
    let bits = |key: &str, value: u8| {
        [b"}X", &(key.len() as u32).to_le_bytes()[..], key.as_bytes(), &[value, b's']].concat()
    };
    let v2 = |metadata: &[u8]| tensor_of("_rebuild_tensor_v2", &[b"\x89", HOOKS, metadata].concat());
    let v3 = |rest: &[u8]| tensor_of("_rebuild_tensor_v3", &[b"\x89", HOOKS, rest].concat());
    let float = b"ctorch\nfloat32\n";
    for pickle in [
        tensor_of("_rebuild_tensor", b""),
        v2(b""),
        v2(b"N"),
        v2(b"}"),
        v2(&bits("neg", 0x89)),
        v3(float),
        v3(&[&float[..], b"}"].concat()),
        tensor_of("_rebuild_tensor_v2", b"\x88N"),
    ] {
        opened(&pickle).unwrap();
    }
    for (pickle, problem) in [
        (v2(&bits("neg", 0x88)), "negative bit"),
        (v2(&bits("conj", 0x88)), "conjugate bit"),
        (v2(&bits("new", 0x88)), "its metadata has \"new\""),
        (v2(b"K\x01"), "in a form that torch does not write"),
        (v2(b"}K\x01"), "in a form that torch does not write"),
        (v3(&[&float[..], &bits("neg", 0x88)].concat()), "negative bit"),
        (v3(b""), "in a form that torch does not write"),
        (v3(b"ctorch\ncomplex128\n"), "its type is torch.complex128"),
        (tensor_of("_rebuild_tensor", b"\x89"), "in a form that torch does not write"),
        (tensor_of("_rebuild_tensor_v2", b"\x89"), "in a form that torch does not write"),
        (tensor_of("_rebuild_tensor_v2", b"\x89}K\x01K\x02s"), "backward hooks"),
        (tensor_of("_rebuild_qtensor", b"N\x89N"), "it is quantized by torch"),
        (tensor_of("_rebuild_new_kind", b""), "its kind is not known"),
    ] {
        let error = opened(&pickle).unwrap_err();
        assert!(error.contains(problem) && error.contains("tensor \"w\""), "{problem}: {error}");
    }
}

#[test]
fn a_tensor_in_an_opaque_object_is_not_lost() {
    let tensor = one_tensor(0, 4, 1, 4);
    // The tensor is the state of an object of another package, in place of being a value of the dict.
    let key = b"\x80\x02}X\x01\x00\x00\x00w".len();
    let inner = &tensor[key..tensor.len() - 2];
    let pickle = [&tensor[..key], b"cours\nConfig\n)R}X\x01\x00\x00\x00v", inner, b"sbs."].concat();
    let error = refusal(&pickle);
    assert!(error.contains("tensor \"w.v\"") && error.contains("it lies in a ours.Config"), "{error}");
}

#[test]
fn tensors_and_names_that_are_used_many_times_are_limited_by_the_length_of_the_pickle() {
    let tensor = one_tensor(0, 4, 1, 4);
    let key = b"\x80\x02}X\x01\x00\x00\x00w".len();
    let mut pickle = [b"\x80\x02", &tensor[key..tensor.len() - 2], b"q\x000}("].concat();
    for number in 0..80_000u32 {
        pickle.push(b'J');
        pickle.extend(number.to_le_bytes());
        pickle.extend(b"h\x00");
    }
    pickle.extend(b"u.");
    assert!(refusal(&pickle).contains("more than"), "{}", refusal(&pickle));
    // A shape of very many dimensions, which could be shared by all tensors.
    let mut pickle = b"\x80\x02}X\x01\x00\x00\x00w".to_vec();
    pickle.extend(&tensor[key..]);
    let at = pickle.windows(3).position(|window| window == b"K\x04\x85").unwrap();
    let many = [b"(", &b"K\x01".repeat(100)[..], b"t"].concat();
    let pickle = [&pickle[..at], &many, &pickle[at + 3..]].concat();
    assert!(refusal(&pickle).contains("in a form that torch does not write"), "{}", refusal(&pickle));
}

#[test]
fn an_object_of_the_metadata_with_very_many_fields_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut metadata = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(".to_vec();
    for number in 0..65 {
        metadata.extend([b'K', number, b'N']);
    }
    metadata.extend(b"ub.");
    std::fs::write(folder.path().join(".metadata"), metadata).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains(".metadata") && error.contains("more than 64 fields"), "{error}");
}

#[test]
fn objects_beside_the_tensors_of_a_folder_are_named_and_counted() {
    let checkpoint = Checkpoint::open(&fixture("torch/torch_dist_tp2")).unwrap();
    let count =
        |kind: &str| checkpoint.left_out.iter().find(|own| own.kind == kind).map_or(0, |own| own.count);
    assert_eq!(count("argparse.Namespace"), 1, "{:?}", checkpoint.left_out);
    let legacy = Checkpoint::open(&fixture("torch/legacy_tp2")).unwrap();
    let kinds: Vec<&str> = legacy.left_out.iter().map(|own| own.kind.as_str()).collect();
    assert!(kinds.contains(&"argparse.Namespace") && kinds.contains(&"attributes of a tensor"), "{kinds:?}");
    let nested = Checkpoint::open(&fixture("torch/saved/dcp_app")).unwrap();
    let objects = nested.left_out.iter().find(|own| own.kind == "saved objects").unwrap();
    assert_eq!((objects.count, &objects.names[..]), (1, &["app.optim.rate".to_string()][..]));
}
