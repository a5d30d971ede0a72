"""One run of the Bridge's own tests: a pytest process in the checkout, with our shims, followed to its end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from seatrial.evidence.redact import Redactor
from seatrial.files import read_model
from seatrial.launch.interrupt import check_stop
from seatrial.launch.process import Outcome, ProcessSpec
from seatrial.launch.process import run as run_process
from seatrial.model.errors import UserError
from seatrial.model.guarded import real_path
from seatrial.model.record import Record
from seatrial.probes.bridge.pytest_shims import IMPORTED
from seatrial.proving.bridge.dead_paths import MEGATRON
from seatrial.trial.preflight import child_environment
from seatrial.trial.sides import JUNIT, LOG, WHOLE, Case, cleaned_cases, said_in

PLUGIN = "seatrial.probes.bridge.pytest_shims"
EACH_S = 300
"""One test may take this long, where pytest-timeout is installed."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One pytest process and what it left."""

    outcome: Outcome
    cases: tuple[Case, ...] | None
    """None without a whole junit.xml."""
    said: str
    imported: dict[str, str | None]
    shims: tuple[str, ...] = ()


def run(python: Path, checkout: Path, files: Sequence[str], instruments: Path, out: Path, deadline_s: float) -> Ran:
    """Run test files of a checkout to their end. `out` is a directory without an earlier run. Raises `Interrupted`."""
    redactor, out, checkout = Redactor(os.environ), out.absolute(), checkout.absolute()
    roots = [instruments.absolute(), checkout / "src", checkout / MEGATRON]
    extra = {
        **{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        **{"PYTEST_TIMEOUT": str(EACH_S), IMPORTED: str(out / "imported.json")},
    }
    environment = child_environment(os.environ, [str(root) for root in roots if root.is_dir()], extra)
    # The tests import their helpers from the directory that pytest is started in.
    del environment["PYTHONSAFEPATH"]
    command = (str(python), "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "--continue-on-collection-errors")
    spec = ProcessSpec(
        argv=(*command, "--junitxml", str(out / JUNIT), *WHOLE, *files),
        env=environment,
        cwd=checkout,
        log=out / LOG,
        run_id=f"{out.name}-own-tests-{time.time_ns()}",
        deadline_s=deadline_s,
        stall_s=deadline_s,
        line_filter=redactor.lines().line,
    )
    outcome = run_process(spec)
    check_stop()
    left = _left(out / "imported.json")
    return Ran(outcome, cleaned_cases(out / JUNIT, redactor), said_in(out / LOG), left.files, left.shims)


class _Imported(Record):
    """What the tests' own process says of its imports."""

    files: dict[str, str | None] = Field(default_factory=dict)
    shims: tuple[str, ...] = ()


def _left(path: Path) -> _Imported:
    """Nothing where the process left nothing, or was killed while it wrote: then nothing shows that the checkout was imported."""
    try:
        return read_model(path, _Imported) if path.is_file() else _Imported()
    except UserError:
        return _Imported()


def origin(ran: Ran, checkout: Path) -> str:
    """Why what ran was not the checkout under test; "" when it was."""
    for package, root in (("megatron.bridge", checkout / "src"), ("megatron.core", checkout / MEGATRON)):
        file = ran.imported.get(package)
        needed = package == "megatron.bridge" or (root / "megatron").is_dir()
        if needed and (file is None or not real_path(Path(file)).is_relative_to(real_path(root))):
            return f"vacuous: {package} was imported from {file or 'nowhere'}, not from {root}"
    return ""


def own_modules(checkout: Path) -> frozenset[str]:
    """Top-level modules that the checkout itself provides."""
    roots = (checkout, checkout / "src", checkout / MEGATRON)
    return frozenset({"megatron", *(entry.stem for root in roots if root.is_dir() for entry in root.iterdir())})
