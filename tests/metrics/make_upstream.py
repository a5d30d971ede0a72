"""Ask upstream's own checker about every expression of its scripts, and store what it says.

Run by hand when the scripts or the cases change; needs a checkout of NeMo-RL and `rich`:
    .venv/bin/python -m tests.metrics.make_upstream /path/to/nemo-rl COMMIT
The checker runs expressions by `eval`: only ever give it a checkout that you trust.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from seatrial.loops.nemo_rl.script_reader import assertions_in
from tests.metrics.upstream_cases import cases

STORED = Path(__file__).parent.parent / "data" / "metrics" / "upstream_verdicts.json.gz"


def expressions(checkout: Path) -> dict[str, list[str]]:
    """The expressions of every script that calls the checker, by script."""
    scripts = sorted(path for path in checkout.rglob("*.sh*") if "check_metrics.py" in path.read_text(encoding="utf-8", errors="replace"))
    return {str(path.relative_to(checkout)): list(assertions_in(path)) for path in scripts}


def verdicts(checker: Any, expr: str) -> str:
    """One letter for each case: P or F."""
    return "".join("P" if checker.evaluate_check(data, expr)[0] else "F" for _, data in cases(expr))


def main(checkout: Path, commit: str) -> None:
    """Write the file."""
    spec = importlib.util.spec_from_file_location("check_metrics", checkout / "tests" / "check_metrics.py")
    assert spec is not None
    assert spec.loader is not None
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    found = expressions(checkout)
    distinct = sorted({expr for script in found.values() for expr in script})
    stored = {
        "commit": commit,
        "scripts": len(found),
        "expressions": sum(map(len, found.values())),
        "verdicts": {expr: verdicts(checker, expr) for expr in distinct},
    }
    STORED.write_bytes(gzip.compress(json.dumps(stored, indent=0).encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
