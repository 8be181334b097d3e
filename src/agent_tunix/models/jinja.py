"""Chat templates of checkpoints, which are programs in Jinja's language: run as transformers runs them, and bounded.

A stranger may have written one. jinja2's sandbox keeps it from what is not its own. The bounds here keep it from taking all
time or memory: the clock is looked at in every turn of a loop and in every call, and sizes before what could multiply them.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LONGEST_SOURCE = 2**20  # characters of a template; those with tools and thinking have 20,000
LONGEST = 2**22  # characters of a text, or items of a list
MOST_WORK = 2**28  # sizes of what a call is given, multiplied: the most that `replace` and `center` could make of it
LARGEST = 2**64  # number
# Filters that may make far more than they are given, and methods that never do.
MULTIPLYING = {"replace", "center", "indent", "join", "wordwrap", "format", "batch", "slice", "truncate", "tojson", "pprint"}
MULTIPLYING |= {"round", "urlize", "xmlattr", "sum"}
HARMLESS = {
    "split",
    "rsplit",
    "splitlines",
    "partition",
    "rpartition",
    "strip",
    "lstrip",
    "rstrip",
    "startswith",
    "endswith",
}
HARMLESS |= {"find", "rfind", "index", "count", "removeprefix", "removesuffix", "lower", "upper", "title", "capitalize"}
# What templates hear of the clock: the day that Llama's name where there is none. Prompts are then the same on every day, so
# that a run goes on with those that it began with.
TODAY = datetime(2024, 7, 26)
SECONDS = 5.0  # for one conversation
WIDE = re.compile(r"\d{5}|\*")  # in a format: by which a number becomes a long text

Render = Callable[[Mapping[str, Any]], str]


def compiled(source: str) -> Render:
    """A function that renders the template with the variables it is given. Whatever is wrong with it is raised."""
    if len(source) > LONGEST_SOURCE:
        raise ValueError(f"it has {len(source):,} characters, where {LONGEST_SOURCE:,} are the most that it may have")
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    template = environment.from_string(source)

    def render(variables: Mapping[str, Any]) -> str:
        environment.begin()
        parts, length = [], 0
        for part in template.generate(variables):
            length += len(part)
            _refuse_size(length)
            parts.append(part)
        return "".join(parts)

    return render


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802  jinja2's name
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """As transformers sets it up, with bounds on what a template does."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        self.begin()
        super().__init__(finalize=_refuse_sizes, **options)
        self.filters = {name: self._bounded(name, f) for name, f in (self.filters | {"tojson": _tojson}).items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}

    def begin(self) -> None:
        self._end = time.monotonic() + SECONDS

    def tick(self) -> None:
        if time.monotonic() > self._end:
            raise TimeoutError(f"it takes more than {SECONDS:g} seconds")

    def concatenated(self, parts: tuple[Any, ...]) -> str:
        """What `~` makes."""
        return "".join(map(str, _refuse_sizes(parts)))

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        """With a look at the clock at the beginning of every loop's body."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick).set_lineno(loop.lineno))
        return tree.set_environment(self)

    def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  jinja2's names
        """`__` as in jinja2, so that a template's arguments may have any name."""
        __self.tick()
        owner = getattr(__function, "__self__", None)
        if isinstance(owner, str | bytes | int | float | list | tuple) and __function.__name__ not in HARMLESS:
            _refuse_work([owner, *args, *kwargs.values()])
        return super().call(__context, __function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` of a text, which jinja2 wraps where a template takes it."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        _refuse_width(value.__self__)

        def within(*args: Any, **kwargs: Any) -> str:
            for given in (*args, *kwargs.values()):  # which may be a width too
                _refuse_size(_size(given))
            return wrapped(*args, **kwargs)

        return within

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _refuse_size(_size(left) + _size(right))
        elif operator == "%":
            _refuse_width(left)
        elif isinstance(left, int | float) and isinstance(right, int | float):
            size = math.log2(max(2, abs(left))) * abs(right) if operator == "**" else math.log2(abs(left * right) + 1)
            _refuse_size(LONGEST * size / math.log2(LARGEST))
        else:
            _refuse_work([left, right])
        return super().call_binop(context, operator, left, right)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter within the bounds; jinja2 marks those that want to know where they are called, and `wraps` keeps that."""

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            if name in MULTIPLYING:
                _refuse_work([*args, *kwargs.values()])
            if name == "format":
                _refuse_width(args[0])
            return function(*args, **kwargs)

        return within


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for trainers that ask for it; it writes what stands in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """As transformers has it: no attribute of Python's own may be put on one."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        for name in dict(*given, **kwargs):
            _refuse_own(name)
        Namespace.__init__(self, *given, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_own(name)
        super().__setitem__(name, value)


def _refuse_own(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no place for {name}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own writes HTML's signs in another way."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(how: str) -> str:
    return TODAY.strftime(how)


def _size(value: Any) -> float:
    """Characters and items of a value, and of all that it holds; numbers count as what they could be multiplied by."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int | float):
        return abs(value)
    total, within = 1, [value] if isinstance(value, list | tuple | dict) else []
    while within:
        for item in (*part, *part.values()) if isinstance(part := within.pop(), dict) else part:
            total += 1 + (len(item) if isinstance(item, str) else 0)
            if isinstance(item, list | tuple | dict):
                within.append(item)
            if total > LONGEST:
                return math.inf
    return total


def _refuse_size(size: float) -> None:
    if size > LONGEST:
        raise ValueError("it makes a text, a list or a number that is too large")


def _refuse_sizes(value: Any) -> Any:
    """The value, unless it would become too long a text."""
    if not isinstance(value, str | int | float):
        _refuse_size(_size(value))
    return value


def _refuse_work(given: list[Any]) -> None:
    if math.prod(max(1, _size(value)) for value in given) > MOST_WORK:
        raise ValueError("it makes a text, a list or a number that is too large")


def _refuse_width(written: Any) -> None:
    if isinstance(written, str) and WIDE.search(written):
        raise ValueError("it formats a value to a width that is too large")
