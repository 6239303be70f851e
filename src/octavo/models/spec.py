"""Models as data: dimensions, rotary embedding, and weights as they lie in a file.

Nothing here says how anything is computed; loaders fill these in, backends read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.cache.spec import CacheSpec, FullGroup

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained length. Field names follow Hugging Face configs.

    kind "linear": all frequencies divided by `factor`. "llama3": by wavelength (Llama 3.1). "yarn": YaRN, arXiv
    2309.00071, with `attention_factor` multiplying cos and sin. "explicit": per-frequency divisors in
    `divisors` (a GGUF's rope_freqs.weight).
    """

    kind: Literal["linear", "llama3", "yarn", "explicit"]
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding in the half-split (NeoX) convention: channel i pairs with i + dim / 2.

    Files that store the interleaved convention (GGUF "llama") are permuted at load, so only this one exists.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder with pre-norm blocks: RMSNorm, rotary attention, SiLU-gated MLP."""

    architecture: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    norm_eps: float
    context_length: int
    rope: RopeSpec
    qkv_bias: bool = False
    qk_norm: bool = False

    def cache_spec(self) -> CacheSpec:
        layers = tuple(range(self.n_layers))
        return CacheSpec((FullGroup(layers, self.n_kv_heads, self.head_dim, key_bias=self.qkv_bias),))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A matrix or vector as stored: `data` is a read-only uint8 view of the (memory-mapped) file.

    Attributes:
        name: its name in the file, for messages.
        dtype: GGUF type name ("F32", "F16", "BF16", "Q4_0", ... "Q6_K").
        rows, cols: a linear layer maps cols inputs to rows outputs; a vector has rows 1. Row r's bytes are
            data[r * row_bytes : (r + 1) * row_bytes].
        row_order: None, or int32 [rows]: logical row i is stored row row_order[i] (undoes the interleaved rotary
            permutation without copying quantized blocks).
    """

    name: str
    dtype: str
    rows: int
    cols: int
    data: NDArray[np.uint8]
    row_order: NDArray[np.int32] | None = None

    @property
    def row_bytes(self) -> int:
        return self.data.size // self.rows


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    norm: F32
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: F32 | None = None
    k_bias: F32 | None = None
    v_bias: F32 | None = None
    q_norm: F32 | None = None
    k_norm: F32 | None = None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    norm: F32
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention: AttentionWeights
    mlp: MlpWeights


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model. `head` is the embedding itself where the model ties them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: F32
    head: Tensor
