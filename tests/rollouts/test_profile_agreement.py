"""The same rollouts through NeMo Gym's own code and Skills' own code give the same figures; where they do not, it is on purpose.

What they say stands in data/rollouts/agreement.json, which make_agreement.py beside it made in their own interpreter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.rollouts.results.profile_build import make_profile
from seatrial.rollouts.results.profile_data import Profile
from tests.rollouts.profiled import campaign, collected, ok, questions

DATA = Path(__file__).parents[1] / "data" / "rollouts" / "agreement.json"
CASES: dict[str, Any] = json.loads(DATA.read_text())["cases"]


def ours(root: Path, case: dict[str, Any]) -> Profile:
    """The case as a campaign, every k profiled."""
    repeats: int = case["repeats"]
    place = campaign(root, {"d": questions(len(case["rollouts"]))}, repeats=repeats)
    tasks = []
    for row in case["rollouts"]:
        by_repeat = {r["repeat"]: ok(r["reward"], r["answer"], output_tokens=r["output_tokens"]) for r in row}
        tasks.append([by_repeat.get(repeat) for repeat in range(repeats)])
    return make_profile(collected(place, tasks), ks=range(1, repeats + 1))


@pytest.mark.parametrize("name", sorted(CASES))
def test_figures_of_tasks_are_gyms(name: str, tmp_path: Path) -> None:
    found = {task.index: task for task in ours(tmp_path, CASES[name]).tasks}
    for theirs in CASES[name]["gym"]["tasks"]:
        task = found.pop(theirs["_ng_task_index"])
        assert (task.n, task.expected) == (theirs["num_rollouts"], theirs["expected_num_rollouts"])
        assert 100 * task.coverage == pytest.approx(theirs["reward_profile_completion_pct"])
        for quantity, numbers in (("reward", task.reward), ("output_tokens", task.output_tokens)):
            assert numbers is not None
            for figure in ("mean", "min", "max", "median", "std"):
                # Gym says 0 for the spread of one rollout; nothing is known of it.
                said = None if figure == "std" and task.n == 1 else pytest.approx(theirs[f"{figure}/{quantity}"])
                assert getattr(numbers, figure) == said, (name, task.index, figure)
    # Gym drops tasks without a rollout; we keep them, with no figures.
    assert all((task.n, task.reward, task.pass_rate) == (0, None, None) for task in found.values())
    assert len(found) == (name == "partial")


@pytest.mark.parametrize("name", sorted(CASES))
def test_figures_over_rollouts_are_gyms_agent_metrics(name: str, tmp_path: Path) -> None:
    theirs, numbers = CASES[name]["gym"]["agent"], ours(tmp_path, CASES[name]).overall.reward
    assert numbers is not None
    for figure in ("mean", "min", "max", "median", "std"):
        assert getattr(numbers, figure) == pytest.approx(theirs[f"{figure}/reward"])


@pytest.mark.parametrize("name", ["binary", "graded", "single"])
def test_pass_majority_and_averages_are_those_of_gym_and_skills(name: str, tmp_path: Path) -> None:
    overall, gym, skills = ours(tmp_path, CASES[name]).overall, CASES[name]["gym"]["metrics"], CASES[name]["skills"]
    columns = zip(overall.pass_at, overall.majority_at, overall.average_of, strict=True)
    for k, (passed, majority, average) in enumerate(columns, 1):
        if name != "graded":
            assert 100 * (passed.value or 0) == pytest.approx(gym[f"pass@{k}/accuracy"]) == pytest.approx(skills[f"pass@{k}"]["accuracy"])
        assert 100 * (majority.value or 0) == pytest.approx(gym[f"majority@{k}/accuracy"])
        assert 100 * (average.value or 0) == pytest.approx(gym[f"pass@1[avg-of-{k}]/accuracy"])
        if k > 1:
            statistics = skills[f"pass@1[avg-of-{k}]"]["accuracy_statistics"]
            assert 100 * (majority.value or 0) == pytest.approx(skills[f"majority@{k}"]["accuracy"])
            assert average.value == pytest.approx(statistics["avg"])
            for figure in ("std_dev_across_runs", "std_err_across_runs"):
                assert getattr(average, figure) == pytest.approx(statistics[figure])
                assert 100 * getattr(average, figure) == pytest.approx(gym[f"pass@1[avg-of-{k}]/accuracy/{figure}"])
        assert passed.tasks == majority.tasks == average.tasks == overall.tasks


def test_graded_rewards_are_no_chances(tmp_path: Path) -> None:
    """There both take the largest of the first k for pass@k; we say best@k over all draws, which is the same when k is all of them."""
    case = CASES["graded"]
    overall = ours(tmp_path, case).overall
    last = case["repeats"]
    theirs = case["gym"]["metrics"]
    assert 100 * (overall.best_at[-1].value or 0) == pytest.approx(theirs[f"pass@{last}/accuracy"])
    assert 100 * (overall.best_at[0].value or 0) != pytest.approx(theirs["pass@1/accuracy"])
    # Ours does not depend on which rollout came first: best of one is the mean.
    assert overall.best_at[0].value == pytest.approx(overall.mean.value)


def test_a_partial_run_leaves_out_short_tasks_by_number(tmp_path: Path) -> None:
    case = CASES["partial"]
    overall, theirs = ours(tmp_path, case).overall, case["gym"]["metrics"]
    lengths = [len(row) for row in case["rollouts"]]
    for passed, majority, average in zip(overall.pass_at, overall.majority_at, overall.average_of, strict=True):
        assert passed.tasks == majority.tasks == average.tasks == sum(length >= passed.k for length in lengths)
        # Gym skips short tasks too, and does not say so.
        assert passed.value is None if not passed.tasks else 100 * (passed.value or 0) == pytest.approx(theirs[f"pass@{passed.k}/accuracy"])
    assert (overall.tasks, overall.measured, overall.missing) == (7, 6, 28 - sum(lengths))


def test_gyms_aggregate_of_40_by_4_fits_one_set_of_counts(tmp_path: Path) -> None:
    """160 rollouts that Gym collected with mcqa from a stub model. Their rows were not kept, only the aggregate: how many tasks had so
    many correct is solved from its four pass@k. So this shows that whole numbers fit them, and not more; votes cannot be had back."""
    correct = [0] * 3 + [1] * 9 + [2] * 5 + [3] * 11 + [4] * 12
    place = campaign(tmp_path, {"mcqa": questions(40)})
    overall = make_profile(collected(place, [[ok(1)] * right + [ok(0)] * (4 - right) for right in correct]), ks=(1, 2, 3, 4)).overall
    assert [100 * (at.value or 0) for at in overall.pass_at] == pytest.approx([62.5, 79.16666666666667, 86.875, 92.5])
    assert overall.mean.value == 0.625
    assert overall.reward is not None
    assert (overall.reward.median, overall.reward.std) == pytest.approx((1.0, 0.4856429311786321))
