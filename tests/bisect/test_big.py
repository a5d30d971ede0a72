"""The generated repository is what it says: its truth is checked by hand, without a bisect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.bisect.big import BUILD, SUBMODULES, Big, big_repository, design
from tests.bisect.repos import populate, run_git


def outcome(big: Big, index: int, wheel: str) -> tuple[int, str]:
    """Build and check one commit in the checkout itself, with a wheel on the path instead of an environment."""
    run_git(big.path, "checkout", "--quiet", "--force", big.ids[index])
    populate(big.path)
    built = subprocess.run(BUILD, cwd=big.path, capture_output=True, check=False, timeout=60)
    if built.returncode:
        return 125, built.stderr.decode()
    wheels = Path(big.variables["PIP_FIND_LINKS"])
    environment = {**os.environ, "PYTHONPATH": str(wheels / f"fit-{wheel}-py3-none-any.whl"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "check.py"], cwd=big.path, env=environment, capture_output=True, check=False, timeout=60)
    return done.returncode, (done.stdout + done.stderr).decode()


def pinned(big: Big, index: int) -> str:
    return big.locks[index].strip().partition("==")[2]


def test_what_the_seeds_decide() -> None:
    ranges = 0
    for seed in range(20):
        plan = design(seed, 500)
        assert len(set(plan.locks)) == 6
        assert not {0, 499} & plan.unbuildable
        assert 1 <= plan.culprit <= 499
        unbuildable = "".join("x" if index in plan.unbuildable else " " for index in range(500))
        assert sorted(len(run) for run in unbuildable.split()) == [*[1] * 40, 20]
        assert 20 < len(plan.breaks) < 60
        assert plan.culprit in plan.suspects
        assert plan.suspects[0] - 1 not in plan.unbuildable
        assert plan.suspects[-1] not in plan.unbuildable
        assert set(plan.suspects[:-1]) <= plan.unbuildable
        ranges += len(plan.suspects) > 1
    assert 3 <= ranges <= 12
    assert design(3, 500) == design(3, 500) != design(4, 500)


def test_a_small_one_by_hand(tmp_path: Path) -> None:
    big = big_repository(tmp_path, seed=1, commits=40)
    first_bad, last_good = big.suspects[-1], big.suspects[0] - 1
    assert run_git(big.path, "rev-parse", "main") == big.bad
    assert run_git(big.path, "status", "--porcelain") == ""
    populated = [(big.path / path / "number.txt").exists() for path in SUBMODULES]
    assert populated == [True, False]
    code, log = outcome(big, last_good, pinned(big, last_good))
    assert (code, log) == (0, f"commit {last_good}\n")
    code, log = outcome(big, first_bad, pinned(big, first_bad))
    assert code == 1
    assert log.endswith("AssertionError: the answer is wrong\n")
    other = "1.0" if pinned(big, first_bad) != "1.0" else "2.0"
    code, log = outcome(big, first_bad, other)
    assert (code, log) == (200, f"the environment has fit {other}, the lock wants {pinned(big, first_bad)}\n")
    broken = next(index for index in sorted(big.unbuildable) if big.locks[index] != "fit==99.0\n")
    assert outcome(big, broken, "1.0") == (125, "build.sh: a header is gone\n")
