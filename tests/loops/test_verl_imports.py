"""Where verl's processes import from: the witness in each of them, and the check with a Ray worker before training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.core.loop import Phase
from seatrial.evidence.imports import judge_imports, read_imports, read_loaded
from seatrial.instruments.verl.verl_process import main_module, process_kind
from seatrial.instruments.witness import under_test
from seatrial.loops.verl.gpu_runs import phases
from tests.instruments.world import World
from tests.loops.verl_checkout import Bench, level, make_bench, run_phase

START = "import seatrial.instruments.verl.import_witness\n"


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["python3", "-m", "verl.trainer.main_ppo", "a=1"], "driver"),
        (["python3", "-u", "-m", "seatrial.instruments.verl.train"], "driver"),
        (["/v/bin/python", "/v/lib/ray/_private/workers/default_worker.py", "--node-ip-address=1"], "worker"),
        (["python3", "-"], "child"),
        (["python3", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"], "child"),
        (["python3", "-m", "torch._inductor.compile_worker"], "child"),
        (["python3", "-m"], "child"),
    ],
)
def test_a_process_is_known_by_its_command_line(command: list[str], kind: str) -> None:
    assert process_kind(command) == kind


def test_words_of_the_environment_are_read_back() -> None:
    assert under_test(os.pathsep.join(["a.b=/x=y", "c=/z"])) == {"a.b": "/x=y", "c": "/z"}
    assert under_test("") == {}
    assert main_module(["python", "-m", "a.b", "-m"]) == "a.b"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def run(world: World, code: str, path: list[Path], tested: dict[str, Path], **more: str) -> subprocess.CompletedProcess[str]:
    """A process that starts the witness as verl does."""
    return world.run(["-S", "-c", START + code], path, tested, **more)


def test_a_package_is_located_at_once_and_reported_when_it_is_imported(world: World) -> None:
    root = world.package("bridge", "megatron.bridge")
    (root / "megatron" / "bridge" / "deep.py").write_text("")
    core = world.package("core", "megatron.core")
    done = run(world, "import megatron.bridge.deep", [root, core], {"megatron.bridge": root, "megatron.core": core})
    assert (done.returncode, done.stderr) == (0, "")
    assert world.methods("megatron.bridge") == ["found", "imported"]
    assert world.methods("megatron.core") == ["found"], "nobody imported it"
    assert world.methods("json") == ["imported"]
    assert [row["file"] for row in world.rows() if row["package"] == "nowhere"] == [None]
    loaded = read_loaded([world.out / "loaded.jsonl"])
    assert loaded == {str(root / "megatron" / "bridge" / name) for name in ("__init__.py", "deep.py")}


def test_a_wrong_place_ends_the_process_before_anything_runs(world: World) -> None:
    root = world.package("bridge", "megatron.bridge")
    other = world.package("installed", "megatron.bridge")
    done = run(world, "print('trained')", [other, root], {"megatron.bridge": root})
    assert done.returncode == 90
    assert "seatrial: wrong import in child: " in done.stdout
    assert f"expected from {root}" in done.stdout
    assert "trained" not in done.stdout
    assert [row["ok"] for row in world.rows() if row["package"] == "megatron.bridge"] == [False]


def test_a_path_that_changes_later_is_caught_at_the_import(world: World) -> None:
    root = world.package("bridge", "megatron.bridge")
    other = world.package("installed", "megatron.bridge")
    late = f"import sys\nsys.path.insert(0, {str(other)!r})\n"
    code = late + "try:\n    import megatron.bridge\nexcept BaseException:\n    pass\nprint('trained')"
    done = run(world, code, [root], {"megatron.bridge": root})
    assert done.returncode == 90
    assert "trained" not in done.stdout
    assert world.methods("megatron.bridge") == ["found", "imported"]


def test_a_package_that_breaks_is_not_reported_as_imported(world: World) -> None:
    root = world.package("bridge", "megatron.bridge", "raise RuntimeError('broken change')")
    done = run(world, "import megatron.bridge", [root], {"megatron.bridge": root})
    assert done.returncode == 1
    assert "RuntimeError: broken change" in done.stderr
    assert world.methods("megatron.bridge") == ["found"]


def test_a_witness_without_a_place_to_write_says_so(world: World) -> None:
    done = run(world, "", [], {}, SEATRIAL_IMPORTS="")
    assert "ImportError: SEATRIAL_IMPORTS is not set here" in done.stderr


# The check before training.


def import_check(bench: Bench, worker: str | None = None) -> Phase:
    made = phases(level("smoke"), bench.context(), bench.level_directory("smoke"))[0]
    words = (*made.argv, "--py-executable", worker) if worker else made.argv
    return Phase(made.name, words, made.env, made.steps, made.processes, made.cwd)


def test_the_check_writes_what_both_say_and_what_the_level_claims(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    context, directory = bench.context(), bench.level_directory("smoke")
    assert run_phase(import_check(bench), context, directory) == 0
    proofs = read_imports(directory / "imports.jsonl")
    assert {proof.process for proof in proofs} == {"imports-driver", "imports-worker"}
    assert {proof.method for proof in proofs} == {"found"}, "only training may count as use"
    (fact,) = [json.loads(line) for line in (directory / "imports" / "facts.jsonl").read_text().splitlines()]
    assert fact["fact"] == "claims"
    assert fact["values"]["actor_rollout_ref.model.lora.rank"] == "> 0"


def test_a_worker_with_another_megatron_is_a_wrong_import(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    (tmp_path / "x").mkdir()
    other = World(tmp_path / "x").package("image", "megatron.core")
    directory = bench.level_directory("smoke")
    ours = tmp_path / "run" / "instruments"
    path = os.pathsep.join(map(str, (other, bench.bridge / "src", bench.verl, ours)))
    assert run_phase(import_check(bench, f"env PYTHONPATH={path} {sys.executable}"), bench.context(), directory) == 90
    log = (directory / "imports" / "run.log").read_text()
    assert f"seatrial: wrong import in imports-worker: megatron.core would come from {other}" in log
    assert judge_imports(read_imports(directory / "imports.jsonl"), bench.context().changes, ())


# With a real Ray.


@pytest.fixture
def ray_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Bench, Path]]:
    """A bench without the stand-in for Ray, and an interpreter with the real one."""
    from tests.runtime.rays import environment

    found = environment()
    place = Path(tempfile.mkdtemp(prefix="st", dir="/tmp"))  # sockets have short names only
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    bench = make_bench(tmp_path)
    shutil.rmtree(bench.verl / "ray")
    yield bench, found.python
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.real
def test_real_ray_workers_prove_their_imports(ray_bench: tuple[Bench, Path]) -> None:
    bench, python = ray_bench
    context, directory = bench.context(python=python.parent / "python3"), bench.level_directory("smoke")
    made = phases(level("smoke"), context, directory)
    for phase in made:
        assert run_phase(phase, context, directory) == 0, (directory / phase.name / "run.log").read_text()
    proofs = read_imports(directory / "imports.jsonl")
    kinds = {process for phase in made for process in phase.processes}
    assert judge_imports(proofs, context.changes, kinds) == ()
    assert ("worker", "imported") in {(proof.process, proof.method) for proof in proofs if proof.package == "megatron.bridge"}
    assert str(bench.bridge / "src" / "megatron" / "bridge" / "__init__.py") in read_loaded([directory / "loaded.jsonl"])


@pytest.mark.real
def test_a_real_worker_with_another_megatron_is_caught(ray_bench: tuple[Bench, Path]) -> None:
    bench, python = ray_bench
    (bench.root / "x").mkdir()
    other = World(bench.root / "x").package("image", "megatron.core")
    context, directory = bench.context(python=python.parent / "python3"), bench.level_directory("smoke")
    made = phases(level("smoke"), context, directory)[0]
    path = os.pathsep.join(map(str, (other, bench.bridge / "src", bench.verl, bench.root / "run" / "instruments")))
    words = (*made.argv, "--py-executable", f"env PYTHONPATH={path} {python}")
    assert run_phase(Phase(made.name, words, made.env, cwd=made.cwd), context, directory) == 90
    assert f"megatron.core would come from {other}" in (directory / "imports" / "run.log").read_text()
