"""What other programs leave: a bad value of theirs is damage or an error with its fix, wherever it is read."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from pytest_seatrial.select import evidence
from pytest_seatrial.select.trace.trace_events import read_logs
from seatrial.bisect.bisect_records import EnvironmentPlan
from seatrial.bisect.git_bisect_log import read_marks
from seatrial.bisect.lockfile import BuildFailed, read_wanted
from seatrial.checks.step import limitations, read_shadow
from seatrial.core.errors import UserError
from seatrial.core.guarded import BadValue, parse_count, parse_python
from seatrial.core.records import CheckResult
from seatrial.core.series import Metrics, Series
from seatrial.core.verdict import Boundary, Verdict
from seatrial.instruments.nemo_rl import vendored_bridge
from seatrial.instruments.nemo_rl.nemo_process import Failed
from seatrial.instruments.refit import payload_header
from seatrial.instruments.refit.payload_header import RefitRefused
from seatrial.loops import get_loop
from seatrial.loops.nemo_rl.nemo_metrics import finite
from seatrial.loops.nemo_rl.nemo_outputs import LISTS, tokens
from seatrial.loops.nemo_rl.nemo_preflight import default_config
from seatrial.loops.verl.gpu_side import adapters
from seatrial.probes.bridge_verdict import _tree
from seatrial.probes.probe_process import require_weights
from seatrial.rollouts.backends.direct_backend import error_of_status, retry_after
from seatrial.rollouts.backends.gym_backend import body_of, outcome_of
from seatrial.rollouts.backends.openai_format import read as read_answer
from seatrial.rollouts.backends.openai_format import sort_sampling
from seatrial.rollouts.campaign_rounds import _check_function
from seatrial.rollouts.fast_json import parse_json_fast
from seatrial.rollouts.inputs import RowSource
from seatrial.rollouts.rollout_record import KEY, InputRow, RolloutError, TornError, Unit, check, row_of
from seatrial.rollouts.verifiers.text_verifiers import cases_of
from seatrial.runtime import slurm
from seatrial.runtime.command import Answer
from seatrial.runtime.process_tree import end_leftovers
from seatrial.runtime.staged import ray_step
from seatrial.trial.conclude import _asserted
from seatrial.trial.judge import Evidence, judge
from seatrial.trial.plan import parse_levels
from tests.bisect.repos import build, linear
from tests.cli.command import inside
from tests.fuzz_mutate import sealed
from tests.fuzz_worlds import bisect, finished, unsealed
from tests.loops import test_trl_proofs as trl
from tests.rollouts.gym_instance import campaign as gym_campaign
from tests.rollouts.imports_made import gym_files
from tests.rollouts.profiled import campaign, collected, ok, questions

DEEP = "[" * 900 + "]" * 900
DIGITS = "9" * 5000
RAW_NAN = "a place for NaN"


BEYOND_64_BITS = '{"answer": 123456789012345678901234567890}'
TWICE = '{"reward": 1.0, "text": "\\"a\\":", "reward" : 0.0}'


@pytest.mark.parametrize("text", [DEEP, DEEP.encode(), "NaN", '"\\ud800"', "1e999", DIGITS, "[" * 3000, "", BEYOND_64_BITS, TWICE])
def test_the_fast_reader_is_as_strict_as_the_guarded_one(text: str | bytes) -> None:
    with pytest.raises(BadValue):
        parse_json_fast(text)


def test_the_fast_reader_takes_what_looks_like_a_doubled_key_in_a_text() -> None:
    given = {"a": '{"a": 1, "a": 2}', "b": {"a": [18446744073709551615, -(1 << 63)]}, "1234567890123456789012": ["a", {"a": 1}]}
    assert parse_json_fast(json.dumps(given)) == given


@pytest.mark.parametrize(("line", "what"), [(TWICE, "stands twice"), (BEYOND_64_BITS, "64 bits"), (DEEP, "nested"), ("NaN", "not JSON")])
def test_rows_that_would_not_survive_are_damage_with_their_line(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "p"}}\n{line}\n')
    [_, (number, found)] = RowSource(tmp_path / "rows.jsonl").rows()
    assert (number, what in str(found)) == (2, True), found


def test_a_record_whose_row_is_no_json_is_torn() -> None:
    line = sealed(b'{"%s":{"crc":"","end":"","unit":7},"reward":NaN}' % KEY.encode()) + b"\n"
    assert check(line)
    with pytest.raises(TornError, match="its row"):
        row_of(line)


@pytest.mark.parametrize(
    ("text", "number"), [("17", 17), ("0", 0), ("-1", None), ("", None), ("9" * 5000, None), ("²", None), ("9999", None)]
)
def test_numbers_in_the_state_of_a_cluster(text: str, number: int | None) -> None:
    assert ray_step._number(text, 255) == number


def test_a_state_file_of_a_cluster_may_hold_anything(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff1\n")
    assert [ray_step._read(tmp_path / name) for name in ("pipe", "bytes", "absent", ".")] == ["", "\ufffd1", "", ""]
    assert ray_step._address("a" * 70 + ".b:x", 1) is None
    assert ray_step._address("127.0.0.1:" + "9" * 30, 1) is None


@pytest.mark.parametrize("marker", ["", "[]", DEEP, '{"target": 1, "keep": "k"}', '{"target": "t"}', "\x00"])
def test_a_damaged_marker_of_a_sync_says_what_to_do(tmp_path: Path, marker: str) -> None:
    (tmp_path / "marker").write_text(marker)
    with pytest.raises(Failed, match="marker"):
        vendored_bridge.restore_tree(tmp_path / "marker")


@pytest.mark.parametrize("manifest", ["", "[]", '{"a": 1}', '{"a": [1, 2]}', '{"a": ["x"]}'])
def test_a_damaged_manifest_of_a_sync_says_what_to_do(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "marker").write_text(json.dumps({"target": str(tmp_path / "t"), "keep": str(tmp_path)}))
    with pytest.raises(Failed, match=r"manifest\.json.*by hand"):
        vendored_bridge.restore_tree(tmp_path / "marker")


def test_counts_beyond_any_count_stay_huge() -> None:
    assert (parse_count("1,234"), parse_count(DIGITS)) == (1234, 10**18)
    with pytest.raises(BadValue):
        parse_count("١٢")


def test_counts_in_a_log(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(f"Adapter parameters: {DIGITS}\n")
    assert adapters("first", tmp_path / "run.log").passed
    assert not finite("run", [f"[WARNING]: {DIGITS}/{DIGITS} valid tokens have -inf in x"], []).passed


def test_levels_and_options_of_5000_digits() -> None:
    for text in (DIGITS, f"0-{DIGITS}", "0-99999999999", "٣"):
        with pytest.raises(UserError):
            parse_levels(text, get_loop("trl"))
    with pytest.raises(UserError):
        get_loop("verl").configured({"tp": DIGITS})


@pytest.mark.parametrize("row", [DEEP, "[1", '["hit",3,"x",""]', '["hello",0,"python","[["]', '["spawn",0,"{}",""]', '["hit",3,"²",""]'])
def test_a_line_of_a_child_that_cannot_be_read_is_told(tmp_path: Path, row: str) -> None:
    (tmp_path / "7-a.log").write_text('["hello",0,"python","[]"]\n' + row + "\n")
    [(process, events)] = read_logs(tmp_path)
    assert (process.trouble, len(events)) == (("line 2 cannot be read",), 1)


def test_a_worker_whose_evidence_is_damaged_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    line = json.dumps({"did": [[], [], []], "ran": None, "needs": [], "collected": ["\udcff.py"]})
    path.write_text(line + "\n" + line[:20])  # the last line belongs to a test that was killed
    assert evidence.read_evidence(path).collected == {"\udcff.py"}
    for damage in ("[1]", DEEP, line[:20], '{"did": 5}'):
        path.write_text(f"{damage}\n{line}\n")
        with pytest.raises(ValueError, match="line 1: not what a worker writes"):
            evidence.read_evidence(path)


def test_a_torn_result_of_a_killed_unit_is_no_result() -> None:
    assert [ray_step._ending(text) for text in ('{"ending": "done"}', '{"ending": "do', "[]", "[" * 3000)] == ["done", None, None, None]


def test_times_and_ranges_that_slurm_cannot_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_MOST_UNITS", 100)
    [row] = slurm._rows("12_3", "COMPLETED", "", "n", "(null)", "2026-99-99T00:00:00")
    assert (row.index, row.ended) == (3, None)
    assert len(slurm._rows(f"12_[0-{DIGITS}]", "PENDING", "", "n", "", "")) == 100
    assert slurm._rows("12_٣", "PENDING", "", "n", "", "") == []


@pytest.mark.parametrize("body", [DEEP, '{"choices": [{"message": {"content": ' + DEEP + "}}]}", '{"choices": 1e999}', "NaN"])
def test_an_answer_that_no_journal_could_hold_is_a_parse_failure(body: str) -> None:
    with pytest.raises(RolloutError):
        read_answer(body.encode(), "chat", 0)
    assert "HTTP 500" in str(error_of_status(500, body.encode(), {}))
    assert retry_after("Fri, 31 Dec 99999 23:59:59 GMT") is None


@pytest.mark.parametrize("response", [{"output": 5}, {"output": {"a": 1}}, {"incomplete_details": "x"}, {"usage": []}])
def test_a_response_of_gym_in_another_shape(response: dict[str, Any]) -> None:
    assert outcome_of({"reward": 1, "response": response}).finish == "stop"


def test_a_record_whose_head_ends_nowhere_is_torn() -> None:
    covered = b'","end":"x00217","unit":7}'
    line = b'{"%s":{"crc":"%08x%s\n' % (KEY.encode(), zlib.crc32(covered), covered)
    with pytest.raises(TornError):
        check(line)


@pytest.mark.parametrize(
    "content", ["[]", '{"python": 5}', '{"python": null, "limits": {"x": 1}, "options": {}}', "null", '{"python": null}']
)
def test_a_request_of_a_trial_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    unsealed(tmp_path / "made").write(tmp_path / "run")
    (tmp_path / "run/evidence/request.json").write_text(content)
    answer = inside("resume", tmp_path / "run", HOME=str(tmp_path))
    assert (answer.code, "request.json" in answer.err, "fix:" in answer.err) == (2, True, True), answer.err


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "0"},
        {"unit": [0]},
        {"reward": "1"},
        {"reward": {}},
        {"kind": [], "outcome": "failed"},
        {"answer": {}},
        {"metrics": {"a": "b"}},
    ],
)
def test_a_record_with_a_field_of_another_type_ends_no_merge(tmp_path: Path, change: dict[str, Any]) -> None:
    place = collected(campaign(tmp_path, {"a": questions(1)}, shards=1), [[ok(1.0, "4", metrics={"a": 1.0})] * 4])
    [path] = place.shard(0).glob("attempt-*.jsonl")
    first, *others = path.read_bytes().splitlines(keepends=True)
    row = json.loads(first)
    row[KEY] |= change
    path.write_bytes(b"".join([sealed(json.dumps(row).encode()) + b"\n", *others]))
    for words in (("status",), ("merge", "--partial"), ("profile",)):
        answer = inside("rollouts", words[0], place.root, *words[1:])
        assert answer.code in (0, 2), answer.err
        assert answer.code == 0 or "fix:" in answer.err


def test_parquet_with_a_column_whose_name_is_no_text(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"prompt": ["a"]}), tmp_path / "rows.parquet")
    data = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(data.replace(b"prompt", b"pro\x9fpt"))
    with pytest.raises(UserError, match="not a whole Parquet file"):
        list(RowSource(tmp_path / "rows.parquet").rows())


@pytest.mark.parametrize("odd", ["a\0b", "x" * 200_000])
def test_a_log_of_git_bisect_whose_commit_no_git_can_be_asked_for(tmp_path: Path, odd: str) -> None:
    build(tmp_path / "repo", linear(2, {"a.py": "1\n"}))
    (tmp_path / "git.log").write_text(f"git bisect start\ngit bisect bad {odd}\n")
    with pytest.raises(UserError, match=r"git\.log:2"):
        read_marks(tmp_path / "git.log", tmp_path / "repo")


@pytest.mark.parametrize(
    ("row", "change"),
    [
        (0, {"max_steps": 10**15}),
        (0, {"max_steps": "x"}),
        (2, {"weights": []}),
        (3, {"never": 5}),
        (4, {"updates": {}}),
        (0, {"process": None}),
    ],
)
def test_facts_of_another_shape_prove_nothing_and_are_no_crash(tmp_path: Path, row: int, change: dict[str, Any]) -> None:
    facts, series = trl.WORLDS["smoke"]
    rows = [dict(one) for one in facts["run"]]
    rows[row] |= change
    trl.prove(tmp_path, "smoke", {}, series)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "facts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    _, made, why = _asserted(get_loop("trl"), trl.LEVELS["smoke"], tmp_path, Metrics(series=series))
    assert why or not all(check.passed for check in made)


@pytest.mark.parametrize(
    "change",
    [
        {"divergence": {"stage": "typo", "what": "norm", "expected": "1", "found": "2", "step": 2}},
        *({"divergence": []}, {"stages": [1]}, {"steps": True}, {"knobs": [{}]}, {"stages": [{"stage": "data", "compared": "9"}]}),
    ],
)
def test_a_shadow_of_another_shape_proves_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "shadow.json").write_text(json.dumps(trl.shadow(3) | change))
    assert "shadow.json is damaged" in str(read_shadow(tmp_path / "shadow.json"))
    assert limitations([tmp_path]) == ()


def test_an_agent_that_is_no_name_is_a_bad_line(tmp_path: Path) -> None:
    made, _ = gym_files(tmp_path)
    first, *others = made.read_text().splitlines()
    made.write_text("\n".join([json.dumps(json.loads(first) | {"agent_ref": {"name": ["a"]}}), *others]) + "\n")
    answer = inside("rollouts", "import", "gym", made, "--out", tmp_path / "c")
    assert (answer.code, f"{made}:1: agent_ref is not" in answer.err) == (2, True)
    assert inside("rollouts", "import", "gym", made, "--out", tmp_path / "d", "--partial").code == 0


def test_links_that_lead_in_a_circle_are_an_error_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").symlink_to("trainer_state.json")
    for words in (("metrics", "show"), ("history", "import")):
        answer = inside(*words, tmp_path, HOME=str(tmp_path))
        assert (answer.code, "fix:" in answer.err) == (2, True)


def test_a_journal_with_a_directory_in_the_place_of_a_file(tmp_path: Path) -> None:
    place = collected(campaign(tmp_path, {"a": questions(1)}, shards=1), [[ok(1.0)] * 4])
    [path] = place.shard(0).glob("attempt-*.jsonl")
    path.unlink()
    path.mkdir()
    for words in (("status",), ("merge",), ("profile",)):
        answer = inside("rollouts", *words, place.root)
        assert (answer.code, "Is a directory" in answer.err) == (2, True)


@pytest.mark.parametrize("extra", [["seed"], 5, {"a": 1}, "[1]", "NaN"])
def test_an_extra_body_that_is_no_object_in_a_text(extra: object) -> None:
    row = {"responses_create_params": {"input": "a", "metadata": {"extra_body": extra}}}
    with pytest.raises(RolloutError):
        body_of(Unit(0, InputRow(0, "t", "d", row, agent="a"), 0, 1), gym_campaign("http://h/v1"), sort_sampling({}))


@pytest.mark.parametrize("change", [{"parents": [5]}, {"parents": [-1]}])
def test_a_history_of_a_bisect_that_cannot_be_one(tmp_path: Path, change: dict[str, Any]) -> None:
    bisect(tmp_path / "made").write(tmp_path / "run")
    file = tmp_path / "run" / "history.json"
    kept = json.loads(file.read_text())
    for content in (kept | {"points": [kept["points"][0], kept["points"][1] | change, *kept["points"][2:]]}, kept | {"points": []}):
        file.write_text(json.dumps(content))
        answer = inside("bisect", "report", tmp_path / "run")
        assert (answer.code, "history.json" in answer.err, "fix:" in answer.err) == (2, True, True)


def test_a_level_without_proofs_is_blocked_and_never_a_pass() -> None:
    met = CheckResult(name="loss", kind="expression", passed=True, boundary=Boundary.METRICS)
    missed = met.model_copy(update={"passed": False})
    metrics = Metrics(series={"loss": Series("loss", (1,), (0.5,))})
    for one, verdict in ((met, Verdict.BLOCKED), (missed, Verdict.FAIL)):
        evidence = Evidence(metrics=metrics, checks=(one,), unproven="facts.jsonl: KeyError: 'step'", steps_reached=1)
        assert judge(evidence, get_loop("trl").milestones()).verdict is verdict


@pytest.mark.parametrize("work", [5, {}, {"seed": "1", "seed_rule": "none"}, {"seed": 1, "seed_rule": "x"}, []])
def test_a_manifest_whose_settings_no_campaign_has(tmp_path: Path, work: object) -> None:
    place = collected(campaign(tmp_path, {"a": questions(1)}, shards=1), [[ok(1.0)] * 4])
    kept = json.loads(place.manifest.read_text())
    for identity in ({**kept["identity"], "work": work}, {**kept["identity"], "datasets": 5}):
        place.manifest.write_text(json.dumps(kept | {"identity": identity}))
        answer = inside("rollouts", "status", place.root)
        assert (answer.code, "manifest.json" in answer.err) == (2, True)


def test_a_record_of_a_trial_that_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    finished(tmp_path / "made").write(tmp_path / "run")
    record = tmp_path / "run" / "trial.json"
    record.write_bytes(b"\xef\xbb\xbf" + record.read_bytes())
    assert inside("report", tmp_path / "run", "--format", "json").code in (0, 1)


@pytest.mark.parametrize("source", ["-" * 3000 + "1", "(" * 300, "a\0b", DIGITS, "def f(:"])
def test_a_program_that_cannot_be_parsed(tmp_path: Path, source: str) -> None:
    with pytest.raises(BadValue):
        parse_python(source.encode())
    with pytest.raises(ValueError, match="not Python"):
        cases_of([source])
    (tmp_path / "x.py").write_text(source)
    with pytest.raises(UserError, match=r"x\.py: not Python"):
        default_config(tmp_path / "x.py")
    with pytest.raises(UserError, match=r"x\.py: not Python"):
        _check_function(f"{tmp_path}/x.py:f", boxed=True)
    assert _tree(tmp_path / "x.py").body == []


def test_lines_that_are_not_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Welcome\n12|RUNNING\n12_3|COMPLETED|2025-01-01T00:00:00|2025-01-01T00:00:00|x|n\nMaxArraySize = (null)\n"
    monkeypatch.setattr(slurm, "_call", lambda *_, **__: Answer(0, said.encode()))
    assert [row.index for row in slurm.squeue("", ["12"])] == [3]
    assert [row.index for row in slurm.sacct("", ["12"]) or ()] == [3]
    with pytest.raises(slurm.ControllerDown, match="MaxArraySize is"):
        slurm.largest_array("")


def test_tokens_and_weights_that_are_pipes_or_infinite(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "results" / "logs"
    logs.mkdir(parents=True)
    row: dict[str, Any] = {key: [[1]] for key in LISTS} | {"input_lengths": [1], "sample_loss_mask": [1]}
    (logs / "train_data_step1.jsonl").write_text(json.dumps(row).replace('"input_lengths": [1]', '"input_lengths": [1e999]') + "\n")
    with pytest.raises(UserError, match="not a sequence of a training step"):
        list(tokens(tmp_path))
    (logs / "train_data_step1.jsonl").unlink()
    for pipe in (logs / "train_data_step1.jsonl", tmp_path / "a.safetensors"):
        os.mkfifo(pipe)
    with pytest.raises(UserError, match="a named pipe"):
        list(tokens(tmp_path))
    with pytest.raises(UserError, match="a named pipe"):
        require_weights(tmp_path, "x")


@pytest.mark.parametrize("package", ["x = 1", 'source = { editable = "." }', 'name = "a"\nsource = { editable = 5 }', "source = 5"])
def test_a_lock_of_uv_in_another_shape(tmp_path: Path, package: str) -> None:
    (tmp_path / "uv.lock").write_text(f"[[package]]\n{package}\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    plan = EnvironmentPlan(kind="uv", lock="uv.lock")
    if package == "x = 1":
        read_wanted(tmp_path, plan)
        return
    with pytest.raises(BuildFailed, match="uv writes it"):
        read_wanted(tmp_path, plan)


def test_requirements_that_name_a_file_whose_name_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"-r {'x' * 5000}\n--find-links {'y' * 5000}\n")
    with pytest.raises(BuildFailed, match="does not exist"):
        read_wanted(tmp_path, EnvironmentPlan(kind="pip", lock="requirements.txt"))


def test_a_header_of_a_refit_that_is_nested_too_deeply() -> None:
    with pytest.raises(RefitRefused, match="header is not valid"):
        payload_header.parse(b"[" * 30_000)


def test_an_edited_record_with_its_checksum_is_named_by_export(tmp_path: Path) -> None:
    place = collected(campaign(tmp_path, {"a": questions(1)}), [[ok(1.0), ok(0.0), ok(1.0), ok(1.0)]])
    shards = list(place.root.rglob("attempt-*.jsonl"))
    for shard in shards:
        lines = shard.read_bytes().splitlines()
        shard.write_bytes(b"".join(with_nan(line) + b"\n" for line in lines))
    assert inside("rollouts", "merge", place.root, "--partial", HOME=str(tmp_path)).code == 0
    for layout in ("gym", "skills"):
        answer = inside("rollouts", "export", place.root, layout)
        assert (answer.code, str(place.merged) in answer.err) == (2, True), answer.err


def with_nan(line: bytes) -> bytes:
    """A record whose row holds NaN, with a checksum that holds."""
    head = json.loads(line)[KEY]
    return sealed(json.dumps({KEY: head, "reward": RAW_NAN}).replace(f'"{RAW_NAN}"', "NaN").encode())


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("limit", -1)])
def test_a_damaged_campaign_is_named_by_what_goes_on_with_it(tmp_path: Path, key: str, value: int) -> None:
    place = collected(campaign(tmp_path, {"a": questions(1)}), [[ok(1.0), ok(0.0), ok(1.0), None]])
    table = json.loads(place.campaign.read_text())
    table["datasets"][0][key] = value
    place.campaign.write_text(json.dumps(table))
    words = (("rescore", place.root, "--out", tmp_path / "again", "--verifier", "exact"), ("resume", place.root))
    for command in words:
        answer = inside("rollouts", *command, HOME=str(tmp_path))
        assert (answer.code, str(place.campaign) in answer.err) == (2, True), answer.err


@pytest.mark.parametrize("change", [{"owner": -1}, {"run_id": ""}, {"started": -1}, {"owner": "x"}])
def test_a_damaged_list_of_processes_is_named_and_ends_none(tmp_path: Path, change: dict[str, Any]) -> None:
    row = {"run_id": "no-such-run", "pid": 1, "started": 1.0, "owner": 4194306, "owner_started": 1.0}
    (tmp_path / "1.pids").write_text(json.dumps({**row, **change}))
    with pytest.raises(UserError, match=r"1\.pids"):
        end_leftovers(tmp_path / "1.pids")
