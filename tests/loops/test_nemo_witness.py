"""Where NeMo-RL's processes import from: the witness in each of them, and the check with a Ray worker before training."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.core.loop import Context
from seatrial.core.records import RepoState
from seatrial.evidence.imports import judge_imports, read_executed, read_imports, read_loaded, unused
from seatrial.instruments import ray_imports
from seatrial.instruments.nemo_rl import nemo_process, run_functional
from seatrial.instruments.nemo_rl.nemo_process import process_kind, program
from seatrial.loops.nemo_rl import nemo_checkout
from tests.instruments.world import World
from tests.loops.nemo_driver import SOURCE, VENDORED, Stage, commit, put

VERSIONS = sorted(Path("~/.pyenv/versions").expanduser().glob("3.*"))
PYTHONS = [path / "bin" / "python" for path in VERSIONS if int(path.name.split(".")[1]) >= 9]
"""Those at hand that a loop may run on."""
COVERAGE = ["/v/bin/python", "/v/bin/coverage", "run", "-a", "--data-file=/rl/tests/.coverage", "--source=/rl/nemo_rl"]
RAY = "/v/lib/ray/_private/workers"


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ([*COVERAGE, "/rl/examples/run_grpo.py", "--config", "/rl/examples/configs/a.yaml", "a=1"], "driver"),
        (["python", "examples/run_sft.py"], "driver"),
        (["python", "-u", "/rl/examples/nemo_gym/run_grpo_nemo_gym.py", "x=y.py"], "driver"),
        (["/v/bin/python", f"{RAY}/default_worker.py", "--node-ip-address=1"], "worker"),
        (["/v/bin/python", f"{RAY}/setup_worker.py", f"{RAY}/default_worker.py", "--node-ip-address=1"], "child"),
        (["python", "-u", "/v/lib/ray/dashboard/agent.py"], "child"),
        (["python", "/rl/tests/json_dump_tb_logs.py", "/rl/logs"], "child"),
        (["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"], "child"),
        (["python", "-m", "vllm.entrypoints"], "child"),
        (["python"], "child"),
    ],
)
def test_a_process_is_known_by_its_command_line(command: list[str], kind: str) -> None:
    assert process_kind(command) == kind


def test_the_program_is_the_one_that_coverage_runs() -> None:
    assert program([*COVERAGE, "/rl/examples/run_grpo.py", "b.py"]) == "/rl/examples/run_grpo.py"
    assert program(["python", "-c", "pass"]) is None


# The start of an interpreter.


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def run(world: World, words: list[str], path: list[Path], tested: dict[str, Path], **more: str) -> subprocess.CompletedProcess[str]:
    """A process as the driver starts it."""
    return world.run(words, [run_functional.START, *path], tested, **more)


def test_a_driver_proves_what_it_imports_and_may_lack_the_rest(world: World) -> None:
    root = world.package("rl", "nemo_rl")
    (root / "nemo_rl" / "algorithms.py").write_text("")
    put(root, {"examples/run_grpo.py": "import json\nimport nemo_rl.algorithms\n"})
    done = run(world, [str(root / "examples" / "run_grpo.py")], [root], {"nemo_rl": root, "megatron.bridge": world.root / "bridge"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {row["process"] for row in world.rows()} == {"driver"}
    assert world.methods("nemo_rl") == ["found", "imported"]
    assert [row["file"] for row in world.rows() if row["package"] == "megatron.bridge"] == [None]
    loaded = ("examples/run_grpo.py", "nemo_rl/__init__.py", "nemo_rl/algorithms.py")
    assert read_loaded([world.out / "loaded.jsonl"]) == {str(root / name) for name in loaded}


def watched(world: World, root: Path, path: str) -> None:
    """A changed file, as the level directory names it."""
    digest = hashlib.sha256((root / path).read_bytes()).hexdigest()
    (world.out / "changed.json").write_text(json.dumps({"files": [{"repo": "rl", "path": path, "sha256": digest}]}))


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parts[-3])
def test_a_driver_and_its_modules_say_which_changed_functions_ran(world: World, python: Path) -> None:
    root = world.package("rl", "nemo_rl")
    (root / "nemo_rl" / "loss.py").write_text("def used(): return 1\ndef idle(): return 1\n")
    watched(world, root, "nemo_rl/loss.py")
    put(root, {"examples/run_grpo.py": "import nemo_rl.loss\nnemo_rl.loss.used()\n"})
    done = world.run([str(root / "examples" / "run_grpo.py")], [run_functional.START, root], {"nemo_rl": root}, python=str(python))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {row[2] for row in read_executed(world.out / "executed.jsonl").ran} == {"<module>", "used"}


def test_what_a_checkout_loads_by_itself_was_neither_loaded_nor_run_by_the_loop(world: World) -> None:
    root = world.package("rl", "nemo_rl")
    (root / "nemo_rl" / "loss.py").write_text("def used(): return 1\n")
    watched(world, root, "nemo_rl/loss.py")
    put(root, {"sitecustomize.py": "import nemo_rl.loss\nnemo_rl.loss.used()\n", "examples/run_grpo.py": "import json\n"})
    done = run(world, [str(root / "examples" / "run_grpo.py")], [root], {"nemo_rl": root})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert read_loaded([world.out / "loaded.jsonl"]) == set()
    assert not read_executed(world.out / "executed.jsonl").ran


def test_an_import_from_elsewhere_ends_the_process(world: World) -> None:
    image = world.package("image", "megatron.bridge")
    code = "try:\n    import megatron.bridge\nexcept BaseException:\n    pass\nprint('trained')"
    done = run(world, ["-c", code], [image], {"megatron.bridge": world.root / "bridge"})
    assert done.returncode == 90
    assert done.stdout == (
        f"seatrial: wrong import in child: child: imported megatron.bridge from {image}/megatron/bridge/__init__.py, "
        f"expected from {world.root / 'bridge'}\n"
    )


def test_other_processes_are_left_alone(world: World) -> None:
    image = world.package("image", "megatron.bridge")
    code = "import sys, json\nprint('typing' in sys.modules or 'seatrial' in sys.modules)"
    done = run(world, ["-S", "-c", "import sitecustomize\n" + code], [image], {"megatron.bridge": world.root / "bridge"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
    assert list(world.out.iterdir()) == []
    quiet = run(world, ["-c", "import megatron.bridge"], [image], {"megatron.bridge": world.root / "bridge"}, SEATRIAL_IMPORTS="")
    assert (quiet.returncode, quiet.stderr) == (0, ""), "nobody asked for a witness"


def test_a_witness_that_cannot_start_breaks_nothing_and_says_so(world: World) -> None:
    root = world.package("rl", "nemo_rl")
    done = run(world, ["-c", "import nemo_rl; print('trained')"], [root], {"nemo_rl": root}, SEATRIAL_IMPORTS="/proc/nowhere")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.startswith("seatrial: wrong import in process: nothing is proven, the witness did not start: FileNotFoundError")


def test_a_start_module_that_is_hidden_runs_too(world: World) -> None:
    put(world.root / "theirs", {"sitecustomize.py": "print('theirs', __file__)\nVALUE = 3\n"})
    done = run(world, ["-c", "import sitecustomize; print(sitecustomize.VALUE)"], [world.root / "theirs"], {"nemo_rl": world.root})
    assert done.stdout == f"theirs {world.root}/theirs/sitecustomize.py\n3\n"
    put(world.root / "bad", {"sitecustomize.py": "raise RuntimeError('of theirs')\n"})
    done = run(world, ["-c", "print('on')"], [world.root / "bad"], {"nemo_rl": world.root})
    assert (done.returncode, done.stdout, "of theirs" in done.stderr) == (0, "on\n", True)


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parts[-3])
def test_every_python_of_a_loop_can_be_watched(world: World, python: Path) -> None:
    root = world.package("rl", "nemo_rl")
    put(root, {"examples/run_grpo.py": "import nemo_rl\n"})
    done = world.run([str(root / "examples" / "run_grpo.py")], [run_functional.START, root], {"nemo_rl": root}, str(python))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {row["process"] for row in world.rows()} == {"driver"}
    assert world.methods("nemo_rl") == ["found", "imported"]


def test_the_instruments_have_the_grammar_of_an_old_python() -> None:
    drive = Path(run_functional.__file__).parent
    for path in [*drive.rglob("*.py"), *(SOURCE / "seatrial" / "instruments").glob("*.py")]:
        ast.parse(path.read_text(), feature_version=(3, 9))


# What the phases are told, and the check before training.


def repo(name: str, path: Path, packages: tuple[str, ...], **more: object) -> RepoState:
    plain = {"name": name, "path": str(path), "commit": "0" * 40, "branch": "main", "packages": packages}
    return RepoState.model_validate({**plain, "import_root": str(path), **more})


def test_every_package_is_expected_where_it_is_imported_from(tmp_path: Path) -> None:
    rl, bridge = tmp_path / "rl", tmp_path / "bridge"
    put(bridge / "3rdparty" / "Megatron-LM", {"megatron/core/__init__.py": ""})
    changes = (
        repo("bridge", bridge, ("megatron.bridge",), import_root=str(bridge / "src")),
        repo("nemo-rl", rl, ("nemo_rl",), companion=True),
    )
    context = Context(run_dir=tmp_path, python=Path(sys.executable), model="m", changes=changes, options={"nemo_rl": str(rl)})
    made = nemo_checkout.witness_variables(context, tmp_path / "level")
    core = f"megatron.core={bridge}/3rdparty/Megatron-LM"
    assert made["SEATRIAL_UNDER_TEST"].split(os.pathsep) == [f"megatron.bridge={bridge}/src", f"nemo_rl={rl}", core]
    assert made["SEATRIAL_IMPORTS"] == str(tmp_path / "level")
    synced = (changes[0].model_copy(update={"synced": str(rl / VENDORED)}), changes[1])
    context = Context(run_dir=tmp_path, python=Path(sys.executable), model="m", changes=synced, options={"nemo_rl": str(rl)})
    assert f"megatron.bridge={rl / VENDORED}{os.pathsep}" in nemo_checkout.witness_variables(context, tmp_path)["SEATRIAL_UNDER_TEST"]


def test_the_workers_python_is_that_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo_process, "IMAGE", tmp_path / "image")
    assert nemo_process.policy_python(tmp_path, {}) is None
    places = [tmp_path / "image", tmp_path / "venvs", tmp_path / "named"]
    for place in places:
        put(place, {f"{nemo_process.POLICY}/bin/python": ""})
        assert nemo_process.policy_python(tmp_path, {"NEMO_RL_VENV_DIR": str(tmp_path / "gone")}) is None
        named = {"NEMO_RL_VENV_DIR": str(place)} if place.name == "named" else {}
        assert nemo_process.policy_python(tmp_path, named) == place / nemo_process.POLICY / "bin" / "python"
    assert nemo_process.policy_python(tmp_path, {"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}) == Path(sys.executable)


def test_the_check_asks_a_worker_in_the_policys_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[list[str]] = []

    def check(words: list[str]) -> int:
        told.append(words)
        return 0

    monkeypatch.setattr(ray_imports, "main", check)
    monkeypatch.setattr(nemo_process, "IMAGE", tmp_path / "image")
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "my venvs"))
    assert nemo_process.main(["--checkout", str(tmp_path), "--claims", "{}"]) == 0
    assert told.pop() == ["--claims", "{}", "--may-lack", "imports-driver,imports-worker"]
    assert "is not made yet" in capsys.readouterr().out
    put(tmp_path / "my venvs", {f"{nemo_process.POLICY}/bin/python": ""})
    assert nemo_process.main(["--checkout", str(tmp_path), "--claims", "{}"]) == 0
    quoted = f"'{tmp_path / 'my venvs' / nemo_process.POLICY / 'bin' / 'python'}'"
    assert told.pop() == ["--claims", "{}", "--may-lack", "imports-driver", "--py-executable", quoted]


# With a real Ray, whose worker has an environment of its own.

TRAIN = """
import os
import nemo_rl
import ray

ray.init(runtime_env={"env_vars": dict(os.environ)}, include_dashboard=False, num_cpus=1)

@ray.remote(num_cpus=1)
class Policy:
    def train(self):
        import nemo_rl
        import megatron.bridge.model
        return megatron.bridge.model.NAME

policy = Policy.options(runtime_env={"py_executable": os.environ["WORKER"], "env_vars": dict(os.environ)}).remote()
print("the policy is", ray.get(policy.train.remote(), timeout=60))
"""
COVER = """
import runpy, sys
runpy.run_path(next(word for word in sys.argv if word.endswith(".py")), run_name="__main__")
"""
SCRIPT = "uv run python $COVERAGE run -a --source=$PROJECT_ROOT/nemo_rl $PROJECT_ROOT/examples/run_grpo.py 2>&1 | tee $EXP_DIR/run.log"


class RayStage(Stage):
    """A checkout with a trainer; the worker's environment has the vendored Bridge, the driver's has none."""

    def __init__(self, root: Path, python: Path) -> None:
        super().__init__(root, SCRIPT)
        put(self.checkout, {"nemo_rl/__init__.py": "", "examples/run_grpo.py": TRAIN})
        put(root, {"coverage": COVER})
        self.python, self.level = python, root / "level"
        self.level.mkdir()
        self.source, self.target = self.bridges(
            {"src/megatron/bridge/__init__.py": "", "src/megatron/bridge/model.py": "NAME = 'vendored'\n"},
            {"src/megatron/bridge/__init__.py": "", "src/megatron/bridge/model.py": "NAME = 'under test'\n"},
        )
        self.worker = self.checkout / "venvs" / nemo_process.POLICY / "bin" / "python"
        subprocess.run([python, "-m", "venv", "--without-pip", self.worker.parents[1]], check=True)

    def installed(self, bridge: Path) -> None:
        """The worker's environment holds Ray, and a Bridge in editable form."""
        (packages,) = self.worker.parents[1].glob("lib/python*/site-packages")
        (theirs,) = self.python.parents[1].glob("lib/python*/site-packages")
        put(packages, {"a.pth": f"{theirs}\n{bridge / 'src'}\n"})

    def variables(self) -> dict[str, str]:
        roots = {"nemo_rl": self.checkout, "megatron.bridge": self.target}
        return {
            "SEATRIAL_IMPORTS": str(self.level),
            "SEATRIAL_UNDER_TEST": os.pathsep.join(f"{name}={root}" for name, root in roots.items()),
            "PYTHONPATH": os.pathsep.join(map(str, (self.checkout, SOURCE))),
            **{"WORKER": str(self.worker), "COVERAGE": str(self.root / "coverage"), "RAY_USAGE_STATS_ENABLED": "0"},
            **{"PATH": f"{self.root / 'bin'}:{self.python.parent}:/usr/bin:/bin", "RAY_TMPDIR": os.environ["RAY_TMPDIR"]},
        }

    def train(self) -> tuple[int, str]:
        process = self.start("--sync", f"{self.source}={self.target}", python=str(self.python), **self.variables())
        text, _ = process.communicate(timeout=100)
        return process.returncode, text

    def check(self) -> tuple[int, str]:
        """The import check, as a phase of its own."""
        (self.level / "imports").mkdir()
        words = ["--out", str(self.level), "--phase-dir", str(self.level / "imports"), "--checkout", str(self.checkout)]
        command = [str(self.python), "-m", nemo_process.__name__, *words, "--packages", "nemo_rl,megatron.bridge", "--claims", "{}"]
        done = subprocess.run(command, env=self.environment(**self.variables()), capture_output=True, text=True, timeout=100, check=False)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayStage]:
    from tests.runtime.rays import environment

    found = environment()
    place = Path(tempfile.mkdtemp(prefix="st", dir="/tmp"))  # sockets have short names only
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    yield RayStage(tmp_path, found.python)
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.real
def test_a_real_worker_with_its_own_environment_proves_the_synced_bridge(stage: RayStage) -> None:
    stage.installed(stage.target)
    code, log = stage.check()
    assert code == 0, log
    code, log = stage.train()
    assert code == 0, log
    assert "the policy is under test" in log
    bridge = repo("bridge", stage.source, ("megatron.bridge",), import_root=str(stage.source / "src"), synced=str(stage.target))
    changes = (bridge.model_copy(update={"changed": ("src/megatron/bridge/model.py",)}), repo("nemo-rl", stage.checkout, ("nemo_rl",)))
    proofs = read_imports(stage.level / "imports.jsonl")
    assert judge_imports(proofs, changes, ("imports-driver", "imports-worker", "driver", "worker")) == ()
    said = {(proof.process, proof.method) for proof in proofs if proof.package == "megatron.bridge" and proof.file}
    assert said == {("imports-worker", "found"), ("worker", "found"), ("worker", "imported")}, "the driver has none"
    assert unused(changes[0], read_loaded([stage.level / "loaded.jsonl"])) is None
    assert (stage.target / "src/megatron/bridge/model.py").read_text() == "NAME = 'vendored'\n"


@pytest.mark.real
def test_a_real_worker_with_another_bridge_ends_the_run(stage: RayStage) -> None:
    other = commit(stage.root / "image", {"src/megatron/bridge/__init__.py": "", "src/megatron/bridge/model.py": "NAME = 'another'\n"})
    stage.installed(other)
    code, log = stage.check()
    assert code == 90
    assert f"wrong import in imports-worker: megatron.bridge would come from {other}" in log
    code, log = stage.train()
    assert code not in (0, 143)
    assert "the policy is another" not in log
    bad = [proof for proof in read_imports(stage.level / "imports.jsonl") if proof.process == "worker" and not proof.ok]
    assert {proof.file for proof in bad} == {str(other / "src/megatron/bridge/__init__.py")}
