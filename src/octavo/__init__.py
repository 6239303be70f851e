"""Octavo: a long-context LLM serving engine in which the KV cache is the product."""

from octavo._version import __version__
from octavo.config import CachePolicy, EngineConfig
from octavo.engine.messages import SamplingParams
from octavo.llm import LLM, Completion, RequestOutput

__all__ = ["LLM", "CachePolicy", "Completion", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]
