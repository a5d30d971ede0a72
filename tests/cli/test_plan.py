"""`seatrial plan --auto` on real git repositories: which levels a diff requires, and from what."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from seatrial.loops import get_loop
from tests.cli.command import inside, seatrial

pytestmark = pytest.mark.slow

SETTINGS = ("user.name=T", "user.email=t@example.org", "protocol.file.allow=always", "init.defaultBranch=main")
MODEL = "src/models/modeling_x.py"
DEFAULTS = [level.number for level in get_loop("trl").levels() if level.default]


def git(repo: Path, *arguments: str) -> str:
    words = [word for setting in SETTINGS for word in ("-c", setting)]
    done = subprocess.run(["git", *words, "-C", os.fspath(repo), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(repo: Path, files: Mapping[str, str]) -> str:
    for name, content in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(content, encoding="utf-8")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "--allow-empty", "-m", "change")
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "my repo ü"
    root.mkdir()
    git(root, "init", "-q")
    text = "".join(f"line {index} of a file that is long enough to be found again\n" for index in range(20))
    commit(root, {MODEL: text, "src/lora.py": text, "pkg/__init__.py": "", "docs/a b ü.md": text})
    return root


def plan(repo: Path, *options: str) -> dict[str, Any]:
    answer = inside("plan", "trl", "--auto", "--change", repo, "--json", *options, cwd=repo.parent, HOME=str(repo.parent))
    assert answer.code == 0, answer.err
    made: dict[str, Any] = json.loads(answer.out)
    return made


def levels(made: dict[str, Any]) -> list[int]:
    return [level["number"] for level in made["levels"]]


def reasons(made: dict[str, Any], number: int) -> str:
    return "; ".join(next(level["reasons"] for level in made["levels"] if level["number"] == number))


def test_a_modified_file_requires_its_levels(repo: Path) -> None:
    (repo / MODEL).write_text("x = 1\n")
    made = plan(repo)
    assert {0, 2} <= set(levels(made)) < set(range(7))
    assert f"{MODEL} matches **/modeling_*.py" in reasons(made, 2)
    assert made["unmatched"] == []
    assert made["changes"][0]["dirty"] == [MODEL]


def test_both_names_of_a_renamed_file_count(repo: Path) -> None:
    git(repo, "mv", "src/lora.py", "src/router.py")
    commit(repo, {})
    made = plan(repo, "--base", "HEAD~1")
    assert 1 in levels(made)
    assert "src/lora.py matches **/*lora*" in reasons(made, 1)
    assert made["unmatched"] == ["my_repo_ü: src/router.py"]
    assert 6 in levels(made)  # the new name is known to no level: the defaults


def test_a_deleted_file_counts(repo: Path) -> None:
    (repo / "src/lora.py").unlink()
    made = plan(repo)
    assert "src/lora.py matches **/*lora*" in reasons(made, 1)


def test_an_untracked_file_counts_with_its_words(repo: Path) -> None:
    (repo / "src" / "mixtral_moe.py").write_text("self.router = Router(num_experts=8)\n")
    made = plan(repo)
    assert "mixtral_moe.py matches" in reasons(made, 5)
    assert "mixtral_moe.py:1 says 'router'" in reasons(made, 5)


def test_a_path_with_spaces_and_letters_beyond_ascii_fans_out(repo: Path) -> None:
    (repo / "docs" / "a b ü.md").write_text("new\n")
    made = plan(repo)
    assert levels(made) == DEFAULTS
    assert made["unmatched"] == ["my_repo_ü: docs/a b ü.md"]
    assert "match no level" in reasons(made, 6)


def test_an_empty_diff_fans_out(repo: Path) -> None:
    made = plan(repo, "--base", "HEAD")
    assert levels(made) == DEFAULTS
    assert "no changed path was found" in reasons(made, 6)


def test_a_detached_head_is_compared_with_its_base(repo: Path) -> None:
    first = git(repo, "rev-parse", "HEAD")
    commit(repo, {"src/accelerate_x/fsdp.py": "pass\n"})
    git(repo, "checkout", "-q", "--detach")
    made = plan(repo, "--base", first)
    assert "fsdp.py matches" in reasons(made, 4)
    assert made["changes"][0]["branch"] is None


def test_a_branch_is_compared_with_where_it_left_main(repo: Path) -> None:
    git(repo, "checkout", "-q", "-b", "feature")
    commit(repo, {MODEL: "feature\n"})
    git(repo, "checkout", "-q", "main")
    commit(repo, {"src/lora.py": "main went on\n"})
    git(repo, "checkout", "-q", "feature")
    made = plan(repo)
    assert MODEL in reasons(made, 0)
    assert 1 not in levels(made)  # what main did meanwhile is not the change


def test_a_moved_submodule_counts_with_the_paths_inside_it(repo: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    commit(inner, {"a.py": "1\n"})
    git(repo, "submodule", "add", "-q", str(inner), "third/party")
    commit(repo, {})
    commit(repo / "third" / "party", {"peft/tuners/lora.py": "2\n"})
    commit(repo, {})
    made = plan(repo, "--base", "HEAD~1")
    assert "third/party/peft/tuners/lora.py matches" in reasons(made, 1)
    assert made["changes"][0]["submodules"][0]["path"] == "third/party"


def test_requested_levels_are_added_to_the_required_ones(repo: Path) -> None:
    (repo / MODEL).write_text("x = 1\n")
    without = levels(plan(repo))
    made = plan(repo, "--level", "4")
    assert levels(made) == sorted([*without, 4])
    assert reasons(made, 4) == "requested"


def test_several_changes_add_up_and_may_be_named(repo: Path, tmp_path: Path) -> None:
    other = tmp_path / "a=b"
    other.mkdir()
    git(other, "init", "-q")
    commit(other, {"src/lora_x.py": "1\n"})
    (repo / MODEL).write_text("x = 1\n")
    answer = inside("plan", "trl", "--auto", "--change", f"my name/x={repo}", "--change", other, "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert [change["name"] for change in found["changes"]] == ["my_name_x", "a_b"]
    assert "lora_x.py" in reasons(found, 1)
    assert MODEL in reasons(found, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--auto",), "--auto needs a change to read"),
        (("--auto", "--change", "/"), "/"),
        (("--auto", "--change", "/no/such/place"), "/no/such/place"),
        (("--level", "7"), "unknown level 7"),
        (("--set", "run.lvl=1"), "unknown key 'run.lvl'"),
    ],
)
def test_wrong_input_is_2(options: tuple[str, ...], message: str) -> None:
    answer = inside("plan", "trl", *options, cwd=Path("/"))
    assert answer.code == 2
    assert message in answer.err
    assert "Traceback" not in answer.err


def test_an_unknown_base_and_a_change_given_twice_are_2(repo: Path) -> None:
    answer = inside("plan", "trl", "--auto", "--change", repo, "--base", "nope")
    assert (answer.code, "unknown base 'nope'" in answer.err) == (2, True)
    answer = inside("plan", "trl", "--auto", "--change", repo, "--change", repo / "src")
    assert (answer.code, "given twice" in answer.err) == (2, True)


def test_people_read_why_and_what_it_costs(repo: Path) -> None:
    (repo / MODEL).write_text("x = 1\n")
    answer = seatrial("plan", "trl", "--auto", "--change", repo, "--level", "3")
    assert answer.code == 0
    assert "level 2: Separate generation process" in answer.out
    assert f"because my_repo_ü: {MODEL} matches" in answer.out
    assert "level 3: vLLM generation" in answer.out
    assert "[will be Skipped: " not in answer.out
    assert "[will be Skipped: " in seatrial("plan", "verl", "--device", "cpu", "--level", "0,2").out
    assert "not requested: " in answer.out
    assert "nothing was run" in answer.out
    assert git(repo, "status", "--porcelain") == f"M {MODEL}"


def test_the_configuration_may_hold_everything(repo: Path, tmp_path: Path) -> None:
    (repo / MODEL).write_text("x = 1\n")
    text = f"[run]\nlevels = '5'\narguments = ['--beta', '0']\n[change]\npaths = ['{repo}']\n"
    (tmp_path / "seatrial.toml").write_text(text)
    made = json.loads(inside("plan", "--json", cwd=tmp_path).out)
    assert (levels(made), made["arguments"], made["changes"][0]["path"]) == ([5], ["--beta", "0"], str(repo))
    made = json.loads(inside("plan", "--json", "--level", "1", cwd=tmp_path).out)
    assert levels(made) == [1]


def test_commands_are_shown_as_they_will_run() -> None:
    answer = inside("plan", "trl", "--level", "0", "--commands")
    assert answer.code == 0
    shown = answer.out.partition("export PYTHONPATH=")[2]
    assert "# level 0: " in shown
    assert "seatrial.instruments.trl" in shown
    assert '"$OUT"' in shown
    assert "# level 1" not in shown


MAPPING = "src/megatron/bridge/models/conversion/param_mapping.py"


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    root = tmp_path / "bridge"
    root.mkdir()
    git(root, "init", "-q")
    files = {"src/megatron/bridge/__init__.py": "", MAPPING: "class AutoMapping:\n    a = 1\n", "docs/lora.md": "x\n"}
    commit(root, {**files, "src/megatron/bridge/recipes/a.py": "x\n"})
    return root


def of_bridge(root: Path, *options: str) -> list[str]:
    return ["plan", "verl", "--auto", "--change", f"bridge={root}", *options]


def test_explain_shows_the_line_that_asks_for_a_level_without_its_secrets(bridge: Path) -> None:
    secret = "hf_" + "aB3" * 12
    (bridge / MAPPING).write_text(f"class AutoMapping:\n    a = 1\n    fp8 = load(token='{secret}', more='{'x' * 200}')\n")
    answer = inside(*of_bridge(bridge, "--explain"))
    assert answer.code == 0, answer.err
    assert f"level 1  bridge: {MAPPING} matches " in answer.out
    assert f"level 4  bridge: {MAPPING}:3 says 'fp8' (quantization, ModelOpt, FP8)\n           + fp8 = load(token=" in answer.out
    assert f"level 0  bridge: {MAPPING}:3 is in AutoMapping, which verl imports" in answer.out
    assert secret not in answer.out
    assert "x" * 130 not in answer.out
    made = json.loads(inside(*of_bridge(bridge, "--explain", "--json")).out)
    (cause,) = [one for one in made["causes"] if one["level"] == 4]
    assert (cause["path"], cause["line"], cause["rule"]) == (MAPPING, 3, "says 'fp8'")
    assert secret not in json.dumps(made)
    assert "causes" not in json.loads(inside(*of_bridge(bridge, "--json")).out)


def test_papers_alone_require_no_level_and_a_trial_of_them_is_skipped(bridge: Path, tmp_path: Path) -> None:
    (bridge / "docs/lora.md").write_text("lora fp8 mtp_num_layers\n")
    (bridge / "src/megatron/bridge/recipes/a.py").write_text("lora\n")
    answer = inside(*of_bridge(bridge, "--explain"))
    assert answer.code == 0, answer.err
    assert "no RL level is required" in answer.out
    assert "would be Skipped" in answer.out
    assert "no line or path asks for a level" in answer.out
    out = tmp_path / "run"
    answer = inside("run", *of_bridge(bridge)[1:], "--out", out)
    assert answer.code == 77, answer.out + answer.err
    report = json.loads((out / "report.json").read_text())
    assert (report["result"], "nothing to run: " in report["answer"]) == ("Skipped", True)
    assert levels(json.loads(inside(*of_bridge(bridge, "--json", "--level", "1")).out)) == [1]


def test_explain_without_a_diff_is_2() -> None:
    answer = inside("plan", "verl", "--explain")
    assert (answer.code, "add --auto" in answer.err) == (2, True)
