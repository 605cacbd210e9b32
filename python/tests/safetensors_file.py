"""Writes safetensors files with the standard library, so that the tests need neither torch nor numpy."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path


def write(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """Writes tensors given as dtype, shape and data."""
    header: dict[str, object] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_zeros(path: Path, name: str, elements: int) -> Path:
    """Writes a file with one BF16 tensor of zeros that takes no space on the disk."""
    size = 2 * elements
    text = json.dumps({name: {"dtype": "BF16", "shape": [elements], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    return path
