"""Whole directories that commands read: made once as their own programs leave them, then damaged, one or two files at a time.

A world is its files and the commands that read it. `{}` in a command is the directory. No command of a world starts a run, sends a signal
or asks a network: what is tried is reading.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from seatrial.core.files import write_json
from seatrial.trial.level import Limits
from tests.fuzz_mutate import mutate

DATA = Path(__file__).parent / "data"
Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class World:
    """Files by their path below the directory, and what is asked of them."""

    files: dict[str, bytes]
    commands: tuple[Command, ...]
    spared: tuple[str, ...] = ()
    """Beginnings of paths that are not damaged."""
    empty: tuple[str, ...] = field(default=())
    """Directories without files."""
    home: Path | None = None
    """Where it must lie, since digests cover files that name their directory."""

    def write(self, root: Path) -> list[Path]:
        """Put it there; gives the files that may be damaged."""
        for folder in self.empty:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.replace(PLACE, str(root).encode()))
        return [root / name for name in sorted(self.files) if not name.startswith(self.spared or "\0")]


PLACE = b"/fuzz-place"
"""Stands for the directory in files that name it."""


def taken(root: Path, *commands: Command, spared: tuple[str, ...] = (), moved: bool = True) -> World:
    """A directory as it is; `moved`: text that names it names the place to which it is written."""
    place = str(root).encode() if moved else PLACE
    files = {
        str(path.relative_to(root)): path.read_bytes().replace(place, PLACE)
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.name not in (".lock", ".gitignore")
    }
    return World(files, commands, spared)


def trial(folder: Path, name: str, loop: str = "trl", sealed: bool = True) -> World:
    """The run directory of a trial; `sealed` has digests, which notice what is changed before anything else does."""
    from tests.report.trials import TRIALS, store_run

    made = TRIALS[name]()
    changes = made.plan.changes if sealed else ()
    made = made.model_copy(update={"plan": made.plan.model_copy(update={"loop": loop, "changes": changes})})
    request: dict[str, Any] = {"python": None, "limits": asdict(Limits()), "options": {}, "sides": [], "base": False}
    write_json(folder / "evidence" / "request.json", request)
    write_json(folder / "evidence" / "redaction.json", [])
    made = store_run(folder, made)
    if not sealed:
        write_json(folder / "trial.json", made.model_copy(update={"files": {}}))
    if name == "against_baseline":
        _submitted(folder / "jobs" / "1")
    level = folder / "levels" / "0-smoke"
    tokens = {name: [[1, 2, 3]] for name in ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")}
    row = {"input_lengths": [3], **tokens, "sample_loss_mask": [1], "rewards": [0.5]}
    if loop == "nemo-rl":
        (level / "run" / "results" / "logs" / "exp_001").mkdir(parents=True)
        (level / "run" / "results" / "logs" / "exp_001" / "train_data_step1.jsonl").write_text((json.dumps(row) + "\n") * 3)
    levels = ("--level", "0")
    check = ("check", "{}", *levels, "--", 'max(data["train/reward"]) > 0')
    return taken(
        folder,
        *(("report", "{}"), ("report", "{}", "--format", "json"), ("report", "{}", "-f", "html"), ("report", "{}", "-f", "junit")),
        *(("resume", "{}"), ("resume", "{}", "--json"), ("attach", "{}"), ("attach", "{}", "--json"), ("localize", "{}")),
        *(("localize", "{}", *levels), ("isolate", "{}", "--dry-run"), ("isolate", "{}", *levels, "--dry-run")),
        *(("metrics", "show", "{}", *levels), ("metrics", "dump", "{}", *levels), check),
        *(("history", "import", "{}", "--store", "{}/../h.db"), ("history", "gate", "{}", "--store", "{}/../h.db")),
        ("judge", loop, "--log", "{}/levels/0-smoke/run.log", "--metrics", "{}/levels/0-smoke/metrics.jsonl"),
    )


def _submitted(folder: Path) -> None:
    """A trial runs as a job of Slurm."""
    from seatrial.core.jobs import Batch, Component, Job, Submission
    from seatrial.runtime.jobdir import job_dir, save

    save(folder, Batch(jobs=(Job(name="trial", components=(Component(name="client", role="client", command=("true",)),)),)))
    job = job_dir(folder, "trial")
    job.make()
    job.submission_file.write_text(Submission(job="trial", name="t-1", slurm="12", profile="p", units=(0,), submitted=1).model_dump_json())
    row = {"job": "trial", "index": 0, "slurm": "12", "restart": 0, "ending": "client-failed", "component": "client.0", "exit_code": 1}
    job.result_file(0).write_text(json.dumps({**row, "node": "n", "started": 1, "ended": 2, "message": ""}))
    job.log("client", 0, None).write_text("hello\n")


def interrupted(folder: Path) -> World:
    """A trial that may go on: what it would run cannot begin, since its interpreter is not there."""
    return trial(folder, "interrupted")


def finished(folder: Path) -> World:
    """A trial that failed."""
    return trial(folder, "failed")


def compared(folder: Path) -> World:
    """A trial with a baseline."""
    return trial(folder, "against_baseline")


def unsealed(folder: Path) -> World:
    """A trial of an earlier version, without digests, that may go on."""
    return trial(folder, "interrupted", sealed=False)


def over(folder: Path) -> World:
    """A trial of an earlier version that failed, with logs of tokens."""
    return trial(folder, "failed", "nemo-rl", sealed=False)


def campaign(folder: Path) -> World:
    """A campaign with everything that merge and profile write."""
    from seatrial.rollouts.journal.attempts import LeaseHolder
    from tests.cli.command import inside
    from tests.rollouts.profiled import Result, collected, failed, ok, questions
    from tests.rollouts.profiled import campaign as make

    results: list[list[Result]] = [
        [ok(1.0, "4", input_tokens=3, finish="stop"), ok(0.0), failed(), ok(0.5)],
        [ok(1.0), None, failed(final=False), ok(1.0)],
    ]
    place = collected(make(folder, {"a": questions(2, level="x")}, a={"tag_columns": ["level"]}), results)
    assert inside("rollouts", "merge", place.root, "--partial").code == 0
    assert inside("rollouts", "profile", place.root).code == 0
    holder = LeaseHolder(host="h", boot="b", namespace="n", pid=1, started=1, token="00ff", number=1)
    place.shard(0).joinpath("lease-0001.json").write_text(holder.model_dump_json())
    asked = (
        *(("rollouts", "status", "{}/campaign"), ("rollouts", "status", "{}/campaign", "--json"), ("rollouts", "merge", "{}/campaign")),
        *(("rollouts", "merge", "{}/campaign", "--partial"), ("rollouts", "merge", "{}/campaign", "--partial", "--json")),
        *(("rollouts", "profile", "{}/campaign"), ("rollouts", "profile", "{}/campaign", "--json", "--k", "2")),
        *(("rollouts", "select", "{}/campaign", "--out", "{}/s.jsonl"), ("rollouts", "export", "{}/campaign", "skills")),
        *(
            ("rollouts", "select", "{}/campaign", "--out", "{}/s.jsonl", "--by-rate", "--with-rate"),
            ("rollouts", "export", "{}/campaign", "gym"),
        ),
        ("rollouts", "rescore", "{}/campaign", "--out", "{}/again", "--verifier", "exact"),
        *(("collect",), ("collect",)),
        ("history", "import", "{}/campaign", "--store", "{}/h.db"),
    )
    return taken(folder, *asked, spared=("campaign/merged/.lease",), moved=False)


def rollouts(folder: Path) -> World:
    """Rollouts of Gym with their materialized inputs, and of Skills."""
    from tests.rollouts.imports_made import gym_files, skills

    made, inputs = gym_files(folder / "gym")
    for seed in (0, 1):
        rows = "".join(json.dumps(skills(line)) + "\n" for line in range(3))
        (folder / f"output-rs{seed}.jsonl").write_text(rows)
    gym = ("rollouts", "import", "gym", f"{{}}/gym/{made.name}", "--out", "{}/c")
    known = ("rollouts", "import", "skills", "{}/output-rs0.jsonl", "{}/output-rs1.jsonl", "--out", "{}/c")
    return taken(folder, gym, (*gym, "--partial"), (*gym, "--inputs", f"{{}}/gym/{inputs.name}"), known, (*known, "--partial"))


def stopped(_: Path) -> World:
    """A trial of the fake loop that was killed in its second level: `resume` judges the first and runs the second, see `fake_loop`."""
    from tests.cli.command import inside
    from tests.trial.test_kills import CUTTER, KilledError

    folder = Path(tempfile.mkdtemp(prefix="seatrial-fuzz-trial-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words, run = ("--level", "0-1", "--python", sys.executable), folder / "run"
    for after in range(20, 1000, 20):
        shutil.rmtree(run, ignore_errors=True)
        with fake_loop(), suppress(KilledError), CUTTER.cut(run, after):
            inside("run", "fake", *words, "--out", run, SEATRIAL_HISTORY="off", SEATRIAL_BASE_CACHE="off")
        if (run / "levels" / "1-second" / "run.log").exists():
            break
    asked = (("fake", "resume", "{}"), ("fake", "resume", "{}", "--json"), ("fake", "report", "{}"), ("fake", "report", "{}", "-f", "json"))
    return replace(taken(run, *asked, moved=False), home=run)


@contextmanager
def fake_loop() -> Iterator[None]:
    """The fake loop instead of the real ones, whose process runs in this one."""
    import seatrial.loops
    from seatrial.core.loop import Loop
    from seatrial.trial import runner
    from tests.trial.conftest import asked_once
    from tests.trial.fake import FakeLoop
    from tests.trial.test_kills import run_here

    def get(_: object) -> Loop:
        return FakeLoop()

    with ExitStack() as patches:
        for owner, name, value in (
            *((seatrial.loops, "get_loop", get), (runner, "loop_of", get), (runner, "environment_record", asked_once)),
            *((os, "fsync", lambda _: None), (sys.modules["seatrial.trial.level"], "run_stoppable", run_here)),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def bisect(folder: Path) -> World:
    """The directory of a bisect."""
    from seatrial.bisect.bisect_records import Mark
    from seatrial.bisect.bisect_report import write_reports
    from seatrial.bisect.commit_history import HISTORY, CachedHistory
    from seatrial.core.files import write_text
    from seatrial.evidence.redact import Redactor
    from tests.bisect.bisects import PLAN, answer, history, runs

    past = history(12)
    plan = PLAN.model_copy(update={"check": 'mean(data["reward"]) > 0.5', "repeat": 10})
    rows = runs(past, (0, Mark.GOOD, 0.9), (11, Mark.BAD, 0.1), (6, Mark.GOOD, 0.8), (9, Mark.BAD, 0.3), (7, Mark.SKIP))
    write_json(folder / "bisect.json", plan)
    write_text(folder / "runs.jsonl", "".join(row.model_dump_json() + "\n" for row in rows))
    write_text(folder / HISTORY, CachedHistory(points=past.points).model_dump_json() + "\n")
    write_reports(folder, plan, past, rows, answer(past, 7), Redactor({}))
    return taken(folder, ("bisect", "report", "{}"), ("bisect", "report", "{}", "--json"), ("replay", "{}/runs.jsonl", "."))


def replayed(folder: Path) -> World:
    """The log of a `git bisect`."""
    from tests.bisect.repos import build, linear

    repo = Path(tempfile.mkdtemp(prefix="seatrial-fuzz-git-"))
    atexit.register(shutil.rmtree, repo, ignore_errors=True)
    first, middle, last = list(build(repo / "r", linear(3, {"a.py": "1\n"})))[:3]
    log = "".join(f"# {how}: [{one}] commit\ngit bisect {how} {one}\n" for how, one in (("bad", last), ("good", first), ("skip", middle)))
    (folder / "git.log").write_text(f"git bisect start\n{log}# first bad commit: [{last}] x\n")
    return taken(folder, ("replay", "{}/git.log", str(repo / "r")))


def jobs(folder: Path) -> World:
    """The directory of a batch of jobs that were submitted and left results."""
    from seatrial.core.jobs import Batch, Component, Job, Submission
    from seatrial.runtime.jobdir import job_dir, save

    one = Job(name="c", array=2, components=(Component(name="client", role="client", command=("true",)),))
    save(folder, Batch(jobs=(one,)))
    place = job_dir(folder, "c")
    place.make()
    for index in (0, 1):
        row = {"job": "c", "index": index, "slurm": "12", "restart": 0, "ending": "done", "component": "client.0", "exit_code": 0}
        place.result_file(index).write_text(json.dumps({**row, "node": "n", "started": 1, "ended": 2, "message": ""}))
        place.log("client", 0, index).write_text("hello\n")
    place.submission_file.write_text(Submission(job="c", name="c-1", slurm="12", profile="p", units=(0, 1), submitted=1).model_dump_json())
    logs = ("jobs", "logs", "{}", "c", "--index", "1")
    more = (("jobs", "wait", "{}", "--deadline", "0.01"), ("jobs", "resubmit", "{}", "--on", "slurm:a"))
    return taken(folder, *more, ("jobs", "list", "{}"), ("jobs", "list", "{}", "--units"), ("jobs", "list", "{}", "--json"), logs)


def environments(folder: Path) -> World:
    """A cache of environments."""
    from seatrial.runtime.environments import BuildRecord

    for name in ("envs/trl-0123456789ab", "layers/torch-cpu-0123456789ab"):
        place = folder / name
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "python").write_text("#!/bin/sh\n")
        built = BuildRecord(
            name="trl", lock_hash="x", python_version="3.11", built="2025-01-01T00:00:00Z", size_mb=1, layer=None, packages={"a": "1"}
        )
        (place / "complete.json").write_text(built.model_dump_json())
    return taken(folder, ("env", "list"), ("env", "list", "--json"), ("env", "check", "trl"), ("env", "check", "trl", "--json"))


def skills(folder: Path) -> World:
    """A project with skills installed."""
    from tests.cli.command import inside

    assert inside("skill", "install", "--to", folder / "skills").code == 0
    words = ("skill", "install", "--to", "{}/skills")
    return taken(folder, words, (*words, "--force"), (*words, "--json"))


def functional(folder: Path) -> World:
    """What a functional script left."""
    (folder / "logs").mkdir()
    (folder / "script.sh").write_text(
        "set -e\nuv run a.py grpo.max_num_steps=3 logger.log_dir=logs\nuv run tests/json_dump_tb_logs.py logs --output_path metrics.json\n"
        "uv run tests/check_metrics.py metrics.json 'max(data[\"train/loss\"]) < 1.05'\n"
    )
    (folder / "metrics.json").write_text(json.dumps({"train/loss": {str(step): 0.5 for step in (1, 2, 3)}}))
    (folder / "run.log").write_text("step 1\nMetric Checks\nSKIP: x\nall good\n")
    return taken(folder, ("functional", "judge"), ("functional", "judge", "1"), ("functional", "run", "{}/script.sh", "--dry-run"))


def facts(folder: Path) -> World:
    """Facts of a refit, as a probe reads them."""
    (folder / "facts.jsonl").write_bytes(_facts())
    return taken(folder, ("probe", "refit", "--facts", "{}/facts.jsonl", "--out", "{}/probe"))


def _facts() -> bytes:
    rows: list[Any] = []
    for path in sorted((DATA / "refit").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        rows += found if isinstance(found, list) else found.get("facts", [])
    return b"\n".join(json.dumps(row).encode() for row in rows[:200]) + b"\n"


def metrics(folder: Path) -> World:
    """Metrics of every kind."""
    events = sorted(DATA.rglob("*tfevents*"), key=lambda path: path.stat().st_size)[2]
    state = min(DATA.rglob("trainer_state.json"), key=lambda path: path.stat().st_size)
    shutil.copy(events, folder / "events.out.tfevents.1.host")
    (folder / "checkpoint-1").mkdir()
    shutil.copy(state, folder / "checkpoint-1" / "trainer_state.json")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "train/loss": 0.5, "x": None}) + "\n" for step in (1, 2, 3)))
    (folder / "metrics.json").write_text('{"train/loss": {"1": 0.5, "2": 0.25}, "score": 1}')
    names = ("events.out.tfevents.1.host", "checkpoint-1/trainer_state.json", "metrics.jsonl", "metrics.json")
    shown = tuple(("metrics", "show", f"{{}}/{name}") for name in names)
    dumped = tuple(("metrics", "dump", f"{{}}/{name}", "--output", "{}/out.json") for name in names)
    checked = tuple(("check", f"{{}}/{name}", "--", 'max(data["train/loss"]) < 1.05') for name in names)
    kept = tuple(("history", "import", f"{{}}/{name}", "--store", "{}/h.db") for name in names)
    return taken(folder, *shown, *dumped, *checked, *kept, ("metrics", "show", "{}"), ("check", "{}", "--json", "--", 'data["score"] > 0'))


def configured(folder: Path) -> World:
    """seatrial.toml with every kind of setting, the files of jobs, campaigns and groups."""
    (folder / "seatrial.toml").write_text(
        '[run]\nloop = "trl"\nlevels = "0,1"\n[limits]\nstall_minutes = 5.5\n[history]\nstore = "h.db"\ntrusted = ["main"]\n'
        '[slurm.a]\npartition = "gpu"\ntime = "0:30:00"\n[slurm.a.containers]\nx = "y"\n'
    )
    (folder / "jobs.toml").write_text(
        '[[jobs]]\nname = "c"\narray = 3\nparallel = 2\n[[jobs.components]]\nname = "client"\nrole = "client"\ncommand = ["a", "{index}"]\n'
        'gpus = 4\n[[jobs.components]]\nname = "s"\nrole = "service"\ncommand = ["b"]\n'
        'port = true\nready = { path = "/h", deadline_s = 18 }\n'
    )
    (folder / "campaign.toml").write_text(
        'name = "a"\nverifier = "exact"\n[policy]\nurl = "http://127.0.0.1:1/v1"\nmodel = "m"\n[[datasets]]\nname = "d"\n'
        'path = "rows.jsonl"\n'
        "limit = 2\n"
        "[sampling]\ntemperature = 1.0\nmax_tokens = 16\n[work]\nrepeats = 2\nshards = 1\n"
    )
    rows: list[Any] = [
        {"prompt": "p", "answer": "a", "tags": ["x"]},
        {"responses_create_params": {"input": "p", "metadata": {"extra_body": "{}"}}, "answer": "b"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    started = ("rollouts", "start", "{}/campaign.toml", "--out", "{}/c", "--dry-run")
    submit = ("jobs", "submit", "{}/jobs.toml", "--on", "slurm:a", "--config", "{}/seatrial.toml", "--dry-run", "--out", "{}/j")
    show = ("config", "show", "--config", "{}/seatrial.toml")
    return taken(folder, show, (*show, "--json"), started, started, submit, submit, ("prepare",), ("prepare",), ("prepare",))


WORLDS: dict[str, Callable[[Path], World]] = {
    made.__name__: made
    for made in (
        *(
            interrupted,
            unsealed,
            over,
            finished,
            compared,
            stopped,
            campaign,
            rollouts,
            bisect,
            replayed,
            jobs,
            environments,
            skills,
            functional,
            facts,
            metrics,
            configured,
        ),
    )
}


def damage(rng: random.Random, files: list[Path]) -> list[str]:
    """Damage one or two files; says which (up to a colon), and how."""
    said = []
    for path in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2)))):
        said.append(f"{path.name}: {mutate(rng, path)}")
    return said
