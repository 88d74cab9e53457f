"""Measures speed, memory or quality, and writes a table, a CSV file and a picture.

titan-tree bench ratio --model qwen3 --flavor 0.6B
titan-tree bench ratio --quick                            # on a CPU, in seconds: shows that it runs
titan-tree bench ratio --against docs/data/ratio.csv      # fails if a ratio fell by more than 3 %
titan-tree bench ratio --rows docs/data/ratio.csv         # draws rows that were measured before
titan-tree bench ratio --help                             # what is measured, and its arguments

All contenders of a benchmark run in one process, in turn. Rows name the benchmark, the date, the commit, the
device and the versions; they are appended to outputs/bench/NAME.csv, or to the file of --csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from titan_tree.bench import BENCHES
from titan_tree.cli import Help, Parser
from titan_tree.errors import UserError, unknown_name

MAY_BE_ZERO = ("beta", "chain", "lora", "seed", "train", "warmup", "workers")  # arguments
PICTURES = (".png", ".pdf", ".svg")  # endings of files that matplotlib draws


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree bench``."""
    width = max(map(len, BENCHES))
    parser.epilog = "benchmarks:\n" + "\n".join(f"  {name:{width}}  {BENCHES[name]}" for name in BENCHES)
    parser.add_argument("name", metavar="NAME", help="a benchmark of the list below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Runs one benchmark. Returns 1 if --against found a ratio that fell."""
    if args.name not in BENCHES:
        raise unknown_name("benchmark", args.name, BENCHES)
    # These import torch, which --help does not need.
    from titan_tree.bench import record

    bench = import_module(f"titan_tree.bench.{args.name}")
    options = parse(bench, args.name, args.arguments)
    device = record.default_device()
    rows = record.read_rows(options.rows, args.name) if options.rows else []
    before = record.read_rows(options.against, args.name) if options.against else []
    if before:  # now, because the file may be that of --csv
        devices = {str(row["device"]) for row in rows} or {record.device_name(device)}
        record.check_comparable(options.against, before, devices, bench.KEYS, bench.RATIOS)
    packages = getattr(bench, "PACKAGES", ())
    csv = options.csv or Path("outputs/bench") / f"{args.name}.csv"
    if not rows:
        if csv.exists():
            record.read_csv(csv)  # now, because rows that cannot be appended would be lost
        setting = {"bench": args.name} | record.environment(device, *packages)
        for row in bench.run(options):
            rows.append(setting | row)
            record.append_csv(csv, rows[-1:])  # at once, because the next row may fail
        if not rows:  # another rank than the first one
            return 0
    names = dict.fromkeys(name for row in rows for name in row)
    measured = [name for name in names if name not in (*record.SETTING, *packages)]
    record.print_table(rows, getattr(bench, "COLUMNS", measured))
    if not options.rows:
        print(f"rows: {csv}")
    if options.quick:
        print("--quick shows that the benchmark runs; its sizes are too small for speeds to mean anything")
    if hasattr(bench, "draw"):
        draw(bench, rows, options.picture or (options.rows or csv).with_suffix(".png"))
    if not before:
        return 0
    compared, fallen = record.slower(rows, before, bench.KEYS, bench.RATIOS)
    if not fallen:
        at_most = f"{record.TOLERANCE:.0%}"
        print(f"ratios compared with {options.against}: {compared}; none fell by more than {at_most}")
    for line in fallen:
        print(f"slower: {line}", file=sys.stderr)
    return int(bool(fallen))


def parse(bench: ModuleType, name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed arguments of a benchmark, with those that all of them have."""
    parser = Parser(
        f"titan-tree bench {name}",
        description=bench.__doc__,
        formatter_class=Help,
    )
    bench.add_arguments(parser)
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes, for a CPU: shows that it runs")
    add("--csv", type=Path, metavar="FILE", help=f"append rows to it (default: outputs/bench/{name}.csv)")
    add("--against", type=Path, metavar="FILE", help="fail if a ratio fell by more than 3 %% since then")
    add("--rows", type=Path, metavar="FILE", help="measure nothing, read the rows of this CSV file")
    add("--picture", type=Path, metavar="FILE", help="where the picture goes (default: beside the CSV file)")
    # The arguments that a measurement needs are not needed to read its rows.
    quick = bench.QUICK if any(text.startswith(("--quick", "--rows")) for text in arguments) else ()
    options = parser.parse_intermixed_args([*quick, *arguments])
    if options.against and not bench.RATIOS:
        raise UserError(f"--against: titan-tree bench {name} has no ratios to compare; remove the argument")
    if options.picture and options.picture.suffix not in PICTURES:
        raise UserError(
            f"--picture {options.picture}: expected a file whose name ends in {', '.join(PICTURES)}"
        )
    for option, value in vars(options).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_number(option, number)
    return options


def _check_number(option: str, number: float) -> None:
    """Raises UserError if an argument is not a number with which something can be measured."""
    if number > 0 or (number == 0 and option in MAY_BE_ZERO):
        return
    least = "a number of at least 0" if option in MAY_BE_ZERO else "a number > 0"
    raise UserError(f"--{option.replace('_', '-')}: expected {least}, got {number}")


def draw(bench: ModuleType, rows: Sequence[dict[str, object]], path: Path) -> None:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")
