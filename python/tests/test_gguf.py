"""GGUF files, read back with llama.cpp's own package."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from ballast.checkpoint import audit, convert, convert_adapter, inspect
from ballast.errors import UsageError

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

MODELS = ["models/gemma2", "models/gemma4_dense", "models/gemma4_moe", "models/gemma4_ple", "release/qwen3_5"]


def arrays(path: Path) -> dict[str, object]:
    """Returns all tensors of a file, in row-major shapes, as f32."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in tensors}


@pytest.mark.parametrize("name", MODELS)
def test_the_package_reads_every_dtype_and_quantizes_alike(root: Path, tmp_path: Path, name: str) -> None:
    files = {}
    for dtype in ["f32", "f16", "bf16", "q8_0"]:
        path = tmp_path / f"{dtype}.gguf"
        convert(root / "fixtures" / name, path, dtype=dtype)
        files[dtype] = gguf.GGUFReader(path)
        assert inspect(path).layout.naming == "gguf"
        assert audit(path).passed
    exact = {t.name: t for t in files["f32"].tensors}
    quantized = 0
    for tensor in files["q8_0"].tensors:
        if tensor.tensor_type.name == "Q8_0":
            source = exact[tensor.name]
            wanted = gguf.quants.quantize(source.data.reshape(source.shape[::-1]), tensor.tensor_type)
            assert np.array_equal(np.ravel(tensor.data), np.ravel(wanted)), tensor.name
            quantized += 1
    assert quantized > 0
    for dtype, limit in [("f16", 2**-11), ("bf16", 2**-8)]:
        narrow = arrays(tmp_path / f"{dtype}.gguf")
        for key, values in arrays(tmp_path / "f32.gguf").items():
            assert np.all(np.abs(narrow[key] - values) <= limit * np.abs(values) + 1e-7), key


def test_vectors_are_f32_and_entries_are_typed(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    convert(root / "fixtures/release/qwen3_5", path, dtype="q8_0")
    file = gguf.GGUFReader(path)
    assert file.fields["general.architecture"].contents() == "qwen35"
    assert file.fields["qwen35.ssm.time_step_rank"].contents() == 4
    assert file.fields["qwen35.rope.dimension_sections"].contents()[3] == 0
    for tensor in file.tensors:
        if len(tensor.shape) < 2 or "ssm_conv1d" in tensor.name:
            assert tensor.tensor_type.name == "F32", tensor.name


def test_what_llama_cpp_cannot_express_is_a_usage_error(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="query_pre_attn_scalar"):
        convert(root / "fixtures/models/gemma3", tmp_path / "model.gguf")


def test_an_adapter_has_the_values_of_its_factors(root: Path, tmp_path: Path) -> None:
    base = root / "fixtures/release/qwen3_5"
    hidden = json.loads((base / "config.json").read_text())["text_config"]["hidden_size"]
    module = "base_model.model.model.language_model.layers.0.mlp.down_proj"
    shapes = {t.name: t.shape for t in inspect(base, tensors=True).tensors}
    width = shapes["model.language_model.layers.0.mlp.down_proj.weight"][1]
    factors = {
        f"{module}.lora_A.weight": np.linspace(-1, 1, 4 * width, dtype=np.float32).reshape(4, width),
        f"{module}.lora_B.weight": np.linspace(2, 3, hidden * 4, dtype=np.float32).reshape(hidden, 4),
    }
    header, data = {}, b""
    for name, values in factors.items():
        end = len(data) + values.nbytes
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [len(data), end]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))

    report = convert_adapter(adapter, tmp_path / "adapter.gguf", base=base)
    assert (report.architecture, report.modules, report.verification.same_bits) == ("qwen35", 1, 2)
    found = arrays(tmp_path / "adapter.gguf")
    assert sorted(found) == ["blk.0.ffn_down.weight.lora_a", "blk.0.ffn_down.weight.lora_b"]
    for values, wanted in zip(found.values(), factors.values(), strict=True):
        assert np.array_equal(values, wanted)
