"""Renders conversations with hostile chat templates, through ``titan-tree inspect``.

Each template must render, or be refused in one line, within a minute. It must not run a command. A trial puts
a hostile part before, into or after the loop of a working template.
"""

from __future__ import annotations

import os
import random
import resource
from functools import partial
from pathlib import Path

from training import Processes, check, fork

TRIALS = 100
LIMIT_S = 60  # longest time of a template, on a loaded machine
MEMORY = 4 << 30  # bytes of address space
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}HERE{% endfor %}"
OPEN = "{{ %s.__globals__['os'].system('touch PWNED') }}"
PARTS = {
    "endless": (
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
        "{% for i in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ f() ~ f() }}{% endmacro %}{{ f() }}",
        "{{ 9**9**9**9 }}",
    ),
    "huge": (
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ range(10**9) | list }}",
        "{{ '%01000000000d' % 1 }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ),
    "failing": (
        "{{ 1 / 0 }}",
        "{{ raise_exception('no\\nway') }}",
        "{{ messages[0].a.b.c }}",
        "{{ nothing() }}",
        "{{ messages['a'] + 1 }}",
        "{{ [1] | sum(start='a') }}",
        "{{ 'a' | int(base='b') }}",
        "{% include 'other' %}",
        "{% extends 'other' %}",
        "{% import 'os' as os %}",
        "{{ '{:d}'.format('a') }}",
        "{{ strftime_now(5) }}",
    ),
    "malformed": (
        "{% if",
        "{{ }}",
        "{% endfor %}",
        "{% nothing %}",
        "{{ 'a",
        "{#",
        "\x00{{ \x1b }}",
        "{{ " + "(" * 100_000,
        "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "{% if 1 %}" * 5000,
        "{{ 1" + " + 1" * 50_000 + " }}",
    ),
    "escaping": (
        OPEN % "cycler.__init__",
        OPEN % "lipsum",
        OPEN % "raise_exception",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].clear() }}",
        "{{ self.__init__.__globals__ }}",
    ),
}
KINDS = tuple(PARTS)


def prepare(work: Path) -> None:
    import titan_tree.cli.inspect  # noqa: F401


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Inspects the bundled sample with a hostile template. Returns the hostile part and the outcome."""
    part = draw.choice(PARTS[kind])
    template, output = folder / "hostile.jinja", folder / "inspect.out"
    before, inside, after = draw.choice(((part, "", ""), ("", part, ""), ("", "", part)))
    template.write_text(before + PLAIN.replace("HERE", inside) + after)
    arguments = ["inspect", "demo", "--limit", "2", "--template", str(template)]
    with Processes([fork(output, partial(_inspect, arguments, folder))], [output]) as process:
        status = process.wait(timeout_s=LIMIT_S)[0]
    process.check_no_traceback()
    check(not (folder / "PWNED").exists(), f"{part[:60]!r} ran a command")
    if status == 0:
        return f"{part[:60]!r} read"
    refusal = process.refusal()
    check(template.name in refusal, f"the refusal of {part[:60]!r} does not name the template: {refusal}")
    return f"{part[:60]!r} refused: {refusal}"


def _inspect(arguments: list[str], folder: Path) -> int:
    from titan_tree.cli import main

    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    return main(arguments)
