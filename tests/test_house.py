"""The house rules of DESIGN as a test: who may import whom, who may print, and where the name of a loop may stand."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import seatrial
from seatrial import loops

ROOT = Path(seatrial.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LOOPS = tuple(name.replace("-", "_") for name in loops.names())
THIRD_PARTY = {"typer", "pydantic", "pydantic_core", "rich", "jinja2", "markupsafe", "psutil"}
ROLLOUT_LIBRARIES = {"aiohttp", "orjson", "pyarrow", "math_verify"}
LOOP_LIBRARIES = {
    *("torch", "transformers", "trl", "peft", "datasets", "tokenizers", "safetensors", "accelerate", "PIL", "numpy"),
    *("verl", "ray", "hydra", "omegaconf", "megatron", "pyarrow", "tensordict", "fastapi", "uvicorn", "transfer_queue"),
    *("vllm", "zstandard", "xxhash"),
}
ALLOWED = {
    "core": {"core"},
    "metrics": {"core", "metrics"},
    "triage": {"core", "triage"},
    "evidence": {"core", "runtime", "evidence", "instruments"},
    "runtime": {"core", "runtime"},
    "report": {"core", "triage", "report"},
    "checks": {"core", "checks", "instruments", "metrics"},
    "instruments": {"instruments"},
    "loops": {"core", "runtime", "checks", "loops", "instruments"},
    "trial": {"core", "metrics", "checks", "triage", "evidence", "runtime", "report", "loops", "trial"},
    "probes": {"core", "checks", "loops", "runtime", "evidence", "report", "trial", "instruments", "probes"},
    "rollouts": {"core", "runtime", "evidence", "report", "rollouts"},
    "bisect": {"core", "metrics", "checks", "triage", "evidence", "runtime", "report", "loops", "trial", "bisect"},
    "functional": {
        "core",
        "metrics",
        "checks",
        "triage",
        "evidence",
        "runtime",
        "report",
        "loops",
        "trial",
        "bisect",
        "history",
        "functional",
    },
    "history": {"core", "metrics", "checks", "triage", "evidence", "runtime", "report", "trial", "history"},
    "cli": set[str](),  # everything but instruments
    "api": {
        *("core", "metrics", "checks", "triage", "evidence", "runtime", "report", "loops", "trial"),
        *("probes", "rollouts", "bisect", "history", "functional"),
    },
    "skills": set[str](),
    "__init__": {"api", "core"},
}
"""What each room may use of the others."""
MAY_NAME_A_LOOP = ("cli/", "instruments/", "core/config.py")
"""Where the name of a loop may stand besides its own folder."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A file, which is read once."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The whole syntax tree of a file."""
    return tuple(ast.walk(parsed(path)))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it; `from a import b` gives `a.b`."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """`seatrial.metrics.read.x` lives in `metrics`."""
    return name.split(".")[1] if "." in name else "__init__"


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_driver(path: Path) -> bool:
    return re.match(rf"instruments/(?:{'|'.join(LOOPS)})/", place(path)) is not None


def foreign(path: Path) -> set[str]:
    """Top-level packages that are neither ours nor the standard library's."""
    tops = {name.partition(".")[0] for name in imported(path)}
    return tops - set(sys.stdlib_module_names) - {"seatrial"}


def test_a_room_uses_only_what_it_may() -> None:
    assert [f"{place(path)}: {wrong}" for path in FILES for wrong in misused(path)] == []


def misused(path: Path) -> list[str]:
    """What a file imports although its room may not."""
    own = room("seatrial." + place(path).removesuffix(".py").replace("/", "."))
    ours = {name for name in imported(path) if name.startswith("seatrial.")}
    if is_driver(path):
        loop = path.relative_to(ROOT).parts[1]
        # A driver runs in the loop's interpreter, where nothing else of ours is.
        rooms = tuple(f"seatrial.{name}." for name in ("instruments", f"instruments.{loop}"))
        wrong = {name for name in ours if not name.startswith(rooms)} - {"seatrial.instruments"}
        return sorted(wrong | foreign(path) - LOOP_LIBRARIES)
    used = {room(name) for name in ours if name != "seatrial.__version__"}
    # The judge of refits reads what the probe writes: kinds, transports and the order of versions are said once, there.
    # What git may run of a foreign checkout is said once, in a file that drivers can import.
    used -= {"instruments"} if place(path).startswith(("checks/refit_", "evidence/git.py")) else set()
    allowed = ALLOWED[own] if own != "cli" else set(ALLOWED) - {"instruments"}
    return sorted((used - allowed) | foreign(path) - may_import(path, own))


def may_import(path: Path, own: str) -> set[str]:
    """Packages of others that a file may use."""
    if own == "instruments" or place(path) == "rollouts/demo_server.py":
        return LOOP_LIBRARIES
    return THIRD_PARTY | (ROLLOUT_LIBRARIES if own == "rollouts" or place(path).startswith("history/") else set())


def test_probes_import_a_loops_libraries_only_when_they_are_used() -> None:
    torch = ("instruments/shadow/", "instruments/batch_record.py", *(f"instruments/{loop}/" for loop in LOOPS))
    for path in (path for path in (ROOT / "instruments").rglob("*.py") if not place(path).startswith(torch)):
        top = [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name if isinstance(node, ast.Import) else node.module for node in top for alias in node.names}
        assert {str(name).partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "seatrial"}, path


def test_no_loop_knows_another() -> None:
    for loop in LOOPS:
        for path in (ROOT / "loops" / loop).rglob("*.py"):
            others = {name for name in imported(path) for other in LOOPS if other != loop and name.startswith(f"seatrial.loops.{other}")}
            assert not others, path


def test_every_room_is_in_the_table() -> None:
    found = {path.stem if path.suffix == ".py" else path.name for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__pycache__"} == set(ALLOWED)


def called(path: Path, *names: str) -> list[str]:
    """Where a file calls a built-in function of one of these names."""
    calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
    return [f"{path}:{call.lineno}" for call in calls if isinstance(call.func, ast.Name) and call.func.id in names]


def test_only_commands_and_what_runs_inside_a_loop_may_print() -> None:
    silent = [path for path in FILES if not place(path).startswith(("cli/", "instruments/")) and not is_driver(path)]
    assert [line for path in silent for line in called(path, "print")] == []


def test_no_eval_no_shell_no_bare_except() -> None:
    for path in FILES:
        assert called(path, "eval", "exec") == []
        for node in nodes(path):
            assert not (isinstance(node, ast.Call) and any(word.arg == "shell" for word in node.keywords)), f"{path}:{node.lineno}"
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{path}:{node.lineno}"


def named_loops(path: Path) -> list[str]:
    """Lines of code, comments and text that name a loop as a word."""
    words = "|".join({*(loop.replace("_", "[-_]") for loop in LOOPS), "trl", "verl", "nemo[-_ ]rl"})
    pattern = re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.IGNORECASE)
    text = path.read_text(encoding="utf-8", errors="replace")
    return [f"{path}:{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def test_a_loop_is_named_only_in_its_own_folder_and_on_the_command_line() -> None:
    texts = [path for suffix in ("py", "toml", "lock", "j2") for path in ROOT.rglob(f"*.{suffix}")]
    outside = [path for path in texts if not place(path).startswith((*MAY_NAME_A_LOOP, *(f"loops/{loop}/" for loop in LOOPS)))]
    assert [line for path in outside for line in named_loops(path)] == []


def test_the_configuration_names_a_loop_only_as_its_default() -> None:
    assert [line.partition(": ")[2] for line in named_loops(ROOT / "core" / "config.py")] == [
        'loop: str = Field(default="trl", description="the loop")'
    ]


@pytest.mark.parametrize("heavy", ["pydantic", "typer", "rich", "jinja2", "psutil", "torch"])
def test_the_package_alone_is_light(heavy: str) -> None:
    code = f"import sys, seatrial; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_probes_and_drivers_compile_for_the_oldest_python_of_a_loop() -> None:
    for path in (ROOT / "instruments").rglob("*.py"):
        with tokenize.open(path) as source:
            ast.parse(source.read(), feature_version=(3, 10))


def test_a_module_that_runs_is_defined_whole_before_it_does() -> None:
    for path in FILES:
        guards = [at for at, node in enumerate(parsed(path).body) if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
        assert not guards or guards == [len(parsed(path).body) - 1], path


def test_every_module_states_its_contract() -> None:
    silent = [place(path) for path in FILES if path.stat().st_size and not ast.get_docstring(parsed(path))]
    assert silent == []


def test_the_rules_see_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from seatrial.cli import main\nimport torch, numpy.linalg\n\n\ndef f() -> None:\n    import seatrial.trial.plan\n"
        "    print(eval('1'))\n# verl\n"
    )
    assert set(imported(bad)) == {"seatrial.cli.main", "torch", "numpy.linalg", "seatrial.trial.plan"}
    assert foreign(bad) == {"torch", "numpy"}
    assert {room(name) for name in imported(bad) if name.startswith("seatrial.")} == {"cli", "trial"}
    assert len(named_loops(bad)) == 1
    assert (called(bad, "print"), called(bad, "eval", "exec")) == ([f"{bad}:7"], [f"{bad}:7"])
    made = tmp_path / "metrics" / "bad.py"
    made.parent.mkdir()
    made.write_text("from seatrial.core import verdict\nfrom seatrial.cli import main\nimport torch\n")
    monkeypatch.setattr("tests.test_house.ROOT", tmp_path)
    assert misused(made) == ["cli", "torch"]


def test_make_check_has_a_smoke_of_every_room() -> None:
    tests = Path(__file__).parent
    files = (tests / "smoke.txt").read_text(encoding="utf-8").split()
    assert [file for file in files if not (tests.parent / file).is_file()] == []
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()} | {"pytest_seatrial"}
    assert rooms - {file.split("/")[1] for file in files} == set()
