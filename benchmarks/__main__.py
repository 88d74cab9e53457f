"""Measures speed, memory or quality, and writes a table, a CSV file and a picture.

python -m benchmarks ratio --model qwen3 --flavor 0.6B
python -m benchmarks ratio --quick                            # on a CPU, in seconds: shows that it runs
python -m benchmarks ratio --against docs/data/ratio.csv      # fails if a ratio fell by more than 3 %
python -m benchmarks ratio --rows docs/data/ratio.csv         # draws rows that were measured before
python -m benchmarks ratio --help                             # what is measured, and its arguments
torchrun --nproc-per-node 2 -m benchmarks experts             # on several GPUs

All contenders of a benchmark run in one process, in turn. Rows name the benchmark, the date, the commit, the
device and the versions; they are appended to outputs/bench/NAME.csv, or to the file of --csv.
"""

from collections.abc import Sequence
from importlib import import_module

from benchmarks import BENCHES, ELSEWHERE
from titan_tree.cli import Help, Parser, call
from titan_tree.cli.bench import add_arguments, measure
from titan_tree.cli.run_process import exit_process, prepare_streams
from titan_tree.errors import UserError, unknown_name

PROGRAM = "python -m benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and returns the exit status, 1 if --against found a ratio that fell."""
    parser = Parser(PROGRAM, description=__doc__, formatter_class=Help)
    add_arguments(parser, BENCHES)
    return call(PROGRAM, lambda: run(**vars(parser.parse_args(argv))))


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs the benchmark ``name``. Raises UserError for names that do not exist, or no longer."""
    if name in ELSEWHERE:
        raise UserError(f"benchmark {name!r} is not here anymore: {ELSEWHERE[name]}")
    if name not in BENCHES:
        raise unknown_name("benchmark", name, BENCHES)
    return measure(import_module(f"benchmarks.{name}"), f"{PROGRAM} {name}", arguments)


if __name__ == "__main__":
    prepare_streams()
    exit_process(main)
