"""What chat templates may use, and that none of them takes all time or memory, or gets out of its sandbox."""

from __future__ import annotations

import time

import pytest

from agent_tunix.models import jinja
from agent_tunix.models.jinja import compiled

GIVEN = {"messages": [{"role": "user", "content": "Why?"}], "tools": None}
GROWING = (
    "{{% set ns = namespace(x={0}) %}}{{% for i in range(80) %}}{{% set ns.x = {1} %}}{{% endfor %}}{{{{ ns.x }}}}".format
)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(9) %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') }}", "2024"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Why?"),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(a, b=2) %}{{ a ~ b }}{% endmacro %}{{ f(1) }}", "12"),
        (
            "{{ '%3d' % 7 }}{{ '{:>3}'.format(7) }}{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 'abc' | replace('b', 'x') }}",
            "  7  7abab1024axc",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(',') }}", "Why?"),
        ("{%- if tools %}\n    no\n{%- else %}\n  yes\n    {%- endif %}\n", "  yes"),
        ("{{ nothing }}", ""),
        ("{% set a = 'a' * 50000 %}{% macro f(a, b) %}{{ (a ~ b) | length }}{% endmacro %}{{ f(a, a) }}", "100000"),
        ("{% set a = 'a' * 50000 %}{{ a | default(a) | length }}{{ a.split(a ~ 'b') | length }}", "500001"),
    ],
)
def test_what_transformers_gives_templates_is_there(source, text):
    assert compiled(source)(GIVEN) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 9 ** 9 ** 9 }}",
        GROWING(3, "ns.x * ns.x"),
        GROWING("'a'", "ns.x ~ ns.x"),
        GROWING("'a'", "ns.x + ns.x"),
        GROWING("'a'", "[ns.x, ns.x]"),
        GROWING("'aa'", "ns.x | replace('a', ns.x)"),
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 1.5 | round(10000000000, 'floor') }}",
        "{{ [1] | batch(10000000000, 0) | list }}",
        "{{ (5).to_bytes(10000000000, 'big') }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' | format(10000000000, 1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10000000000) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        " " * (2**20 + 1),
    ],
    ids=lambda source: source[:60],
)
def test_no_template_takes_all_time_or_memory(source, monkeypatch):
    monkeypatch.setattr(jinja, "SECONDS", 0.2)
    monkeypatch.setattr(jinja, "LONGEST", 2**18)
    begun = time.monotonic()
    with pytest.raises((ValueError, TimeoutError, RecursionError, OverflowError)):
        compiled(source)(GIVEN)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum() }}",
    ],
)
def test_no_template_gets_out(source):
    from jinja2.exceptions import SecurityError, UndefinedError

    with pytest.raises((SecurityError, UndefinedError, TypeError)):
        compiled(source)(GIVEN)


def test_the_clock_begins_anew_with_every_conversation(monkeypatch):
    monkeypatch.setattr(jinja, "SECONDS", 0.05)
    render = compiled("{% for m in messages %}{{ m.content }}{% endfor %}")
    time.sleep(0.1)
    assert render(GIVEN) == "Why?"
