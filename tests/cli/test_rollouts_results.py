"""`seatrial rollouts merge`, `profile`, `select`, `rescore`, `import`, `export`: what is printed, what is refused, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.rollouts.campaign_dir import CampaignDir
from tests.cli.command import inside
from tests.rollouts.profiled import campaign, collected, ok, questions
from tests.rollouts.served import halves, run_in_process, serving, write_rows

pytestmark = pytest.mark.slow

GYM = Path(__file__).parents[1] / "data/rollouts/gym_rollouts.jsonl"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Two tasks, of which the second passes always."""
    place = campaign(tmp_path, {"a": questions(2)})
    return collected(place, [[ok(1.0), ok(0.0), ok(0.0), ok(0.0)], [ok(1.0)] * 4]).root


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    place: CampaignDir = campaign(tmp_path, {"a": questions(2)})
    return collected(place, [[ok(1.0), ok(0.0), None, ok(0.0)], [ok(1.0)] * 4]).root


def test_merge_prints_the_file_or_what_it_found(whole: Path) -> None:
    answer = inside("rollouts", "merge", whole)
    assert (answer.code, answer.out) == (0, f"{whole}/merged/rollouts.jsonl\n")
    assert "merged 8 of 8 rollouts (100.00 %)" in answer.err
    found = json.loads(inside("rollouts", "merge", whole, "--json").out)
    assert (found["expected"], found["ok"], found["missing"], found["coverage"]) == (8, 8, 0, 1.0)


def test_merge_refuses_what_is_incomplete_unless_partial_is_said(torn: Path) -> None:
    answer = inside("rollouts", "merge", torn)
    assert answer.code == 99
    assert "incomplete: 1 of 8 units have no result" in answer.err
    assert f"seatrial rollouts resume {torn}" in answer.err
    assert not (torn / "merged/rollouts.jsonl").exists()
    answer = inside("rollouts", "merge", torn, "--partial")
    assert answer.code == 0
    assert "merged 7 of 8 rollouts (87.50 %), 1 missing" in answer.err


def test_profile_prints_markdown_or_json(whole: Path, tmp_path: Path) -> None:
    answer = inside("rollouts", "profile", whole, "--k", "2", "--out", tmp_path / "p")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("# ")
    assert (tmp_path / "p/profile.html").is_file()
    found = json.loads(inside("rollouts", "profile", whole, "--json").out)
    assert found == json.loads((whole / "profile/profile.json").read_text())


def test_select_writes_the_rows_in_a_band(whole: Path, tmp_path: Path) -> None:
    answer = inside("rollouts", "select", whole, "--max", "0.5", "--out", tmp_path / "hard.jsonl")
    assert (answer.code, answer.out) == (0, f"{tmp_path}/hard.jsonl\n")
    assert "1 of 2 tasks" in answer.err
    assert [json.loads(line)["prompt"] for line in (tmp_path / "hard.jsonl").read_text().splitlines()] == ["question 0"]
    answer = inside("rollouts", "select", whole, "--min", "0.8", "--max", "0.2", "--out", tmp_path / "none.jsonl")
    assert answer.code == 2


def test_export_writes_the_layouts_that_others_know(whole: Path, tmp_path: Path) -> None:
    assert inside("rollouts", "merge", whole).code == 0
    answer = inside("rollouts", "export", whole, "skills", "--out", tmp_path / "s")
    assert answer.code == 0, answer.err
    assert (tmp_path / "s/rollouts-rs0.jsonl").is_file()
    assert str(tmp_path / "s/rollouts-rs0.jsonl") in answer.out
    answer = inside("rollouts", "export", whole, "other")
    assert answer.code == 2
    assert "the layouts are skills and gym" in answer.err


def test_imported_rollouts_are_profiled_and_never_resumed(tmp_path: Path) -> None:
    answer = inside("rollouts", "import", "gym", GYM, "--out", tmp_path / "i")
    assert answer.code == 0, answer.err
    assert answer.out == f"{tmp_path}/i\n"
    assert inside("rollouts", "profile", tmp_path / "i").code == 0
    answer = inside("rollouts", "resume", tmp_path / "i")
    assert answer.code == 2
    assert "was imported, so there is nothing to collect" in answer.err
    answer = inside("rollouts", "import", "gym", GYM, "--out", tmp_path / "i")
    assert (answer.code, "resume" in answer.err) == (2, False)
    assert "an import makes a new one" in answer.err
    answer = inside("rollouts", "import", "other", GYM, "--out", tmp_path / "j")
    assert answer.code == 2
    assert "gym or of skills" in answer.err


def test_an_import_is_scored_anew_by_a_verifier_alone(tmp_path: Path) -> None:
    assert inside("rollouts", "import", "gym", GYM, "--out", tmp_path / "i").code == 0
    answer = inside("rollouts", "rescore", tmp_path / "i", "--verifier", "choice", "--out", tmp_path / "r")
    assert answer.code == 0, answer.err
    assert len((tmp_path / "r/merged/rollouts.jsonl").read_bytes().splitlines()) == 2
    answer = inside("rollouts", "rescore", tmp_path / "i", "--out", tmp_path / "n")
    assert (answer.code, "say --verifier" in answer.err) == (2, True)
    answer = inside("rollouts", "rescore", tmp_path / "i", "--verifier", "function", "--out", tmp_path / "n")
    assert (answer.code, "a function needs a table: [verifiers.mine]" in answer.err) == (2, True)
    answer = inside("rollouts", "rescore", tmp_path / "i", "--verifier", "judge", "--out", tmp_path / "n")
    assert answer.code == 2
    assert "there is no policy that could be the judge" in answer.err
    assert not (tmp_path / "n").exists()


def test_a_verifier_that_fails_everywhere_is_not_to_be_resumed(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(row, text):\n    return None\n")
    said = ("--verifier", "mine", "--set", "verifiers.mine.kind=function", "--set", f"verifiers.mine.function={tmp_path}/mine.py:score")
    answer = inside("rollouts", "rescore", whole, *said, "--out", tmp_path / "n")
    assert answer.code == 99
    assert "mend the verifier, and rescore into another directory" in answer.err
    assert "--retry-failed" not in answer.err


def test_results_are_never_written_into_a_campaign(whole: Path, tmp_path: Path) -> None:
    assert inside("rollouts", "merge", whole).code == 0
    assert inside("rollouts", "import", "gym", GYM, "--out", tmp_path / "other").code == 0
    before = sorted((tmp_path / "other").rglob("*"))
    (tmp_path / "link").symlink_to(tmp_path / "other")
    for out in (tmp_path / "other", tmp_path / "other/new", tmp_path / "link/new", whole / "shards"):
        for command in (("export", whole, "skills"), ("export", whole, "gym"), ("profile", whole)):
            answer = inside("rollouts", *command, "--out", out)
            assert answer.code == 2, command
            assert "lies in the directory of a campaign" in answer.err
    assert inside("rollouts", "select", whole, "--out", tmp_path / "other/rows.jsonl").code == 2
    assert sorted((tmp_path / "other").rglob("*")) == before
    assert inside("rollouts", "export", whole, "gym").code == 0
    assert inside("rollouts", "export", whole, "skills", "--out", whole / "skills/again").code == 0


def test_rescore_asks_no_policy_and_keeps_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process(monkeypatch)
    write_rows(tmp_path / "rows.jsonl", halves(2))
    flags = ("--input", "rows.jsonl", "--verifier", "choice", "--repeats", "2", "--out", "c")
    with serving() as stub:
        assert inside("rollouts", "start", *flags, "--url", stub.url, cwd=tmp_path).code == 0
    before = (tmp_path / "c/merged/rollouts.jsonl").read_bytes()
    other = ("--verifier", "odd", "--set", "verifiers.odd.kind=exact", "--set", "verifiers.odd.pattern=(no such answer)")
    answer = inside("rollouts", "rescore", "c", *other, "--out", "n", cwd=tmp_path)
    assert answer.code == 0, answer.err
    assert "reward:     mean 0.0000" in answer.out
    assert (tmp_path / "c/merged/rollouts.jsonl").read_bytes() == before
    assert len((tmp_path / "n/merged/rollouts.jsonl").read_bytes().splitlines()) == 4
    answer = inside("rollouts", "resume", "n", cwd=tmp_path)
    assert answer.code == 2
    assert "repeat the rescore command" in answer.err


def test_rescore_of_what_is_incomplete_says_so(torn: Path, tmp_path: Path) -> None:
    answer = inside("rollouts", "rescore", torn, "--verifier", "exact", "--out", tmp_path / "n")
    assert answer.code == 99
    assert "1 rollout not scored yet" in answer.err
    assert "seatrial rollouts resume" not in answer.err.replace(str(torn), "")


@pytest.mark.parametrize("command", ["status", "merge", "profile", "cancel"])
def test_a_directory_without_a_campaign(tmp_path: Path, command: str) -> None:
    answer = inside("rollouts", command, tmp_path)
    assert answer.code == 2
    assert "no manifest.json, so it is no campaign" in answer.err


def test_help_says_how_to_begin() -> None:
    text = inside("rollouts", "--help").out
    for word in ("start", "status", "resume", "cancel", "merge", "profile", "select", "rescore", "import", "export", "demo", "sandbox"):
        assert f"\n  {word} " in text
    assert "seatrial rollouts start --input" in text
    assert "99" in text
    assert "\n  collect " not in text  # jobs call it
