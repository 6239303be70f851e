"""From a model's name and a configuration to a running engine."""

from __future__ import annotations

import os

from octavo._version import __version__
from octavo.cache.eviction import LeastRecentlyUsed
from octavo.cache.footprint import Footprint, plan
from octavo.cache.format import Form
from octavo.cache.ghosts import Ghosts
from octavo.cache.lifetime import Lifetime
from octavo.cache.manager import KVCache
from octavo.cache.pins import Pins
from octavo.config import EngineConfig
from octavo.engine.client import EngineInfo, PageClassInfo
from octavo.engine.decoder import Decoder
from octavo.engine.engine import Engine
from octavo.engine.runner import Runner
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.models.loading.load import LoadedModel, load_model
from octavo.models.spec import ModelSpec
from octavo.ops.base import SPLIT_PAGES, Ops
from octavo.ops.profile import Profile, ProfiledOps

#: Share of free memory that the cache takes when the budget is left open.
DEFAULT_MEMORY_SHARE = 0.25
#: The ghost list remembers what this many arenas would have held, MAX_GHOSTS pages at most (of about 200 bytes each).
GHOST_MEMORIES, MAX_GHOSTS = 8, 1_000_000


def build_engine(source: str, config: EngineConfig, model_name: str | None = None) -> Engine:
    """Load a model and start its engine. `source` is what `load_model` accepts; `model_name` what clients call it.

    Raises LoadError for the model, ConfigError for settings that cannot work, with the nearest that would.
    """
    return assemble_engine(load_model(source), config, model_name)


def assemble_engine(model: LoadedModel, config: EngineConfig, model_name: str | None = None) -> Engine:
    """An engine around a model that is loaded already. Raises ConfigError."""
    spec, policy = model.spec, config.policy
    budget = default_budget(spec, config) if config.kv_memory_bytes is None else config.kv_memory_bytes
    free = free_memory()
    if budget > free:
        raise ConfigError(
            f"the KV memory budget of {budget:,} bytes is more than the {free:,} bytes of memory that are free; "
            f"the most that works now is --kv-memory {free // 2**20}MiB"
        )
    footprint = plan(spec.cache_spec(), config.page_size, [Form(policy.key_codec, policy.value_codec)], budget)
    max_model_len = fitting_length(footprint, spec, config, budget)
    ops, profile = make_ops(config), None
    if config.profile:
        profile = Profile()
        ops = ProfiledOps(ops, profile)
    decoder = Decoder(spec, model.weights, ops, config.page_size)
    store = ops.new_store(footprint.arena_bytes)
    ghosts = make_ghosts(footprint)
    cache = KVCache(
        footprint,
        store,
        prefix_cache=policy.prefix_cache,
        eviction=LeastRecentlyUsed(),
        observer=ghosts,
        lifetime=Lifetime(policy.ttl_s, policy.max_age_s),
    )
    pins = Pins(cache)
    scheduler = Scheduler(
        cache,
        fingerprint(model, ops, config),
        max_num_seqs=config.max_num_seqs,
        step_tokens=config.step_tokens,
        ghosts=ghosts,
        pins=pins,
    )
    info = EngineInfo(
        model_name=model_name or model.name,
        backend=f"{ops.name} ({ops.arithmetic})",
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=spec.vocab_size,
        page_size=config.page_size,
        key_codec=policy.key_codec,
        value_codec=policy.value_codec,
        bytes_per_token=footprint.bytes_per_token(),
        kv_memory_bytes=footprint.arena_bytes,
        prefix_cache=policy.prefix_cache,
        page_classes=tuple(
            PageClassInfo(cache.groups[c.group].name, c.form, c.is_open, c.page_bytes) for c in cache.classes
        ),
    )
    runner = Runner(decoder, ops, cache)
    return Engine(
        info, model.tokenizer, ops, runner, cache, scheduler, pins, max_queue=config.max_queue, profile=profile
    )


def make_ghosts(footprint: Footprint) -> Ghosts:
    """A ghost list for GHOST_MEMORIES times the pages that the arena holds."""
    classes = footprint.classes
    sealed = [classes.sealed(g, classes.default_form) for g in range(len(classes.spec.groups))]
    page_bytes = sum(page_class.page_bytes for page_class in sealed)
    capacity = min(GHOST_MEMORIES * footprint.arena_bytes // page_bytes, MAX_GHOSTS)
    return Ghosts(capacity, page_bytes, footprint.page_size, footprint.arena_bytes)


def make_ops(config: EngineConfig) -> Ops:
    """The backend of a configuration."""
    if config.backend == "cpu":
        from octavo.ops.cpu import CpuOps

        return CpuOps(threads=config.threads, isa=config.isa)
    try:
        from octavo.ops.reference import ReferenceOps
    except ImportError as error:
        raise ConfigError(
            f"the reference backend needs torch ({error}); install it with: pip install 'octavo[torch]'"
        ) from error
    return ReferenceOps()


def fingerprint(model: LoadedModel, ops: Ops, config: EngineConfig) -> tuple[str, ...]:
    """Everything that decides the bits of a page beside its tokens and its stored form."""
    return (
        f"octavo-{__version__}",
        f"backend={ops.name}",
        f"arithmetic={ops.arithmetic}",
        f"split_pages={SPLIT_PAGES}",
        f"page_size={config.page_size}",
        "open=f32",
        "tensor_parallel=1",
        f"weights={model.weights_sha256}",
        f"rope={model.spec.rope!r}",
    )


def default_budget(spec: ModelSpec, config: EngineConfig) -> int:
    """A quarter of free memory, but no more than full contexts for everyone would fill."""
    length = config.max_model_len or spec.context_length
    form = Form(config.policy.key_codec, config.policy.value_codec)
    # Any budget will do: what is asked of the plan does not depend on it.
    footprint = plan(spec.cache_spec(), config.page_size, [form], 1 << 62)
    everyone = footprint.frames_for([length] * config.max_num_seqs) * footprint.frame_bytes
    return min(int(free_memory() * DEFAULT_MEMORY_SHARE), everyone)


def fitting_length(footprint: Footprint, spec: ModelSpec, config: EngineConfig, budget: int) -> int:
    """max_model_len as asked, or the longest that the model and the budget allow."""
    # The last token's keys and values are never needed, so one more token than the pages hold can be served.
    fits = footprint.max_tokens_alone() + 1
    asked = config.max_model_len
    if asked > spec.context_length:
        raise ConfigError(
            f"max_model_len {asked} is beyond this model's context of {spec.context_length} tokens; "
            f"the most that works is --max-model-len {spec.context_length}"
        )
    if asked > fits:
        needed = footprint.frames_for([asked - 1]) * footprint.frame_bytes
        raise ConfigError(
            f"a sequence of {asked} tokens needs {needed:,} bytes of KV memory, the budget is {budget:,}: "
            f"use --kv-memory {-(-needed // 2**20)}MiB, or --max-model-len {fits}"
        )
    return asked or min(spec.context_length, fits)


def free_memory() -> int:
    """Bytes of memory that can be had without swapping, within the container's limit if there is one."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    limits = []
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as a, open(used) as b:
                limits.append(int(a.read()) - int(b.read()))
        except (OSError, ValueError):
            continue
    return max(min([free, *limits]), 0)
