"""Expressions that NeMo-RL's scripts assert: read from their text, and as checks of a level."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.core.loop import read_tables
from seatrial.core.records import Cost
from seatrial.core.specs import CheckSpec, Level
from seatrial.loops.nemo_rl import script_reader
from seatrial.loops.nemo_rl.script_reader import assertions_in, commands, own_checks, prefixed, unexpanded, unread
from seatrial.metrics.checks import parse

LEVEL = Level(number=2, name="refit", title="t", proves="p", cost=Cost(minutes=1))


def read(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = tmp_path / "script.sh"
    path.write_text(text)
    return assertions_in(path)


def test_plain_calls_in_all_the_ways_they_are_written(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """#!/bin/bash
set -eou pipefail
# don't: uv run tests/check_metrics.py $JSON 'max(data["commented"]) < 1'
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS
uv run tests/check_metrics.py $JSON_METRICS \\
    'max(data["a"]) < 1.05' \\
    "data['b']['3'] > 0.5" \\
    "data[\\"c\\"][\\"1\\"] < 2" \\

if [[ $STEPS -ge 3 ]]; then
\tuv run --no-sync tests/check_metrics.py ${JSON_METRICS} --table-width 100 'min(data["d"]) > 0' 2>&1 | tee out
else
    ${NRL_PYTHON:-python} tests/check_metrics.py "$JSON" 'max(data["e"]) < 1' > report.txt
fi; python tests/check_metrics.py $JSON 'max(data["f"]) < 1'
""",
    )
    assert found == (
        'max(data["a"]) < 1.05',
        "data['b']['3'] > 0.5",
        'data["c"]["1"] < 2',
        'min(data["d"]) > 0',
        'max(data["e"]) < 1',
        'max(data["f"]) < 1',
    )


def test_arrays_and_variables_with_a_literal_value_are_put_in(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """MAX_STEPS=30
BOUND="1.05"
export STEP=$MAX_STEPS
COMMON=(
    'median(data["kl"]) < 1.3'
    # a remark inside
    "max(data[\\"x\\"]) < ${BOUND}"
)
check_metrics.py "$JSON" "${COMMON[@]}" "data['loss']['$STEP'] < 1" 'max(data["$KEPT"]) < 1'
check_metrics.py "$JSON" "${COMMON[@]}"
""",
    )
    assert found == ('median(data["kl"]) < 1.3', 'max(data["x"]) < 1.05', "data['loss']['30'] < 1", 'max(data["$KEPT"]) < 1')


def test_arguments_of_functions_are_put_in_and_cases_go_before_the_tags(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """EXP_NAME=$(basename "$0" .sh)
EXP_DIR=$SCRIPT_DIR/$EXP_NAME
one_case() {
    local name=$1
    local bound=$2
    local metrics_json="$EXP_DIR/$name/metrics.json"
    grep -q x y || { echo "[FAIL] no x"; exit 1; }
    uv run tests/check_metrics.py "$metrics_json" "max(data[\\"err\\"]) < $bound"
}
one_case real 1.05 "$@"
one_case fake 1.15 "$@"
""",
    )
    assert found == ('max(data["real/err"]) < 1.05', 'max(data["fake/err"]) < 1.15')


def test_what_was_really_handed_over_must_have_been_read(tmp_path: Path) -> None:
    """Cases of one script may assert the same; each of them must have been read."""
    path = tmp_path / "run.sh"
    path.write_text("for case in a b; do uv run check_metrics.py $EXP_DIR/$case/metrics.json \"max(data['x']) < 1\"; done\n")
    assert assertions_in(path) == ("max(data['a/x']) < 1", "max(data['b/x']) < 1")
    assert unread(path, ["max(data['x']) < 1"] * 2) == []
    assert unread(path, ["max(data['x']) < 1"] * 3) == ["max(data['x']) < 1"]
    assert unread(path, ["max(data['x']) < 2"]) == ["max(data['x']) < 2"]
    assert unread(path, []) == []


def test_loops_over_literal_words_are_gone_through(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """for spec in "run1 1" "run2 2"; do
    read -r run steps <<< "${spec}"
    uv run tests/check_metrics.py "metrics_${run}.json" 'len(data["r"]) == 2' "len(data[\\"loss\\"]) == ${steps}"
done
for file in logs/*; do check_metrics.py $file "max(data['$file']) < 1"; done
""",
    )
    assert found == ('len(data["r"]) == 2', 'len(data["loss"]) == 1', 'len(data["loss"]) == 2', "max(data['$file']) < 1")


@pytest.mark.parametrize(
    "text",
    [
        "BOUND=$(cat bound.txt)\n",
        'BOUND="$(cat bound.txt)"\n',
        "BOUND=`cat bound.txt`\n",
        "BOUND=${BOUND:-1.05}\n",
        "",
        "BOUND=1\nif [[ -n $FAST ]]; then\n  BOUND=2\nfi\n",
        "if [[ -n $FAST ]]; then BOUND=2; fi\n",
        "case $X in\n a) BOUND=2 ;;\nesac\n",
    ],
)
def test_what_is_not_known_is_left_as_it_is_and_reported(tmp_path: Path, text: str) -> None:
    found = read(tmp_path, text + 'check_metrics.py m.json "max(data[\\"x\\"]) < $BOUND" \'max(data["y"]) < 1\'\n')
    assert len(found) == 2
    assert "$" in found[0]
    assert unexpanded(found) == [found[0]]


def test_here_documents_are_no_commands(tmp_path: Path) -> None:
    text = """python - <<EOF $A
don't check_metrics.py m.json 'max(data["no"]) < 1'
EOF
cat <<-'END'
\tcheck_metrics.py m.json 'x'
\tEND
check_metrics.py m.json 'max(data["yes"]) < 1'
"""
    assert read(tmp_path, text) == ('max(data["yes"]) < 1',)


def test_a_function_that_calls_itself_ends(tmp_path: Path) -> None:
    assert read(tmp_path, "f() {\n  f $1\n  check_metrics.py m.json \"max(data['a']) < $1\"\n}\nf 3\n") == ("max(data['a']) < 3",)


def test_words_keep_what_quotes_protect() -> None:
    found = [command.words for command in commands("a 'b c' \"d e\"'f' g\\ h # i\nX=(1 2\n3) ; j=k l")]
    assert found == [("a", "b c", "d ef", "g h"), ("X=(", "1", "2", "3", ")"), ("j=k", "l")]


def test_checks_of_a_level_carry_the_prefix_of_their_phase(tmp_path: Path) -> None:
    facts = tmp_path / "imports" / "facts.jsonl"
    facts.parent.mkdir()
    rows = [
        {"fact": "assertions", "phase": "run", "script": "tests/functional/a.sh", "expressions": ['max(data["x"]) < 1', "data['y'] > $Z"]},
        {
            "fact": "assertions",
            "phase": "delta",
            "script": "tests/functional/b.sh",
            "expressions": ['"3" in data["x"]', "data['y']['1'] < 2"],
        },
    ]
    facts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    specs = own_checks(LEVEL, tmp_path)
    assert [spec.expr for spec in specs] == ['max(data["x"]) < 1', '"3" in data["delta/x"]', "data['delta/y']['1'] < 2"]
    assert specs[1].why == "b.sh asserts it itself"
    for spec in specs:
        parse(spec.expr)
    known = LEVEL.model_copy(update={"checks": (CheckSpec(expr='max(data["x"]) < 1', why="ours"),)})
    assert [spec.expr for spec in own_checks(known, tmp_path)] == ['"3" in data["delta/x"]', "data['delta/y']['1'] < 2"]
    assert own_checks(LEVEL, tmp_path / "absent") == ()


def test_every_tag_of_an_expression_gets_the_prefix() -> None:
    assert prefixed('data["a"]["100"] < 0.7 * data[ \'a\']["0"]', "r/") == 'data["r/a"]["100"] < 0.7 * data[\'r/a\']["0"]'


def test_the_levels_own_checks_are_of_the_check_language() -> None:
    levels = read_tables(Path(script_reader.__file__).parent / "levels.toml", "level", Level, beside=("concern", "surface"))
    for level in levels:
        for check in level.checks:
            parse(check.expr)
    # Their runs depend on the checkout: what the scripts assert and what is proven for each run must do.
    assert [level.name for level in levels if not level.checks] == ["refit", "architecture"]
