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
        pytest.fail(
            f"{path} is missing: fetch it with `octavo pull {name}`, or point OCTAVO_MODELS at its folder"
        )
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
    tokenizer.train_from_iterator(
        ["the cat sat on the mat and then the other hat was there too"] * 4, trainer
    )
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

    def make(
        kind: str, *, rope: str = "default", dtype: str = "float32", seed: int = 0, **config: Any
    ) -> Path:
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
