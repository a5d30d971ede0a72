"""Extensions by entry points: what is found, what a broken one does, and a scaffolded loop from nothing to a Pass and a Fail."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

import seatrial as package
from seatrial import loops
from seatrial.cli import new
from seatrial.core import registry
from seatrial.core.errors import UserError
from seatrial.rollouts.campaign import SandboxLimits
from seatrial.rollouts.rollout_record import InputRow
from seatrial.rollouts.verifiers import installed_verifier, make_verifier
from seatrial.triage.signatures import GENERAL, load_signatures
from tests.cli.command import environ, inside

Install = Callable[..., Path]
SIGNATURE = '[[signature]]\nid = "{}"\npattern = "{}"\nboundary = "environment"\n'


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution that is nothing but its entry points, and modules beside them."""
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(distribution: str, entry_points: str, **files: str) -> Path:
        info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        registry.forget()
        return tmp_path

    registry.forget()
    yield made
    registry.forget()
    for name in set(sys.modules) - modules:
        if not name.startswith("seatrial."):
            del sys.modules[name]


def scaffolded(root: Path, name: str) -> str:
    """Write the package of a new loop below `root`, as if it were installed there; its module."""
    for path, text in new.files(name).items():
        if path.startswith("src/"):
            place = root / path.removeprefix("src/")
            place.parent.mkdir(exist_ok=True)
            place.write_text(text)
    return f"seatrial_{name.replace('-', '_')}.loop"


def test_an_installed_loop_is_listed_without_its_module_and_loaded_when_it_is_used(install: Install, tmp_path: Path) -> None:
    module = scaffolded(tmp_path, "my-toy")
    install("my-toy-dist", f"[console_scripts]\nx = y:z\n[seatrial.loops]\n# a comment\nmy-toy = {module}:LOOP\n")
    assert loops.names() == ("my-toy", *loops.built_in())
    assert module not in sys.modules
    loop = loops.get_loop("my-toy")
    assert (loop.name, [level.name for level in loop.levels()], list(loop.faults())) == ("my-toy", ["smoke"], [new.FAULT])
    assert loops.environments().keys() >= {"trl"}
    assert [loop.name for loop in loops.usable()] == [*loops.built_in(), "my-toy"]


def test_an_unknown_loop_is_an_error_that_names_installed_ones(install: Install) -> None:
    install("toys", "[seatrial.loops]\nmy-toy = nothing:LOOP\n")
    with pytest.raises(UserError, match=r"unknown loop 'my-tou'; known: my-toy, nemo-rl, trl, verl") as caught:
        loops.get_loop("my-tou")
    assert caught.value.fix == "use 'my-toy'"


def test_built_in_names_win_and_need_no_entry_points(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("impostor", "[seatrial.loops]\ntrl = impostor:LOOP\n", impostor="raise SystemExit(9)\n")
    assert loops.names() == loops.built_in()
    monkeypatch.setattr(registry, "find", None)  # it is not asked
    assert type(loops.get_loop("trl")).__module__ == "seatrial.loops.trl.loop"


def test_two_distributions_with_one_name_are_an_error_that_names_both(install: Install) -> None:
    install("toys-one", "[seatrial.loops]\nmy-toy = one:LOOP\n")
    install("toys-two", "[seatrial.loops]\nmy-toy = two:LOOP\n")
    assert loops.names().count("my-toy") == 1
    with pytest.raises(UserError, match=r"toys-(one|two) 1\.0.*toys-(one|two) 1\.0"):
        loops.get_loop("my-toy")


def test_a_distribution_hides_another_of_its_name_further_down_the_path(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("toys", "[seatrial.loops]\nmy-toy = one:LOOP\n")
    (tmp_path / "first").mkdir()
    (tmp_path / "toys-1.0.dist-info").rename(tmp_path / "first" / "toys-1.0.dist-info")
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    install("toys", "[seatrial.loops]\nmy-toy = two:LOOP\n")
    found = registry.find(registry.LOOPS, "my-toy")
    assert found is not None
    assert found.value == "one:LOOP"


@pytest.mark.parametrize(
    ("value", "module", "said"),
    [
        ("gone:LOOP", None, "cannot be loaded: ModuleNotFoundError"),
        ("toy:LOOP", "1 / 0\n", "cannot be loaded: ZeroDivisionError"),
        ("toy:LOOP", "raise SystemExit(3)\n", "cannot be loaded: SystemExit"),
        ("toy:LOOP", "", "cannot be loaded: AttributeError"),
        ("toy:LOOP", "class LOOP:\n    name = 'my-toy'\n", "is no loop: it is no seatrial.core.loop.Loop"),
        ("toy", "", "is not of the form module:object"),
        ("", None, "is not of the form module:object"),
    ],
)
def test_a_broken_entry_names_itself_and_disturbs_nothing_else(install: Install, value: str, module: str | None, said: str) -> None:
    line = f"my-toy = {value}" if value else "my-toy"
    install("toys", f"[seatrial.loops]\n{line}\n", **({} if module is None else {"toy": module}))
    with pytest.raises(UserError) as caught:
        loops.get_loop("my-toy")
    assert caught.value.message.startswith("toys 1.0: entry point my-toy = ")
    assert said in caught.value.message
    assert "pip uninstall toys" in caught.value.fix
    assert [loop.name for loop in loops.usable()] == list(loops.built_in())
    assert loops.get_loop("trl").name == "trl"
    load_signatures(GENERAL)


def test_a_loop_of_another_name_is_refused(install: Install, tmp_path: Path) -> None:
    module = scaffolded(tmp_path, "my-toy")
    install("toys", f"[seatrial.loops]\nother = {module}:LOOP\n")
    with pytest.raises(UserError, match="names a loop that calls itself 'my-toy'"):
        loops.get_loop("other")


def test_signatures_come_with_the_general_ones(install: Install, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(SIGNATURE.format("lab-quota", "quota of the lab"))
    install("lab", "[seatrial.signatures]\nlab = lab:own.toml\n", lab="raise RuntimeError('never imported')\n")
    assert load_signatures(GENERAL)[-1].id == "lab-quota"
    assert [signature.id for signature in load_signatures(own)] == ["lab-quota"]
    own.write_text(SIGNATURE.format(load_signatures(GENERAL)[0].id, "quota"))
    with pytest.raises(UserError, match=rf"lab 1\.0: .* has a signature .*, which is also in {GENERAL}"):
        load_signatures(GENERAL)
    own.unlink()
    with pytest.raises(UserError, match=r"lab 1\.0: entry point lab = .*own\.toml does not exist"):
        load_signatures(GENERAL)


VERIFIERS = """
def long(row, text):
    return len(text) > 3


class Length:
    def __init__(self, verify, truth):
        pass

    async def score(self, row, text, output):
        from seatrial.rollouts.rollout_record import Score
        return Score(float(len(text)))

    async def close(self):
        pass


class Half:
    def __init__(self, verify, truth):
        pass
"""


@pytest.mark.parametrize(("name", "reward"), [("long", 1.0), ("length", 4.0)])
def test_a_verifier_is_a_function_or_a_class(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reward: float
) -> None:
    install("lab", "[seatrial.verifiers]\nlong = scores:long\nlength = scores:Length\n", scores=VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the function runs in a process of its own
    verify = installed_verifier(name)
    assert verify is not None
    verifier = make_verifier(verify, SandboxLimits(), tmp_path, None, {})

    async def score() -> float:
        try:
            return (await verifier.score(InputRow(index=0, id="1", dataset="d", data={}), "four", ())).reward
        finally:
            await verifier.close()

    assert asyncio.run(score()) == reward


def test_a_class_that_is_no_verifier_is_refused(install: Install, tmp_path: Path) -> None:
    install("lab", "[seatrial.verifiers]\nhalf = scores:Half\n", scores=VERIFIERS)
    assert installed_verifier("whole") is None
    verify = installed_verifier("half")
    assert verify is not None
    with pytest.raises(UserError, match=r"lab 1\.0: .* is no verifier"):
        make_verifier(verify, SandboxLimits(), tmp_path, None, {})


def test_help_and_import_do_not_look_for_extensions() -> None:
    code = "import sys; sys.argv = ['seatrial', '--help']\nfrom seatrial.cli.main import run\ntry: run()\nexcept SystemExit: pass\n"
    code += "sys.exit('seatrial.core.registry' in sys.modules or 'importlib.metadata' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_new_loop_writes_a_package_once(tmp_path: Path) -> None:
    answer = inside("new", "loop", "my-toy", cwd=tmp_path)
    assert answer.code == 0, answer.err
    made = tmp_path / "seatrial-my-toy"
    assert {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()} == new.files("my-toy").keys()
    project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][registry.LOOPS] == {"my-toy": "seatrial_my_toy.loop:LOOP"}
    for path in made.rglob("*.py"):
        compile(path.read_text(), path, "exec")
    (made / "README.md").write_text("mine\n")
    for words in (("my-toy",), ("my-toy", "--out", made), ("other", "--out", made / "README.md")):
        again = inside("new", "loop", *words, cwd=tmp_path)
        assert (again.code, "exists already; nothing was written" in again.err, "  fix: " in again.err) == (2, True, True)
    assert (made / "README.md").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trl", "fix: choose another name, such as my-trl"),
        ("My_Toy", "fix: use 'my-toy'"),
        ("a--b", "fix: use 'a-b'"),
        ("1a", "fix: use 'a'"),
        ("class", "fix: use a name such as my-loop"),
        ("../x", "fix: use 'x'"),
        ("ü", "fix: use a name such as my-loop"),
        ("x" * 41, f"fix: use {'x' * 40!r}"),
    ],
)
def test_names_of_new_loops_are_checked(tmp_path: Path, name: str, said: str) -> None:
    answer = inside("new", "loop", name, cwd=tmp_path)
    assert answer.code == 2
    assert said in answer.err
    assert not list(tmp_path.iterdir())


def _install(python: Path, made: Path, site: Path, variables: dict[str, str]) -> None:
    """`pip install -e` without a network; by hand where what is here cannot build an editable wheel."""
    if int(metadata.version("setuptools").partition(".")[0]) > 70 or importlib.util.find_spec("wheel"):
        pip = [os.fspath(python), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", os.fspath(made)]
        done = subprocess.run(pip, env=variables, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return
    project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = (f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in e.items()) for group, e in project["entry-points"].items())
    (info / "entry_points.txt").write_text("\n".join(groups))
    (site / "made.pth").write_text(f"{made / 'src'}\n")


@pytest.mark.slow
def test_a_new_loop_is_installed_and_runs_to_a_pass_and_a_fail(tmp_path: Path) -> None:
    """In an environment of its own, beside a Seatrial that is installed from this checkout and the dependencies that are here."""
    made, home = tmp_path / "made", tmp_path / "venv"
    assert inside("new", "loop", "my-toy", "--out", made).code == 0
    venv.create(home, with_pip=False, symlinks=True)
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    here = next(Path(path) for path in sys.path if Path(path, "pydantic").is_dir())
    (site / "here.pth").write_text(f"{Path(package.__file__).parents[1]}\n{here}\n")
    python = home / "bin" / "python"
    variables = environ(XDG_DATA_HOME=str(tmp_path / "data"), PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONPATH="")
    _install(python, made, site, variables)
    start = [os.fspath(python), "-m", "seatrial.cli.main", "run", "my-toy", "--python", os.fspath(python), "--level", "0"]

    def trial(out: Path, *words: str) -> tuple[int, str, str | None]:
        ran = subprocess.run(
            [*start, "--out", out, *words], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert (out / "trial.json").is_file(), ran.stderr
        level = json.loads((out / "trial.json").read_text())["levels"][0]
        return ran.returncode, level["verdict"], level["boundary"]

    assert trial(tmp_path / "passed") == (0, "Pass", None)
    assert trial(tmp_path / "slower", "--opt", "rate=50") == (0, "Pass", None)
    assert trial(tmp_path / "failed", "--fault", new.FAULT) == (1, "Fail", "optimizer")
