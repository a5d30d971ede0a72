"""`localize` of a run directory: which level has token logs, their analysis, and its files below RUN/localize/.

Nothing of the trial itself is changed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.files import write_json, write_text
from seatrial.loops import loop_of
from seatrial.model.errors import UserError
from seatrial.model.localization import Localization
from seatrial.model.record import PlannedLevel, Trial
from seatrial.model.tokens import TokenRow
from seatrial.model.verdict import Verdict
from seatrial.report.localize import localize_html
from seatrial.triage.localize.conclude import localize
from seatrial.trial import rundir
from seatrial.trial.level_files import read_level_metrics

PLACE, JSON, HTML = "localize", "localize.json", "localize.html"


def localize_run(path: Path, number: int | None = None) -> Localization:
    """Analyse one level of a trial and store the answer; a trial without token logs is a UserError."""
    path = path.absolute()
    trial = rundir.load(path)
    loop = loop_of(trial.plan)
    candidates = _candidates(path, trial, number)
    for planned in candidates:
        directory = rundir.level_directory(path, planned)
        rows = loop.tokens(directory)
        first = next(rows, None)
        if first is None:
            continue
        metrics = read_level_metrics(loop, directory)
        redactor = Redactor(os.environ)
        found = localize(_cleared(chain((first,), rows), redactor), metrics, trial.id, planned.number, planned.name)
        # Prompts and names of files come from outside.
        found = Localization.model_validate(redactor.value(found.model_dump(mode="json")))
        write_json(path / PLACE / JSON, found)
        write_text(path / PLACE / HTML, localize_html(found))
        return found
    looked = ", ".join(str(rundir.level_directory(path, planned)) for planned in candidates)
    raise UserError(
        f"no token logs in {looked}: looked for sequences with the log-probabilities of generator and trainer",
        f"only levels of {loop.title} whose run logged them can be localized: let it train a step, and keep what it wrote",
    )


def _cleared(rows: Iterable[TokenRow], redactor: Redactor) -> Iterator[TokenRow]:
    """The rows; settings whose names say secret, which sentences would quote, are replaced."""
    clear = functools.cache(lambda settings: tuple(redactor.value(dict(settings)).items()))
    for row in rows:
        yield row if clear(row.settings) == row.settings else replace(row, settings=clear(row.settings))


def _candidates(path: Path, trial: Trial, number: int | None) -> Sequence[PlannedLevel]:
    """The level that was asked for; else all, those that failed first."""
    planned = trial.plan.levels
    if number is None:
        failed = {result.number for result in trial.levels if result.verdict is Verdict.FAIL}
        return sorted(planned, key=lambda level: (level.number not in failed, level.number))
    chosen = [level for level in planned if level.number == number]
    if not chosen:
        listed = ", ".join(str(level.number) for level in planned)
        raise UserError(f"{path}: level {number} is not part of this trial", f"choose from {listed}")
    return chosen
