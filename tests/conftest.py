"""Shared fixtures: the real models of the catalog, and tiny random checkpoints of every supported family."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROPE_VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _catalog_model(name: str) -> Path:
    base = os.environ.get("OCTAVO_MODELS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = (Path(base) if base else cache / "octavo" / "models") / f"{name}.gguf"
    if not path.is_file():
        pytest.fail(f"{path} is missing: fetch it with `octavo pull {name}`, or point OCTAVO_MODELS at its folder")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 and Q8_0: the GGUF of the catalog's smollm2-135m."""
    return _catalog_model("smollm2-135m")


@pytest.fixture(scope="session")
def qwen_coder() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: the GGUF of the catalog's qwen2.5-coder-0.5b."""
    return _catalog_model("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer of at most 320 tokens and a ChatML template, as transformers
    reads it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in specials],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and then the other hat was there too"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Callable[..., Path]:
    """A factory of random checkpoints that transformers wrote, with a tokenizer beside them.

    `tiny_checkpoint(kind, rope="default", dtype="float32", seed=0, **config)` -> folder. kind is "llama"
    (with num_key_value_heads 4 for MHA, 2 for GQA, 1 for MQA), "mistral", "qwen2" or "qwen3"; rope a key of
    ROPE_VARIANTS; config overrides fields of the transformers config. Weights are seeded and large enough for
    sharp predictions; norms and biases are random too. Equal arguments give the same folder.
    """
    made: dict[str, Path] = {}

    def make(kind: str, *, rope: str = "default", dtype: str = "float32", seed: int = 0, **config: Any) -> Path:
        key = json.dumps([kind, rope, dtype, seed, config], sort_keys=True)
        if key not in made:
            made[key] = _write_checkpoint(
                tmp_path_factory.mktemp(f"tiny-{kind}"), tiny_tokenizer, kind, rope, dtype, seed, config
            )
        return made[key]

    return make


def _write_checkpoint(
    folder: Path, tokenizer: Path, kind: str, rope: str, dtype: str, seed: int, overrides: dict[str, Any]
) -> Path:
    import torch
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    fields: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0, **ROPE_VARIANTS[rope]},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    if kind == "mistral":
        fields["sliding_window"] = None
    if kind == "qwen2":
        del fields["head_dim"]
    model = model_class(config_class(**(fields | overrides)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias") or "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tokenizer / name).read_text(encoding="utf-8"), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """A factory of GGUF files holding the weights of `tiny_checkpoint`, laid out as llama.cpp's converter
    does.

    `tiny_gguf(kind, tensor_type="F32", metadata={}, **checkpoint)` -> file; matrices are stored as
    tensor_type, one of those that the gguf package can write (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0),
    vectors as F32. `metadata` adds or replaces numbers and strings, None removes.
    """

    def make(kind: str, *, tensor_type: str = "F32", metadata: dict[str, Any] | None = None, **checkpoint: Any) -> Path:
        source = tiny_checkpoint(kind, **checkpoint)
        path = tmp_path_factory.mktemp("tiny-gguf") / f"tiny-{kind}.gguf"
        _write_gguf(source, path, kind, tensor_type, metadata or {})
        return path

    return make


_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, parameter = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{parameter}"


def _write_gguf(source: Path, path: Path, kind: str, tensor_type: str, changes: dict[str, Any]) -> None:
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    architecture = "llama" if kind == "mistral" else kind
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config["rope_parameters"]
    values: dict[str, Any] = {
        "general.type": "model",
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": rope["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    if "head_dim" in config:
        values[f"{architecture}.attention.key_length"] = config["head_dim"]
        values[f"{architecture}.attention.value_length"] = config["head_dim"]
    if rope["rope_type"] in ("linear", "yarn"):
        values[f"{architecture}.rope.scaling.type"] = rope["rope_type"]
        values[f"{architecture}.rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        key = f"{architecture}.rope.scaling.original_context_length"
        values[key] = rope["original_max_position_embeddings"]
    values.update(changes)

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    types = [5] * len(tokens)
    for piece, i in vocab.items():
        tokens[i], types[i] = piece, 3 if i in special else 1
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])

    stored = gguf.GGMLQuantizationType[tensor_type]
    for name, array in load_file(source / "model.safetensors").items():
        array = array.astype(np.float32)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            n = heads if "q_proj" in name else kv_heads
            # The converter's permutation: of each head, the two halves become neighbours.
            half = array.reshape(n, 2, array.shape[0] // n // 2, *array.shape[1:])
            array = half.swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 2 and tensor_type != "F32":
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(_gguf_name(name), array)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama3_divisors(config: dict[str, Any]) -> Any:
    """Plain frequencies over those that transformers computes, which is what a GGUF stores for Llama 3."""
    import numpy as np
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**config), "cpu")
    dim = config["head_dim"]
    plain = config["rope_parameters"]["rope_theta"] ** -(np.arange(0, dim, 2, dtype=np.float32) / dim)
    return (plain / stretched.numpy()).astype(np.float32)
