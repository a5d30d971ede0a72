"""The repository of issue 9's bar, generated from a seed: who broke it is known, and so is how far anybody can narrow it down.

- A line of commits; commit i writes `i` into `number.txt`. `check.py` fails from the culprit on, always with the same message.
- Two submodules (local repositories) that are moved now and then; only the first is populated in the checkout.
- Five locks that can be installed, `requirements.lock`, each pinning another version of a tiny wheel; they come and go.
- 12 % of the commits cannot be built: one block by `build.sh`, single ones by `build.sh` or by a sixth lock that nothing can
  satisfy. The block lies at the culprit for about every third seed.
- `check.py` exits with 200, which aborts a bisect, when the environment is not that of the lock, a submodule is at another commit
  than recorded, or the build is not of this commit: a wrong step cannot go unnoticed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bisect.repos import Commit, Entry, Link, Script, build, gitmodules, linear, populate
from tests.runtime.wheels import make_wheel

BUILD = ("sh", "build.sh")
COMMAND = ("{python}", "check.py")
SUBMODULES = ("third/alpha", "third/beta")
UNBUILDABLE = 0.12
_LOCKS = tuple(f"fit=={version}.0\n" for version in range(1, 6))
_LOST_LOCK = "fit==99.0\n"
_MODULE_COMMITS = 6
_BUILDS = Script("""#!/bin/sh\nset -e\necho "NUMBER = $(cat number.txt)" > built.py\n""")
_BREAKS = Script("""#!/bin/sh\necho "build.sh: a header is gone" >&2\nexit 1\n""")
_CHECK = '''"""Fails from the culprit on; exits with 200 when this step was not prepared as its commit says."""

import sys
from pathlib import Path

import built
import fit
import product

ROOT = Path(__file__).resolve().parent
pinned = (ROOT / "requirements.lock").read_text().strip().partition("==")[2]
number = int((ROOT / "number.txt").read_text())
modules = [line.split() for line in (ROOT / "modules.txt").read_text().splitlines()]
if fit.VERSION != pinned:
    print(f"the environment has fit {fit.VERSION}, the lock wants {pinned}")
    sys.exit(200)
if built.NUMBER != number:
    print(f"built is of commit {built.NUMBER}, this is {number}")
    sys.exit(200)
for path, wanted in modules:
    seen = (ROOT / path / "number.txt").read_text().strip()
    if seen != wanted:
        print(f"{path} is at its commit {seen}, recorded is {wanted}")
        sys.exit(200)
print(f"commit {number}")
assert product.answer() == 42, "the answer is wrong"
'''


@dataclass(frozen=True)
class Big:
    """A generated repository, and the truth about it."""

    path: Path
    ids: tuple[str, ...]
    """Of every commit, oldest first."""
    culprit: int
    """Index of the commit that broke `check.py`."""
    suspects: tuple[int, ...]
    """The smallest range that testing can give: indices after the last good commit that can be built, to the first such bad one."""
    locks: tuple[str, ...]
    """Text of `requirements.lock` at each commit."""
    unbuildable: frozenset[int]
    variables: Mapping[str, str]
    """Environment under which pip sees the wheels, and nothing else."""

    @property
    def good(self) -> str:
        """The good end."""
        return self.ids[0]

    @property
    def bad(self) -> str:
        """The bad end."""
        return self.ids[-1]


@dataclass(frozen=True)
class Design:
    """What the seed decides."""

    culprit: int
    locks: tuple[str, ...]
    """What each commit has, broken ones included."""
    breaks: frozenset[int]
    """Commits whose `build.sh` fails."""
    modules: tuple[tuple[int, int], ...]
    """For each commit, at which of its own commits each submodule is."""

    @property
    def unbuildable(self) -> frozenset[int]:
        """Commits that nobody can test."""
        return self.breaks | {index for index, lock in enumerate(self.locks) if lock == _LOST_LOCK}

    @property
    def suspects(self) -> tuple[int, ...]:
        """As in `Big`."""
        testable = sorted(set(range(len(self.locks))) - self.unbuildable)
        last_good = max(index for index in testable if index < self.culprit)
        first_bad = min(index for index in testable if index >= self.culprit)
        return tuple(range(last_good + 1, first_bad + 1))


def big_repository(root: Path, seed: int, commits: int = 500) -> Big:
    """Make the repository `root / "repo"`, its submodules and its wheels; the same seed gives the same ids at the same `root`."""
    root.mkdir(parents=True, exist_ok=True)
    plan = design(seed, commits)
    for lock in _LOCKS:
        make_wheel(root / "wheels", "fit", lock.strip().partition("==")[2])
    sources = {path: root / Path(path).name for path in SUBMODULES}
    modules = [build(source, linear(_MODULE_COMMITS)) for source in sources.values()]
    states = [_state(plan, index, sources, modules) for index in range(commits)]
    before: list[dict[str, Entry]] = [{}, *states]
    changed = [
        Commit({path: entry for path, entry in state.items() if path not in old or old[path] != entry})
        for old, state in zip(before, states, strict=False)
    ]
    ids = build(root / "repo", changed)
    populate(root / "repo", SUBMODULES[0])
    return Big(
        path=root / "repo",
        ids=tuple(ids),
        culprit=plan.culprit,
        suspects=plan.suspects,
        locks=plan.locks,
        unbuildable=plan.unbuildable,
        variables={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(root / "wheels"), "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_COMPILE": "1"},
    )


def design(seed: int, commits: int) -> Design:
    """Decide what each commit is like. The ends can be built, the culprit is neither of them."""
    chance = random.Random(seed)
    culprit = chance.randrange(1, commits)
    wanted = round(UNBUILDABLE * commits)
    block = _block(chance, culprit, wanted // 3, commits)
    breaks, lost = set(block), set[int]()
    candidates = list(range(1, commits - 1))
    chance.shuffle(candidates)
    for index in candidates:
        taken = breaks | lost
        # Single ones: none beside another.
        if len(taken) < wanted and not taken & {index - 1, index, index + 1}:
            (lost if len(taken) % 2 else breaks).add(index)
    locks = [_LOST_LOCK if index in lost else lock for index, lock in enumerate(_periods(chance, commits))]
    modules = list(zip(*(_moves(chance, commits) for _ in SUBMODULES), strict=True))
    return Design(culprit=culprit, locks=tuple(locks), breaks=frozenset(breaks), modules=tuple(modules))


def _block(chance: random.Random, culprit: int, length: int, commits: int) -> range:
    """Commits in a row that cannot be built; now and then the culprit is one of them or comes right after."""
    start = culprit - chance.randint(0, length) if chance.random() < 1 / 3 else chance.randrange(1, commits - length)
    start = min(max(start, 1), commits - 1 - length)
    return range(start, start + length)


def _periods(chance: random.Random, commits: int) -> list[str]:
    """The lock of each commit: all five in a row, and then some of them again."""
    order = [*_LOCKS, *chance.sample(_LOCKS[:-1], 3)]
    cuts = sorted(chance.sample(range(1, commits), len(order) - 1))
    return [order[sum(cut <= index for cut in cuts)] for index in range(commits)]


def _moves(chance: random.Random, commits: int) -> list[int]:
    """At which of its commits one submodule is; it moves on five times."""
    cuts = sorted(chance.sample(range(1, commits), _MODULE_COMMITS - 1))
    return [sum(cut <= index for cut in cuts) for index in range(commits)]


def _state(plan: Design, index: int, sources: Mapping[str, Path], modules: list[list[str]]) -> dict[str, Entry]:
    """Every file of one commit."""
    places = list(zip(SUBMODULES, plan.modules[index], modules, strict=True))
    return {
        "check.py": _CHECK,
        "product.py": f"def answer() -> int:\n    return {41 if index >= plan.culprit else 42}\n",
        "build.sh": _BREAKS if index in plan.breaks else _BUILDS,
        "number.txt": f"{index}\n",
        "requirements.lock": plan.locks[index],
        "modules.txt": "".join(f"{path} {place}\n" for path, place, _ in places),
        ".gitmodules": gitmodules(sources),
        ".gitignore": "__pycache__/\nbuilt.py\n",
        **{path: Link(ids[place]) for path, place, ids in places},
    }
