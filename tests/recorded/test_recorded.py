"""The bits of real models' answers are those that were recorded, on every instruction set that this machine has."""

from __future__ import annotations

import json

import pytest

from octavo.ops import _cpu
from tests.recorded.requests import CODECS, MODELS, RECORDED, run

ISAS = [isa for isa in ("avx2", "avx512") if _cpu.have_isa(isa)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("isa", ISAS)
def test_answers_are_as_recorded(isa: str, model: str, codec: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert recorded["kernel_revision"] == _cpu.KERNEL_REVISION, "the arithmetic has changed: record anew"
    assert run(model, codec, isa) == recorded["digests"][f"{isa} {model} {codec}"]  # type: ignore[arg-type]
