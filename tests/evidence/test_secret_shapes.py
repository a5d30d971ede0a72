"""A hundred secret shapes as plain text, in a log, in JSON and in the evidence of a checkout; harmless lines stay as they are."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs, repo_state, write_repos
from seatrial.runtime.process import LineLog
from tests.evidence.attacks import ATTACKS, LATER
from tests.evidence.conftest import MakeRepo, put, run_git
from tests.evidence.harmless import RL_LINES
from tests.evidence.nested import HARMLESS_NESTED, KEY_DUMPS, NESTED
from tests.evidence.shapes import B62, DUMPS, HARMLESS, OPENSSH, PLAIN_PW, ROWS, SHAPES

PLAIN = Redactor({})
PREFIXES = ("2026-11-18T12:00:00.123Z ", "(TaskRunner pid=4711) ", "[rank0]: ", "12:00:00 INFO worker: ", "\x1b[36m(Worker pid=7)\x1b[0m ")
IDS = [name for name, _, _ in SHAPES]


def leaks(text: str, secrets: tuple[str, ...]) -> list[str]:
    """What is left of the secrets: no run of eight characters may be."""
    runs = [secret[at : at + 8] for secret in secrets for at in range(max(1, len(secret) - 7))]
    return [run for run in runs if run in text]


def streamed(rows: list[str], *, program: bool = False) -> str:
    lines = PLAIN.lines(program=program)
    return "\n".join(lines.line(row) for row in rows)


def test_the_table_is_long_enough() -> None:
    assert len(SHAPES) >= 100
    assert len(set(IDS)) == len(IDS)
    assert len(HARMLESS) >= 60


@pytest.mark.parametrize(("name", "text", "secrets"), SHAPES, ids=IDS)
def test_a_secret_goes_wherever_it_stands(name: str, text: str, secrets: tuple[str, ...]) -> None:
    redacted = PLAIN.text(text)
    assert not leaks(redacted, secrets), redacted
    assert redacted.count("\n") == text.count("\n")
    assert PLAIN.text(redacted) == redacted
    for prefix in PREFIXES:
        rows = [prefix + row for row in text.split("\n")]
        assert not leaks(PLAIN.text("\n".join(rows)), secrets), prefix
        assert not leaks(streamed(rows), secrets), prefix
    assert not leaks(PLAIN.text(json.dumps({"step": 3, "note": text, "end": 1})), secrets)
    assert not leaks(PLAIN.text(repr({"step": 3, "note": text, "end": 1})), secrets)
    assert not leaks(json.dumps(PLAIN.value({"note": [text]})), secrets)


@pytest.mark.parametrize(("name", "rows", "secret"), DUMPS, ids=[name for name, _, _ in DUMPS])
def test_a_dump_of_a_private_key_goes(name: str, rows: list[str], secret: list[str]) -> None:
    text = "\n".join(["first line", *rows, "last line"])
    for prefix in ("", "+", "\x1b[32m", *PREFIXES):
        prefixed = [prefix + row for row in text.split("\n")]
        for cleared in (PLAIN.text("\n".join(prefixed)), streamed(prefixed)):
            assert not [row for row in secret if row.strip() in cleared], cleared
            assert cleared.split("\n")[0].endswith("first line")
            assert cleared.split("\n")[-1].endswith("last line")
    assert not [row for row in secret if row.strip() in PLAIN.text(json.dumps({"note": text}))]


@pytest.mark.parametrize(("name", "text", "secret"), ATTACKS, ids=[name for name, _, _ in ATTACKS])
def test_a_shape_that_was_tried_afterwards_goes(name: str, text: str, secret: str) -> None:
    assert not leaks(PLAIN.text(text), (secret,))
    assert not leaks(PLAIN.text(json.dumps({"n": text})), (secret,))
    assert not leaks(streamed([f"(W pid=1) {row}" for row in text.split("\n")]), (secret,))


@pytest.mark.parametrize(("name", "text", "secret"), LATER, ids=[name for name, _, _ in LATER])
def test_a_shape_of_the_second_set_goes_also_from_diffs(name: str, text: str, secret: str) -> None:
    for prefix in ("", *PREFIXES, "+", "-", " "):
        rows = [prefix + row for row in text.split("\n")]
        for cleared in (PLAIN.text("\n".join(rows)), streamed(rows)):
            assert not leaks(cleared, (secret,)), cleared
    assert not leaks(json.dumps(PLAIN.value({"note": [text]})), (secret,))


@pytest.mark.parametrize(("name", "text", "secret"), NESTED, ids=[name for name, _, _ in NESTED])
def test_a_secret_that_another_line_names_goes(name: str, text: str, secret: str) -> None:
    for prefix in ("", *PREFIXES, "+"):
        rows = [prefix + row for row in text.split("\n")]
        for cleared in (PLAIN.text("\n".join(rows)), streamed(rows)):
            assert not leaks(cleared, (secret,)), cleared
            assert cleared.count("\n") == text.count("\n")
            assert PLAIN.text(cleared) == cleared
    assert not leaks(PLAIN.text(json.dumps({"note": text})), (secret,))


@pytest.mark.parametrize(("name", "rows"), KEY_DUMPS, ids=[name for name, _ in KEY_DUMPS])
def test_a_dump_shows_no_row_of_a_key(name: str, rows: list[str]) -> None:
    for prefix in ("", *PREFIXES, "+", "-"):
        prefixed = [prefix + row for row in rows]
        for cleared in (PLAIN.text("\n".join(prefixed)), streamed(prefixed)):
            assert len([row for row in rows if row in cleared]) <= 4, cleared
            assert rows[len(rows) // 2] not in cleared


@pytest.mark.parametrize("text", [*HARMLESS, *RL_LINES, *HARMLESS_NESTED])
def test_harmless_text_stays(text: str) -> None:
    assert PLAIN.text(text) == text
    assert streamed(text.split("\n")) == text
    assert PLAIN.value([text]) == [text]
    for prefix in (*PREFIXES, "+", *(("-",) if text[:1] not in (" ", "-") else ())):
        rows = [prefix + row for row in text.split("\n")]
        assert streamed(rows) == PLAIN.text("\n".join(rows)) == "\n".join(rows)


def test_the_evidence_of_a_checkout_holds_no_secret(make_repo: MakeRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    github, known = "ghp_" + B62, "zq-plain-zq"
    monkeypatch.setenv("PLANTED_PASSWORD", known)
    repo = make_repo()
    run_git(repo, "checkout", "-q", "-b", f"fix-{github}")
    run_git(repo, "remote", "add", "origin", f"https://{B62}@example.org/x.git")
    put(repo, {f"shapes/{at}.txt": f"first line\n{text}\nlast line\n" for at, (_, text, _) in enumerate(SHAPES)})
    put(repo, {"id_ed25519": OPENSSH + "\n", f"id_{github}.txt": "x\n", f"{known}.txt": "y\n", "key.p12": b"\x00\x01" + ROWS[0].encode()})
    put(repo, {"pkg/__init__.py": f'KEY = """{OPENSSH}"""\npassword = "{PLAIN_PW}"\nmax_tokens = 512\n'})
    evidence, redactor = tmp_path / "evidence", Redactor(os.environ)
    (state,) = write_repos([repo_state(repo)], evidence, redactor)
    secrets = (github, known, *(part for _, _, parts in SHAPES for part in parts))
    for path in evidence.iterdir():
        assert not leaks(path.read_text(), secrets), path.name
    assert not leaks(state.model_dump_json(), secrets)
    patch = (evidence / f"{state.name}.patch").read_text()
    assert "+max_tokens = 512" in patch
    assert patch.count("+first line") == patch.count("+last line") == len(SHAPES)
    assert "key.p12': a binary file that holds keys" in patch
    assert "GIT binary patch" not in patch
    assert differs(state, evidence, redactor) is None
    put(repo, {"id_ed25519": OPENSSH.replace("OPENSSH", "RSA") + "\n\n"})
    assert differs(state, evidence, redactor) is not None


def test_a_key_that_hunks_cut_goes(make_repo: MakeRepo, tmp_path: Path) -> None:
    rows = [(ROWS[1][at:] + ROWS[1][:at])[:70] for at in range(40)]
    text = "\n".join((OPENSSH.split("\n")[0], *rows, OPENSSH.split("\n")[-1]))
    repo = make_repo(files={"key": text + "\n"})
    changed = text.replace(rows[20], rows[20][::-1])
    put(repo, {"key": changed + "\n"})
    write_repos([repo_state(repo)], tmp_path / "evidence", PLAIN)
    patch = (tmp_path / "evidence" / "repo.patch").read_text()
    assert "@@" in patch
    assert not leaks(patch, (rows[18], rows[20], rows[20][::-1], rows[23]))


def test_a_checkout_whose_path_holds_a_token_is_refused(make_repo: MakeRepo) -> None:
    repo = make_repo("ghp_" + B62)
    with pytest.raises(UserError, match="the path holds a secret") as refused:
        repo_state(repo)
    assert B62 not in str(refused.value)


def test_a_key_across_two_writes_goes(tmp_path: Path) -> None:
    data = f"before\n{OPENSSH}\nafter\n".encode()
    for cut in range(1, len(data), 37):
        log = tmp_path / f"{cut}.log"
        with LineLog(log, PLAIN.lines().line) as stream:
            stream.feed(data[:cut])
            stream.feed(data[cut:])
        written = log.read_text()
        assert not leaks(written, ROWS)
        assert written.split("\n")[-2].endswith(" after")


def test_a_torn_key_leaves_the_log_readable() -> None:
    log = ["step 1 loss 0.5", *OPENSSH.split("\n")[:3], *(f"step {step} loss 0.{step} reward 1.0" for step in range(2, 80))]
    redacted = streamed(log).split("\n")
    assert redacted[0] == log[0]
    assert redacted[4:] == log[4:]


def test_program_text_loses_literals_and_keeps_expressions() -> None:
    kept = [
        "token = load(key)",
        "def f(password: str, token: str | None = None) -> None:",
        "client = Client(api_key=api_key, password=self.password, token=other_token)",
        'password: str = "changeme"',
        'parser.add_argument("--api-key", help="the key of it")',
        'if password == "": raise ValueError("no password")',
        "assert token_2 == tokens[2]",
        "rows.sort(key=lambda row: row.key)",
    ]
    assert streamed(kept, program=True).split("\n") == kept
    for source in (
        f'password = "{PLAIN_PW}"',
        f"connect(password='{PLAIN_PW}')",
        f'url = "host=db password={PLAIN_PW}"',
        f"# password: {PLAIN_PW}",
        f'os.environ["DB_PASSWORD"] = "{PLAIN_PW}"',
    ):
        assert PLAIN_PW not in streamed([source], program=True), source


def test_a_source_line_of_a_traceback_is_program_text() -> None:
    rows = ['  File "/x/auth.py", line 3, in login', "    api_key = other_name", "RuntimeError: password=hunter2"]
    assert streamed(rows).split("\n") == [*rows[:2], "RuntimeError: password=[redacted:password]"]


@pytest.mark.parametrize(
    "unit",
    [
        "name: a value: b ",
        "curl -u ",
        "-----BEGIN ",
        "password ",
        "<a>",
        '\\"',
        "\\n",
        "\\t",
        "a\\u0041 ",
        "-\\n-----END ",
        "[[",
        "password={",
        "eyJa.",
        "$2y$",
        "machine a login b ",
        "_a1B",
        "@a:b",
        "[0] ",
        "token: ",
        "pass{",
    ],
)
def test_time_is_linear(unit: str) -> None:
    begin = time.process_time()
    PLAIN.text(unit * (50_000 // len(unit)))
    assert time.process_time() - begin < 8, "quadratic time would be minutes"


def test_records_and_facts_lose_tokens_only(tmp_path: Path) -> None:
    token = "hf_" + B62
    facts = tmp_path / "facts.jsonl"
    row = {"fact": "hashes", "hashes": {"lm.key": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"}, f"train/{token}": 1.0}
    facts.write_text(json.dumps(row) + "\n")
    PLAIN.sweep(tmp_path)
    assert json.loads(facts.read_text()) == {"fact": "hashes", "hashes": row["hashes"], "train/[redacted:hf-token]": 1.0}


SCEPTIC = (
    "machine github.com\nlogin me\npassword\n{}",
    'curl -u "bob":"{}" https://x',
    "curl -K - <<< 'user = \"bob:{}\"'",
    "sqlplus me/{}@orcl",
    "sudo -S <<< {}",
    "kinit me <<< {}",
    "<Secret><Value>{}</Value></Secret>",
    "| password | {} |",
    "│ api_key      │ {} │",
    ".github.com\tTRUE\t/\tTRUE\t1790000000\tuser_session\t{}",
    "**Password:** `{}`",
)


@pytest.mark.parametrize("form", SCEPTIC)
def test_what_a_sceptic_got_through(form: str) -> None:
    secret = "pbHU4JK5hyDh9x"
    text = form.format(secret)
    for shown in (
        text,
        *(prefix + text.replace("\n", "\n" + prefix) for prefix in (*PREFIXES, "+")),
        json.dumps({"note": text}),
        repr([text]),
    ):
        cleared = PLAIN.text(shown)
        assert not leaks(cleared, (secret,)), cleared
        assert PLAIN.text(cleared) == cleared


@pytest.mark.parametrize(
    "line",
    [
        "| token | 1234 |",
        "│ num_key_value_heads │ 8 │",
        "| secret | none |",
        "grep step <<< $LOG",
        "**Tokens:** 4096",
        'user = "node:8080"',
        "0.1234567890123456e-05 AgentLoopWorkerTQ target_num_threads",
    ],
)
def test_harmless_neighbours_of_them_stay(line: str) -> None:
    assert PLAIN.text(line) == line
