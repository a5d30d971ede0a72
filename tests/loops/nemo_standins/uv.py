"""A stand-in for uv, for tests: `uv run …` runs bash as it is, the trainer by its stand-in, and NeMo-RL's two metric scripts.

python uv.py run [options] bash SCRIPT WORDS | coverage run … examples/X.py WORDS | examples/X.py WORDS
    | tests/json_dump_tb_logs.py DIR --output_path FILE | tests/check_metrics.py FILE EXPRESSION…
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The instruments on PYTHONPATH hold a part of Seatrial: here the whole of it is needed.
sys.path[:] = [entry for entry in sys.path if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
TAKES_VALUE = ("--extra", "--group", "--with")


def main(words: list[str]) -> int:
    assert words[0] == "run", words
    rest = words[1:]
    while rest[0].startswith("-"):
        rest = rest[2 if rest[0] in TAKES_VALUE else 1 :]
    if rest[0] == "bash":
        os.execvp("bash", rest)
    if rest[0] == "python":  # the resume comparison's own asserts, which Seatrial makes again
        sys.stdin.read()
        return 0
    program = next(word for word in rest if word.endswith(".py"))
    given = rest[rest.index(program) + 1 :]
    if program.endswith("json_dump_tb_logs.py"):
        return dump(Path(given[0]), Path(given[given.index("--output_path") + 1]))
    if program.endswith("check_metrics.py"):
        return check(Path(given[0]), given[1:])
    # `-m`, so that the program is the first word that names a file, as it is under coverage.
    os.environ["PYTHONPATH"] = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(HERE)))
    return os.execv(sys.executable, [sys.executable, "-m", "nemo_trainer", program, *given])


def dump(logs: Path, out: Path) -> int:
    """What upstream's script writes: tag, step as text, value."""
    from seatrial.metrics.read import read_metrics

    found = read_metrics(tuple(sorted(logs.rglob("*tfevents*"))))
    rows = {tag: {str(s): v for s, v in zip(series.steps, series.values, strict=True)} for tag, series in found.series.items()}
    out.write_text(json.dumps(rows, indent=2, sort_keys=True))
    return 0


def check(file: Path, expressions: list[str]) -> int:
    """What upstream's script prints of each expression; like it, it lets NaN through that does not come first."""
    from seatrial.metrics.checks import evaluate
    from seatrial.metrics.read import read_metrics

    metrics = read_metrics((file,))
    results = [evaluate(expression, metrics) for expression in expressions]
    lax = os.environ.get("SIM_CHECKS") == "lax"
    for result in results:
        sys.stdout.write(f"│ {'PASS' if result.passed or lax else 'FAIL'}   │ {result.name} │ {result.value} │\n")
    return 0 if lax or all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
