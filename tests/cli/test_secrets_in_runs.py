"""Secrets planted in logs, environments, arguments, job files, rows and errors reach no artifact of any kind of run, and no terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.cli import hermetic
from seatrial.functional.hermetic import ExecutionPlace
from seatrial.probes.refit_run import DRIVERS
from seatrial.rollouts import collect_campaign
from tests.cli.command import Answer, inside
from tests.cli.test_localize import give
from tests.cli.test_localize import run as run
from tests.cli.test_probe import INTERPRETER
from tests.cli.test_secrets import KNOWN, LOG, NAME, PASSWORD, PLANTED, TOKEN, call, leaked
from tests.rollouts.served import QUICK, run_in_process, serving
from tests.rollouts.stub import Stub
from tests.triage.token_rows import rows


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """What a program prints, outside of the places that are looked through."""
    file = tmp_path / "said" / "text"
    file.parent.mkdir()
    file.write_text(LOG)
    return file


def test_a_command_in_another_place(said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hermetic, "make_place", lambda *_, **__: ExecutionPlace())
    log = tmp_path / "out" / "kept.log"
    log.parent.mkdir()
    program = ("sh", "-c", f'cat {said}; echo "$PLANTED_API_KEY"; exit 3', "--api-key", PASSWORD, TOKEN)
    answer = call("hermetic", "--log", log, "--", *program, cwd=tmp_path)
    assert answer.code == 3, answer.err
    assert log.read_text().count("[redacted") > 8
    assert not leaked(answer, log.parent)
    assert not leaked(call("hermetic", "--show", "--", *program, cwd=tmp_path))


def jobs(tmp_path: Path, command: list[str], more: str = "") -> Path:
    file = tmp_path / "jobs.toml"
    client = f'[[jobs.components]]\nname = "client"\nrole = "client"\ncommand = {json.dumps(command)}\n'
    file.write_text(f'[[jobs]]\nname = "one"\nminutes = 1\n{client}{more}')
    return file


def test_jobs_on_this_machine(said: Path, tmp_path: Path) -> None:
    file, out = jobs(tmp_path, ["sh", "-c", f'cat {said}; echo "$PLANTED_API_KEY"; exit 3'], "tasks = 2\n"), tmp_path / "out"
    answer = call("jobs", "submit", file, "--on", "local", "--out", out, cwd=tmp_path)
    assert answer.code == 1, answer.err
    assert (out / "one" / "logs" / "client.0.log").read_text().count("[redacted") > 16
    assert not leaked(answer, out)
    assert not leaked(call("jobs", "logs", out, cwd=tmp_path))
    assert not leaked(call("jobs", "list", out, "--units", "--json", cwd=tmp_path))


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (["serve", "--api-key", PASSWORD], ""),
        (["serve", TOKEN], ""),
        (["sh", "-c", f"DB_PASSWORD={PASSWORD} serve"], ""),
        (["sh", "-c", f"curl -u bob:{PASSWORD} https://x"], ""),
        (["serve", KNOWN], ""),
        (["serve"], f'environment = {{ URL = "https://bob:{PASSWORD}@example.org" }}\n'),
        (["serve"], f'environment = {{ EXTRA = "{TOKEN}" }}\n'),
        (["serve"], f'environment = {{ DB_PASSWORD = "{PASSWORD}" }}\n'),
        (["serve"], f'workdir = "/x/{NAME}"\n'),
        (["serve"], f'[jobs.servers]\nmodel = "http://bob:{PASSWORD}@example.org/v1"\n'),
    ],
)
@pytest.mark.parametrize("place", ["local", "slurm:main"])
def test_a_job_file_with_a_secret_is_refused(command: list[str], more: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "seatrial.toml").write_text('[slurm.main]\npartition = "batch"\n')
    file = jobs(tmp_path, command, more)
    for words in (("--out", tmp_path / "out"), ("--dry-run",) if place != "local" else ("--out", tmp_path / "out")):
        answer = call("jobs", "submit", file, "--on", place, *words, cwd=tmp_path)
        assert answer.code == 2
        assert "secret" in answer.err
        assert not leaked(answer)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line",
    [
        f'prolog = ["export DB_PASSWORD={PASSWORD}"]',
        f'setup = ["wandb login {TOKEN}"]',
        f'sbatch = ["--comment={TOKEN}"]',
        f'image = "docker://bob:{PASSWORD}@registry.example.org/x"',
        f'environment = {{ EXTRA = "{TOKEN}" }}',
    ],
)
def test_a_profile_with_a_secret_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "seatrial.toml").write_text(f'[slurm.main]\npartition = "batch"\n{line}\n')
    answer = call("jobs", "submit", jobs(tmp_path, ["true"]), "--on", "slurm:main", "--dry-run", cwd=tmp_path)
    assert answer.code == 2
    assert "secret" in answer.err
    assert not leaked(answer)


def test_job_files_without_secrets_are_taken(tmp_path: Path) -> None:
    program = 'HF_TOKEN=$(cat ~/.hf) serve --api-key "$API_KEY" --max-tokens 512 --tokenizer Qwen/Qwen3-8B'
    more = 'environment = { MAX_TOKENS = "512", TOKENIZERS_PARALLELISM = "false", HF_TOKEN_PATH = "/run/hf" }\n'
    (tmp_path / "seatrial.toml").write_text(
        '[slurm.main]\nprolog = ["source ~/.secrets", "module load cuda", "export HF_TOKEN=$(cat f)"]\n'
    )
    answer = call("jobs", "submit", jobs(tmp_path, ["sh", "-c", program], more), "--on", "slurm:main", "--dry-run", cwd=tmp_path)
    assert "secret" not in answer.err
    assert "#SBATCH --partition" not in answer.err
    assert program.split()[1] in answer.out


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A model server that takes one key."""
    run_in_process(monkeypatch)
    monkeypatch.setattr(collect_campaign, "profile", lambda *_: None)
    with serving(key=KNOWN) as found:
        yield found


def test_a_campaign(stub: Stub, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    prompts = ["fine [[gold=C p=0.5]]", "[[echo]]", "[[status=500]]", "[[garbage]]", "[[redirect]]"]
    rows.write_text("".join(json.dumps({"prompt": prompt, "answer": "C"}) + "\n" for prompt in prompts))
    words = ("--input", rows, "--url", stub.url, "--verifier", "choice", "--out", "c", *QUICK, "--set", "policy.key_env=PLANTED_API_KEY")
    answer = call("rollouts", "start", *words, cwd=tmp_path)
    assert stub.calls > 4, answer.err
    assert not leaked(answer, tmp_path / "c")
    for command in (("status", "c"), ("show", "c")):
        assert not leaked(call("rollouts", *command, cwd=tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        f'[policy]\nurl = "http://bob:{PASSWORD}@h/v1"',
        f'[policy]\nurl = "http://h/v1"\nkey_env = "{TOKEN}"',
        f'[policy]\nurl = "http://h/v1"\nmodel = "{TOKEN}"',
        f'[sampling]\npassword = "{PASSWORD}"',
        f'password = "{PASSWORD}"',
        f'notes = {{ x = "{TOKEN}" }}',
        f'[policy]\nurl = 3\napi_key = "{PASSWORD}"',
        f"[policy]\napi_key = {PASSWORD}",
    ],
)
def test_a_campaign_file_with_a_secret(line: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    file = tmp_path / "campaign.toml"
    file.write_text(f'name = "x"\nverifier = "math"\n[[datasets]]\nname = "rows"\npath = "rows.jsonl"\n{line}\n')
    answer = call("rollouts", "start", file, "--out", tmp_path / "c", "--dry-run", cwd=tmp_path)
    assert not leaked(answer)


@pytest.fixture
def engine(tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that runs no driver, prints and leaves an error."""
    monkeypatch.setattr("seatrial.probes.refit_run.stage", lambda out: out)
    place = tmp_path / "python"
    text = INTERPRETER.format(python=sys.executable).replace("print(", f"print(open({str(said)!r}).read())\nprint(", 1)
    place.write_text(text.replace('"RuntimeError: boom"', f"'RuntimeError: password={PASSWORD} {TOKEN}'"))
    place.chmod(0o755)
    row = {"fact": "probe_error", "text": LOG, "error": LOG, "where": f"/x/{NAME}"}
    (tmp_path / "rows.json").write_text(json.dumps([row, {"fact": "hashes", TOKEN: KNOWN}]))
    return place


@pytest.mark.parametrize("fake", ["die", ""])
def test_a_probe(engine: Path, tmp_path: Path, fake: str) -> None:
    assert DRIVERS
    words = ("probe", "refit", "--python", engine, "--steps", "3", "--out", tmp_path / "out")
    answer = inside(*words, cwd=tmp_path, ROWS=str(tmp_path / "rows.json"), PLANTED_API_KEY=KNOWN, FAKE=fake)
    assert (tmp_path / "out" / "run.log").read_text().count("[redacted") > 8
    assert not leaked(answer, tmp_path / "out")


def test_a_history(tmp_path: Path) -> None:
    metrics, store = tmp_path / "m.json", tmp_path / "store" / "history.db"
    store.parent.mkdir()
    metrics.write_text(json.dumps({"train/loss": {str(step): 1.0 for step in range(1, 5)}}))
    assert call("history", "import", metrics, "--passed", "--clean", "--commit", "abc1234", "--name", "n", "--store", store).code == 0
    answers = [
        call("history", "mark", "1", "--reason", f"password={PASSWORD} {TOKEN} {KNOWN}", "--store", store),
        call("history", "runs", "--store", store),
        call("history", "import", tmp_path / f"{NAME}.json", "--store", store),
        call("history", "trend", TOKEN, "--store", store),
        call("history", "runs", "--project", f"https://bob:{PASSWORD}@x", "--store", store),
    ]
    assert [leak for answer in answers for leak in leaked(answer, store.parent)] == []


def test_a_localization(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (("temperature", "1"), ("api_key", PASSWORD))
    more: dict[str, Any] = {
        "source": f"{NAME}.jsonl:1",
        "prompt": f"my password={PASSWORD}, {TOKEN}, {KNOWN}",
        "run": f"run-{TOKEN}",
        "settings": settings,
    }
    give(monkeypatch, level1=rows(lambda chance, _, along: chance.gauss(0, 0.01 + along), **more))
    answer = call("localize", run)
    assert answer.code == 0, answer.err
    assert "[redacted" in (run / "localize" / "localize.json").read_text()
    assert not leaked(answer, run / "localize")
    assert not leaked(call("localize", run, "--json"))


def shown(answer: Answer) -> str:
    return answer.out + answer.err


@pytest.mark.parametrize(
    "words",
    [
        ("config", "--set", f"limits.password={PASSWORD}"),
        ("run", "trl", "--set", f"limits.stall_minutes={TOKEN}"),
        ("run", "trl", "--on", f"slurm:{TOKEN}"),
        ("isolate", f"/nowhere/{NAME}"),
        ("localize", f"/nowhere/{NAME}"),
        ("jobs", "list", f"/nowhere/{NAME}"),
        ("bisect", "--good", TOKEN, "--bad", NAME, "--", "true"),
        ("functional", "run", f"/nowhere/{NAME}.sh"),
        ("rollouts", "status", f"/nowhere/{TOKEN}"),
        ("env", "build", TOKEN),
    ],
)
def test_an_error(words: tuple[str, ...], tmp_path: Path) -> None:
    answer = call(*words, cwd=tmp_path)
    assert answer.code != 0
    assert not [value for value in PLANTED if value in shown(answer)], shown(answer)


@pytest.mark.parametrize(
    "text",
    [
        f"password = {PASSWORD}\n",
        f'[limits]\nstall_minutes = "password={PASSWORD}"\n',
        f'[limits]\napi_key = "{PASSWORD}"\n',
        f'[loops.trl]\npython = "{TOKEN}"\n',
        f'[slurm.main]\nenvironment = {{ DB_PASSWORD = "{PASSWORD}" }}\n',
        f'[slurm.main]\ntime = "password={PASSWORD}"\n',
    ],
)
def test_a_configuration_that_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "seatrial.toml").write_text(text)
    for words in (("config",), ("plan", "trl"), ("jobs", "submit", jobs(tmp_path, ["true"]), "--on", "slurm:main", "--dry-run")):
        assert not [value for value in PLANTED if value in shown(call(*words, cwd=tmp_path))], words
