"""What a row must have, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.rollouts.campaign import Campaign, Dataset, expected, prompt_messages
from seatrial.rollouts.inputs import BadRowError, RowIds, agent_of, canonical, check_row, content_of, is_chosen, tags_of
from tests.rollouts.inputs_made import campaign, gym, plain

ASKED = {"role": "user", "content": "hi"}
GYM = {"config_paths": ["x.yaml"]}


def one(**dataset: Any) -> tuple[Dataset, Campaign]:
    """A campaign of one dataset."""
    whole = campaign({"name": "a", **dataset})
    return whole.datasets[0], whole


def said(row: dict[str, Any], **dataset: Any) -> str:
    """Why a row is refused."""
    with pytest.raises(BadRowError) as caught:
        check_row(row, *one(**dataset))
    return str(caught.value)


def test_good_rows_pass() -> None:
    check_row(plain(1), *one())
    check_row(gym(1), *one())
    check_row({"prompt": [ASKED], "expected_answer": 4}, *one())
    check_row({"question": "q", "gold": "g"}, *one(prompt="question", answer="gold"))
    check_row({"responses_create_params": {"input": "text", "temperature": 1}, "answer": "A"}, *one())
    check_row({"responses_create_params": {"input": [{"type": "function_call_output", "output": "x"}]}, "answer": "A"}, *one())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "answer": "1"}, "neither responses_create_params nor a column 'prompt'; there are: question, answer"),
        ({"prompt": " ", "answer": "1"}, "column 'prompt' is empty"),
        ({"prompt": None, "answer": "1"}, "column 'prompt' is empty"),
        ({"prompt": [], "answer": "1"}, "column 'prompt' is empty"),
        ({"prompt": 7, "answer": "1"}, "column 'prompt' is no text and no list of messages"),
        ({"prompt": [ASKED, {"role": "user"}], "answer": "1"}, "column 'prompt'[1] is no message with role and content"),
        ({"prompt": "q"}, "no answer: the verifier exact needs"),
        ({"prompt": "q", "answer": None}, "no answer: the verifier exact needs"),
        (gym(1, responses_create_params=[]), "responses_create_params is not an object"),
        (gym(1, responses_create_params={}), "responses_create_params.input is empty"),
        (gym(1, responses_create_params={"input": ["hi"]}), "responses_create_params.input[0] is no message"),
        (gym(1, responses_create_params={"input": "x", "seed": 1, "n": 2}), "does not have: n, seed (say work.seed"),
        (gym(1, responses_create_params={"messages": [ASKED]}), "does not have: messages (the Responses API calls it input)"),
        (gym(1, responses_create_params={"input": "x", "stream": True}), "stream"),
    ],
)
def test_a_bad_row_is_told(row: dict[str, Any], reason: str) -> None:
    assert reason in said(row)


def test_what_a_dataset_says_must_fit_its_rows() -> None:
    assert "no responses_create_params" in said(plain(1), format="gym")
    assert "so it is Gym's" in said(gym(1), format="plain")
    assert "the column 'gold' is missing or empty" in said(plain(1), answer="gold")
    assert "system message is for plain rows" in said(gym(1), system="Be brief.")
    assert "no tests: the verifier code needs the column 'tests'" in said(plain(1), verifier="code")
    check_row({"prompt": "write it", "tests": "assert True"}, *one(verifier="code"))
    check_row({"prompt": "write it"}, *one(verifier="judge"))


def test_tests_of_code_may_lie_in_an_object() -> None:
    deep = campaign({"name": "a"}, verifier="deep", verifiers={"deep": {"kind": "code", "tests": "meta.tests"}})
    check_row({"prompt": "write it", "meta": {"tests": "assert True"}}, deep.datasets[0], deep)
    for row in ({"prompt": "write it", "meta": {}}, {"prompt": "write it", "meta": {"tests": None}}, {"prompt": "write it", "meta": "x"}):
        with pytest.raises(BadRowError, match=r"no tests: the verifier code needs the column 'meta\.tests'"):
            check_row(row, deep.datasets[0], deep)


def test_gym_verifies_by_itself_and_needs_an_agent() -> None:
    whole = campaign(gym=GYM)
    row = gym(1)
    check_row({key: row[key] for key in ("responses_create_params",)}, whole.datasets[0], whole)
    with pytest.raises(
        BadRowError, match=r"no agent: the row has no agent_ref, the dataset no agent, and gym\.agent is not said"
    ) as caught:
        agent_of(row, whole.datasets[0], whole)
    assert caught.value.fix == "say gym.agent, or agent of the dataset in [[datasets]]"
    both = campaign({"name": "a", "agent": "dataset"}, {"name": "b"}, gym={**GYM, "agent": "campaign"})
    assert agent_of(gym(1, agent_ref={"name": "own"}), both.datasets[0], both) == "own"
    assert [agent_of(row, dataset, both) for dataset in both.datasets] == ["dataset", "campaign"]
    for wrong in ("own", {}, {"name": ""}, {"name": 3}):
        with pytest.raises(BadRowError, match="agent_ref"):
            agent_of(gym(1, agent_ref=wrong), both.datasets[0], both)
    assert agent_of(row, *one()) is None


def test_tags_come_from_the_dataset_and_its_columns() -> None:
    dataset, _ = one(tags=["math"], tag_columns=["level", "topics", "absent"])
    assert tags_of(plain(1, level=3, topics=["x", "y", "x"]), dataset) == ("math", "level=3", "topics=x", "topics=y")
    assert tags_of(plain(1, level=None), dataset) == ("math",)
    with pytest.raises(BadRowError, match="tag column 'level' holds a dict"):
        tags_of(plain(1, level={}), dataset)


def test_prompts_and_answers() -> None:
    dataset, _ = one(system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert prompt_messages({"prompt": "hi"}, dataset) == [system, ASKED]
    assert prompt_messages({"prompt": [ASKED, ASKED]}, dataset) == [system, ASKED, ASKED]
    bare, _ = one()
    assert prompt_messages({"prompt": "hi"}, bare) == [ASKED]
    assert prompt_messages({"responses_create_params": {"input": "hi"}}, bare) == [ASKED]
    assert prompt_messages(gym(5), bare) == [{"role": "user", "content": "Question 5"}]
    assert expected({"answer": "long", "expected_answer": 0}, bare) == 0
    assert expected({"answer": "x", "expected_answer": None}, bare) == "x"
    assert expected({"answer": "x"}, one(answer="gold")[0]) is None


def test_ids_depend_on_content_alone() -> None:
    rows = [plain(n) for n in range(20)]
    ids = RowIds("a")
    before = {row["answer"]: ids.give(canonical(row)) for row in rows}
    assert len(set(before.values())) == 20
    assert all(len(task) == 16 and int(task, 16) >= 0 for task in before.values())
    again = RowIds("a")
    for row in reversed([*rows[3:], plain(99)]):
        task = again.give(canonical(dict(reversed(row.items())) | {"_ng_task_index": 7}))
        assert task == before.get(row["answer"], task)
    # Pinned, by sha256sum: an id that changes with a release would part old results from new ones.
    assert before["1"] == "816f6d785879f59c"


def test_equal_rows_are_counted_and_other_datasets_do_not_matter() -> None:
    text = canonical(plain(1))
    ids, other = RowIds("a"), RowIds("b")
    first = ids.give(text)
    assert [ids.give(text), ids.give(canonical(plain(2))) != first, ids.give(text)] == [f"{first}-2", True, f"{first}-3"]
    assert ids.duplicates == 2
    assert other.give(text) not in (first, f"{first}-2")
    assert content_of(text) == content_of(canonical(plain(1)))


def test_a_share_is_the_same_each_time_and_grows() -> None:
    tasks = [f"{number:016x}" for number in range(2000)]
    half = {task for task in tasks if is_chosen(task, 0.5)}
    assert 900 < len(half) < 1100
    assert {task for task in tasks if is_chosen(task, 0.25)} < half
    assert all(is_chosen(task, 1.0) for task in tasks)


@pytest.mark.parametrize("answer", ["C", "(b)", "second", ["A", "B"]])
def test_an_answer_that_is_a_letter_or_an_option_can_be_chosen(answer: Any) -> None:
    check_row({"prompt": "q", "answer": answer, "options": ["first", "second", "third"]}, *one(verifier="choice"))


@pytest.mark.parametrize("answer", ["E", "fourth", "12", ["A", "F"], {"A": 1}, True, " "])
def test_an_answer_that_nobody_can_choose_is_refused_before_the_start(answer: Any) -> None:
    row = {"prompt": "q", "answer": answer, "options": ["first", "second", "third"]}
    assert said(row, verifier="choice") == f"expects {answer!r}, which is no letter and no option"
    check_row(row, *one(verifier="exact"))
