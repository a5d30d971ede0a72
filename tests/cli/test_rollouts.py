"""`seatrial rollouts start`, `resume`, `cancel`: flags and files, what is refused, exit codes. Collectors run in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.rollouts import campaign_rounds, collect_campaign
from seatrial.rollouts.campaign_dir import CampaignDir, read_stop_file
from seatrial.rollouts.manifest import load_campaign, load_manifest
from tests.cli.command import Answer, inside
from tests.rollouts.served import QUICK, halves, run_in_process, serving, write_rows
from tests.rollouts.stub import Stub

pytestmark = pytest.mark.slow


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    run_in_process(monkeypatch)
    with serving() as found:
        yield found


@pytest.fixture
def stub(served: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """For tests that are not about the profile, which takes longest."""
    monkeypatch.setattr(collect_campaign, "profile", lambda *_: None)
    return served


def campaign_file(tmp_path: Path, url: str, more: str = "") -> Path:
    write_rows(tmp_path / "rows.jsonl", halves(2))
    file = tmp_path / "campaign.toml"
    table = '[[datasets]]\nname = "rows"\npath = "rows.jsonl"\n'
    file.write_text(f'name = "filed"\nverifier = "choice"\n{table}[policy]\nurl = "{url}"\n[work]\nseeds = "0-1"\nshards = 2\n{more}')
    return file


def start(tmp_path: Path, url: str, prompts: list[str], *words: str) -> Answer:
    """With flags alone, into `c`."""
    rows = write_rows(tmp_path / "rows.jsonl", prompts)
    flags = ("--input", str(rows), "--url", url, "--verifier", "choice", "--out", "c", *QUICK)
    return inside("rollouts", "start", *flags, *words, cwd=tmp_path)


def files(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (tmp_path / "c/merged").iterdir() if path.is_file()}


def test_flags_alone(tmp_path: Path, served: Stub) -> None:
    answer = start(tmp_path, served.url, halves(3), "--repeats", "2", "--shards", "2")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[0] == str(tmp_path / "c")
    assert "rollouts:   6 of 6 settled: 6 ok, 0 failed for good; 0 owed" in answer.out
    assert "3 rows, 6 rollouts, 2 shards" in answer.err
    assert "merged 6 of 6 rollouts (100.00 %)" in answer.err
    assert sorted(path.name for path in (tmp_path / "c/profile").iterdir())[0] == "profile.html"
    assert (tmp_path / "c/.gitignore").read_text() == "*\n"


def test_a_complete_campaign_is_only_merged_and_profiled_again(tmp_path: Path, served: Stub) -> None:
    assert start(tmp_path, served.url, halves(2)).code == 0
    before, calls = files(tmp_path), served.calls
    (tmp_path / "c/profile/profile.md").unlink()
    (tmp_path / "rows.jsonl").unlink()  # the campaign has its own copy
    answer = inside("rollouts", "resume", "c", cwd=tmp_path)
    assert answer.code == 0, answer.err
    assert (files(tmp_path), served.calls) == (before, calls)
    assert len(campaign_rounds.list_rounds(CampaignDir(tmp_path / "c"))) == 1
    assert (tmp_path / "c/profile/profile.md").is_file()


def test_flags_win_over_the_file(tmp_path: Path, stub: Stub) -> None:
    file = campaign_file(tmp_path, "http://127.0.0.1:9/v1")
    answer = inside("rollouts", "start", file, "--url", stub.url, "--repeats", "3", "--out", "c", "--set", "name=other", cwd=tmp_path)
    assert answer.code == 0, answer.err
    manifest = load_manifest(CampaignDir(tmp_path / "c"))
    assert (manifest.name, manifest.units, manifest.shards) == ("other", 6, 2)


def test_without_a_directory_it_is_named_by_time_and_name(tmp_path: Path, stub: Stub) -> None:
    answer = inside("rollouts", "start", campaign_file(tmp_path, stub.url), cwd=tmp_path)
    assert answer.code == 0, answer.err
    root = Path(answer.out.splitlines()[0])
    assert root.parent == tmp_path / "campaigns"
    assert re.fullmatch(r"\d{8}T\d{6}Z-filed", root.name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to collect: no campaign file, and no --input"),
        (["campaign.toml", "--input", "rows.jsonl"], "--input and a campaign file exclude each other"),
        (["campaign.toml", "--repeats", "2", "--seeds", "0-1"], "--repeats and --seeds exclude each other"),
        (["campaign.toml", "--detach"], "--detach leaves jobs to Slurm"),
        (["campaign.toml", "--on", "slurm:nowhere"], "slurm:nowhere: there is no profile"),
        (["campaign.toml", "--set", "policy.urls=['http://h/v1']"], "say one of url (pre-hosted)"),
        (["campaign.toml", "--set", "work.shard=2"], "campaign.toml: work.shard: unknown key"),
        (["campaign.toml", "--set", "policy.key_env=S4_KEY"], "the variable S4_KEY is to hold an API key, and is not set here"),
        (["campaign.toml", "--set", "sampling.seed=1"], "sampling.seed cannot be said"),
        (["campaign.toml", "--out", "a{index}"], "a{index}: words in braces have a meaning in a job"),
        (["no.toml"], "no.toml: cannot read"),
        (["rows.jsonl"], "rows.jsonl: rows go with --input"),
        (["campaign.toml", "--prompt", "problem"], "--prompt and --answer name columns of --input"),
        (["--input", "rows.jsonl", "--input", "other/rows.jsonl"], "two files make a dataset called rows"),
        (["campaign.toml", "--dry-run", "--set", "policy.key_env=S4_KEY"], "the variable S4_KEY is to hold an API key"),
        (["campaign.toml", "--set", "sampling.temperature=hot"], "temperature = 'hot': a number is meant"),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    campaign_file(tmp_path, "http://h/v1")
    before = sorted(tmp_path.iterdir())
    answer = inside("rollouts", "start", *words, cwd=tmp_path)
    assert answer.code == 2
    assert message in answer.err
    assert "  fix: " in answer.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sampling.api_key={}", "campaign.toml: sampling: api_key holds a secret"),
        ("sampling.extra_headers={{Authorization = 'Bearer {}'}}", "campaign.toml: sampling: extra_headers.Authorization holds a secret"),
        ("policy.key_env=sk-{}", "campaign.toml: policy.key_env: the name of a variable is meant, not a key"),
        ("policy.key_env=['{}']", "campaign.toml: policy.key_env: "),
        ("policy.key_env=lower{}", "key_env names a variable that is not set here"),
    ],
)
def test_a_secret_in_a_campaign_is_refused_and_not_repeated(tmp_path: Path, setting: str, message: str) -> None:
    campaign_file(tmp_path, "http://h/v1")
    answer = inside("rollouts", "start", "campaign.toml", "--set", setting.format("secretsecretword"), cwd=tmp_path)
    assert answer.code == 2
    assert message in answer.err
    assert "  fix: " in answer.err
    assert "secretsecretword" not in answer.err + answer.out


def test_bad_rows_are_listed_with_their_lines_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "C"}\n{"prompt": 3}\nno\n')
    answer = inside("rollouts", "start", "--input", "rows.jsonl", "--url", "http://h/v1", "--verifier", "exact", "--out", "c", cwd=tmp_path)
    assert answer.code == 2
    assert "2 bad rows; nothing was started" in answer.err
    assert "rows.jsonl:2: " in answer.err
    assert "rows.jsonl:3: not JSON" in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_directory_that_holds_a_campaign_is_refused(tmp_path: Path, stub: Stub) -> None:
    assert start(tmp_path, stub.url, halves(1)).code == 0
    answer = start(tmp_path, stub.url, halves(1))
    assert answer.code == 2
    assert f"{tmp_path}/c: holds a campaign already" in answer.err


def test_a_file_of_any_name_is_a_dataset(tmp_path: Path) -> None:
    write_rows(tmp_path / "my rows (1).jsonl", halves(1))
    words = ("--input", "my rows (1).jsonl", "--url", "http://h/v1", "--verifier", "exact", "--dry-run")
    answer = inside("rollouts", "start", *words, cwd=tmp_path)
    assert answer.code == 0, answer.err
    assert "\n  my-rows-1: 1 row x 1 (" in answer.out


def test_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    campaign_file(tmp_path, "http://h/v1")
    before = sorted(tmp_path.iterdir())
    answer = inside("rollouts", "start", "campaign.toml", "--out", "c", "--dry-run", "--shards", "3", cwd=tmp_path)
    assert answer.code == 0, answer.err
    assert "campaign filed: 2 rows, 4 rollouts" in answer.out
    assert "3 shards of 1 to 2 rollouts, dealt by units" in answer.out
    assert f"rollouts collect {tmp_path}/c --round 1" in answer.out
    assert sorted(tmp_path.iterdir()) == before


def test_an_incomplete_campaign_ends_with_99_and_the_command_that_goes_on(tmp_path: Path, stub: Stub) -> None:
    answer = start(tmp_path, "http://127.0.0.1:9/v1", halves(2), "--repeats", "2")
    assert answer.code == 99
    assert "no server of the policy answered" in answer.err
    assert f"4 rollouts are still owed; collect them with: seatrial rollouts resume {tmp_path}/c" in answer.err
    assert not (tmp_path / "c/merged").exists()
    resumed = inside("rollouts", "resume", "c", "--set", f"policy.url={stub.url}", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert load_campaign(CampaignDir(tmp_path / "c")).policy.url == stub.url


def test_resume_names_what_changed_and_stores_nothing(tmp_path: Path) -> None:
    file = campaign_file(tmp_path, "http://127.0.0.1:9/v1", "[requests]\ndead_s = 0.1\n")
    place = CampaignDir(tmp_path / "c")
    with pytest.MonkeyPatch.context() as patch:
        run_in_process(patch)
        assert inside("rollouts", "start", file, "--out", "c", cwd=tmp_path).code == 99
    before = place.campaign.read_bytes()
    answer = inside("rollouts", "resume", "c", "--set", "sampling.temperature=0.5", "--set", "work.seeds=0-2", cwd=tmp_path)
    assert answer.code == 2
    assert "sampling.temperature: (none) -> 0.5" in answer.err
    assert 'work.seeds: "0-1" -> "0-2"' in answer.err
    write_rows(tmp_path / "rows.jsonl", halves(5))
    for words in ((), (str(file),)):
        answer = inside("rollouts", "resume", "c", *words, cwd=tmp_path)
        assert answer.code == 2
        assert f"datasets.rows: content changed ({tmp_path}/rows.jsonl)" in answer.err
    (tmp_path / "rows.jsonl").unlink()
    answer = inside("rollouts", "resume", "c", file, cwd=tmp_path)
    assert "cannot be read any more" in answer.err
    assert (place.campaign.read_bytes(), len(campaign_rounds.list_rounds(place))) == (before, 1)


def test_edited_inputs_are_refused(tmp_path: Path, stub: Stub) -> None:
    assert start(tmp_path, stub.url, halves(1)).code == 0
    inputs = tmp_path / "c/inputs.jsonl"
    inputs.write_bytes(inputs.read_bytes().replace(b"question 0", b"question 1"))
    answer = inside("rollouts", "resume", "c", cwd=tmp_path)
    assert answer.code == 2
    assert "inputs.jsonl: its content is not what manifest.json says" in answer.err


def test_a_spent_failure_budget_ends_with_99_and_the_reason_and_resume_goes_on(tmp_path: Path, stub: Stub) -> None:
    prompts = ["[[status=400]]", *halves(3)]
    answer = start(tmp_path, stub.url, prompts, "--set", "failures.max_count=0", "--set", "requests.concurrency=1")
    assert answer.code == 99
    assert "stopped:    1 of 1 units failed; failures.max_count is 0" in answer.out
    assert "seatrial rollouts resume" in answer.err
    place = CampaignDir(tmp_path / "c")
    assert read_stop_file(place)
    resumed = inside("rollouts", "resume", "c", "--set", "failures.max_count=1", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "it had stopped: 1 of 1 units failed" in resumed.err
    assert "3 ok, 1 failed for good; 0 owed" in resumed.out
    assert not read_stop_file(place)


def test_a_campaign_in_which_no_rollout_worked_is_no_success(tmp_path: Path, stub: Stub) -> None:
    answer = start(tmp_path, stub.url, ["[[status=400]]"])
    assert answer.code == 99
    assert "no rollout worked" in answer.err
    assert "--retry-failed" in answer.err
    again = inside("rollouts", "resume", "c", cwd=tmp_path)
    assert (again.code, stub.calls) == (99, 1)
    again = inside("rollouts", "resume", "c", "--retry-failed", cwd=tmp_path)
    assert (again.code, stub.calls) == (99, 2)
    assert "units that had failed for good are owed again" in again.err


def test_only_what_was_started_can_be_resumed(tmp_path: Path) -> None:
    answer = inside("rollouts", "resume", tmp_path)
    assert answer.code == 2
    assert "no manifest.json, so it is no campaign" in answer.err


def test_resume_on_this_machine_cannot_be_left(tmp_path: Path, stub: Stub) -> None:
    assert start(tmp_path, stub.url, halves(1)).code == 0
    answer = inside("rollouts", "resume", "c", "--detach", cwd=tmp_path)
    assert answer.code == 2
    assert "--detach leaves jobs to Slurm" in answer.err


def test_cancel_without_jobs(tmp_path: Path, stub: Stub) -> None:
    assert inside("rollouts", "cancel", tmp_path).code == 2
    assert start(tmp_path, stub.url, halves(1)).code == 0
    answer = inside("rollouts", "cancel", "c", cwd=tmp_path)
    assert (answer.code, answer.out) == (0, "")
    assert "nothing to cancel" in answer.err


def test_status_as_a_table_and_as_json(tmp_path: Path, stub: Stub) -> None:
    assert start(tmp_path, stub.url, halves(2), "--repeats", "2").code == 0
    assert "campaign:   rollouts (round 1 on local)" in inside("rollouts", "status", "c", cwd=tmp_path).out
    found = json.loads(inside("rollouts", "status", "c", "--json", cwd=tmp_path).out)
    documented = (Path(__file__).parents[2] / "docs/rollouts.md").read_text()
    assert [key for key in found if f"`{key}`" not in documented] == []
    assert (found["ok"], found["owed"], found["stopped"]) == (4, 0, "")
    followed = inside("rollouts", "status", "c", "--follow", "--json", cwd=tmp_path)
    assert (followed.code, len(followed.out.splitlines())) == (0, 1)
    assert "4/4 rollouts (100.0 %)" in inside("rollouts", "status", "c", "--follow", cwd=tmp_path).err


def test_following_ends_when_the_campaign_has_stopped(tmp_path: Path, stub: Stub) -> None:
    start(tmp_path, stub.url, ["[[status=400]]", *halves(2)], "--set", "failures.max_count=0", "--set", "requests.concurrency=1")
    answer = inside("rollouts", "status", "c", "-f", cwd=tmp_path)
    assert answer.code == 0
    assert "stopped: 1 of 1 units failed" in answer.err


def test_several_inputs_are_datasets_and_their_columns_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"problem": f"which? {name}", "solution": "C"}) + "\n")
    flags = ("--input", "a.jsonl", "--input", "b.jsonl", "--url", "http://h/v1", "--verifier", "exact", "--dry-run")
    answer = inside("rollouts", "start", *flags, "--prompt", "problem", "--answer", "solution", cwd=tmp_path)
    assert answer.code == 0, answer.err
    assert "\n  a: 1 row x 1 (" in answer.out
    assert "\n  b: 1 row x 1 (" in answer.out
    assert inside("rollouts", "start", *flags, cwd=tmp_path).code == 2


def test_a_parameter_that_is_probably_a_slip_is_warned_of(tmp_path: Path) -> None:
    file = campaign_file(tmp_path, "http://h/v1", "[sampling]\ntemprature = 0.5\ntop_k = 3\nmy_own = 1\n")
    answer = inside("rollouts", "start", file, "--dry-run", cwd=tmp_path)
    assert (answer.code, answer.err) == (0, "seatrial: warning: sampling.temprature is passed on as it is; did you mean temperature?\n")


def test_another_model_than_the_first_is_refused_with_both_names(tmp_path: Path, stub: Stub) -> None:
    answer = start(tmp_path, stub.url, ["[[status=500]]", *halves(1)], "--set", "work.rounds=1")
    assert answer.code == 99
    assert (tmp_path / "c/model.json").read_text() == '{"name":"stub"}'
    calls = stub.calls
    stub.models = ("other",)
    answer = inside("rollouts", "resume", "c", cwd=tmp_path)
    assert "the server has the model 'other', and this campaign began with 'stub'" in answer.err
    assert stub.calls == calls
