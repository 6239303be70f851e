"""A Jinja environment for chat templates, which come with model files and are not to be trusted.

It behaves as Hugging Face's does: immutable sandbox, trimmed blocks, loop controls, `tojson` that keeps
Unicode, `raise_exception`, `strftime_now`, `{% generation %}`. In addition a render is bounded: by loop
iterations and calls, by CPU time (looked at on each of them), and by the length of strings made with `~`,
`+`, `*` and of the output. Not bounded is what happens inside a single filter or method call, such as
`"x".center(10 ** 9)`: it may take memory before the next look at the clock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 1 << 20
MAX_STEPS = 2_000_000
MAX_CPU_SECONDS = 5.0
MAX_CHARS = 1 << 26


T = TypeVar("T")


class TemplateLimitError(jinja2.TemplateError):
    """A template ran too long or made too much."""


class _Budget(threading.local):
    """What the render on this thread may still spend."""

    steps = 0
    deadline = 0.0

    def start(self, steps: int, seconds: float) -> None:
        self.steps, self.deadline = steps, time.thread_time() + seconds

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimitError("the chat template does not come to an end: too many steps")
        if self.steps % 256 == 0 and time.thread_time() > self.deadline:
            raise TemplateLimitError("the chat template does not come to an end: too much time")


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountSteps(NodeTransformer):
    """Makes loop iterations and macro calls spend a step, and `~` check the length of its result."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _spend_step())
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _spend_step())
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("octavo_join")
        return nodes.Call(joined, [nodes.List(node.nodes)], [], None, None)


def _spend_step() -> nodes.Node:
    return nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("octavo_step"), [], [], None, None))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        # The optimizer would evaluate constant expressions at load, outside every limit.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[LoopControls, _Generation])
        self.budget = _Budget()
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    # Called by the nodes that _CountSteps puts in, through `call`, which counts them.

    def octavo_step(self) -> None:
        pass

    def octavo_join(self, values: Iterable[object]) -> str:
        return _checked("".join(map(str, values)))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.budget.spend()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend()
        if operator == "**" and isinstance(right, int | float) and abs(right) > 1024:
            raise TemplateLimitError(f"the chat template raises a number to the power {right}")
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > MAX_CHARS:
                    raise TemplateLimitError(f"the chat template makes more than {MAX_CHARS} characters")
        return _checked(super().call_binop(context, operator, left, right))


def _checked(value: T) -> T:
    if isinstance(value, str) and len(value) > MAX_CHARS:
        raise TemplateLimitError(f"the chat template makes more than {MAX_CHARS} characters")
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and non-ASCII characters; models have not seen that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class SandboxedTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateError where the source is not a template or is too long."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimitError(f"a chat template of {len(source)} characters; {MAX_SOURCE_CHARS} are the limit")
        self._environment = _Environment()
        try:
            tree: nodes.Template = _CountSteps().visit(self._environment.parse(source))
            self._template = self._environment.from_string(tree)
        except RecursionError as error:
            raise TemplateLimitError("the chat template is nested too deeply") from error

    def render(self, variables: Mapping[str, Any], *, steps: int = MAX_STEPS, seconds: float = MAX_CPU_SECONDS) -> str:
        """Raises one of RENDER_ERRORS where the template refuses or cannot take the values."""
        self._environment.budget.start(steps, seconds)
        chunks: list[str] = []
        total = 0
        for chunk in self._template.generate(variables):
            self._environment.budget.spend()
            total += len(chunk)
            if total > MAX_CHARS:
                raise TemplateLimitError(f"the chat template makes more than {MAX_CHARS} characters")
            chunks.append(chunk)
        return "".join(chunks)


#: Errors by which a template, while it renders, says that it cannot take these messages.
RENDER_ERRORS: tuple[type[Exception], ...] = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
