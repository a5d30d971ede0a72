"""A whole `seatrial bisect --on slurm:PROFILE`, and one that is killed while its jobs run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seatrial.bisect import bisect_dir
from seatrial.bisect.bisect_records import BisectRun
from seatrial.bisect.bisect_report import BisectReport
from seatrial.bisect.runners import JOB, JOBS
from seatrial.core.files import read_model
from seatrial.runtime.jobdir import job_dir
from tests.bisect.several import main_line, repository
from tests.bisect.untouched import untouched
from tests.cli.command import SEATRIAL, environ
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.harness import until

pytestmark = pytest.mark.real
PROFILE = '[slurm.test]\ntime = "0:10:00"\ncpus = 1\n'
DEADLINE_S = 180


class Desk:
    """Somebody who bisects a repository of six commits on the cluster; the fourth is broken."""

    def __init__(self, cluster: PrivateSlurm, root: Path) -> None:
        self.cluster, self.root, self.out = cluster, root, root / "bisect"
        (root / "seatrial.toml").write_text(PROFILE)
        self.repo = repository(root / "a", main_line(6, {3: {"broken": ""}}))

    def words(self, *command: str) -> list[str]:
        flags = ["--repo", str(self.repo.path), "--good", self.repo.ids[0], "--on", "slurm:test", "--jobs", "2", "--out", str(self.out)]
        return ["bisect", *flags, "--", *command]

    @contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """A Seatrial that runs meanwhile; what it says goes to `said`."""
        with self.said.open("wb") as log:
            command = [str(SEATRIAL), *words]
            process = subprocess.Popen(
                command, cwd=self.root, env=environ(SLURM_CONF=self.cluster.env["SLURM_CONF"]), stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait(60)

    @property
    def said(self) -> Path:
        return self.root / "said"

    @property
    def rows(self) -> tuple[BisectRun, ...]:
        return bisect_dir.read_runs(self.out / "runs.jsonl").rows

    def jobs(self) -> dict[str, str]:
        """Slurm's ids by the name of the step."""
        found = {path.name: job_dir(path / JOBS, JOB).submission() for path in sorted((self.out / "steps").glob("*"))}
        return {name: sent.slurm for name, sent in found.items() if sent is not None and sent.slurm is not None}

    def queue(self) -> list[str]:
        return self.cluster.run("squeue", "-h", "-o", "%i").stdout.split()

    def check_answer(self) -> None:
        answer = read_model(self.out / "report.json", BisectReport).answer
        assert [one.commit for one in answer.suspects] == [self.repo.ids[3]], self.said.read_text()
        assert not self.queue()
        assert not list(self.out.glob("steps/*/tree"))


@pytest.fixture
def desk(cluster: PrivateSlurm, tmp_path: Path) -> Desk:
    return Desk(cluster, tmp_path)


def test_a_whole_bisect(desk: Desk) -> None:
    with untouched(desk.repo.path), desk.started(*desk.words("sh", "check.sh")) as process:
        assert process.wait(DEADLINE_S) == 0, desk.said.read_text()
    desk.check_answer()
    # One job for each row, but for those that were cancelled because they no longer mattered.
    assert {Path(row.directory).name for row in desk.rows} <= set(desk.jobs())
    assert len(set(desk.jobs().values())) == len(desk.jobs())


def test_a_killed_bisect_waits_for_the_very_jobs_that_it_began(desk: Desk) -> None:
    go = desk.root / "go"
    waits = f'touch "$SEATRIAL_OUTPUT/began"; while [ ! -e {go} ]; do sleep 0.2; done; exec sh check.sh'
    with desk.started(*desk.words("sh", "-c", waits)) as process:
        until(lambda: len(list(desk.out.glob("steps/*/output/began"))) == 2 or None, desk.said.read_text, 60)
        process.kill()
        process.wait(60)
    before = desk.jobs()
    assert (len(before), desk.rows) == (2, ())
    with desk.started("bisect", "resume", str(desk.out)) as process:
        until(lambda: desk.said.read_text().count("of an earlier session is waited for") == 2 or None, desk.said.read_text, 60)
        assert (desk.jobs(), sorted(desk.queue())) == (before, sorted(before.values()))
        go.touch()
        assert process.wait(DEADLINE_S) == 0, desk.said.read_text()
    desk.check_answer()
    assert {Path(row.directory).name for row in desk.rows if row.stage == "ends"} == set(before)
    assert all("outlived" in row.notes[0] for row in desk.rows if row.stage == "ends")
    assert before.items() <= desk.jobs().items()
