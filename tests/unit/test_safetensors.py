"""Hugging Face directories: the file format, configs, and what is refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import LoadError, UnsupportedError
from octavo.models.loading.dequant import dequantize
from octavo.models.loading.load import load_model
from octavo.models.loading.safetensors import open_tensors, weight_files
from octavo.models.loading.safetensors_model import read_directory, read_eos_ids
from octavo.models.spec import RopeScaling, Tensor

Factory = Callable[..., Path]


def write(path: Path, header: Any, body: bytes = b"") -> Path:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + body)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# The file format


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    wrote = {
        "f32": torch.randn(3, 5),
        "f16": torch.randn(2, 7).half(),
        "bf16": torch.randn(4, 3).bfloat16(),
        "vector": torch.randn(9),
        "odd": torch.randn(1, 3).half(),
    }
    save_file(wrote, tmp_path / "x.safetensors", metadata={"format": "pt"})
    read = open_tensors([tmp_path / "x.safetensors"])
    assert read.keys() == wrote.keys()
    for name, tensor in wrote.items():
        assert read[name].shape == tuple(tensor.shape)
        assert not read[name].data.flags.writeable
        rows = tensor.shape[0] if tensor.ndim == 2 else 1
        got = dequantize(Tensor(name, read[name].dtype, rows, tensor.shape[-1], read[name].data))
        np.testing.assert_array_equal(got.reshape(tensor.shape), tensor.float().numpy())


def test_unaligned_data_is_copied_to_whole_words(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    header = json.dumps({"w": entry("F32", [4], 0, 16)}).encode()
    for padding in range(4):
        path = write(tmp_path / "x.safetensors", header + b" " * padding, values.tobytes())
        tensor = open_tensors([path])["w"]
        assert tensor.data.ctypes.data % 4 == 0
        assert tensor.data.view(np.float32).tolist() == [0, 1, 2, 3]
        assert not tensor.data.flags.writeable


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": entry("F32", [4], 0, 12)}, "12 bytes do not hold F32 of shape"),
        ({"w": entry("F32", [8], 0, 32)}, "truncated: tensor w ends at byte 32 of the data, 16 are there"),
        ({"w": entry("F32", [4], 16, 0)}, "damaged header entry"),
        ({"w": entry("F32", [-4], 0, 16)}, "damaged header entry"),
        ({"w": entry("F32", [4], -16, 0)}, "damaged header entry"),
        ({"w": {"dtype": "F32", "shape": [4]}}, "damaged header entry"),
        ({"w": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}, "damaged header entry"),
        ({"w": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}}, "damaged header entry"),
        ({"w": 1}, "damaged header entry"),
        ({"w": entry("F8_E4M3", [16], 0, 16)}, "tensor w has type F8_E4M3; Octavo reads F32, F16, BF16"),
        ({"w": entry("I64", [2], 0, 16)}, "type I64"),
        ([1], "not a JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
    ],
)
def test_damaged_files(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(LoadError, match=r"x\.safetensors") as caught:
        open_tensors([write(tmp_path / "x.safetensors", header, b"\0" * 16)])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are less than a header"),
        (b"1234567", "7 bytes are less"),
        (struct.pack("<Q", 1 << 62), "a header of 4611686018427387904 bytes"),
        (struct.pack("<Q", 5000) + b"{}", "truncated: a header of 5000 bytes in a file of 10"),
    ],
)
def test_broken_beginnings(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=r"x\.safetensors") as caught:
        open_tensors([path])
    assert message in str(caught.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage(tiny_checkpoint: Factory, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray((tiny_checkpoint("llama") / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 3000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    try:
        tensors = open_tensors([path])
    except LoadError:
        return
    for tensor in tensors.values():
        assert tensor.data.size <= len(content)


def test_shards(tiny_checkpoint: Factory, tmp_path: Path) -> None:
    import transformers

    single = tiny_checkpoint("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(single)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(single / name, tmp_path / name)
    assert len(weight_files(tmp_path)) > 2
    sharded, whole = load_model(tmp_path), load_model(single)
    for a, b in zip(sharded.weights.layers, whole.weights.layers, strict=True):
        np.testing.assert_array_equal(a.mlp.down.data, b.mlp.down.data)
    assert sharded.weights_sha256 != whole.weights_sha256
    weight_files(tmp_path)[1].unlink()
    with pytest.raises(LoadError, match=r"model-00002-of-\d+\.safetensors is missing"):
        load_model(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "../other/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(LoadError, match="is not the name of a file beside it"):
        weight_files(tmp_path)


# Configs


def edited(source: Path, target: Path, changes: dict[str, Any], *, drop: tuple[str, ...] = ()) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | changes
    config = {key: value for key, value in config.items() if key not in drop}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_equal_the_checkpoints(kind: str, dtype: str, tiny_checkpoint: Factory) -> None:
    import transformers

    path = tiny_checkpoint(kind, dtype=dtype)
    state = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32").state_dict()
    spec, weights = read_directory(path)
    for i, layer in enumerate(weights.layers):
        a, m, p = layer.attention, layer.mlp, f"model.layers.{i}."
        pairs = [(getattr(a, n), f"{p}self_attn.{n}_proj.weight") for n in "qkvo"]
        pairs += [(getattr(m, n), f"{p}mlp.{n}_proj.weight") for n in ("gate", "up", "down")]
        pairs += [(a.norm, p + "input_layernorm.weight"), (m.norm, p + "post_attention_layernorm.weight")]
        pairs += [(getattr(a, n + "_bias"), f"{p}self_attn.{n}_proj.bias") for n in "qkv"]
        pairs += [(getattr(a, n), f"{p}self_attn.{n}.weight") for n in ("q_norm", "k_norm")]
        for value, name in pairs:
            if value is None:
                assert name not in state
                continue
            got = value if isinstance(value, np.ndarray) else dequantize(value)
            np.testing.assert_array_equal(got, state[name].numpy(), err_msg=name)
    np.testing.assert_array_equal(dequantize(weights.head), state["lm_head.weight"].numpy())
    np.testing.assert_array_equal(weights.final_norm, state["model.norm.weight"].numpy())
    assert spec.qkv_bias == (kind == "qwen2")


def frequencies(scaling: RopeScaling | None, theta: float, dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the factor on cos and sin, from a RopeScaling, as its docstring defines it."""
    inverse = theta ** -(np.arange(0, dim, 2) / dim)
    if scaling is None:
        return inverse, 1.0
    if scaling.kind == "linear":
        return inverse / scaling.factor, 1.0
    if scaling.kind == "llama3":
        turns = scaling.original_context * inverse / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return inverse * (keep + (1 - keep) / scaling.factor), 1.0

    def channel(turns: float) -> float:
        return dim * np.log(scaling.original_context / (turns * 2 * np.pi)) / (2 * np.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    factor = scaling.attention_factor
    if factor is None and scaling.mscale and scaling.mscale_all_dim:
        log = 0.1 * np.log(scaling.factor)
        factor = (scaling.mscale * log + 1) / (scaling.mscale_all_dim * log + 1)
    if factor is None:
        factor = 0.1 * np.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    return inverse * (1 - ramp) + inverse / scaling.factor * ramp, factor


ROPE_EDITS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("rope", ROPE_EDITS)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "rope_scaling with type"])
def test_rope_scaling_means_what_transformers_computes(
    rope: dict[str, Any], spelling: str, tiny_checkpoint: Factory, tmp_path: Path
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if spelling == "rope_parameters":
        changes: dict[str, Any] = {"rope_parameters": {"rope_theta": 5000.0, **rope}}
        drop: tuple[str, ...] = ()
    else:
        values = dict(rope)
        if spelling.endswith("type"):
            values["type"] = values.pop("rope_type")
        changes = {"rope_scaling": values, "rope_theta": 5000.0}
        drop = ("rope_parameters",)
    path = edited(tiny_checkpoint("llama"), tmp_path, changes, drop=drop)
    spec, _ = read_directory(path)
    assert spec.rope.theta == 5000.0
    got, got_factor = frequencies(spec.rope.scaling, spec.rope.theta, spec.rope.dim)
    if rope["rope_type"] == "default":
        assert spec.rope.scaling is None
        return
    config = LlamaConfig.from_pretrained(path)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5)
    assert got_factor == pytest.approx(expected_factor)


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"architectures": ["Gemma3ForCausalLM"]},
        "architecture 'Gemma3ForCausalLM' is not supported: it needs slid",
    ),
    ("llama", {"architectures": ["DeepseekV3ForCausalLM"]}, "latent attention"),
    ("llama", {"architectures": ["MixtralForCausalLM"]}, "mixture-of-experts"),
    ("llama", {"architectures": ["Qwen3NextForCausalLM"]}, "state-space"),
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, "Supported: LlamaForCausalLM"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config = 'gptq'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_parameters.rope_type = 'dynamic'",
    ),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope_scaling.rope_type = 'su'"),
    (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "one rotary embedding for all layers is",
    ),
    ("mistral", {"sliding_window": 256}, "sliding_window = 256"),
    (
        "qwen2",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
        "sliding_window = 64",
    ),
    ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types = ['linear_attention']"),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1, "layer_types": None},
        "sliding_window = 100",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSALS)
def test_unsupported_fields_are_named(
    kind: str, changes: dict[str, Any], message: str, tiny_checkpoint: Factory, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"config\.json") as caught:
        load_model(edited(tiny_checkpoint(kind), tmp_path, changes))
    assert message in str(caught.value)


def test_windows_that_change_nothing_are_accepted(tiny_checkpoint: Factory, tmp_path: Path) -> None:
    read_directory(edited(tiny_checkpoint("mistral"), tmp_path / "a", {"sliding_window": 512}))
    read_directory(edited(tiny_checkpoint("mistral"), tmp_path / "b", {"sliding_window": None}))
    unused = {"use_sliding_window": False, "sliding_window": 100, "max_window_layers": 0, "layer_types": None}
    read_directory(edited(tiny_checkpoint("qwen2"), tmp_path / "c", unused))
    # transformers' Mistral slides over 4096 tokens where the config is silent.
    wide = {"max_position_embeddings": 8192}
    with pytest.raises(UnsupportedError, match="sliding_window = 4096"):
        read_directory(edited(tiny_checkpoint("mistral"), tmp_path / "d", wide, drop=("sliding_window",)))


def test_biases(tiny_checkpoint: Factory, tmp_path: Path) -> None:
    """attention_bias of Llama and Qwen3 gives the output projection a bias too, which is not supported."""
    for kind in ("llama", "qwen3"):
        with pytest.raises(UnsupportedError, match=r"attention_bias.*o_proj\.bias"):
            read_directory(tiny_checkpoint(kind, attention_bias=True))
    # The same without that one tensor is.
    from safetensors.numpy import load_file, save_file

    source = tiny_checkpoint("llama", attention_bias=True)
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    tensors = {k: v for k, v in load_file(source / "model.safetensors").items() if "o_proj.bias" not in k}
    save_file(tensors, tmp_path / "model.safetensors")
    spec, weights = read_directory(tmp_path)
    assert spec.qkv_bias
    np.testing.assert_array_equal(weights.layers[1].attention.k_bias, tensors["model.layers.1.self_attn.k_proj.bias"])


def test_tied_heads(tiny_checkpoint: Factory, tmp_path: Path) -> None:
    _, weights = read_directory(tiny_checkpoint("llama", tie_word_embeddings=True))
    assert weights.head is weights.embedding
    with pytest.raises(LoadError, match=r"no tensor lm_head\.weight"):
        read_directory(
            edited(
                tiny_checkpoint("llama", tie_word_embeddings=True),
                tmp_path / "a",
                {"tie_word_embeddings": False},
            )
        )
    with pytest.raises(LoadError, match=r"tie_word_embeddings is true but lm_head\.weight is not the embedding"):
        read_directory(edited(tiny_checkpoint("llama"), tmp_path / "b", {"tie_word_embeddings": True}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "shape"),
        ({"num_hidden_layers": 3}, r"no tensor model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"do not have in Octavo: model\.layers\.1\."),
        ({"num_key_value_heads": 3}, "4 query heads do not divide into 3 KV heads"),
        ({"vocab_size": "big"}, "vocab_size must be a whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"head_dim": 15}, "even head_dim"),
        ({"architectures": None, "model_type": None}, "not a model's config"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a positive number, is None"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str, tiny_checkpoint: Factory, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        read_directory(edited(tiny_checkpoint("llama"), tmp_path, changes))


def test_directories_that_are_something_else(tmp_path: Path, tiny_checkpoint: Factory) -> None:
    with pytest.raises(LoadError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnsupportedError, match="an adapter"):
        load_model(tmp_path)
    torch_only = tmp_path / "torch"
    shutil.copytree(tiny_checkpoint("llama"), torch_only)
    (torch_only / "model.safetensors").rename(torch_only / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"torch files \(\.bin, \.pth\)"):
        load_model(torch_only)
    (torch_only / "pytorch_model.bin").unlink()
    with pytest.raises(LoadError, match=r"no model\.safetensors"):
        load_model(torch_only)
    (torch_only / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(LoadError, match="cannot be read as JSON"):
        load_model(torch_only)


def test_eos_ids(tiny_checkpoint: Factory, tmp_path: Path) -> None:
    path = edited(tiny_checkpoint("llama"), tmp_path, {"eos_token_id": [2, 0]})
    (path / "generation_config.json").unlink(missing_ok=True)
    assert read_eos_ids(path) == {0, 2}
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}', encoding="utf-8")
    assert read_eos_ids(path) == {5, 6}
    assert load_model(path).tokenizer.eos_token_ids >= {5, 6, 2}


def test_the_hash_follows_content_and_config(tiny_checkpoint: Factory, tmp_path: Path) -> None:
    first = load_model(tiny_checkpoint("llama")).weights_sha256
    shutil.copytree(tiny_checkpoint("llama"), tmp_path / "copy")
    assert load_model(tmp_path / "copy").weights_sha256 == first
    edited(tiny_checkpoint("llama"), tmp_path / "other", {"rms_norm_eps": 1e-5})
    assert load_model(tmp_path / "other").weights_sha256 != first
    assert load_model(tiny_checkpoint("llama", seed=1)).weights_sha256 != first
