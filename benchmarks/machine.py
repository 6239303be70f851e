"""What a measurement ran on, and what else ran meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.protocol import ROOT

_TICKS = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """CPU, memory, system and versions: what a reader needs to judge a figure by."""
    import numpy

    import octavo

    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpu_family_model": f"{_field('/proc/cpuinfo', 'cpu family')}/{_field('/proc/cpuinfo', 'model')}",
        "cores": os.cpu_count(),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "isa": [f for f in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if f in _field("/proc/cpuinfo", "flags")],
        "l3": _read("/sys/devices/system/cpu/cpu0/cache/index3/size"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "compiler": _first_line(["g++", "--version"]),
        "octavo": octavo.__version__,
        "revision": _first_line(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
    }


class OtherLoad:
    """How much CPU time everything outside this process and the given ones used between `start` and `stop`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = [os.getpid(), *pids]
        self._begin = self._sample()

    def stop(self) -> dict[str, float]:
        """`other`: cores' worth of CPU time that others used on average. `steal`: the same, by the hypervisor."""
        wall, busy, steal, own = (b - a for a, b in zip(self._begin, self._sample(), strict=True))
        return {
            "other": round(max(busy - own, 0.0) / wall, 3),
            "steal": round(steal / wall, 3),
            "wall_s": round(wall, 1),
        }

    def _sample(self) -> tuple[float, float, float, float]:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        own = 0
        for pid in self._pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except FileNotFoundError:
                continue
            own += int(fields[11]) + int(fields[12])
        busy = user + nice + system + irq + softirq
        return time.monotonic(), busy / _TICKS, steal / _TICKS, own / _TICKS


def _field(path: str, name: str) -> str:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "?"


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "?"
