"""A sample of mutants: one line of a training step is broken at a time, and the proving level sees it. `make mutants` runs hundreds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.mutants.__main__ import choose
from bench.mutants.edits import EDITS, Edit, outcome, wrong
from bench.mutants.harness import Server, run, same_record
from bench.mutants.mutations import mutated, mutations

from seatrial.runtime.environments import Environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
COUNT = 6
SEED = 7


def test_a_sample_of_mutants_is_seen_and_the_clean_run_is_not(server: Server, environment: Environment, tmp_path: Path) -> None:
    clean = {number: tmp_path / "clean" / str(number) for number in (0, 1)}
    for number, place in clean.items():
        assert run(server, number, place, environment.python, short=True, run_dir=tmp_path) is None
    outcomes: dict[str, Any] = {}
    for index, mutant in enumerate(choose(server, environment.python, tmp_path, COUNT, SEED, short=True)[:COUNT]):
        number, place = mutant["level"], tmp_path / str(index) / str(mutant["level"])
        found = run(server, number, place, environment.python, short=True, mutant=mutant, run_dir=tmp_path)
        if found is None and not same_record(place, clean[number]):
            outcomes[f"{mutant['short']}:{mutant['line']} {mutant['before']} -> {mutant['after']}"] = found
    assert outcomes == {}, "these change what a step does, and pass"


@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit.sample], ids=lambda edit: edit.name)
def test_a_hand_written_change_is_named_at_its_stage_or_passes(
    edit: Edit, server: Server, environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert wrong(edit, outcome(server, edit, environment.python, tmp_path_factory.getbasetemp() / "edits")) == ""


def test_every_kind_of_mutation_is_found_and_applied() -> None:
    source = "def f(a, b):\n    if a < 1 and b:\n        a += g(a, b)\n    g(a, dim=1)\n    return -a * 2.0\n"
    found = mutations(source, "f.py", {2, 3, 4, 5})
    kinds = {"comparison", "and/or", "condition", "operator", "swapped arguments", "dropped statement", "axis", "sign", "constant"}
    assert {mutation.kind for mutation in found} == kinds
    import ast

    for mutation in found:
        _, tree = mutated(source, "f.py", {2, 3, 4, 5}, mutation.number)
        assert ast.unparse(tree) != ast.unparse(ast.parse(source)), mutation
        compile(tree, "f.py", "exec")
