"""Which Gym is used, what it is told, and what is refused before anything starts."""

from __future__ import annotations

import random
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.rollouts.backends import gym_install, gym_servers
from seatrial.rollouts.backends.gym_install import GYM_LOCK
from seatrial.rollouts.backends.gym_servers import Block, PolicyEndpoint, Private, collect_words, environment, quoted, start_words
from seatrial.rollouts.campaign import Gym
from seatrial.runtime.servers import port_in_use
from seatrial.runtime.venvs import find_python, read_lock
from tests.rollouts.gym_instance import KEY, campaign, fake_installation

POLICY = PolicyEndpoint(("http://h:1/v1",), "org/model", KEY)


def about(**gym: Any) -> Gym:
    found = campaign("http://h/v1", gym=gym).gym
    assert found is not None
    return found


def test_the_lock_is_a_full_freeze_for_python_3_12() -> None:
    lock = read_lock(GYM_LOCK)
    assert (lock.python, lock.pins["nemo-gym"]) == ("3.12", "0.4.0")
    assert {"ray", "tiktoken", "uvicorn"} <= lock.pins.keys()
    assert lock.disk_mb >= 900


def test_its_python_is_found_where_only_pyenv_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = tmp_path / "versions" / "3.99.1" / "bin" / "python3.99"
    scripts = {"bin/python3.99": "echo not activated >&2; exit 127", "bin/pyenv": f"echo {real.parent.parent}", str(real): "echo 3.99"}
    for name, script in scripts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert find_python("3.99") == str(real)
    real.unlink()
    with pytest.raises(BlockedError, match=r"no working python3.99"):
        find_python("3.99")


def test_an_environment_that_is_not_built_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path))
    with pytest.raises(BlockedError) as caught:
        gym_install.find_gym(about())
    assert caught.value.fix == "seatrial env build gym"


@pytest.mark.parametrize(
    ("gym", "message"),
    [
        ({"environment": "other"}, "'other' is not known"),
        ({"python": "/nowhere/python"}, "/nowhere/python is not there"),
        ({"python": sys.executable}, "nemo-gym is not installed there"),
    ],
)
def test_a_gym_that_is_none_is_refused(gym: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        gym_install.find_gym(about(**gym))


@pytest.mark.parametrize(
    ("gym", "message"),
    [
        ({"run_arguments": ["+head_server.port=1"]}, "run_arguments.*head_server.port"),
        ({"run_arguments": ["++policy_api_key=x"]}, "policy_api_key cannot be said"),
        ({"driver": "collector", "collect_arguments": ["--temperature", "1"]}, "--temperature"),
        ({"driver": "collector", "collect_arguments": ["+responses_create_params.top_p=1"]}, "top_p"),
        ({"driver": "collector", "collect_arguments": ["+num_repeats=4"]}, "num_repeats"),
        ({"resources": ["mcq"]}, "no resources_servers/mcq/configs/mcq.yaml"),
        ({"resources": [], "config_paths": ["own,1.yaml"]}, "own,1.yaml"),
        ({"directory": "/nowhere"}, "/nowhere is no directory"),
    ],
)
def test_what_would_fail_or_be_ignored_is_refused(tmp_path: Path, gym: dict[str, Any], message: str) -> None:
    (tmp_path / "own,1.yaml").touch()
    with pytest.raises(UserError, match=message) as caught:
        gym_install.check_gym(about(**{"directory": str(tmp_path), **gym}), fake_installation(tmp_path / "gym"))
    assert caught.value.fix


def test_a_name_that_is_nearly_right_is_offered(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        gym_install.check_gym(about(resources=["mcqaa"]), fake_installation(tmp_path))
    assert "did you mean resources_servers/mcqa?" in caught.value.fix


def test_servers_share_only_a_venv_and_run_only_from_a_plain_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="such signs"):
        gym_install.check_gym(about(), fake_installation(tmp_path / "a b"))
    found = fake_installation(tmp_path / "ab")
    gym_install.check_gym(about(), found)
    (tmp_path / "ab" / "bin" / "activate").unlink()
    with pytest.raises(UserError, match="no venv"):
        gym_install.check_gym(about(), found)


def test_the_key_is_in_no_word_and_gym_is_told_the_variable(tmp_path: Path) -> None:
    installation, private = fake_installation(tmp_path), Private(tmp_path / "p")
    with closing(Block()) as block:
        words = start_words(about(run_arguments=["+uv_venv_dir=/mine", "+x=1"]), installation, block, POLICY, private)
        assert [f"+head_server.port={block.head}", f"+port_range_low={block.low}"] == [w for w in words if "_low" in w or "r.port" in w]
    assert "+policy_api_key=${oc.env:SEATRIAL_POLICY_API_KEY}" in words
    assert "+policy_model_name='org/model'" in words
    assert not any(KEY in word for word in words)
    assert [word for word in words if "uv_venv_dir" in word] == ["+uv_venv_dir=/mine"]
    assert "+config_paths=[resources_servers/mcqa/configs/mcqa.yaml,responses_api_models/vllm_model/configs/vllm_model.yaml]" in words


def test_logs_of_its_own_are_asked_for_only_where_gym_can_bear_it(tmp_path: Path) -> None:
    with closing(Block()) as block:
        given = (fake_installation(tmp_path), block, POLICY, Private(tmp_path / "p"))
        shared, own = start_words(about(), *given), start_words(about(shared_environments=False), *given)
    assert f"+nemo_gym_log_dir='{tmp_path / 'p' / 'l'}'" in shared
    assert "+skip_venv_if_present=true" in shared
    assert not any("nemo_gym_log_dir" in word or "skip_venv" in word for word in own)
    assert any(word.startswith("+uv_cache_dir=") for word in own)


def test_several_servers_of_a_policy_are_a_list_and_any_text_is_quoted(tmp_path: Path) -> None:
    with closing(Block()) as block:
        several = PolicyEndpoint(("http://a/v1", "http://b/v1"), "it's")
        words = start_words(about(), fake_installation(tmp_path), block, several, Private(tmp_path))
    assert "+policy_base_url=['http://a/v1','http://b/v1']" in words
    assert "+policy_model_name='it\\'s'" in words
    assert quoted("a b") == "'a b'"


def test_the_collector_is_told_the_seam(tmp_path: Path) -> None:
    gym = about(driver="collector", collect_arguments=["+num_samples_in_parallel=3"])
    words = collect_words(gym, fake_installation(tmp_path), 7, tmp_path / "o.jsonl", 64)
    assert words[2:6] == ("eval", "run", "--no-serve", "--resume")
    assert "+disable_aggregation=true" in words
    assert [word for word in words if "parallel" in word] == ["+num_samples_in_parallel=3"]


def test_the_environment_ties_an_instance_to_nothing_else(tmp_path: Path) -> None:
    given = {"RAY_ADDRESS": "auto", "PATH": "/bin", "VIRTUAL_ENV": "/v", "no_proxy": "corp", "NEMO_SKILLS_SANDBOX_HOST": "old", "X": "1"}
    found = environment(given, fake_installation(tmp_path), POLICY, Private(tmp_path / "p"), ("h", 6000))
    assert "RAY_ADDRESS" not in found
    assert "VIRTUAL_ENV" not in found
    assert found["SEATRIAL_POLICY_API_KEY"] == KEY
    assert (found["NEMO_SKILLS_SANDBOX_HOST"], found["NEMO_SKILLS_SANDBOX_PORT"]) == ("h", "6000")
    assert found["no_proxy"] == found["NO_PROXY"] == "corp,127.0.0.1,localhost"
    assert found["PATH"].split(":") == [str(tmp_path / "bin"), f"{sys.base_prefix}/bin", "/bin"]
    assert (found["RAY_TMPDIR"], found["UV_PYTHON_DOWNLOADS"], found["X"]) == (str(tmp_path / "p" / "r"), "never", "1")
    passed = environment(given, fake_installation(tmp_path / "2"), PolicyEndpoint(("u",), "m"), Private(tmp_path), None)
    assert (passed["SEATRIAL_POLICY_API_KEY"], passed["NEMO_SKILLS_SANDBOX_HOST"]) == ("EMPTY", "old")


def two_free_blocks() -> int:
    """Where two blocks begin in which nobody listens: other tests start servers meanwhile."""
    starts = random.sample(range(gym_servers._LOW, gym_servers._HIGH - gym_servers.SIZE, gym_servers.SIZE), 60)
    return next(start for start in starts if not any(map(port_in_use, range(start, start + 2 * gym_servers.SIZE))))


def test_two_instances_never_share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    start = two_free_blocks()
    monkeypatch.setattr(gym_servers, "_LOW", start)
    monkeypatch.setattr(gym_servers, "_HIGH", start + gym_servers.SIZE + 1)
    with closing(Block()) as first, closing(Block()) as second:
        assert {first.head, second.head} == {start + 1, start + gym_servers.SIZE + 1}
        with pytest.raises(BlockedError, match="no 200 free ports"):
            Block()
    monkeypatch.setattr(gym_servers, "_HIGH", start + 1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", start + 101))
        listener.listen()
        with pytest.raises(BlockedError):
            Block()
    Block().close()
