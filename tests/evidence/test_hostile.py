"""A checkout that somebody else made: nothing that its configuration names is run, and reading it ends.

Each vector names a command that leaves a mark. The controls show that plain git does run it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_seatrial.results_collector import read_origin
from seatrial.bisect.bisect_records import Pin, Repo
from seatrial.bisect.git_stores import Stores
from seatrial.bisect.worktrees import make_tree
from seatrial.core.errors import UserError
from seatrial.core.files import LFS_POINTER as POINTER
from seatrial.evidence.changes import base_contents, changed_lines, read_changes
from seatrial.evidence.git import MissingObjectsError, git, top_level
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import make_patch, repo_state, write_repos
from seatrial.instruments import safe_git
from seatrial.trial.base_worktrees import unchanged
from tests.cli.command import inside
from tests.evidence.conftest import commit, put, run_git

PLAIN = Redactor({})
SUB = "third/library"


@dataclass(frozen=True)
class World:
    """A checkout with a submodule and a nested repository, and the command that leaves a mark."""

    root: Path
    evil: Path
    base: str

    @property
    def sub(self) -> Path:
        return self.root / SUB

    def marks(self) -> list[str]:
        found = self.evil.parent / "marks"
        return found.read_text().splitlines() if found.exists() else []


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, copied for each case."""
    top = tmp_path_factory.mktemp("template")
    library = top / "library"
    for place in (library, top / "repo"):
        place.mkdir()
        run_git(place, "init", "-q")
    commit(library, {"lib.py": "x = 1\n", ".gitattributes": "*.py filter=evil diff=evil\n"})
    root = top / "repo"
    commit(root, {"pkg/__init__.py": "", "a.py": "a = 1\n", "b.dat": "one\n"})
    run_git(root, "submodule", "--quiet", "add", "../library", SUB)
    attributes = "*.py filter=evil diff=evil merge=evil\n*.dat filter=a=b diff=evil\n"
    commit(root, {".gitattributes": attributes, "a.py": "a = 2\n", "run.sh": "true\n"})
    return top


@pytest.fixture
def world(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    shutil.copytree(template, tmp_path / "world", symlinks=True)
    evil = tmp_path / "evil"
    evil.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/marks\ncase "$1" in filter*|global) cat ;; esac\n')
    evil.chmod(0o755)
    root = tmp_path / "world" / "repo"
    made = World(root, evil, run_git(root, "rev-parse", "HEAD~1"))
    dirty(made)
    return made


def dirty(world: World) -> None:
    """Change, touch and add files, in the submodule too."""
    put(world.root, {"a.py": "a = 3\n", "new.py": "n = 1\n", f"{SUB}/lib.py": "x = 2\n", f"{SUB}/new.py": "n = 1\n"})
    os.utime(world.root / "b.dat", (1, 1))


def setting(key: str, value: str = "{evil} {key}", sub: bool = True) -> Callable[[World], None]:
    def apply(world: World) -> None:
        for place in (world.root, world.sub) if sub else (world.root,):
            subprocess.run(["git", "-C", place, "config", key, value.format(evil=world.evil, key=key)], check=True)

    return apply


def both(*parts: Callable[[World], None]) -> Callable[[World], None]:
    def apply(world: World) -> None:
        for part in parts:
            part(world)

    return apply


def hooks(world: World) -> None:
    for git_dir in (world.root / ".git", world.root / ".git/modules" / SUB):
        (git_dir / "hooks").mkdir(exist_ok=True)
        for name in ("post-checkout", "post-index-change", "reference-transaction", "pre-auto-gc", "post-merge"):
            shutil.copy(world.evil, git_dir / "hooks" / name)


def hooks_path(world: World) -> None:
    hooks(world)
    both(setting("core.hooksPath", str(world.root / ".git/hooks")))(world)


def included(world: World) -> None:
    file = world.root / "shared.inc"
    file.write_text(f'[filter "evil"]\n\tclean = {world.evil} included\n[core]\n\tfsmonitor = {world.evil} included\n')
    both(setting("include.path", str(file)), setting("includeIf.gitdir:**.path", str(file)))(world)


def worktree_config(world: World) -> None:
    setting("extensions.worktreeConfig", "true")(world)
    for git_dir in (world.root / ".git", world.root / ".git/modules" / SUB):
        text = f'[filter "evil"]\n\tclean = {world.evil} worktree\n\tprocess = {world.evil} worktree\n'
        with (git_dir / "config.worktree").open("a") as stream:
            stream.write(text)


def promisor(url: str) -> Callable[[World], None]:
    """A partial clone that lacks the base's blobs."""

    def apply(world: World) -> None:
        setting("extensions.partialClone", "origin", sub=False)(world)
        for key, value in {"url": url, "promisor": "true", "uploadpack": "{evil} uploadpack"}.items():
            setting(f"remote.origin.{key}", value, sub=False)(world)
        lost = run_git(world.root, "rev-parse", f"{world.base}:a.py")
        (world.root / ".git/objects" / lost[:2] / lost[2:]).unlink(missing_ok=True)

    return apply


def git_file(world: World) -> None:
    """`.git` is a file that leads to a git directory elsewhere, with settings of its own."""
    elsewhere = world.root.parent / "elsewhere"
    (world.root / ".git").rename(elsewhere)
    (world.root / ".git").write_text(f"gitdir: {elsewhere}\n")
    (world.sub / ".git").write_text(f"gitdir: {elsewhere}/modules/{SUB}\n")
    subprocess.run(["git", "config", "--file", elsewhere / f"modules/{SUB}/config", "core.worktree", world.sub], check=True)
    both(setting("filter.evil.clean"), setting("core.fsmonitor"))(world)


def nested(world: World) -> None:
    """An untracked repository inside the tree, and a bare one among the tracked directories."""
    for name, options in {"inner": (), "bare.git": ("--bare",)}.items():
        place = world.root / name
        place.mkdir()
        run_git(place, "init", "-q", *options)
        for key in ("core.fsmonitor", "filter.evil.clean", "diff.external"):
            subprocess.run(["git", "-C", place, "config", key, f"{world.evil} {name}"], check=True)
    put(world.root, {"inner/x.py": "1\n", "inner/.gitattributes": "* filter=evil\n"})


def info_attributes(world: World) -> None:
    (world.root / ".git/info").mkdir(exist_ok=True)
    (world.root / ".git/info/attributes").write_text("* filter=hidden diff=hidden\n")
    both(setting("filter.hidden.clean"), setting("diff.hidden.textconv"), setting("diff.hidden.command"))(world)


def global_lfs(world: World) -> None:
    """The user's own filter: Git LFS reads commands (extensions) from the checkout's configuration."""
    home = Path(os.environ["HOME"])
    home.mkdir(exist_ok=True)
    (home / ".gitconfig").write_text(f'[filter "evil"]\n\tclean = {world.evil} global\n\tsmudge = {world.evil} global\n\trequired = true\n')


def submodule_only(world: World) -> None:
    for key in ("filter.evil.clean", "diff.evil.textconv", "core.fsmonitor"):
        subprocess.run(["git", "-C", world.sub, "config", key, f"{world.evil} sub"], check=True)


def unlisted(world: World) -> None:
    """A key that a later git may run: what is not known to be harmless is blanked."""
    both(setting("hook.evil.command"), setting("hook.evil.event", "post-index-change"), setting("core.someFutureCommand"))(world)


VECTORS: dict[str, Callable[[World], None]] = {
    "filter.clean": setting("filter.evil.clean"),
    "filter.smudge": setting("filter.evil.smudge"),
    "filter.process": setting("filter.evil.process"),
    "filter.required": both(setting("filter.evil.clean"), setting("filter.evil.smudge"), setting("filter.evil.required", "true")),
    "filter with = in its name": setting("filter.a=b.clean"),
    "filter in another case": setting("FILTER.evil.CLEAN"),
    "filter of the submodule": submodule_only,
    "textconv": both(setting("diff.evil.textconv"), setting("diff.evil.cachetextconv", "true")),
    "diff driver": setting("diff.evil.command"),
    "diff.external": setting("diff.external"),
    "merge driver": setting("merge.evil.driver"),
    "core.fsmonitor": setting("core.fsmonitor", "{evil}"),
    "core.hooksPath": hooks_path,
    "hooks": hooks,
    "core.pager": both(setting("core.pager"), setting("pager.diff"), setting("pager.status"), setting("pager.config")),
    "core.editor": both(setting("core.editor"), setting("sequence.editor")),
    "core.sshCommand": both(promisor("ssh://nowhere.invalid/x.git"), setting("core.sshCommand"), setting("ssh.variant", "simple")),
    "core.gitProxy": both(promisor("git://nowhere.invalid/x.git"), setting("core.gitProxy", "{evil}")),
    "credential.helper": both(promisor("https://nowhere.invalid/x.git"), setting("credential.helper", "!{evil} helper")),
    "core.askPass": both(promisor("https://nowhere.invalid/x.git"), setting("core.askPass", "{evil}")),
    "gpg.program": both(setting("gpg.program", "{evil}"), setting("log.showSignature", "true"), setting("commit.gpgSign", "true")),
    "gpg.ssh": both(setting("gpg.format", "ssh"), setting("gpg.ssh.program", "{evil}"), setting("gpg.ssh.defaultKeyCommand", "{evil}")),
    "ext:: remote": promisor("ext::{evil} ext"),
    "ext:: allowed": both(promisor("ext::{evil} ext"), setting("protocol.ext.allow", "always"), setting("protocol.allow", "always")),
    "uploadpack": both(promisor("file:///tmp"), setting("protocol.file.allow", "always")),
    "insteadOf": both(promisor("https://nowhere.invalid/x"), setting("url.ext::{evil} .insteadOf", "https://nowhere.invalid/")),
    "remote.vcs": both(promisor("https://nowhere.invalid/x"), setting("remote.origin.vcs", "ext")),
    "submodule.update": setting(f"submodule.{SUB}.update", "!{evil} update", sub=False),
    "submodule.recurse": both(
        setting("submodule.recurse", "true"), setting("fetch.recurseSubmodules", "true"), setting("filter.evil.clean")
    ),
    "include": included,
    "config.worktree": worktree_config,
    "alias": both(setting("alias.status", "!{evil} alias"), setting("alias.diff", "!{evil} alias"), setting("alias.ls-files", "!{evil}")),
    "packObjectsHook": setting("uploadpack.packObjectsHook", "{evil}"),
    "alternateRefsCommand": setting("core.alternateRefsCommand", "{evil}"),
    "gc.recentObjectsHook": both(setting("gc.recentObjectsHook", "{evil}"), setting("gc.auto", "1"), setting("maintenance.auto", "true")),
    "trailer": both(setting("trailer.evil.command"), setting("trailer.evil.cmd")),
    "interactive": both(setting("interactive.diffFilter"), setting("difftool.evil.cmd"), setting("mergetool.evil.cmd")),
    ".git file": git_file,
    "nested repositories": nested,
    "info/attributes": info_attributes,
    "the user's filter": global_lfs,
    "settings of later versions": unlisted,
}


def collect(world: World, tmp_path: Path) -> None:
    """All evidence of a change."""
    (state,) = write_repos([repo_state(world.root)], tmp_path / "evidence", PLAIN)
    assert {"a.py", "new.py", f"{SUB}/lib.py", f"{SUB}/new.py"} <= set(state.dirty)
    read_origin(world.root)
    assert "a.py" in dict(base_contents(world.root, world.base))
    paths = {change.path for change in read_changes(world.root, world.base).paths}
    assert {"a.py", "new.py", "run.sh", SUB} <= paths
    changed_lines(world.root, world.base)


QUICK = {"filter.clean", "filter with = in its name", "filter of the submodule", "core.fsmonitor", "ext:: allowed", "include", ".git file"}


@pytest.mark.parametrize("vector", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VECTORS])
def test_evidence_runs_nothing_of_a_checkout(world: World, tmp_path: Path, vector: str) -> None:
    VECTORS[vector](world)
    collect(world, tmp_path)
    assert world.marks() == []


GROUPS: dict[str, Sequence[str]] = {
    "commands": (
        *("filter.required", "filter.process", "filter with = in its name", "textconv", "diff driver", "diff.external", "merge driver"),
        *("core.fsmonitor", "core.hooksPath", "core.pager", "gpg.program", "submodule.update", "include", "info/attributes"),
        *("packObjectsHook", "alternateRefsCommand", "nested repositories", "settings of later versions", "alias"),
    ),
    "fetches": ("ext:: allowed", "core.sshCommand", "submodule.recurse", "filter of the submodule"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_a_plan_runs_nothing_of_a_checkout(world: World, group: str) -> None:
    for name in GROUPS[group]:
        VECTORS[name](world)
    home = os.environ["HOME"]
    answer = inside("plan", "trl", "--auto", "--change", world.root, "--json", cwd=world.root.parent, HOME=home)
    assert (answer.code, world.marks()) == (0, []), answer.err
    answer = inside("plan", "trl", "--auto", "--change", world.root, "--base", world.base, cwd=world.root.parent, HOME=home)
    assert (answer.code, world.marks()) == (0, []), answer.err


@pytest.mark.parametrize("group", GROUPS)
def test_the_tree_of_a_bisect_runs_nothing_of_a_checkout(world: World, tmp_path: Path, group: str) -> None:
    for name in GROUPS[group]:
        VECTORS[name](world)
    head = run_git(world.root, "rev-parse", "HEAD")
    stores = Stores(tmp_path / "stores", [Repo(name="repo", path=str(world.root), good=world.base, bad=head)], lambda _: None)
    make_tree(stores, [Pin(repo="repo", commit=head)], tmp_path / "tree")
    assert (tmp_path / "tree" / SUB / "lib.py").read_text() == "x = 1\n"
    assert world.marks() == []


def test_the_tree_of_the_base_runs_nothing_of_a_checkout(world: World, tmp_path: Path) -> None:
    for name in GROUPS["commands"]:
        if "filter" not in name and name not in ("include", "info/attributes"):  # with a filter the tree is refused
            VECTORS[name](world)
    VECTORS["filter.clean"](world)
    head = run_git(world.root, "rev-parse", "HEAD")
    with unchanged([(repo_state(world.root), head)], tmp_path / "src") as (made,):
        assert made.dirty == ()
    assert world.marks() == []


CONTROLS: dict[str, tuple[str, ...]] = {
    "filter.clean": ("status",),
    "filter.smudge": ("worktree", "add", "--detach", "../smudged"),
    "filter.process": ("status",),
    "filter with = in its name": ("status",),
    "textconv": ("diff",),
    "diff driver": ("diff",),
    "diff.external": ("diff",),
    "core.fsmonitor": ("status",),
    "core.hooksPath": ("worktree", "add", "--detach", "../hooked"),
    "filter of the submodule": ("status",),
    "include": ("status",),
    "config.worktree": ("status",),
    ".git file": ("status",),
    "info/attributes": ("diff",),
    "the user's filter": ("status",),
    "ext:: allowed": ("fetch",),
    "core.sshCommand": ("fetch",),
}


@pytest.mark.parametrize("vector", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONTROLS])
def test_plain_git_does_run_it(world: World, vector: str) -> None:
    VECTORS[vector](world)
    subprocess.run(["git", "-C", world.root, *CONTROLS[vector]], capture_output=True, timeout=60, check=False)
    assert world.marks()


def test_a_work_tree_elsewhere_is_not_read(world: World, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    put(secrets, {"key": "hunter2\n"})
    for place in (secrets, tmp_path):
        setting("core.worktree", str(place), sub=False)(world)
        assert not any("key" in path for path in repo_state(world.root).dirty)
        assert b"hunter2" not in make_patch(world.root, PLAIN)
        with pytest.raises(UserError, match=r"another place|without a work tree"):
            top_level(world.root / "pkg")


def test_submodules_behind_links_end(world: World) -> None:
    """Two submodules that lead back to the top would be 2**40 checkouts."""
    head = run_git(world.root, "rev-parse", "HEAD")
    for name in ("left", "right"):
        run_git(world.root, "update-index", "--add", "--cacheinfo", f"160000,{head},{name}")
        (world.root / name).symlink_to(".")
    assert len(repo_state(world.root).submodules) == 3
    read_changes(world.root)


@pytest.mark.parametrize("how", ["include.path", "relative", "includeIf.gitdir:/nowhere/.path", "nested", "link"])
def test_a_configuration_that_includes_a_pipe(world: World, how: str) -> None:
    """The listing of settings would be held for half a minute: the pipe is named at once, with who includes it, and nothing runs."""
    above, config = world.root.parent, world.root / ".git" / "config"
    os.mkfifo(above / "pipe")
    place, named_by = above / "pipe", config
    if how == "nested":
        (above / "one").write_text("[include]\n\tpath = two\n")
        (above / "two").write_text("[include]\n\tpath = pipe\n")
        named_by = above / "two"
    elif how == "link":
        (place := above / "link").symlink_to(above / "pipe")
    key = how if how.startswith("include") else "include.path"
    setting(key, {"nested": str(above / "one"), "relative": "../../pipe"}.get(how, str(place)), sub=False)(world)
    for read in (repo_state, read_changes, top_level):
        with pytest.raises(UserError, match="a named pipe, which git would wait for") as told:
            read(world.root)
        assert f"delete the line that includes it in {named_by}" in told.value.fix
        assert Path(told.value.message.partition(": ")[0]).samefile(above / "pipe")


@pytest.mark.parametrize(
    "text",
    [
        "[include]\n\tpath = {pipe}\n[broken\n",
        "[include]\n\tpath\n\tpath = {pipe}\n",
        "[include]\n\tpath = ~nosuch/x\n[INCLUDE]\n\tPATH = {pipe}\n",
    ],
)
@pytest.mark.parametrize("where", [".git/config", "one"])
def test_a_configuration_that_git_cannot_read_includes_a_pipe(world: World, text: str, where: str) -> None:
    """Git opens the pipe before it comes to the mistake."""
    os.mkfifo(world.root.parent / "pipe")
    with (world.root / where).open("a") as stream:
        stream.write(text.format(pipe=world.root.parent / "pipe"))
    if where == "one":
        setting("include.path", str(world.root / "one"), sub=False)(world)
    begun = time.monotonic()
    for read in (repo_state, safe_git.environment):
        with pytest.raises((UserError, safe_git.Held), match="git would wait for"):
            read(world.root)
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("how", ["global", "global include", "system", "xdg", "config", "config.worktree", "commondir"])
def test_a_pipe_among_the_files_of_settings_themselves(world: World, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if how in ("global", "system"):
        monkeypatch.setenv(f"GIT_CONFIG_{how.upper()}", str(pipe))
    elif how == "global include":
        (tmp_path / "own").write_text(f"[include]\n\tpath = {pipe}\n")
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "own"))
    elif how == "xdg":
        (tmp_path / "x" / "git").mkdir(parents=True)
        pipe.rename(tmp_path / "x" / "git" / "config")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "x"))
    else:
        (world.root / ".git" / how).unlink(missing_ok=True)
        pipe.rename(world.root / ".git" / how)
    begun = time.monotonic()
    for read in (repo_state, safe_git.environment):
        with pytest.raises((UserError, safe_git.Held), match="git would wait for"):
            read(world.root)
    assert time.monotonic() - begun < 3


def test_a_configuration_that_includes_a_device_or_nothing(world: World) -> None:
    setting("include.path", "/dev/null", sub=False)(world)
    setting("include.path", "absent", sub=False)(world)
    repo_state(world.root)
    setting("include.path", "/dev/zero", sub=False)(world)
    with pytest.raises(UserError, match="/dev/zero: no file, which git would wait for") as told:
        repo_state(world.root)
    assert "rm /dev/zero" not in told.value.fix


def test_a_listing_that_never_ends(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(tmp_path / "bin", {"git": "#!/bin/sh\ncase $* in *--version) echo git version 2.40.0;; *) exec sleep 60;; esac\n"})
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(safe_git, "LISTING_SECONDS", 0.3)
    with pytest.raises(UserError, match="did not finish within"):
        repo_state(world.root)


def test_an_old_git_is_refused(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "bin", {"git": "#!/bin/sh\necho git version 2.30.2\n"})
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"git 2\.30 is too old"):
        repo_state(world.root)


def pointer(contents: bytes) -> bytes:
    return f"{POINTER}\noid sha256:{hashlib.sha256(contents).hexdigest()}\nsize {len(contents)}\n".encode()


def test_files_of_git_lfs_are_compared_by_their_pointers(world: World) -> None:
    root = world.root
    (root / "new.py").unlink()
    run_git(root, "checkout", "-q", "--", ".")
    held = {"same.bin": b"same\n" * 9, "touched.bin": b"touched\n", "edited.bin": b"old\n", "pointer.bin": b"absent\n"}
    commit(root, {".gitattributes": "*.bin text\n", **{name: pointer(contents) for name, contents in held.items()}})
    put(root, {name: contents for name, contents in held.items() if name != "pointer.bin"})
    commit_attributes = "*.bin filter=lfs diff=lfs merge=lfs -text\n"
    put(root, {".gitattributes": commit_attributes})
    run_git(root, "add", ".gitattributes")
    run_git(root, "commit", "-q", "-m", "lfs")
    setting("filter.lfs.clean")(world)
    setting("filter.lfs.process")(world)
    setting("filter.lfs.required", "true")(world)
    shutil.rmtree(root / SUB)
    (root / SUB).mkdir()
    assert repo_state(root).dirty == ()
    put(root, {"edited.bin": b"new\n", "fresh.bin": b"fresh\n"})
    assert repo_state(root).dirty == ("edited.bin", "fresh.bin")
    patch = make_patch(root, PLAIN)
    for contents in (b"new\n", b"fresh\n"):
        assert b"+oid sha256:" + hashlib.sha256(contents).hexdigest().encode() in patch
    assert b"+fresh" not in patch
    assert {change.path for change in read_changes(root, "HEAD").paths} == {"edited.bin", "fresh.bin"}
    assert world.marks() == []
    assert not list((root / ".git").rglob("seatrial*"))


def test_a_file_behind_another_filter_counts_as_changed_and_is_not_read(world: World) -> None:
    """It may be decrypted by its filter: its contents must not reach the patch."""
    root = world.root
    run_git(root, "checkout", "-q", "--", ".")
    commit(root, {".gitattributes": "*.key filter=crypt\n", "a.key": "scrambled\n", "b.key": "scrambled\n"})
    setting("filter.crypt.clean", "sed s/plain/scrambled/")(world)
    setting("filter.crypt.smudge", "sed s/scrambled/plain/")(world)
    put(root, {"a.key": "plain\n", "c.key": "plain and new\n"})
    assert {"a.key", "c.key"} <= set(repo_state(root).dirty)
    assert "b.key" not in repo_state(root).dirty
    patch = make_patch(root, PLAIN)
    assert b"plain" not in patch
    assert b"left out 'a.key': 6 bytes" in patch
    assert b"no filter of a checkout is run" in patch
    assert {"a.key", "c.key"} <= {change.path for change in read_changes(root, "HEAD").paths}
    assert not changed_lines(root, "HEAD").complete


def test_settings_of_a_healthy_checkout_stay(world: World) -> None:
    """Line endings, names and URLs are data: they hold as before."""
    root = world.root
    run_git(root, "checkout", "-q", "--", ".")
    (root / "new.py").unlink()
    commit(root, {".gitattributes": "*.txt text eol=crlf\n*.md text\n*.u16 working-tree-encoding=UTF-16LE\n"})
    run_git(world.sub, "checkout", "-q", "--", ".")
    (world.sub / "new.py").unlink()
    put(root, {"a.txt": "one\r\ntwo\r\n", "a.md": "one\r\n", "a.u16": "one\n".encode("utf-16-le")})
    setting("core.autocrlf", "true")(world)
    run_git(root, "add", "-A")
    run_git(root, "commit", "-q", "-m", "lines")
    for name in ("a.txt", "a.md", "a.u16"):
        os.utime(root / name, (1, 1))
    keys = ("user.name", "branch.main.merge", "pull.rebase", "push.default", "lfs.url", "gpg.format", "pack.windowMemory", "gc.auto")
    for key, value in zip(keys, ("N", "refs/heads/main", "true", "simple", "https://x", "ssh", "1m", "0"), strict=True):
        setting(key, value, sub=False)(world)
    assert repo_state(root).dirty == ()
    assert safe_git.read_configuration(root).foreign == ()
    put(root, {"a.txt": "one\r\nthree\r\n"})
    assert repo_state(root).dirty == ("a.txt",)
    assert [line.text for line in changed_lines(root, "HEAD").lines] == ["two", "three"]
    assert git(root, "config", "--get", "user.name") == b"N\n"


def test_a_partial_clone_is_read_without_a_fetch(world: World) -> None:
    VECTORS["ext:: allowed"](world)
    with pytest.raises(MissingObjectsError, match="fetches nothing"):
        git(world.root, "show", f"{world.base}:a.py")
    assert {change.path for change in read_changes(world.root, world.base).paths} >= {"a.py", "run.sh", "new.py", ".gitattributes"}
    found = changed_lines(world.root, world.base)
    assert "a = 3" in found
    assert not found.complete
    assert world.marks() == []


def test_marks_that_hide_changes_inside_a_submodule_do_not(world: World) -> None:
    run_git(world.sub, "update-index", "--assume-unchanged", "lib.py")
    assert f"{SUB}/lib.py" in repo_state(world.root).dirty


@pytest.mark.parametrize(
    "name",
    [
        *(".gitattributes", "pkg/.gitignore", "untracked/deep/.gitattributes", "untracked/.gitignore", ".gitmodules", ".mailmap"),
        *(".git/info/exclude", ".git/info/attributes"),
    ],
)
def test_a_pipe_that_git_would_wait_for(world: World, name: str) -> None:
    put(world.root, {f"{Path(name).parent}/beside.py": "x = 1\n"} if name.startswith("untracked") else {})
    (world.root / name).parent.mkdir(exist_ok=True)
    (world.root / name).unlink(missing_ok=True)
    os.mkfifo(world.root / name)
    with pytest.raises(UserError, match="a named pipe"):
        repo_state(world.root)


@pytest.mark.parametrize("key", ["core.attributesFile", "core.excludesFile"])
def test_a_pipe_that_the_configuration_names(world: World, key: str) -> None:
    os.mkfifo(world.root / "pipe")
    setting(key, str(world.root / "pipe"), sub=False)(world)
    with pytest.raises(UserError, match="a named pipe"):
        repo_state(world.root)


@pytest.mark.parametrize(
    "name",
    [
        *("packed-refs", "objects/info/alternates", "HEAD", "config", "commondir", "refs/heads/main", "refs/remotes/origin/HEAD"),
        *("refs/replace/x", "objects/info/commit-graph", "objects/pack/multi-pack-index", "objects/ab/cdef", "modules/x/HEAD"),
    ],
)
def test_a_pipe_in_the_git_directory(world: World, name: str) -> None:
    place = world.root / ".git" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    for read in (read_changes, repo_state, top_level):
        with pytest.raises(UserError, match="a named pipe"):
            read(world.root)


@pytest.mark.parametrize("name", ["index", "HEAD", "packed-refs", "commondir", "objects/pack/multi-pack-index", "info/exclude"])
def test_a_device_in_the_git_directory(world: World, name: str) -> None:
    """A copy of the index would fill the disk, and git itself would read for ever."""
    place = world.root / ".git" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to("/dev/zero")
    for read in (read_changes, repo_state, top_level):
        with pytest.raises(UserError, match="a device, which git would wait for"):
            read(world.root)


def test_the_null_device_in_the_git_directory_is_an_empty_file(world: World) -> None:
    (world.root / ".git" / "info").mkdir(exist_ok=True)
    (world.root / ".git" / "info" / "exclude").unlink(missing_ok=True)
    (world.root / ".git" / "info" / "exclude").symlink_to("/dev/null")
    assert "new.py" in repo_state(world.root).dirty


@pytest.mark.parametrize("key", ["core.attributesFile", "core.excludesFile"])
def test_a_device_that_the_configuration_names(world: World, key: str) -> None:
    setting(key, "/dev/zero", sub=False)(world)
    with pytest.raises(UserError, match="/dev/zero: a device"):
        repo_state(world.root)


def test_objects_elsewhere_are_not_looked_through(world: World, tmp_path: Path) -> None:
    """Any directory may be named; git opens in it only what is called as in a directory of objects."""
    (tmp_path / "any" / "deep").mkdir(parents=True)
    os.mkfifo(tmp_path / "any" / "deep" / "pipe")
    put(world.root / ".git", {"objects/info/alternates": f"{tmp_path}/any\n/\n"})
    repo_state(world.root)
    put(world.root / ".git", {"objects/info/alternates": f"{tmp_path}/any\n" * 10_000})
    with pytest.raises(UserError, match=r"alternates: \d+ bytes"):
        repo_state(world.root)


def test_more_settings_than_a_command_takes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with (world.root / ".git" / "config").open("a") as stream:
        stream.write("".join(f'[filter "f{number}"]\n\tclean = {world.evil}\n' for number in range(1000)))
    with pytest.raises(UserError, match="settings that could run something"):
        repo_state(world.root)
    monkeypatch.setattr(safe_git, "_MOST_LISTED", 10_000)
    safe_git._KNOWN.clear()
    with pytest.raises(UserError, match="of settings"):
        repo_state(world.root)
    assert world.marks() == []


def test_a_pipe_among_the_objects_of_another_repository(world: World, tmp_path: Path) -> None:
    (tmp_path / "others" / "pack").mkdir(parents=True)
    os.mkfifo(tmp_path / "others" / "pack" / "multi-pack-index")
    put(world.root / ".git", {"objects/info/alternates": f"{tmp_path}/others\n"})
    with pytest.raises(UserError, match="others/pack/multi-pack-index: a named pipe"):
        repo_state(world.root)


def test_a_pipe_in_the_directory_that_worktrees_share(world: World, tmp_path: Path) -> None:
    run_git(world.root, "worktree", "add", "-q", str(tmp_path / "tree"), "HEAD")
    shared = world.root / ".git" / "objects" / "info" / "commit-graph"
    os.mkfifo(shared)
    with pytest.raises(UserError, match="commit-graph: a named pipe"):
        repo_state(tmp_path / "tree")
