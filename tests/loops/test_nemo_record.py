"""The real scripts with stand-ins: what they would run, and that nothing of it happens.

With SEATRIAL_NEMO_RL_CHECKOUT=DIR the scripts of a real checkout are recorded too, and compared with those of the fixture.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.loops.hydra import override_key
from seatrial.loops.nemo_rl import script_dry_run as module
from seatrial.loops.nemo_rl.script_dry_run import RecordedScript, ScriptError, ShadowCheckout, record_script
from seatrial.runtime.command import run_command
from tests.loops.nemo_rl_checkout import REAL, Bench, make_bench

FUNCTIONAL = "tests/functional"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


def recorded(checkout: Path, name: str, *words: str, **variables: str) -> RecordedScript:
    place = name if "/" in name else f"{FUNCTIONAL}/{name}.sh"
    return record_script(checkout / place, checkout, words, {**os.environ, "PYTHONPATH": "/mine", **variables})


def script(bench: Bench, text: str) -> str:
    """A script of ours among those of the checkout."""
    (bench.nemo_rl / FUNCTIONAL / "own.sh").write_text(f"SCRIPT_DIR=$(cd $(dirname $0) && pwd)\nROOT=$SCRIPT_DIR/../..\n{text}\n")
    return "own"


def test_what_the_smoke_would_run(bench: Bench) -> None:
    made = recorded(bench.nemo_rl, "grpo_megatron", "grpo.seed=7", "--config", "/other.yaml")
    (training,) = made.trainings
    assert training.program == "examples/run_grpo.py"
    assert training.argv[:4] == ("uv", "run", "coverage", "run")
    assert training.config == "/other.yaml", "the last one counts"
    assert training.overrides[0] == "policy.model_name=Qwen/Qwen2.5-0.5B"
    assert training.overrides[-1] == "grpo.seed=7"
    assert f"logger.log_dir={bench.nemo_rl}/tests/functional/grpo_megatron/logs" in training.overrides
    assert len(made.assertions) == 5
    assert made.assertions[0] == 'max(data["train/token_mult_prob_error"]) < 1.05'
    assert made.files == tuple(f"tests/functional/grpo_megatron/{name}" for name in ("logs/", "metrics.json", "run.log"))
    assert made.ended == 0


def test_the_environment_is_told_as_the_run_would_have_it(bench: Bench) -> None:
    environment = recorded(bench.nemo_rl, "grpo_megatron", MINE="1").trainings[0].environment
    assert environment["PYTHONPATH"] == f"{bench.nemo_rl}:/mine"
    assert environment["MINE"] == "1"
    for name in ("PATH", "HOME", "TMPDIR", "BASH_ENV", "GIT_CONFIG_GLOBAL"):
        assert environment.get(name) == os.environ.get(name), name
    assert not [value for value in environment.values() if "seatrial-record" in value]


def test_no_value_of_the_users_environment_is_written_down(bench: Bench) -> None:
    """Tokens are among them. What the script sets or unsets is told all the same."""
    name = script(bench, "export NEW=mine CHANGED=after; unset GONE; uv run $ROOT/examples/run_grpo.py")
    given = {**os.environ, "HF_TOKEN": "hf_verysecret", "CHANGED": "secret-before", "GONE": "secret-gone"}
    stage = ShadowCheckout(bench.root / "stage", bench.nemo_rl, Path(FUNCTIONAL, f"{name}.sh"), given)
    stage.build()
    assert run_command(["bash", stage.script], 60, cwd=stage.root, env=stage.environment()).code == 0
    written = [path for path in stage.folder.rglob("*") if path.is_file() and not path.is_relative_to(stage.root)]
    assert stage.calls in written
    assert not [path for path in written if "secret" in path.read_text()]
    (row,) = stage.rows()
    kept = {key: row["environment"].get(key) for key in ("HF_TOKEN", "NEW", "CHANGED", "GONE")}
    assert kept == {"HF_TOKEN": "hf_verysecret", "NEW": "mine", "CHANGED": "after", "GONE": None}


def test_a_script_that_trains_several_times(bench: Bench) -> None:
    five = recorded(bench.nemo_rl, "sft_resume_diamond").trainings
    assert [training.program for training in five] == ["examples/run_sft.py"] * 5
    assert [training.config for training in five] == [None] * 5
    last = [dict(word.partition("=")[::2] for word in training.overrides) for training in five]
    assert [Path(words["logger.log_dir"]).name for words in last] == ["baseline", "dtensor", "dtensor", "mcore", "mcore"]
    assert [words["policy.megatron_cfg.enabled"] for words in last] == ["false"] * 3 + ["true"] * 2


def test_the_lines_that_only_a_real_run_prints_do_not_end_the_recording(bench: Bench) -> None:
    made = recorded(bench.nemo_rl, "modelopt_quant_rollout")
    assert len(made.trainings) == 2
    assert made.trainings[0].argv[:6] == ("uv", "run", "--no-sync", "--extra", "modelopt", "--group")
    assert made.trainings[0].environment["NRL_MEGATRON_CHECKPOINT_DIR"] == f"{bench.nemo_rl}/.cache/w4a16_real_quant"
    assert "++policy.generation.real_quant=true" in made.trainings[0].overrides
    assert made.assertions[::3] == ('data["train/gen_kl_error"]["1"] < 0.003', 'max(data["train/token_mult_prob_error"]) < 1.15')
    assert recorded(bench.nemo_rl, "grpo_megatron_eagle3_online").assertions == ('min(data["train/draft_loss"]) > 0',)


def test_a_recipe_is_recorded_with_its_assertions(bench: Bench) -> None:
    made = recorded(bench.nemo_rl, "tests/test_suites/llm/grpo-llama3.2-1b-instruct-1n8g-megatron.sh", "grpo.max_num_steps=2")
    assert made.trainings[0].program == "examples/run_grpo.py"
    assert str(made.trainings[0].config).endswith("/configs/recipes/llm/grpo-llama3.2-1b-instruct-1n8g-megatron.yaml")
    assert made.assertions[1] == 'data["train/reward"]["500"] > 0.1'


def test_nothing_of_it_happens(bench: Bench) -> None:
    """Evidence, the user's git configuration, the folder for checkpoints and the rest of the checkout stay as they are."""
    evidence = bench.nemo_rl / FUNCTIONAL / "own" / "run.log"
    evidence.parent.mkdir()
    evidence.write_text("earlier")
    outside = bench.root / "checkpoints"
    outside.mkdir()
    marks = {path: path.stat().st_mtime_ns for path in bench.root.rglob("*")}
    name = script(
        bench,
        f"""git config --global --add safe.directory x; echo y > ~/.gitconfig; apt-get install z; sudo reboot; pkill -9 python
        rm -rf $SCRIPT_DIR/own {outside}; rm -rf $ROOT/nemo_rl/utils; rm -rf $ROOT/3rdparty
        echo token > $ROOT/3rdparty/Megatron-Bridge-workspace/Megatron-Bridge/env.yaml; mkdir -p $ROOT/results $SCRIPT_DIR/own
        uv run $ROOT/examples/run_grpo.py; touch $SCRIPT_DIR/own/run.log""",
    )
    marks.pop(bench.nemo_rl / FUNCTIONAL)
    made = recorded(bench.nemo_rl, name, HOME=str(bench.root))
    assert made.files == ("tests/functional/own/run.log",)
    assert {path: path.stat().st_mtime_ns for path in marks} == marks
    assert evidence.read_text() == "earlier"


@pytest.mark.parametrize(
    "line",
    [
        "python3 -m coverage run $ROOT/examples/run_grpo.py a=1",
        "python $ROOT/examples/run_grpo.py --config=c.yaml a=1",
        "cd $ROOT; uv run examples/run_grpo.py --config c.yaml a=1",
        "cd $ROOT; uv run ./examples/run_grpo.py a=1 & wait",
        "bash $SCRIPT_DIR/other.sh",
    ],
)
def test_training_is_recognised_however_it_is_started(bench: Bench, line: str) -> None:
    (bench.nemo_rl / FUNCTIONAL / "other.sh").write_text('uv run "$(dirname $0)/../../examples/run_grpo.py" a=1\n')
    (training,) = recorded(bench.nemo_rl, script(bench, line)).trainings
    assert training.program == "examples/run_grpo.py"
    assert training.overrides == ("a=1",)
    assert training.config == ("c.yaml" if "c.yaml" in line else None)


def test_a_configuration_that_the_script_writes_is_kept(bench: Bench) -> None:
    line = 'mkdir $SCRIPT_DIR/own; echo "defaults: $SCRIPT_DIR/x.yaml" > $SCRIPT_DIR/own/c.yaml'
    (training,) = recorded(
        bench.nemo_rl, script(bench, f"{line}; uv run $ROOT/examples/run_grpo.py --config $SCRIPT_DIR/own/c.yaml")
    ).trainings
    assert training.text == f"defaults: {bench.nemo_rl}/tests/functional/x.yaml\n"
    assert recorded(bench.nemo_rl, "grpo_megatron").trainings[0].text is None


def test_a_script_that_never_trains_shows_its_last_words(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScriptError, match=r"code 1 before training: .*own\.sh: line 4: GONE: unbound variable") as caught:
        recorded(bench.nemo_rl, script(bench, "set -xeu\necho $GONE"))
    assert "seatrial-record" not in str(caught.value)
    with pytest.raises(ScriptError, match="code 0 before training"):
        recorded(
            bench.nemo_rl, script(bench, "uv run python - <<EOF\nx\nEOF\nuv run examples/other.py; exit 0\nuv run examples/run_grpo.py")
        )
    with pytest.raises(ScriptError, match="code 1 before training"):
        recorded(bench.nemo_rl, script(bench, "set -e\nfalse\nuv run $ROOT/examples/run_grpo.py"))
    monkeypatch.setattr(module, "SCRIPT_SECONDS", 0.2)
    with pytest.raises(ScriptError, match=r"no end within 0\.2 s"):
        recorded(bench.nemo_rl, script(bench, "tail -f /dev/null | cat"))
    with pytest.raises(ScriptError, match="No such file"):
        recorded(bench.root / "nowhere", "own")


real = pytest.mark.skipif(not REAL, reason="no real checkout: SEATRIAL_NEMO_RL_CHECKOUT=DIR")
NAMES = sorted(path.stem for path in (Path(__file__).parents[1] / "data/nemo_rl/checkout" / FUNCTIONAL).glob("*.sh"))


@pytest.mark.real
@real
@pytest.mark.parametrize("name", NAMES)
def test_the_fixture_has_the_interface_of_the_real_checkout(bench: Bench, name: str) -> None:
    place = Path(str(REAL))
    ours, theirs = recorded(bench.nemo_rl, name), recorded(place, name)
    assert ours.assertions == theirs.assertions
    assert len(ours.trainings) == len(theirs.trainings)
    for own, their in zip(ours.trainings, theirs.trainings, strict=True):
        assert own.program == their.program
        assert str(own.config).removeprefix(str(bench.nemo_rl)) == str(their.config).removeprefix(str(place))
        assert set(map(override_key, own.overrides)) == set(map(override_key, their.overrides))
