"""Git in a checkout that somebody else made: no command of its configuration runs, and nothing is fetched.

- `.git/config` can name commands: filters, hooks, a file system monitor, diff and merge drivers, helpers, `ext::` remotes. Git runs
  them while it only reads. They cannot be switched off as a whole, and `.gitattributes` chooses filters by names of its own.
- So the configuration is listed first, which runs nothing. Every setting of the checkout that is not known to be harmless is blanked,
  and so is every filter, whoever configured it: Git LFS of the user reads commands (extensions) from the checkout's configuration.
- No protocol is allowed, so a partial clone fetches nothing. The work tree is the directory of `.git`, whatever `core.worktree` says.
- Standard library only: what runs inside a loop uses it too, and so does what is installed alone. The copies are equal byte for byte.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

OLDEST = (2, 31)
"""The first git that takes settings from GIT_CONFIG_COUNT; an older one would ignore what is blanked."""
LISTING_SECONDS = 10.0
NETWORK = "file:git:http:https:ssh"
"""Protocols of a fetch that the user asked for; never `ext`, which is a command."""

_SETTINGS = (
    *("core.quotePath=false", "core.fsmonitor=false", "core.hooksPath=/dev/null", "core.pager=cat", "core.editor=false"),
    *("status.renames=false", "submodule.recurse=false", "diff.noprefix=false", "log.showSignature=false", "gc.auto=0"),
)
_PREFIX = ("git", "--no-pager", "--literal-pathspecs", *(part for setting in _SETTINGS for part in ("-c", setting)))

# How git is configured and how it reaches other machines.
_PASSED_ON = ("GIT_CONFIG", "GIT_EXEC_PATH", "GIT_SSH", "GIT_SSL", "GIT_ASKPASS", "GIT_PROXY")

_OURS = ("local", "worktree")
"""Scopes of settings that come with the checkout, files that it includes among them."""

# Settings of a checkout that are data: they change what git answers as the user expects, and name no command.
_HARMLESS = re.compile(
    r"""
    core\.(?:repositoryformatversion|filemode|bare|worktree|logallrefupdates|ignorecase|precomposeunicode|symlinks|autocrlf|eol|safecrlf
        |checkroundtripencoding|quotepath|sharedrepository|compression|loosecompression|bigfilethreshold|packedgit\w+|deltabasecachelimit
        |excludesfile|attributesfile|trustctime|checkstat|untrackedcache|splitindex|sparsecheckout|sparsecheckoutcone|preloadindex
        |comment(?:char|string)|whitespace|abbrev|multipackindex|commitgraph|protecthfs|protectntfs|longpaths|fscache|hidedotfiles
        |fsync\w*|notesref|createobject|disambiguate|maxtreedepth|ignorestat|warnambiguousrefs|prefersymlinkrefs|filesreflocktimeout
        |packedrefstimeout|lockfilepid|usereplacerefs|streamingthreshold|restrictinheritedhandles)
    | remote\..+\.(?:url|pushurl|fetch|push|mirror|prune|prunetags|tagopt|skip\w+|promisor|partialclonefilter|followremotehead|gh-resolved)
    | submodule\.(?:.+\.)?(?:url|active|branch|ignore|fetchrecursesubmodules|shallow|recurse|fetchjobs|propagatebranches|alternate\w+)
    | (?:diff|merge)\.\w+(?<!^diff\.external)
    | diff\..+\.(?:x?funcname|binary|wordregex|cachetextconv|algorithm)
    | (?:pack|gc|log|commit)\.\w+(?<!hook)(?<!editor)
    | gpg\.(?:format|mintrustlevel)
    | (?:branch|extensions|user|author|committer|advice|color|column|status|i18n|feature|index|push|pull|rerere|lfs|gui|apply|checkout|tag
        |worktree|commitgraph|protocol|transfer|receive|url|include|includeif|alias|safe|pretty|notes|mailmap|blame|grep|versionsort
        |fetch|stash|rebase|init|add|clone|am|repack|sparse|splitindex)\..+
    | format\.pretty
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_MOST_INCLUDED = 100
_LONGEST_POINTER = 1_000_000
_PATH_LINE = re.compile(r"^[^#;\n]*?\bpath[ \t]*=[ \t]*([^\n]*)", re.MULTILINE | re.IGNORECASE)
_MOST_LISTED = 8_000_000
"""Bytes of a listing of settings; that of a large checkout has some ten thousand."""
_FILTER = re.compile(r"filter\.(.*)\.(?:clean|smudge|process|required)", re.IGNORECASE | re.DOTALL)


_MOST_BLANKED = 2000
"""Settings that are blanked by variables: a command takes only so many."""


class GitRefused(Exception):
    """Git cannot be run safely here: its exit code (None: it ran out of time, or is too old) and what it said."""

    def __init__(self, code: int | None, said: str) -> None:
        super().__init__(said)
        self.code = code
        self.said = said


class Held(GitRefused):
    """A file that git would wait for, since it is a named pipe or a device: which, and who names it."""

    def __init__(self, place: str, named_by: str) -> None:
        super().__init__(None, f"{place}: no file, and git would wait for it{f' ({named_by} includes it)' if named_by else ''}")
        self.place = place
        self.named_by = named_by


class Setting(NamedTuple):
    """One setting that git reads here."""

    scope: str
    origin: str
    key: str


@dataclass(frozen=True)
class Configuration:
    """The settings of a repository that could run something."""

    drivers: frozenset[str]
    """Names of filters, by whomever they are configured."""
    foreign: tuple[str, ...]
    """Settings of the checkout that are not known to be harmless."""

    def blanks(self, filters: bool) -> dict[str, str]:
        """What to set instead; with `filters` those of the user (not of the checkout) stay."""
        found = dict.fromkeys(self.foreign, "")
        found.update({key: "false" for key in self.foreign if key.lower().endswith(".required")})
        if not filters:
            for name in self.drivers:
                found.update({f"filter.{name}.{part}": "" for part in ("clean", "smudge", "process")})
                found[f"filter.{name}.required"] = "false"
        return found


def command_line(repo: Path, *arguments: str) -> list[str]:
    """The words that run git in `repo`."""
    return [*_PREFIX, "-C", os.fspath(repo), *arguments]


def environment(repo: Path, filters: bool = False, network: bool = False, trusted: bool = False) -> dict[str, str]:
    """The environment in which git runs nothing of the checkout at `repo`.

    - `trusted`: read it also when another user owns it.
    - `filters`: filters that the user configured may run. For repositories whose configuration is our own.
    - `network`: the user asked for something that may fetch.
    """
    env = _base(repo)
    env["GIT_ALLOW_PROTOCOL"] = NETWORK if network else "none"
    if not network:
        env["GIT_NO_LAZY_FETCH"] = "1"
    blanks = read_configuration(repo, trusted).blanks(filters)
    if len(blanks) > _MOST_BLANKED:
        raise GitRefused(None, f"its configuration has {len(blanks)} settings that could run something: more than {_MOST_BLANKED}")
    return _set(env, blanks)


def _set(env: dict[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Settings that win over those of files; by variables, because `-c` cuts a name at its first `=`."""
    given = env.get("GIT_CONFIG_COUNT") or "0"
    if not re.fullmatch("[0-9]{1,6}", given):
        raise GitRefused(None, f"the variable GIT_CONFIG_COUNT is {given[:40]!r}, which is no count")
    count = int(given)
    for key, value in sorted(values.items()):
        env[f"GIT_CONFIG_KEY_{count}"] = key
        env[f"GIT_CONFIG_VALUE_{count}"] = value
        count += 1
    env["GIT_CONFIG_COUNT"] = str(count)
    return env


def read_configuration(repo: Path, trusted: bool = False) -> Configuration:
    """What git would read in `repo`; listed anew when one of the files changed."""
    env = _base(repo)
    if trusted:
        _set(env, {"safe.directory": "*"})
    key = (os.fspath(repo), *(env.get(name, "") for name in ("HOME", "XDG_CONFIG_HOME", "PATH")), _variables(env))
    known = _KNOWN.get(key)
    if known is not None and known[1] == _stamps(known[0]):
        return known[2]
    _require_version(env)
    _refuse_held(repo, env)
    settings = list(_listed(repo, env))
    files = sorted({*_own_files(env), *(_file(repo, setting.origin) for setting in settings)})
    stamps = _stamps(tuple(files))
    found = Configuration(
        frozenset(match[1] for setting in settings if (match := _FILTER.fullmatch(setting.key))),
        tuple(sorted({setting.key for setting in settings if setting.scope in _OURS and not _HARMLESS.fullmatch(setting.key)})),
    )
    if len(_KNOWN) > 500:
        _KNOWN.clear()
    _KNOWN[key] = (tuple(files), stamps, found)
    return found


_Stamps = tuple["tuple[int, int, int] | None", ...]
_KNOWN: dict[tuple[str, ...], tuple[tuple[str, ...], _Stamps, Configuration]] = {}
_VERSIONS: dict[str, tuple[int, ...]] = {}


def _base(repo: Path) -> dict[str, str]:
    """The caller's environment, without what would point git at another repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(_PASSED_ON)}
    kept.update(GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0", GIT_PAGER="cat", GIT_EDITOR="false", LC_ALL="C")
    if (Path(repo) / ".git").exists():
        kept["GIT_WORK_TREE"] = "."
    return kept


def _listed(repo: Path, env: Mapping[str, str]) -> Iterator[Setting]:
    words = command_line(repo, "config", "--list", "--show-scope", "--show-origin", "--name-only", "-z")
    code, said, complaint = _asked(words, env, "config --list")
    if code:
        raise GitRefused(code, complaint)
    columns = said.split("\0")[:-1]
    if len(columns) % 3:
        raise GitRefused(None, f"cannot parse what `git config --list` printed ({len(columns)} columns)")
    for scope, origin, key in zip(columns[::3], columns[1::3], columns[2::3]):  # noqa: B905 (Python 3.9)
        yield Setting(scope, origin, key)


def _asked(words: list[str], env: Mapping[str, str], what: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of git on settings, within bounds of time and size."""
    late = threading.Event()
    with tempfile.TemporaryFile() as complaint:
        process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaint)

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(LISTING_SECONDS, end)
        timer.start()
        try:
            with process:
                assert process.stdout is not None
                said = process.stdout.read(_MOST_LISTED + 1)
                if len(said) > _MOST_LISTED:
                    process.kill()
        finally:
            timer.cancel()
        if late.is_set():
            raise GitRefused(None, f"`git {what}` did not finish within {LISTING_SECONDS:.0f} s")
        if len(said) > _MOST_LISTED:
            raise GitRefused(None, f"`git {what}` lists more than {_MOST_LISTED // 1_000_000} MB of settings")
        complaint.seek(0)
        return process.returncode, os.fsdecode(said), os.fsdecode(complaint.read(_MOST_LISTED)).strip()


def _refuse_held(repo: Path, env: Mapping[str, str]) -> None:
    """Refuse a configuration that includes a named pipe: whoever opens it waits for ever. Nothing is opened to find that out but files."""
    for file in _repository_files(repo):  # before the first git, which reads them all
        _require_file(file, "")
    seen: set[str] = set()
    left = [(file, "") for file in _own_files(env)]
    while left and len(seen) < _MOST_INCLUDED:  # of the user every git reads also what they include, to learn whom to trust
        file, named_by = left.pop()
        if file not in seen and _require_file(file, named_by):
            left += _included_roughly(file, env)
        seen.add(file)
    left, seen = _included(repo, env, ""), set()
    while left:
        file, named_by = left.pop()
        if file in seen:
            continue
        seen.add(file)
        if len(seen) > _MOST_INCLUDED:
            raise GitRefused(None, f"its configuration includes more than {_MOST_INCLUDED} files")
        if _require_file(file, named_by):
            left += _included(repo, env, file)


def _require_file(file: str, named_by: str) -> bool:
    """Whether this is a file; one that is absent is no mistake of a configuration."""
    try:
        mode = Path(file).stat().st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and file != os.devnull):
        raise Held(file, named_by)
    return stat.S_ISREG(mode)


def _repository_files(repo: Path) -> Iterator[str]:
    """Where the repository's own settings are."""
    place = next((above / ".git" for above in (Path(repo), *Path(repo).absolute().parents) if os.path.lexists(above / ".git")), None)
    if place is None:
        return
    yield os.fspath(place)
    places = [place]
    if _is_short_file(place):
        places = [place.parent / os.fsdecode(place.read_bytes()).strip()[len("gitdir: ") :]]
    yield os.fspath(places[0] / "commondir")
    if _is_short_file(places[0] / "commondir"):
        places.append(places[0] / os.fsdecode((places[0] / "commondir").read_bytes()).strip())
    for directory in places:
        yield from (os.fspath(directory / name) for name in ("config", "config.worktree"))


def _is_short_file(place: Path) -> bool:
    try:
        return place.is_file() and place.stat().st_size < _LONGEST_POINTER
    except (OSError, ValueError):
        return False


def _included(repo: Path, env: Mapping[str, str], file: str) -> list[tuple[str, str]]:
    """Files that a file of settings includes (all that git reads in `repo`, where none is named), under any condition; and who names it."""
    words = command_line(repo, "config", *(("--file", file) if file else ()), "--no-includes", "--show-origin", "--type=path", "-z")
    words += ["--get-regexp", r"^include(if\..*)?\.path$"]
    code, said, _ = _asked(words, env, "config --get-regexp")
    if code == 1:
        return []
    if code:  # the listing says what is wrong, once it has read what comes before that
        return [place for above in ([file] if file else _repository_files(repo)) for place in _included_roughly(above, env)]
    columns = said.split("\0")[:-1]
    found = []
    for origin, setting in zip(columns[::2], columns[1::2]):  # noqa: B905 (Python 3.9)
        above = _file(repo, origin)
        found.append((os.fspath(Path(above).parent / setting.partition("\n")[2]), above))
    return found


def _included_roughly(file: str, env: Mapping[str, str]) -> list[tuple[str, str]]:
    """What a file that git cannot read to its end may include."""
    if not _is_short_file(Path(file)):
        return []
    found = (match[1].strip() for match in _PATH_LINE.finditer(os.fsdecode(Path(file).read_bytes())))
    paths = (path.strip('"') for path in found)
    return [(os.fspath(Path(file).parent / re.sub("^~(?=/)", lambda _: env.get("HOME", ""), path)), file) for path in paths if path]


def _require_version(env: Mapping[str, str]) -> None:
    path = env.get("PATH", "")
    if path not in _VERSIONS:
        done = subprocess.run(["git", "--version"], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
        found = re.search(rb"git version (\d+)\.(\d+)", done.stdout)
        if found is None:
            return  # git itself says what is wrong with it, to the next command
        _VERSIONS[path] = (int(found[1]), int(found[2]))
    if _VERSIONS[path] < OLDEST:
        version, oldest = (".".join(map(str, numbers)) for numbers in (_VERSIONS[path], OLDEST))
        raise GitRefused(None, f"git {version} is too old: before {oldest} it cannot be kept from running commands of a checkout")


def _file(repo: Path, origin: str) -> str:
    return os.fspath(Path(repo) / origin[len("file:") :]) if origin.startswith("file:") else ""


def _own_files(env: Mapping[str, str]) -> Iterator[str]:
    """Where the user's settings are, or may come to be."""
    home = Path(env.get("HOME", ""))
    yield env.get("GIT_CONFIG_SYSTEM") or "/etc/gitconfig"
    yield env.get("GIT_CONFIG_GLOBAL") or os.fspath(home / ".gitconfig")
    yield os.fspath(Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "git" / "config")


def _variables(env: Mapping[str, str]) -> str:
    return repr(sorted((name, value) for name, value in env.items() if name.startswith("GIT_CONFIG")))


def _stamps(files: tuple[str, ...]) -> _Stamps:
    return tuple(map(_stamp, files))


def _stamp(file: str) -> tuple[int, int, int] | None:
    try:
        found = Path(file).stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
