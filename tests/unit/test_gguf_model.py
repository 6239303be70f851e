"""GGUF files as models: the same weights as the checkpoint they were made from, and clear refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.errors import LoadError, UnsupportedError
from octavo.models.loading.dequant import dequantize
from octavo.models.loading.gguf import GgufFile, open_gguf
from octavo.models.loading.gguf_model import read_model
from octavo.models.loading.load import load_model
from octavo.models.loading.safetensors_model import read_directory
from octavo.models.spec import ModelWeights, RopeScaling
from octavo.text.gguf_tokenizer import tokenizer_from_gguf

KINDS = ["llama", "mistral", "qwen2", "qwen3"]
Factory = Callable[..., Path]


def arrays(weights: ModelWeights) -> dict[str, np.ndarray]:
    """All weights as float32, in logical row order."""
    found = {
        "embedding": dequantize(weights.embedding),
        "norm": weights.final_norm,
        "head": dequantize(weights.head),
    }
    for i, layer in enumerate(weights.layers):
        for block in (layer.attention, layer.mlp):
            for field in block.__dataclass_fields__:
                value = getattr(block, field)
                if value is not None:
                    found[f"{i}.{field}"] = value if isinstance(value, np.ndarray) else dequantize(value)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_same_weights_as_the_checkpoint(kind: str, kv_heads: int, tiny_gguf: Factory, tiny_checkpoint: Factory) -> None:
    spec, weights = read_model(open_gguf(tiny_gguf(kind, num_key_value_heads=kv_heads)))
    expected_spec, expected = read_directory(tiny_checkpoint(kind, num_key_value_heads=kv_heads))
    got, want = arrays(weights), arrays(expected)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    for field in expected_spec.__dataclass_fields__:
        if field not in ("architecture", "norm_eps"):
            assert getattr(spec, field) == getattr(expected_spec, field), field
    assert spec.norm_eps == pytest.approx(expected_spec.norm_eps)
    assert spec.qkv_bias == (kind == "qwen2")
    assert spec.qk_norm == (kind == "qwen3")


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights(tensor_type: str, tiny_gguf: Factory, tiny_checkpoint: Factory) -> None:
    _, weights = read_model(open_gguf(tiny_gguf("llama", tensor_type=tensor_type)))
    _, exact = read_directory(tiny_checkpoint("llama"))
    stored = gguf.GGMLQuantizationType[tensor_type]
    assert weights.layers[1].attention.q.dtype == tensor_type
    for name, want in arrays(exact).items():
        if want.ndim == 2:
            want = gguf.quants.dequantize(gguf.quants.quantize(want, stored), stored)
        np.testing.assert_array_equal(arrays(weights)[name], want, err_msg=name)


def with_tensors(source: Path, path: Path, extra: dict[str, np.ndarray]) -> Path:
    """A copy of a GGUF file with more tensors in it."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_biases_of_a_llama_file_are_put_in_order(tiny_gguf: Factory, tmp_path: Path) -> None:
    """A llama file with q and k biases, as converters write them: in the same order as the rows."""
    _, plain = read_model(open_gguf(tiny_gguf("llama")))
    biases = {
        f"blk.{i}.attn_{part}.bias": np.arange(rows, dtype=np.float32)
        for i in range(2)
        for part, rows in (("q", 64), ("k", 32), ("v", 32))
    }
    path = with_tensors(tiny_gguf("llama"), tmp_path / "biased.gguf", biases)
    spec, weights = read_model(open_gguf(path))
    attention = weights.layers[0].attention
    assert spec.qkv_bias
    assert attention.q.row_order is not None
    assert attention.q_bias is not None
    assert attention.v_bias is not None
    # Head 0 of 16 channels: stored 0 1 2 3 ... are channels 0 8 1 9 ...
    assert attention.q_bias[:16].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert attention.q_bias[16] == 16
    np.testing.assert_array_equal(attention.q_bias, attention.q.row_order)
    np.testing.assert_array_equal(attention.v_bias, np.arange(32))
    np.testing.assert_array_equal(dequantize(attention.q), dequantize(plain.layers[0].attention.q))


def test_tied_head(tiny_gguf: Factory) -> None:
    _, weights = read_model(open_gguf(tiny_gguf("llama", tie_word_embeddings=True)))
    assert weights.head is weights.embedding
    _, weights = read_model(open_gguf(tiny_gguf("llama")))
    assert weights.head is not weights.embedding


def scaling(path: Path) -> RopeScaling | None:
    return read_model(open_gguf(path))[0].rope.scaling


def test_rope_scaling(tiny_gguf: Factory, tiny_checkpoint: Factory) -> None:
    for rope in ("default", "linear", "yarn"):
        expected = read_directory(tiny_checkpoint("qwen2", rope=rope))[0].rope.scaling
        assert scaling(tiny_gguf("qwen2", rope=rope)) == expected
    got = scaling(tiny_gguf("llama", rope="llama3"))
    assert got is not None
    assert got.kind == "explicit"
    assert len(got.divisors) == 8
    assert got.divisors[0] == pytest.approx(1.0)
    assert got.divisors[-1] == pytest.approx(8.0)
    old = {"llama.rope.scale_linear": 2.0}
    assert scaling(tiny_gguf("llama", metadata=old)) == RopeScaling("linear", factor=2.0)
    none = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 3.0}
    assert scaling(tiny_gguf("llama", metadata=none)) is None
    got = scaling(tiny_gguf("qwen2", rope="yarn", metadata={"qwen2.rope.scaling.attn_factor": 0.5}))
    assert got is not None
    assert got.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1.0))


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported: it needs sliding-window"),
    ({"general.architecture": "deepseek2"}, r"latent attention \(MLA\)"),
    ({"general.architecture": "mamba2"}, "state-space"),
    ({"general.architecture": "qwen3moe"}, "mixture-of-experts"),
    ({"general.architecture": "granitehybrid"}, "state-space"),
    ({"general.architecture": "bert"}, "outside what Octavo serves"),
    (
        {"general.architecture": "gptj"},
        "architecture 'gptj' is not supported. Supported: llama, qwen2, qwen3",
    ),
    ({"general.type": "adapter"}, "a GGUF of type 'adapter'"),
    ({"split.count": 3, "split.no": 1}, "part 2 of 3"),
    ({"llama.expert_count": 8}, "8 experts per layer"),
    ({"llama.attention.sliding_window": 256}, "a sliding window of 256 tokens in a context of 512"),
    ({"llama.attention.causal": False}, "not causal"),
    ({"llama.attention.scale": 0.5}, r"attention\.scale = 0\.5"),
    ({"llama.attention.clamp_kqv": 8.0}, r"attention\.clamp_kqv = 8"),
    ({"llama.logit_scale": 0.5}, r"logit_scale = 0\.5"),
    ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"llama.embedding_scale": 12.0}, "embedding_scale"),
    ({"llama.rope.dimension_count": 8}, "8 of 16 channels"),
    ({"llama.attention.value_length": 8}, "keys of 16 and values of 8"),
    ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ({"llama.rope.scaling.attn_factor": 1.5}, r"attn_factor = 1\.5 without YaRN"),
    ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv differs between layers \(\[1, 2\]\)"),
    ({"tokenizer.ggml.pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm'"),
    ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model 'rwkv'"),
]


@pytest.mark.parametrize(("metadata", "message"), REFUSALS)
def test_unsupported_is_named(metadata: dict[str, Any], message: str, tiny_gguf: Factory) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load_model(tiny_gguf("llama", metadata=metadata))


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"llama.embedding_length": None}, "no llama.embedding_length"),
    ({"llama.block_count": 3}, r"no tensor blk\.2\."),
    ({"llama.embedding_length": 128}, "shape"),
    ({"llama.attention.head_count_kv": 3}, "4 query heads do not divide into 3"),
    ({"llama.attention.key_length": 15, "llama.attention.value_length": 15}, "even head size, is 15"),
    ({"llama.attention.head_count": 0}, "at least 1, is 0"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon must be a number"),
    ({"tokenizer.ggml.eos_token_id": 5000}, "outside the vocabulary"),
    ({"tokenizer.chat_template": "{% for %}"}, "not valid Jinja"),
]


@pytest.mark.parametrize(("metadata", "message"), CONTRADICTIONS)
def test_contradictions_are_found(metadata: dict[str, Any], message: str, tiny_gguf: Factory) -> None:
    with pytest.raises(LoadError, match=message):
        load_model(tiny_gguf("llama", metadata=metadata))


WEIRD: list[Any] = ["text", True, -1, 0.5, float("nan"), float("inf"), [1, 2], ["a"], [0.5]]
LLAMA_KEYS = [
    "block_count", "context_length", "embedding_length", "feed_forward_length", "expert_count", "logit_scale",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.causal", "attention.scale",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.attn_factor", "rope.scaling.original_context_length",
]  # fmt: skip
OTHER_KEYS = [
    "general.type", "general.architecture", "split.count", "tokenizer.ggml.model", "tokenizer.ggml.pre",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id", "tokenizer.chat_template",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token",
]  # fmt: skip


@pytest.fixture(scope="module")
def parsed(tiny_gguf: Factory) -> GgufFile:
    return open_gguf(tiny_gguf("llama", rope="yarn"))


@pytest.mark.parametrize("key", [f"llama.{key}" for key in LLAMA_KEYS] + OTHER_KEYS)
@pytest.mark.parametrize("value", WEIRD, ids=map(str, WEIRD))
def test_values_of_the_wrong_kind(key: str, value: Any, parsed: GgufFile) -> None:
    """Loads, or says what is wrong: nothing else."""
    if isinstance(value, list):
        value = np.array(value) if not isinstance(value[0], str) else value
    file = replace(parsed, metadata={**parsed.metadata, key: value})
    with contextlib.suppress(LoadError):
        read_model(file)
        tokenizer_from_gguf(file.metadata, "x")


def test_a_window_as_wide_as_the_context_is_fine(tiny_gguf: Factory) -> None:
    spec, _ = read_model(open_gguf(tiny_gguf("mistral", metadata={"llama.attention.sliding_window": 512})))
    assert spec.context_length == 512


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blk.1.attn_q_norm.weight", r"do not have in Octavo: blk\.1\.attn_q_norm\.weight"),
        ("blk.0.attn_output.bias", r"blk\.0\.attn_output\.bias"),
        ("blk.0.ffn_gate_inp.weight", r"blk\.0\.ffn_gate_inp\.weight"),
        ("blk.0.attn_q.bias", "a bias on some of q, k and v"),
    ],
)
def test_no_tensor_is_ignored(name: str, message: str, tiny_gguf: Factory, tmp_path: Path) -> None:
    extra = {name: np.zeros(64, dtype=np.float32)}
    with pytest.raises(UnsupportedError, match=message):
        load_model(with_tensors(tiny_gguf("llama"), tmp_path / "x.gguf", extra))


def test_real_models(smollm2: Path, qwen_coder: Path) -> None:
    spec, weights = read_model(open_gguf(smollm2))
    assert (spec.n_layers, spec.d_model, spec.d_ff) == (30, 576, 1536)
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.vocab_size, spec.context_length, spec.rope.theta) == (49152, 8192, 1e5)
    assert weights.head is weights.embedding
    assert weights.layers[0].mlp.gate.dtype == "Q4_1"
    spec, weights = read_model(open_gguf(qwen_coder))
    assert (spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim) == (24, 14, 2, 64)
    assert spec.qkv_bias
    assert weights.layers[0].attention.q.row_order is None
    assert np.abs(weights.layers[0].attention.k_bias).max() > 100


@pytest.mark.slow
def test_real_weights_equal_transformers(smollm2: Path) -> None:
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    _, weights = read_model(open_gguf(smollm2))
    for i in (0, 29):
        block, attention = theirs.model.layers[i], weights.layers[i].attention
        np.testing.assert_array_equal(dequantize(attention.q), block.self_attn.q_proj.weight.detach().numpy())
        np.testing.assert_array_equal(dequantize(attention.k), block.self_attn.k_proj.weight.detach().numpy())
        np.testing.assert_array_equal(dequantize(attention.v), block.self_attn.v_proj.weight.detach().numpy())
    np.testing.assert_array_equal(dequantize(weights.head), theirs.lm_head.weight.detach().numpy())
