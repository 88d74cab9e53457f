"""Renders conversations with hostile chat templates, through ``titan-tree inspect``.

Each template must render, or be refused in one line, within two minutes. It must not run a command. A trial
puts a hostile part before, into or after the loop of a working template. The limit of CPU time is lowered, so
that a campaign does not take hours.
"""

from __future__ import annotations

import json
import os
import random
import resource
from functools import partial
from pathlib import Path

from training import Processes, check, fork

TRIALS = 100
CPU_S = 2.0  # the limit of a template
LIMIT_S = 120  # longest time of a trial, on a loaded machine
MEMORY = 4 << 30  # bytes of address space
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}HERE{% endfor %}"
DAG = (  # lists that hold one list twice, so their contents are exponential in their depth
    "{% set ns = namespace(a=[1], b=[1], t=(1,), d={'k': 1}, e={'k': 1}) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}"
    "{% set ns.d = {'k': ns.d, 'l': ns.d} %}{% set ns.e = {'k': ns.e, 'l': ns.e} %}{% endfor %}"
)
DEEP = "{% set ns = namespace(a=(), l=[]) %}{% for i in range(90000) %}{% set ns.a = (ns.a,) %}"
DEEP += "{% set ns.l = [ns.l] %}{% endfor %}"
REPEATED = "{%% for i in range(100000) %%}{%% set x = %s %%}{%% endfor %%}"
OPEN = "{{ %s.__globals__['os'].system('touch PWNED') }}"
PARTS = {
    "endless": (
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
        "{% for i in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ f() ~ f() }}{% endmacro %}{{ f() }}",
        "{{ 9**9**9**9 }}",
        "{{ 9**(9**9) }}",
        "{{ (3**1000000)**100 % 7 }}",
        "{{ 1.5 | round(10**9, 'ceil') }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
        "{% for a in [[[]]] * 9999 recursive %}{{ loop([a] * 9999) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
    ),
    # No check inside the interpreter ends these: one operation runs for hours, or ends the process.
    "one operation": (
        DAG + "{{ ns.a == ns.b }}",
        DAG + "{{ ns.a < ns.b }}",
        DAG + "{{ ns.a in [ns.b] }}",
        DAG + "{{ ns.d == ns.e }}",
        DAG + "{{ {ns.t: 1} | length }}",
        DAG + "{{ [ns.a, ns.b] | sort | length }}",
        DAG + "{{ [ns.a, ns.b] | max | length }}",
        DAG + "{{ [ns.t, ns.t] | unique | list | length }}",
        DAG + "{{ [{'k': ns.a}, {'k': ns.b}] | groupby('k') | length }}",
        DAG + "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
        DAG + "{{ [ns.a].index(ns.b) }}{{ [ns.a].count(ns.b) }}",
        DAG + "{{ ns.a | tojson }}",
        DAG + "{{ ns.a }}",
        DAG + "{{ ns.d | pprint }}",
        DAG + "{{ '%s' % (ns.a,) }}",
        DAG + "{{ ns }}",
        DEEP + "{{ {ns.a: 1} | length }}",
        DEEP + "{{ ns.l == [ns.l] }}",
        DEEP + "{{ ns.l }}",
        DEEP + "{{ ns.l | tojson }}",
        DEEP + "{{ ns.l | pprint }}",
        "{{ ('%(' * 400000) % {} }}",
        "{{ ('<' * 10**6) | striptags }}",
        "{{ ('<!--' * 10**6) | striptags }}",
        "{{ ('(' * 10**6) | urlize }}",
        "{{ ('http://a.' * 10**6) | urlize | length }}",
        "{{ ('a-' * 10**7) | title | length }}",
        "{{ ('a' * 10**7) | wordwrap(1) | length }}",
        "{{ ('a b ' * 10**7) | wordwrap(1, wrapstring='y' * 9999) }}",
        "{{ ('\\n' * 10**6) | indent(9999) }}",
        "{{ ('a,' * 10**8).split(',') | unique | list | length }}",
        "{{ strftime_now('%c' * 10**7) | length }}",
        "{{ lipsum(10**7) | length }}",
        "{{ ('9' * 10**7) | int }}",
        "{{ range(99999) | batch(10**9, 'x') | list }}",
        "{{ range(9) | slice(10**9) | list | length }}",
    ),
    "repeated operation": (
        "{% set l = [range(300) | list] * 1500 %}" + REPEATED % "l | pprint | length",
        "{% set s = 'a b ' * 8000000 %}" + REPEATED % "s | wordcount",
        "{% set s = 'a b ' * 8000000 %}" + REPEATED % "s | wordwrap | length",
        "{% set s = 'a' * 10**8 %}" + REPEATED % "s.count('b')",
        "{% set s = 'a' * 10**7 %}" + REPEATED % "s.replace('a', 'bc') | length",
        "{% set s = 'a' * 10**7 %}" + REPEATED % "s | list | join | length",
        "{% set l = range(99999) | list %}" + REPEATED % "l | sort(reverse=true) | first",
        "{% set l = range(99999) | list %}" + REPEATED % "l | map('string') | join | length",
        "{% set l = range(99999) | list %}" + REPEATED % "l | random",
        "{% set l = range(99999) | list %}" + REPEATED % "l | tojson(indent=i) | length",
        "{% set ns = namespace(l=[]) %}" + REPEATED.replace("x =", "ns.l =") % "[ns.l, 'a' * 9999]",
    ),
    "huge": (
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ range(10**9) | list }}",
        "{{ range(99999) | list * 99999 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ 'x\\t'.expandtabs(2 * 10**9) }}",
        "{{ 'x'.translate({120: 'y' * 10**10}) }}",
        "{{ 'x'.encode().center(10**10) }}",
        "{{ (1).to_bytes(10**10, 'big') }}",
        "{{ ('-' * 99999).join(['x'] * 99999) }}",
        "{{ 'a' * (2**31 - 9) }}",
        "{% set b = 'x' * 10**6 %}{% for i in range(9999) %}{{ b }}{% endfor %}",
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
        "{% if x %}a" + "{% elif x %}a" * 15_000 + "{% endif %}",
        "{{ " + "not " * 50_000 + "a }}",
        "{{ " + "a if b else " * 20_000 + "c }}",
        "{{ a" + ".b" * 100_000 + " }}",
        "{{ a" + "|string" * 30_000 + " }}",
        "{{ a" + "()" * 100_000 + " }}",
        "{{ [" + "'a'," * 60_000 + "] }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% set x %}" * 5000 + "{% endset %}" * 5000,
        "{% macro a() %}" * 3000,
        "{% filter upper %}" * 5000 + "{% endfilter %}" * 5000,
        "{{ '" + "\\" * 200_000,
        "{#" * 100_000,
        "{% raw %}" * 25_000,
        "{{ 1" + " " * 250_000,
        "\n" * 250_000 + "{%-",
        "{" * 250_000,
    ),
    "escaping": (
        OPEN % "cycler.__init__",
        OPEN % "lipsum",
        OPEN % "raise_exception",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].clear() }}",
        "{{ dict.update(messages[0], content='x') }}",
        "{{ ('' | attr('format')).__self__ }}",
        "{{ ''['__class__'].x }}",
        "{% autoescape true %}{{ '<' }}{{ ('<b>' | safe).__class__ }}{% endautoescape %}",
        "{{ self.__init__.__globals__ }}",
    ),
}
KINDS = tuple(PARTS)
CONVERSATION = [{"role": "user", "content": "Hi <"}, {"role": "assistant", "content": "Ho"}]


def prepare(work: Path) -> None:
    import titan_tree.cli.inspect.tables  # noqa: F401


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Inspects a conversation with a hostile template. Returns the hostile part and the outcome."""
    part = draw.choice(PARTS[kind])
    data = folder / "conversation.jsonl"
    data.write_text(json.dumps({"messages": CONVERSATION}) + "\n")
    template, output = folder / "hostile.jinja", folder / "inspect.out"
    before, inside, after = draw.choice(((part, "", ""), ("", part, ""), ("", "", part)))
    template.write_text(before + PLAIN.replace("HERE", inside) + after)
    arguments = ["inspect", str(data), "--template", str(template)]
    with Processes([fork(output, partial(_inspect, arguments, folder))], [output]) as process:
        status = process.wait(timeout_s=LIMIT_S)[0]
    process.check_no_traceback()
    check(not (folder / "PWNED").exists(), f"{part[:60]!r} ran a command")
    if status == 0:
        return f"{part[:60]!r} read"
    refusal = process.refusal()
    names_cause = template.name in refusal or data.name in refusal
    check(names_cause, f"the refusal of {part[:60]!r} names no file: {refusal}")
    return f"{part[:60]!r} refused: {refusal}"


def _inspect(arguments: list[str], folder: Path) -> int:
    from titan_tree.cli import main
    from titan_tree.components.tree_tokenizer.template_process import PROCESS

    PROCESS.seconds = CPU_S
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    return main(arguments)
