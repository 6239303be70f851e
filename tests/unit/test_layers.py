"""Lower layers never import upper ones."""

from __future__ import annotations

import ast
from pathlib import Path

import octavo

ROOT = Path(octavo.__file__).parent

#: Lowest first. A module may import its own layer and those before it.
LAYERS = [
    ["_version", "errors"],
    ["config"],
    ["codecs", "text"],
    ["cache"],
    ["models"],
    ["ops"],
    ["engine"],
    ["llm", "explain"],
    [""],
    ["api"],
    ["cli", "__main__"],
]

#: Modules that the base install must be able to import without these.
TORCH_FREE_EXCEPT = {"ops.reference"}


def modules() -> list[str]:
    names = []
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(p for p in parts if p != "__init__"))
    return sorted(names)


def layer(name: str) -> int:
    best, best_length = -1, -1
    for i, prefixes in enumerate(LAYERS):
        for prefix in prefixes:
            exact = name == prefix or (prefix and name.startswith(prefix + "."))
            if exact and len(prefix) > best_length:
                best, best_length = i, len(prefix)
    assert best >= 0, f"{name or 'octavo'} belongs to no layer"
    return best


def imports(name: str) -> set[str]:
    path = ROOT / Path(*name.split(".")) if name else ROOT
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "octavo" or (ROOT / Path(*node.module.split(".")[1:])).is_dir():
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            else:
                found.add(node.module)
    return found


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def test_lower_layers_never_import_upper_ones() -> None:
    wrong = []
    for name in modules():
        for target in imports(name):
            if not target.startswith("octavo."):
                continue
            inner = target.removeprefix("octavo.")
            if not is_module(inner):
                inner = inner.rpartition(".")[0]
            if inner != "_version" and layer(inner) > layer(name):
                wrong.append(f"octavo.{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_the_base_install_needs_no_torch() -> None:
    wrong = [
        name
        for name in modules()
        if name not in TORCH_FREE_EXCEPT and any(t.split(".")[0] in {"torch", "transformers"} for t in imports(name))
    ]
    assert not wrong, f"these import torch or transformers: {wrong}"


def test_the_check_sees_a_violation(tmp_path: Path) -> None:
    assert layer("engine.engine") > layer("cache.radix")
    assert "octavo.engine.messages" in imports("engine.engine")
    assert layer("engine.decoder") > layer("ops.base") > layer("models.spec") > layer("cache.spec")
