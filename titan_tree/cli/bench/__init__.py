"""Answers the question "is it faster on my data": trains a configuration on trees, and on rows without trees.

titan-tree bench real my.toml --steps 20
titan-tree bench real --quick                             # on a CPU, in a minute: shows that it runs
titan-tree bench real my.toml --against before.csv        # fails if a ratio fell by more than 3 %
titan-tree bench real --rows docs/data/curves.csv         # draws rows that were measured before
titan-tree bench real --help                              # what is measured, and its arguments

Rows name the benchmark, the date, the commit, the device and the versions; they are appended to
outputs/bench/real.csv, or to the file of --csv. The other benchmarks are not in the package: run
`python -m benchmarks NAME` in a clone of the repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from titan_tree.cli import Help, Parser
from titan_tree.cli.data_arguments import add_force_argument
from titan_tree.config.files import check_output, new_output
from titan_tree.errors import UserError

BENCHES = {"real": "a configuration trained twice, on trees and on rows without trees: losses and speed"}
DRAWN = "titan-tree bench"  # in the metadata of every picture
PICTURES = (".png", ".pdf", ".svg")  # endings of files that matplotlib draws


def add_arguments(parser: argparse.ArgumentParser, benches: Mapping[str, str] = BENCHES) -> None:
    """Declares a command line that begins with the name of a benchmark; ``benches`` has their summaries."""
    width = max(map(len, benches))
    parser.epilog = "benchmarks:\n" + "\n".join(f"  {name:{width}}  {benches[name]}" for name in benches)
    parser.add_argument("name", metavar="NAME", help="a benchmark of the list below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Runs ``titan-tree bench``. Returns 1 if --against found a ratio that fell."""
    if args.name not in BENCHES:
        raise UserError(
            f"unknown benchmark {args.name!r}: the package has only {', '.join(BENCHES)}; for others, run "
            f"python -m benchmarks {args.name} in a clone of the repository"
        )
    module = import_module(f"{__name__}.{args.name}")
    return measure(module, f"titan-tree bench {args.name}", args.arguments)


def measure(bench: ModuleType, program: str, arguments: Sequence[str]) -> int:
    """Runs one benchmark and writes its table, CSV file and picture.

    Args:
        bench: the module of the benchmark; benchmarks/__init__.py lists what it has.
        program: the command that runs it; its last word is the name of the benchmark.
        arguments: those of the benchmark.

    Returns:
        1 if --against found a ratio that fell, else 0.
    """
    from titan_tree.cli.bench import record  # imports torch, which --help does not need

    options = parse(bench, program, arguments)
    device = record.default_device()
    rows = record.read_rows(options.rows, program) if options.rows else []
    before = record.read_rows(options.against, program) if options.against else []
    if before:  # now, because the file may be that of --csv
        devices = {str(row["device"]) for row in rows} or {record.device_name(device)}
        record.check_comparable(options.against, before, devices, bench.KEYS, bench.RATIOS)
    packages = getattr(bench, "PACKAGES", ())
    picture = options.picture or (options.rows or options.csv).with_suffix(".png")
    if hasattr(bench, "draw"):
        check_output(picture, DRAWN, force=options.force)  # measuring takes minutes
    if not rows:
        if options.csv.exists():
            record.read_csv(options.csv)  # now, because rows that cannot be appended would be lost
        setting = {"bench": program.split()[-1]} | record.environment(device, *packages)
        for row in bench.run(options):
            rows.append(setting | row)
            record.append_csv(options.csv, rows[-1:])  # at once, because the next row may fail
        if not rows:  # another rank than the first one
            return 0
    names = dict.fromkeys(name for row in rows for name in row)
    measured = [name for name in names if name not in (*record.SETTING, *packages)]
    record.print_table(rows, getattr(bench, "COLUMNS", measured))
    if not options.rows:
        print(f"rows: {options.csv}")
    if options.quick:
        print("--quick shows that the benchmark runs; its sizes are too small for speeds to mean anything")
    if hasattr(bench, "draw"):
        draw(bench, rows, picture, options.force)
    if not before:
        return 0
    compared, fallen = record.slower(rows, before, bench.KEYS, bench.RATIOS)
    if not fallen:
        at_most = f"{record.TOLERANCE:.0%}"
        print(f"ratios compared with {options.against}: {compared}; none fell by more than {at_most}")
    for line in fallen:
        print(f"slower: {line}", file=sys.stderr)
    return int(bool(fallen))


def parse(bench: ModuleType, program: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed arguments of a benchmark, with those that all of them have."""
    parser = Parser(program, description=bench.__doc__, formatter_class=Help)
    bench.add_arguments(parser)
    add = parser.add_argument
    csv = Path(f"outputs/bench/{program.split()[-1]}.csv")
    add("--quick", action="store_true", help="small sizes, for a CPU: shows that it runs")
    add("--csv", type=Path, default=csv, metavar="FILE", help="append rows to it (default: %(default)s)")
    add("--against", type=Path, metavar="FILE", help="fail if a ratio fell by more than 3 %% since then")
    add_force_argument(parser)
    add("--rows", type=Path, metavar="FILE", help="measure nothing, read the rows of this CSV file")
    add("--picture", type=Path, metavar="FILE", help="where the picture goes (default: beside the CSV file)")
    # The arguments that a measurement needs are not needed to read its rows.
    quick = bench.QUICK if any(text.startswith(("--quick", "--rows")) for text in arguments) else ()
    options = parser.parse_intermixed_args([*quick, *arguments])
    if options.against and not bench.RATIOS:
        raise UserError(f"--against: {program} has no ratios to compare; remove the argument")
    if options.picture and options.picture.suffix not in PICTURES:
        raise UserError(
            f"--picture {options.picture}: expected a file whose name ends in {', '.join(PICTURES)}"
        )
    for option, value in vars(options).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_number(option, number, option in getattr(bench, "MAY_BE_ZERO", ()))
    return options


def _check_number(option: str, number: float, may_be_zero: bool) -> None:
    """Raises UserError if an argument is not a number with which something can be measured."""
    if number > 0 or (number == 0 and may_be_zero):
        return
    least = "a number of at least 0" if may_be_zero else "a number > 0"
    raise UserError(f"--{option.replace('_', '-')}: expected {least}, got {number}")


def draw(bench: ModuleType, rows: Sequence[dict[str, object]], path: Path, force: bool = False) -> None:
    """Draws the picture of a benchmark, if matplotlib is installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} was not drawn, because matplotlib is not installed: pip install matplotlib")
        return
    figure = Figure(layout="constrained")
    bench.draw([{name: str(value) for name, value in row.items()} for row in rows], figure)
    kind = path.suffix.removeprefix(".")
    maker = {"Software" if kind == "png" else "Creator": DRAWN}
    with new_output(path, DRAWN, force=force) as part:
        figure.savefig(part, dpi=150, format=kind, metadata=maker)
    print(f"picture: {path}")
