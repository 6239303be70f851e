"""What is missing for model families that Octavo knows but cannot run yet, so that a refusal can say."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.errors import UnsupportedError

_SLIDING = "sliding-window attention layers"
_LATENT = "latent attention (MLA)"
_STATE = "state-space layers"
_EXPERTS = "mixture-of-experts layers"
_ENCODER = "encoders"

#: Prefix of a family's name, in a GGUF ("gemma3") or in a Hugging Face config ("Gemma3ForCausalLM") -> what
#: it needs. The longest prefix wins.
_PLANNED: dict[str, str] = {
    "gemma": _SLIDING + " and its own norms",
    "deepseek2": _LATENT + " and " + _EXPERTS,
    "deepseekv2": _LATENT + " and " + _EXPERTS,
    "deepseekv3": _LATENT + " and " + _EXPERTS,
    "minicpm3": _LATENT,
    "mamba": _STATE,
    "jamba": _STATE,
    "bamba": _STATE,
    "falcon-h1": _STATE,
    "falconh1": _STATE,
    "granitehybrid": _STATE,
    "granitemoehybrid": _STATE,
    "nemotron-h": _STATE,
    "nemotronh": _STATE,
    "qwen3next": _STATE,
    "qwen2moe": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "mixtral": _EXPERTS,
}

#: Known families that are not on the way.
_OUTSIDE: dict[str, str] = {"bert": _ENCODER, "t5": _ENCODER, "clip": "vision towers", "whisper": _ENCODER}


def refuse_architecture(where: str, architecture: str, supported: Iterable[str]) -> UnsupportedError:
    """The error for an architecture that is not supported: what is missing, if known, and what works."""
    name = architecture.lower()
    missing = ""
    for table, when in ((_PLANNED, "planned, not built yet"), (_OUTSIDE, "outside what Octavo serves")):
        fits = [prefix for prefix in table if name.startswith(prefix)]
        if fits:
            missing = f": it needs {table[max(fits, key=len)]} ({when})"
    return UnsupportedError(
        f"{where}: architecture {architecture!r} is not supported{missing}. Supported: {', '.join(supported)}"
    )
