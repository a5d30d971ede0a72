"""What is known before a round is launched."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.rollouts import campaign_rounds, sandbox
from seatrial.rollouts.backends import gym_install
from seatrial.rollouts.campaign import Campaign, api_key_of
from tests.rollouts.gym_instance import fake_installation
from tests.rollouts.test_campaign import SERVER, made

JUDGE = {"kind": "judge", "url": "http://j/v1", "model": "m", "key_env": "S4_JUDGE_KEY"}


def keyed(**more: Any) -> Campaign:
    return made(policy={"url": "http://h/v1", "key_env": "S4_KEY"}, **more)


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("S4_KEY", raising=False)
    with pytest.raises(UserError, match="variable S4_KEY is to hold an API key") as caught:
        campaign_rounds.check_campaign(keyed(), here=True)
    assert caught.value.fix.startswith("export S4_KEY=")
    monkeypatch.setenv("S4_KEY", "secret")
    campaign_rounds.check_campaign(keyed(), here=True)
    assert api_key_of("S4_KEY") == "secret"
    assert api_key_of(None) is None


def test_a_key_may_end_in_a_newline_and_nothing_else_that_no_header_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S4_KEY", "secret\n")
    assert api_key_of("S4_KEY") == "secret"
    monkeypatch.setenv("S4_KEY", "sec\nret")
    with pytest.raises(UserError, match="holds characters that no header can") as caught:
        api_key_of("S4_KEY")
    assert "ret" not in caught.value.message.replace("header", "")


def test_a_sampling_parameter_that_cannot_be_said_is_named() -> None:
    with pytest.raises(UserError, match=r"sampling\.n cannot be said"):
        campaign_rounds.check_campaign(made(sampling={"n": 2}), here=True)


def test_so_is_the_key_of_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S4_KEY", "secret")
    with pytest.raises(UserError, match="S4_JUDGE_KEY"):
        campaign_rounds.check_campaign(keyed(verifier="j", verifiers={"j": JUDGE}), here=False)


def test_an_empty_key_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S4_KEY", "")
    with pytest.raises(UserError, match="is not set here"):
        api_key_of("S4_KEY")


def test_math_needs_its_package_where_the_collector_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs math-verify") as caught:
        campaign_rounds.check_campaign(made(verifier="math"), here=False)
    assert caught.value.fix == 'pip install "seatrial[rollouts]"'
    campaign_rounds.check_campaign(made(verifier="math", collector={"container": "tools"}), here=False)


def test_code_needs_a_sandbox_on_this_machine_only_if_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "why_not", lambda: "no bwrap")
    with pytest.raises(BlockedError, match="no sandbox here: no bwrap"):
        campaign_rounds.check_campaign(made(verifier="code"), here=True)
    campaign_rounds.check_campaign(made(verifier="code"), here=False)
    with pytest.raises(BlockedError, match="no sandbox here"):
        campaign_rounds.check_campaign(made(gym={"resources": ["code_gen"]}, verifier=None, sandbox_service=True), here=True)


def test_gyms_environment_is_built_only_where_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    class Cache:
        def find(self, name: str, lock: Path) -> None:
            return None

        def build(self, name: str, lock: Path, progress: object, line_filter: object) -> None:
            assert lock.is_file()
            built.append(name)

    monkeypatch.setattr(campaign_rounds, "Environments", Cache)
    campaign_rounds.build_environments(made(), print)
    campaign_rounds.build_environments(made(gym={"resources": ["mcqa"], "python": "/opt/python"}, verifier=None), print)
    assert built == []
    campaign_rounds.build_environments(made(gym={"resources": ["mcqa"]}, verifier=None), print)
    assert built == ["gym"]
    monkeypatch.setattr(Cache, "find", lambda self, name, lock: object())
    monkeypatch.setattr(gym_install, "find_gym", lambda gym: None)
    monkeypatch.setattr(gym_install, "check_gym", lambda gym, found: None)
    campaign_rounds.build_environments(made(gym={"resources": ["mcqa"]}, verifier=None), print)
    assert built == ["gym"]


def test_a_server_that_needs_gpus_is_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = made(policy={"server": SERVER})
    monkeypatch.setattr(campaign_rounds, "gpus_here", lambda: ())
    with pytest.raises(UserError, match="this machine has none"):
        campaign_rounds.check_campaign(hosted, here=True)
    campaign_rounds.check_campaign(hosted, here=False)
    monkeypatch.setattr(campaign_rounds, "gpus_here", lambda: ("0",))
    campaign_rounds.check_campaign(hosted, here=True)


def scored(function: str, **more: Any) -> Campaign:
    return made(verifier="mine", verifiers={"mine": {"kind": "function", "function": function}}, **more)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "score", "cannot read"),
        ("def score(row, text): return 1\n", "scores", "has no scores"),
        ("import os\n", "score", "has no score"),
        ("def score(:\n", "score", "invalid syntax"),
        ("def score(): ...\n", "a.b", "names no function"),
    ],
)
def test_a_function_that_is_not_there_is_refused_without_running_it(tmp_path: Path, text: str | None, name: str, message: str) -> None:
    if text is not None:
        (tmp_path / "fn.py").write_text(text)
    with pytest.raises(UserError, match=message):
        campaign_rounds.check_campaign(scored(f"{tmp_path}/fn.py:{name}"), here=False)


@pytest.mark.parametrize("text", ["def score(): ...", "score = print", "from x import y as score", "from x import *", "class score: ..."])
def test_what_may_be_there_is_left_to_the_call(tmp_path: Path, text: str) -> None:
    (tmp_path / "fn.py").write_text(f"raise SystemExit\nif 1:\n    {text}\n" if "*" not in text else text)
    campaign_rounds.check_campaign(scored(f"{tmp_path}/fn.py:score"), here=True)


def test_a_module_that_nobody_has_is_refused_unless_a_container_may_have_it() -> None:
    with pytest.raises(UserError, match=r"there is no module nobody_has\.this"):
        campaign_rounds.check_campaign(scored("nobody_has.this:score"), here=True)
    campaign_rounds.check_campaign(scored("nobody_has.this:score", collector={"image": "tools.sqsh"}), here=True)


def test_gym_is_checked_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake_installation(tmp_path)
    monkeypatch.setattr(gym_install, "find_gym", lambda _: found)
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    wrong = made(gym={"resources": ["mcqaa"], "python": "/p"}, verifier=None)
    with pytest.raises(UserError, match="there is no resources_servers/mcqaa") as caught:
        campaign_rounds.check_campaign(wrong, here=False)
    assert "did you mean resources_servers/mcqa?" in caught.value.fix
    right = made(gym={"resources": ["mcqa"], "python": "/p"}, verifier=None)
    campaign_rounds.check_campaign(right, here=False)
    with pytest.raises(BlockedError, match="uv, which is not on PATH"):
        campaign_rounds.check_campaign(right, here=True)
    campaign_rounds.check_campaign(
        made(gym={"resources": ["mcqaa"], "python": "/p"}, verifier=None, collector={"image": "gym.sqsh"}), here=True
    )


def test_gym_that_is_not_built_yet_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cache:
        def find(self, name: str, lock: Path) -> None:
            return None

    monkeypatch.setattr(campaign_rounds, "Environments", Cache)
    monkeypatch.setattr(shutil, "which", lambda name, path: "/bin/uv")
    campaign_rounds.check_campaign(made(gym={"resources": ["mcqaa"]}, verifier=None), here=True)


def test_a_slip_among_the_parameters_is_warned_of() -> None:
    assert campaign_rounds.campaign_warnings(made(sampling={"temprature": 1, "max_token": 3, "min_p": 0.1, "stop": "x", "mine": 1})) == [
        "sampling.temprature is passed on as it is; did you mean temperature?",
        "sampling.max_token is passed on as it is; did you mean max_tokens?",
    ]
