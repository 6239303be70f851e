"""Incremental detokenization: whole characters only, and in the end what decode gives."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.models.loading.gguf import open_gguf
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.fast_tokenizer import FastTokenizer
from octavo.text.gguf_tokenizer import tokenizer_from_gguf

TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="aé日本한👩‍👧👍🏽🇩🇪\u0301\u200d \n", max_size=40),
)


@pytest.fixture(scope="module")
def qwen(qwen_coder: Path) -> FastTokenizer:
    return tokenizer_from_gguf(open_gguf(qwen_coder).metadata, "qwen")


def stream(tokenizer: FastTokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
    chunks = [detokenizer.push(i) for i in ids]
    return [*chunks, detokenizer.finish()]


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_pieces_join_to_the_text(text: str, qwen: FastTokenizer) -> None:
    ids = qwen.encode(text)
    chunks = stream(qwen, ids)
    assert "".join(chunks) == qwen.decode(ids) == unicodedata.normalize("NFC", text)
    if "\ufffd" not in text:
        assert not any("\ufffd" in chunk for chunk in chunks)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 60))
def test_cut_off_anywhere_no_character_is_split(text: str, cut: int, qwen: FastTokenizer) -> None:
    """As at max_tokens: the unfinished character is dropped, what was shown is a prefix of the text."""
    ids = qwen.encode(text)[:cut]
    shown = "".join(stream(qwen, ids))
    assert unicodedata.normalize("NFC", text).startswith(shown)
    whole = b"".join(qwen.token_bytes(i) for i in ids)
    assert len(whole) - len(shown.encode()) < 4


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 151935), max_size=30))
@example(ids=[169, 254])  # half a surrogate: two bytes that Python's decoder holds back, though neither can be UTF-8
def test_any_tokens_give_what_decode_gives(ids: list[int], qwen: FastTokenizer) -> None:
    """Invalid bytes too, up to what is still unfinished at the end."""
    for skip in (True, False):
        shown = "".join(stream(qwen, ids, skip_special=skip))
        decoded = qwen.decode(ids, skip_special=skip)
        assert decoded.startswith(shown)
        assert decoded[len(shown) :] in ("", "\ufffd", 2 * "\ufffd")


def test_a_character_comes_with_its_last_byte(qwen: FastTokenizer) -> None:
    by_byte = {qwen.token_bytes(i): i for i in range(256)}
    ids = [by_byte[bytes([b])] for b in "é👍".encode()]
    assert stream(qwen, ids) == ["", "é", "", "", "", "👍", ""]


def test_certain_garbage_shows_at_once(qwen: FastTokenizer) -> None:
    by_byte = {qwen.token_bytes(i): i for i in range(256)}
    assert stream(qwen, [by_byte[b"\xff"], by_byte[b"a"]]) == ["\ufffd", "a", ""]
    assert stream(qwen, [by_byte[b"\xf0"], by_byte[b"a"]]) == ["", "\ufffda", ""]


def test_control_tokens(qwen: FastTokenizer) -> None:
    ids = [9707, 151645, 198]
    assert stream(qwen, ids) == ["Hello", "", "\n", ""]
    assert stream(qwen, ids, skip_special=False) == ["Hello", "<|im_end|>", "\n", ""]


def test_finish_starts_afresh(qwen: FastTokenizer) -> None:
    by_byte = {qwen.token_bytes(i): i for i in range(256)}
    detokenizer = IncrementalDetokenizer(qwen)
    assert detokenizer.push(by_byte[b"\xf0"]) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.push(by_byte[b"a"]) == "a"
