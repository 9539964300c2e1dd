"""`rmsnorm inspect` of files that were damaged at random: a report or one line, in bounded time and memory."""

import copy
import json
import random
import resource
import struct
import time

import pytest

from rmsnorm.cli import main

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

# Lengths, counts and offsets that programs get wrong.
NUMBERS = (0, 1, 3, 2**8, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
VALUES = (None, True, -1, 0, 1.5, 2**63, 10**30, float("nan"), float("inf"), "", "x\x1b[2J\n", "\ud800", [], [[1]], {})


def safetensors_file(rng):
    tensors = {
        "__metadata__": {"format": "pt"},
        "model.layers.0.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "model.layers.1.norm.weight": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [16, 32]},
        "model.norm.weight": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [32, 40]},
    }
    if rng.random() < 0.5:
        damage(rng, tensors)
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + bytes(rng.randrange(256) for _ in range(40))


def gguf_file(path):
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["a", "b", "c"])
    writer.add_array("scores", [0.5, 1.5])
    writer.add_tensor("blk.0.attn_norm.weight", np.linspace(0.5, 1.5, 32, dtype=np.float32))
    quantised = gguf.quantize(np.ones(64, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.1.attn_norm.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def damage(rng, tree):
    """Swap one value anywhere in a tree of JSON, or its key."""
    places = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(tree)
    node, key = rng.choice(places)
    if isinstance(node, dict) and rng.random() < 0.2:
        node[rng.choice(("", "\x1b[31m.norm.weight", "\ud800", "norm_eps", "__metadata__"))] = node.pop(key)
    else:
        node[key] = copy.deepcopy(rng.choice(VALUES))


def flipped(rng, data):
    """The bytes with some of them changed, a number put over them, or cut."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(min(len(data), 600))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case _:
                del data[rng.randrange(at, len(data)) :]
        if not data:
            return b""
    return bytes(data)


def inspected(capsys, path, most=500_000):
    """Neither a traceback nor a byte that would steer a terminal, whatever the file."""
    start, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = main(["inspect", str(path)])
    said = capsys.readouterr()
    assert code in (0, 1, 2)
    assert (said.out == "") == (code == 2)
    assert "\x1b" not in said.out + said.err
    assert not any(0xD800 <= ord(c) < 0xE000 for c in said.out + said.err)
    assert time.monotonic() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < most  # kB
    return code


@pytest.mark.parametrize("seed", range(4))
def test_damaged_safetensors_files(capsys, tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "model.safetensors"
    codes = set()
    for _ in range(400):
        whole = safetensors_file(rng)
        path.write_bytes(whole if rng.random() < 0.3 else flipped(rng, whole))
        codes.add(inspected(capsys, path))
    assert codes >= {1, 2}


@pytest.mark.parametrize("seed", range(4))
def test_damaged_gguf_files(capsys, tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "model.gguf"
    whole = gguf_file(path)
    codes = set()
    for _ in range(400):
        path.write_bytes(flipped(rng, whole))
        codes.add(inspected(capsys, path))
    assert codes >= {1, 2}


def test_damaged_configurations(capsys, tmp_path):
    pytest.importorskip("transformers")
    rng = random.Random(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}
    sound = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads, "head_dim": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**sound, "hidden_size": 4096}))
    assert inspected(capsys, path, most=2_000_000) == 0  # what importing and running a model takes is not counted
    codes = set()
    for _ in range(60):
        config = copy.deepcopy(sound)
        damage(rng, config)
        if rng.random() < 0.3:
            config[rng.choice(("num_hidden_layers", "hidden_size", "num_labels", "head_dim"))] = rng.choice(NUMBERS)
        text = json.dumps(config).encode()
        path.write_bytes(flipped(rng, text) if rng.random() < 0.3 else text)
        codes.add(inspected(capsys, path))
    assert codes >= {0, 2}
