"""What a lock asks for: which changes make another environment, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import EnvironmentPlan
from seatrial.bisect.environment_cache import BisectEnvironments, detect_environment
from seatrial.bisect.lockfile import MACHINE, BuildFailed, by_machine, read_wanted
from seatrial.core.errors import BlockedError, UserError
from seatrial.triage.signatures import GENERAL, load_signatures
from tests.bisect.repos import Commit, build

PIP = EnvironmentPlan(kind="pip", lock="requirements.txt")
BUILT = PIP.model_copy(update={"build": ("make",)})
UV = EnvironmentPlan(kind="uv", lock="uv.lock")


class Trees:
    """Trees of commits, and the keys of their environments."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0

    def tree(self, contents: Mapping[str, str]) -> Path:
        self.count += 1
        tree = self.root / f"tree{self.count}"
        for name, text in contents.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)
        return tree

    def key(self, contents: Mapping[str, str] | str, plan: EnvironmentPlan = PIP) -> str:
        tree = self.tree({plan.lock: contents} if isinstance(contents, str) else contents)
        return BisectEnvironments(self.root / "cache").key(tree, plan)


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    return Trees(tmp_path)


def test_comments_and_blank_lines_make_no_other_environment(trees: Trees) -> None:
    plain = trees.key("one==1\ntwo==2\n")
    assert trees.key("\ufeff# made by a tool\n\none==1  # why\ntwo==2") == plain
    assert trees.key("one==1\ntwo==\\\n2\n") == plain
    assert trees.key("one==1\ntwo==3\n") != plain
    assert trees.key("one==1\ntwo==2\n", PIP.model_copy(update={"python": "3.99"})) != plain
    assert trees.key("one==1\n--pre\ntwo==2\n") != plain


def test_included_files_count_by_their_content(trees: Trees) -> None:
    def key(base: str, limits: str, how: str = "-r deps/base.txt\n--constraint=limits.txt\none==1\n") -> str:
        return trees.key({"requirements.txt": how, "deps/base.txt": "-r more.txt\n", "deps/more.txt": base, "limits.txt": limits})

    first = key("two==2\n", "three==3\n")
    assert key("two==2 # same\n", "three==3\n") == first
    assert key("two==3\n", "three==3\n") != first
    assert key("two==2\n", "three==4\n") != first
    assert key("two==2\n", "three==3\n", "-rdeps/base.txt\n-c limits.txt\none==1\n") == first
    tree = trees.tree({"requirements.txt": "-r a.txt\n-c c.txt\n", "a.txt": "one\n", "c.txt": "one==1\n"})
    wanted = read_wanted(tree, PIP)
    assert (wanted.requirements, wanted.constraints) == (["one"], ["one==1"])


def test_wheels_in_the_tree_count_by_their_content(trees: Trees) -> None:
    def key(wheel: str) -> str:
        return trees.key({"requirements.txt": "-f ./wheels\none==1\n", "wheels/one-1-py3-none-any.whl": wheel})

    assert key("first") == key("first")
    assert key("first") != key("second")
    tree = trees.tree({"requirements.txt": "--find-links 'my wheels'\n--find-links https://x.org/w\n", "my wheels/x": ""})
    assert read_wanted(tree, PIP).requirements == [f"--find-links '{tree}/my wheels'", "--find-links https://x.org/w"]


@pytest.mark.parametrize(
    "line",
    [
        *("-e .", "--editable=./x", "-e.", ".", "./x", "libs/x", "../x", "/abs/x", "file:x", "x @ file:///x", "x[y] @ ./x", "x-1.whl"),
        *("git+file:///repo", "./x ; python_version > '3'", "X-1.TAR.GZ --hash=sha256:00"),
    ],
)
def test_what_installs_from_a_path_is_refused_or_left_to_the_build(trees: Trees, line: str) -> None:
    with pytest.raises(BuildFailed, match=r"shared by commits; .* --build") as caught:
        trees.key(f"one==1\n{line}\n")
    assert not caught.value.transient
    assert f"requirements.txt: `{line}`" in caught.value.message
    assert trees.key(f"one==1\n{line}\n", BUILT) == trees.key("one==1\n", PIP)


@pytest.mark.parametrize(
    "line",
    [
        *("one==1 --hash=sha256:00ff", "-e git+https://x.org/y@abc#egg=y", "y @ https://x.org/y-1.whl", "one[a,b]>=1; os_name == 'posix'"),
        *("--extra-index-url https://x.org/simple", "--no-binary :all:"),
    ],
)
def test_what_pip_takes_from_elsewhere_is_passed_on(trees: Trees, line: str) -> None:
    assert read_wanted(trees.tree({"requirements.txt": f"{line}\n"}), PIP).requirements == [line]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"other": ""}, "requirements.txt does not exist at this commit"),
        ({"requirements.txt": "-r deps/gone.txt\n"}, "deps/gone.txt does not exist at this commit"),
        ({"requirements.txt": "-r a.txt\n", "a.txt": "-r requirements.txt\n"}, "requirements.txt includes itself"),
        ({"requirements.txt": "-r https://x.org/r.txt\n"}, "is not part of the commit"),
        ({"requirements.txt": "-i https://x.org -f wheels\n"}, "two options in one line"),
        ({"requirements.txt": "-r 'a.txt\n"}, "No closing quotation"),
    ],
)
def test_a_lock_that_cannot_be_followed_fails_its_commit_only(trees: Trees, contents: Mapping[str, str], message: str) -> None:
    with pytest.raises(BuildFailed, match=message) as caught:
        trees.key(contents)
    assert not caught.value.transient


LOCK = """version = 1
[[package]]
name = "demo"
version = "VERSION"
source = { editable = "." }
[[package]]
name = "part"
version = "1"
source = { directory = "libs/part" }
[[package]]
name = "tiny"
version = "TINY"
source = { registry = "https://x.org" }
"""
PROJECT = """[project]
name = "demo"
version = "VERSION"
[tool.ruff]
line-length = WIDTH
[tool.uv]
default-groups = ["GROUP"]
"""


def test_the_key_of_uv_covers_what_uv_reads(trees: Trees) -> None:
    def key(version: str = "1", tiny: str = "1", width: str = "1", group: str = "dev", **more: str) -> str:
        lock = LOCK.replace("VERSION", version).replace("TINY", tiny)
        project = PROJECT.replace("VERSION", version).replace("WIDTH", width).replace("GROUP", group)
        return trees.key({"uv.lock": lock, "pyproject.toml": project} | more, UV)

    first = key()
    assert key(version="2") == first
    assert key(width="2") == first
    assert key(tiny="2") != first
    assert key(group="test") != first
    assert key(**{".python-version": "3.13\n"}) != first


def test_local_packages_of_uv_are_left_out(trees: Trees) -> None:
    tree = trees.tree({"sub/uv.lock": LOCK, "sub/pyproject.toml": ""})
    wanted = read_wanted(tree, EnvironmentPlan(kind="uv", lock="sub/uv.lock"))
    assert wanted.left_out == ["demo", "part"]
    assert wanted.roots == [tree / "sub", tree / "sub" / "libs" / "part"]
    with pytest.raises(BuildFailed, match=r"pyproject\.toml does not exist"):
        trees.key({"uv.lock": LOCK}, UV)
    with pytest.raises(BuildFailed, match=r"uv\.lock: not valid TOML"):
        trees.key({"uv.lock": "<<<<<<< ours\n", "pyproject.toml": ""}, UV)


def test_the_way_is_chosen_by_the_lock_or_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = (
        {"a": ""},
        {"requirements.txt": ""},
        {"requirements.lock": ""},
        {"uv.lock": ""},
        {"requirements.txt": None, "requirements.lock": None},
    )
    repo = tmp_path / "repo"
    ids = build(repo, [Commit(dict(text)) for text in texts])
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    found = [detect_environment(repo, commit, None) for commit in ids]
    assert [(plan.kind, plan.lock) for plan in found] == [
        *(("none", ""), ("pip", "requirements.txt"), ("pip", "requirements.lock")),
        *(("uv", "uv.lock"), ("uv", "uv.lock")),
    ]
    assert detect_environment(repo, ids[3], "none").kind == "none"
    assert detect_environment(repo, ids[3], "pip:requirements.txt").lock == "requirements.txt"
    assert detect_environment(repo, ids[3], "uv:uv.lock") == detect_environment(repo, ids[3], "uv") == found[3]
    for wrong in ("conda", "pip", "pip:", ""):
        with pytest.raises(UserError, match=f"unknown way `{wrong}`"):
            detect_environment(repo, ids[3], wrong)
    with pytest.raises(UserError, match=r"gone\.txt does not exist at"):
        detect_environment(repo, ids[3], "pip:gone.txt")
    with pytest.raises(UserError, match=r"uv\.lock does not exist at"):
        detect_environment(repo, ids[0], "uv")
    monkeypatch.setattr("shutil.which", lambda name: None if name == "uv" else f"/bin/{name}")
    assert detect_environment(repo, ids[3], None).kind == "pip"
    with pytest.raises(UserError, match="uv is not on PATH") as caught:
        detect_environment(repo, ids[4], None)
    assert "--env none" in caught.value.fix


def test_a_missing_tool_is_no_commits_fault(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = trees.tree({"uv.lock": LOCK, "pyproject.toml": ""})
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(BlockedError, match="uv is not on PATH"):
        BisectEnvironments(trees.root / "cache").ensure(tree, UV, lambda _: None, 1)


def test_the_callers_environment_has_the_tree_on_its_import_path_only(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/home/me/checkout")
    cache, plan = BisectEnvironments(trees.root / "cache"), EnvironmentPlan(kind="none")
    flat, src = trees.tree({"demo/__init__.py": ""}), trees.tree({"src/demo/__init__.py": ""})
    for tree, root in ((flat, flat), (src, src / "src")):
        ready = cache.ensure(tree, plan, lambda _: None, 1)
        assert (ready.python, ready.variables, ready.key, ready.built) == (None, {"PYTHONPATH": str(root)}, "", False)


@pytest.mark.parametrize(
    ("line", "machine"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", True),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(<x>: [Errno -2] Name or service not known')'",
            True,
        ),
        ("  Caused by: error sending request for url (https://pypi.org/simple/x/)", True),
        ("pip._vendor.requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://x.org", True),
        ("ERROR: HTTP error 429 Client Error: Too Many Requests for url: https://x.org", True),
        ("ERROR: No matching distribution found for nowhere==1.0", False),
        ("ERROR: 404 Client Error: Not Found for url: https://x.org/x.whl", False),
        ("ModuleNotFoundError: No module named 'setuptools'", False),
        ("gcc: fatal error: x.c: No such file or directory", False),
    ],
)
def test_the_log_says_whether_the_machine_failed(tmp_path: Path, line: str, machine: bool) -> None:
    log = tmp_path / "build.log"
    log.write_text(f"2026-11-15T03:41:59.123Z Collecting x\n2026-11-15T03:41:59.124Z {line}\n2026-11-15T03:41:59.125Z ERROR: it failed\n")
    assert by_machine(log) is machine


def test_every_failure_of_the_machine_is_known_to_triage() -> None:
    assert set(MACHINE) <= {signature.id for signature in load_signatures(GENERAL)}
