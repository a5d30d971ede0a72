"""Workers of every node are asked before a trial inside Ray begins; here by a stand-in for the loop's Python."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.loop import Context
from seatrial.core.records import RepoState
from seatrial.evidence.redact import Redactor
from seatrial.trial.level import Limits, RunContext
from seatrial.trial.preflight import RAY_NODES
from seatrial.trial.runner import ray_findings
from tests.trial.fake import FakeLoop


def bench(tmp_path: Path, answer: dict[str, Any] | None) -> RunContext:
    """A bench whose interpreter is a shell script that leaves `answer` where the probe would."""
    (tmp_path / "run" / "evidence").mkdir(parents=True)
    (tmp_path / "answer").write_text(json.dumps(answer) if answer is not None else "")
    python = tmp_path / "python"
    copy = f'printf "%s\\n" "$@" > {tmp_path}/words; test -s {tmp_path}/answer && cp {tmp_path}/answer "$4"'
    python.write_text(f"#!/bin/sh\n{copy}\n")
    python.chmod(0o755)
    repo = RepoState(name="pkg", path=str(tmp_path), commit="0" * 40, branch="main", packages=("pkg",), import_root=str(tmp_path / "src"))
    context = Context(run_dir=tmp_path / "run", python=python, model="tiny", changes=(repo,))
    return RunContext(FakeLoop(), context, tmp_path, dict(os.environ), Redactor({}), Limits(), lambda _: None)


def node(tmp_path: Path, host: str, ok: bool = True) -> dict[str, Any]:
    root = str(tmp_path / "src")
    row = {"package": "pkg", "file": f"{root}/pkg/__init__.py", "expected": root, "ok": ok}
    return {"node_id": host * 8, "host": host, "error": "", "python_version": "3.12.1", "imports": [row]}


def test_without_ray_nobody_is_asked(tmp_path: Path) -> None:
    assert ray_findings(bench(tmp_path, None), {}) == ()
    assert not (tmp_path / "words").exists()


def test_every_node_is_asked_for_the_packages_of_the_change(tmp_path: Path) -> None:
    made = bench(tmp_path, {"nodes": [node(tmp_path, "n1"), node(tmp_path, "n2")], "error": ""})
    findings = ray_findings(made, {RAY_NODES: "2"})
    assert len(findings) == 3
    assert all(finding.ok for finding in findings)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:2] == ["-m", "seatrial.instruments.ray_nodes"]
    assert f"pkg={tmp_path / 'src'}" in words
    assert f"PYTHONPATH={tmp_path / 'src'}:{tmp_path}" in words


@pytest.mark.parametrize(
    ("hosts", "wrong", "error", "words"),
    [
        (("n1",), "", "", "1 of 2 expected nodes"),
        (("n1", "n2"), "n2", "", "n2"),
        ((), "", "cannot connect to Ray: refused", "cannot connect to Ray: refused"),
        (("n1", "n2"), "", "cannot connect to Ray: refused", "cannot connect"),
    ],
)
def test_a_node_that_is_missing_or_imports_from_elsewhere_is_a_bad_finding(
    tmp_path: Path, hosts: tuple[str, ...], wrong: str, error: str, words: str
) -> None:
    made = bench(tmp_path, {"nodes": [node(tmp_path, host, host != wrong) for host in hosts], "error": error})
    bad = [finding for finding in ray_findings(made, {RAY_NODES: "2"}) if not finding.ok]
    assert len(bad) == 1
    assert words in bad[0].message
    assert bad[0].fix


def test_no_answer_is_not_ok_even_when_an_earlier_attempt_left_one(tmp_path: Path) -> None:
    made = bench(tmp_path, None)
    (tmp_path / "run" / "evidence" / "ray-nodes.json").write_text(json.dumps({"nodes": [node(tmp_path, "n1")]}))
    assert [finding.ok for finding in ray_findings(made, {RAY_NODES: "1"})] == [False]
