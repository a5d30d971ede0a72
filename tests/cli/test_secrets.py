"""Planted secrets in the environment, in logs, in arguments and in names of files and branches reach nothing that is printed or stored."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import Answer, inside

KNOWN = "xylo-phone-7731"
PASSWORD = "Mango7" + "Tango8Out"
TOKEN = "ghp_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ2bC4dF6hJ8"
NAME = "hf_" + "Zq3dE5gH7jK9mN1pQ3sT5vW7yZ2bC4dF6x"
PLANTED = (KNOWN, PASSWORD, TOKEN[4:], NAME[3:])
LOG = f"""step 1 loss 0.5
{{'loss': 0.5, 'grad_norm': 1.0, 'num_tokens': 10.0, 'epoch': 0.1}}
connecting with password={PASSWORD}
- value: {PASSWORD}
  name: DB_PASSWORD
user,password
bob,{PASSWORD}
<secret>
  <value>{PASSWORD}</value>
</secret>
secret "db" {{
  value = "{PASSWORD}"
}}
DB_PASSWORD={PASSWORD} ./serve --api-key {PASSWORD} https://bob:{PASSWORD}@example.org/x
{{"password": "{PASSWORD}", "headers": {{"Authorization": "Bearer {PASSWORD}x1"}}}}
Traceback (most recent call last):
  File "/x/{NAME}.py", line 3, in login
    connect(password="{PASSWORD}")
RuntimeError: {KNOWN} refused: password={PASSWORD} token {TOKEN} at {NAME}
"""


def call(*words: str | Path, cwd: Path | None = None) -> Answer:
    return inside(*words, cwd=cwd, PLANTED_API_KEY=KNOWN)


def leaked(answer: Answer, *places: Path) -> list[str]:
    """Which of the planted values are in an answer, or in a file or its name."""
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*"))]
    texts = [("answer", f"{answer.out}\n{answer.err}")]
    texts += [(str(file), file.name + (file.read_bytes().decode("utf-8", "replace") if file.is_file() else "")) for file in files]
    return [f"{where}: {value}" for where, text in texts for value in PLANTED if value in text]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A checkout whose fourth commit breaks `check.py`, on a branch and with files and messages that hold secrets."""
    path = tmp_path / "repo"
    path.mkdir()

    def git(*words: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (path / "check.py").write_text(f"v = open('v').read().strip()\nprint('password={PASSWORD}')\nassert v == '1', 'token {TOKEN}'\n")
    for value in ("1", "1 ", "1  ", "2"):
        (path / "v").write_text(value)
        git("add", "-A")
        git("commit", "-q", "-m", f"v is {value} password={PASSWORD} {TOKEN}")
    git("checkout", "-q", "-b", f"fix-{TOKEN}")
    git("remote", "add", "origin", f"https://bob:{PASSWORD}@example.org/x.git")
    (path / f"{NAME}.py").write_text(f"key = '{TOKEN}'\npassword = '{PASSWORD}'\n")
    return path


@pytest.mark.parametrize("loop", ["trl", "verl", "nemo-rl"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_verdict_on_a_raw_log_quotes_no_secret(loop: str, options: tuple[str, ...], tmp_path: Path) -> None:
    log = tmp_path / f"{NAME}.log"
    log.write_text(LOG)
    answer = call("judge", loop, "--log", log, *options)
    assert not leaked(answer)
    if options:
        assert json.loads(answer.out)["verdict"] in ("Fail", "Blocked")


def test_an_import_stores_no_secret(tmp_path: Path) -> None:
    metrics, store = tmp_path / "m.json", tmp_path / "history.db"
    metrics.write_text(
        json.dumps({"train/loss": {"1": 1.0}, TOKEN: {"1": 2.0}, TOKEN.replace("a", "c"): {"1": 3.0}, f"at/{NAME}": {"1": 4.0}})
    )
    words = ("--passed", "--clean", "--commit", "abc1234", "--branch", f"fix-{TOKEN}", "--name", f"n-{KNOWN}", "--machine", NAME)
    answer = call("history", "import", metrics, *words, "--store", store)
    assert answer.code == 0, answer.err
    assert "4 points" in answer.out
    assert not leaked(answer, *tmp_path.glob("history.db*"))
    assert not leaked(call("history", "runs", "--store", store))


def test_a_bisect_stores_no_secret(repo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = (
        "--good",
        "main~3",
        "--bad",
        f"fix-{TOKEN}",
        "--env",
        "none",
        "--out",
        out,
        "--",
        "sh",
        "-c",
        "python3 check.py $PLANTED_API_KEY",
    )
    answer = call("bisect", *words, cwd=repo)
    assert answer.code == 0, answer.err
    assert (out / "runs.jsonl").is_file()
    kept = [path for path in out.iterdir() if path.name not in ("stores", "trees")]  # the commits themselves
    assert not leaked(answer, *kept)
    assert not leaked(call("bisect", "report", out))


def test_a_plan_shows_no_secret(repo: Path) -> None:
    for words in (
        ("--auto", "--explain"),
        ("--auto", "--json"),
        ("--commands",),
        ("--base", NAME),
        ("--set", f"limits.stall_minutes={TOKEN}"),
    ):
        assert not leaked(call("plan", "trl", "--change", repo, *words)), words


def test_a_functional_run_stores_no_secret(repo: Path, tmp_path: Path) -> None:
    script = repo / "fun.sh"
    (repo / "run.log").write_text(LOG)
    script.write_text(f'cat run.log\necho $PLANTED_API_KEY $*\necho \'{{"train/loss": {{"1": 1.0}}, "{TOKEN}": {{"1": 1.0}}}}\' > m.json\n')
    out = tmp_path / "out"
    answer = call(
        "functional", "run", script, "--out", out, "--metrics", "m.json", "--steps", "1", "--", "--api-key", PASSWORD, TOKEN, cwd=repo
    )
    assert (out / "fun" / "run.log").read_text().count("[redacted") > 5
    assert not leaked(answer, out)


def test_an_error_quotes_no_secret(tmp_path: Path) -> None:
    for words in (
        ("judge", TOKEN, "--log", __file__),
        ("check", tmp_path / NAME, "true"),
        ("metrics", tmp_path / TOKEN),
        ("report", tmp_path / KNOWN),
    ):
        answer = call(*words)
        assert answer.code != 0
        assert not leaked(answer), words


def test_a_rehearsed_campaign_shows_no_secret(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?", "answer": "2"}\n')
    for url in ("http://127.0.0.1:9/v1", f"http://bob:{PASSWORD}@127.0.0.1:9/v1", f"http://127.0.0.1:9/v1?api_key={TOKEN}"):
        words = ("--input", rows, "--url", url, "--verifier", "math", "--out", tmp_path / f"out_{NAME}", "--dry-run")
        assert not leaked(call("rollouts", "start", *words)), url
