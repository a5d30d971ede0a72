"""A shadow of the checkout in which a script runs with stand-ins, and what they wrote down.

- The folders on the way to the script and some more are real, so that what it writes stays here; all else is linked.
- HOME, the git configuration and the folder for temporary files are others.
- Programs that act come from a folder of stand-ins, first on PATH: they write down how they were called, and succeed.
- From the first training on, a failure does not end the script: its greps find nothing in an empty log.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.files import read_text
from seatrial.model.guarded import parse_json

WORKPLACES = "3rdparty"
DEPTH = 3
"""So deep the folders below are real, too: scripts go into 3rdparty/Gym-workspace/Gym and write files of their own there."""
RECORDED = ("uv", "python", "python3")
"""These start programs of NeMo-RL."""
IDLE = (
    *("git", "apt-get", "apt", "sudo", "pip", "pip3", "ray", "docker", "curl", "wget", "sleep"),
    *("pkill", "pgrep", "killall", "nsys", "sbatch", "srun", "hf", "huggingface-cli"),
)
"""These do nothing."""
STAND_IN = """\
import hashlib, json, os, sys
calls, name, *words = sys.argv[1:]
if "-" in words:
    sys.stdin.read()
if any(word.endswith("json_dump_tb_logs.py") for word in words) and "--output_path" in words[:-1]:
    with open(words[words.index("--output_path") + 1], "w") as stream:
        stream.write("{}")
if any(os.path.basename(word).startswith("run_") and word.endswith(".py") for word in words):
    open(calls + ".trained", "w").close()
with open(os.path.join(os.path.dirname(calls), "given.json")) as stream:
    salt, given = json.load(stream)
own = {k: v for k, v in os.environ.items() if given.get(k) != hashlib.blake2b(os.fsencode(v), key=bytes.fromhex(salt)).hexdigest()}
gone = [k for k in given if k not in os.environ]
with open(calls, "a") as stream:
    stream.write(json.dumps({"argv": [name, *words], "cwd": os.getcwd(), "environment": own, "unset": gone}) + "\\n")
"""
"""Variables are stored where they differ from those given to the script, which hold the user's tokens: of these it knows
salted digests."""
SMI = '#!/bin/sh\nfor n in 0 1 2 3 4 5 6 7; do case "$*" in *--query*) echo 0;; *) echo "GPU $n: stand-in";; esac; done\n'
REMOVE = '#!/bin/sh\nfor word; do case "$word" in *..*) exit 0;; -*|{own}/*|{home}/*) ;; *) exit 0;; esac; done\nexec {rm} "$@"\n'
"""Only what the script made itself: a link of the shadow tree leads into the checkout."""
QUERY = "#!/bin/sh\n[ -e {trained} ] && echo 1000000\nexit 0\n"
"""jq: scripts of recipes ask it for the steps that are done."""
AFTERWARDS = """\
trap '[[ -e {trained} ]] && set +e' DEBUG
set -o functrace
exit() {{ if [[ -e {trained} ]]; then return 0; else builtin exit "$@"; fi; }}
"""
"""Bash reads it before a script: from the first training on, a failure does not end the script."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The shadow tree and the stand-ins, below one temporary folder."""

    folder: Path
    checkout: Path
    name: Path
    """Of the script, relative to the checkout."""
    given: Mapping[str, str]

    @property
    def root(self) -> Path:
        return self.folder / "checkout"

    @property
    def script(self) -> Path:
        return self.root / self.name

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def calls(self) -> Path:
        return self.folder / "calls.jsonl"

    def build(self) -> None:
        """Make the shadow tree and the stand-ins."""
        self._shadow(Path())
        (self.home / "tmp").mkdir(parents=True)
        programs = self.folder / "bin"
        programs.mkdir()
        (self.folder / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
        (self.folder / "given.json").write_text(json.dumps(self._digests()), encoding="utf-8")
        made = dict.fromkeys(IDLE, "#!/bin/sh\nexit 0\n")
        for name in RECORDED:
            words = shlex.join([sys.executable, "-I", "-S", str(self.folder / "stand_in.py"), str(self.calls), name])
            made[name] = f'#!/bin/sh\nexec {words} "$@"\n'
        made["nvidia-smi"] = SMI
        made["rm"] = REMOVE.format(own=self.script.parent, home=self.home, rm=shutil.which("rm") or "/bin/rm")
        made["jq"] = QUERY.format(trained=f"{self.calls}.trained")
        for name, text in made.items():
            (programs / name).write_text(text, encoding="utf-8")
            (programs / name).chmod(0o755)
        (self.folder / "afterwards.sh").write_text(AFTERWARDS.format(trained=f"{self.calls}.trained"), encoding="utf-8")

    def _shadow(self, part: Path) -> None:
        """Real folders where a script works, copies of the files beside it, links to all else but hidden files."""
        real, shadow, way = self.checkout / part, self.root / part, self.name.parent
        shadow.mkdir(parents=True)
        for entry in real.iterdir():
            place = part / entry.name
            if entry.is_dir() and part == way:
                continue  # what earlier runs left
            if entry.is_file() and way.is_relative_to(part) and part.parts:
                shutil.copy(entry, shadow / entry.name)  # a script that resolves a link would come to the checkout
            elif entry.is_dir() and (way.is_relative_to(place) or (place.parts[0] == WORKPLACES and len(place.parts) <= DEPTH)):
                self._shadow(place)
            elif not entry.name.startswith("."):
                (shadow / entry.name).symlink_to(entry)

    def environment(self) -> dict[str, str]:
        """What the script runs with."""
        path = os.pathsep.join((str(self.folder / "bin"), self.given.get("PATH") or os.defpath))
        ours = {"HOME": self.home, "GIT_CONFIG_GLOBAL": self.home / ".gitconfig", "TMPDIR": self.home / "tmp"}
        return {**self.given, "PATH": path, "BASH_ENV": str(self.folder / "afterwards.sh"), **{k: str(v) for k, v in ours.items()}}

    def _digests(self) -> tuple[str, dict[str, str]]:
        """A salt, and what the script runs with as digests: no value can be read back from the file."""
        salt = secrets.token_bytes(32)
        made = {key: hashlib.blake2b(os.fsencode(value), key=salt).hexdigest() for key, value in self.environment().items()}
        return salt.hex(), made

    def written(self) -> set[str]:
        """Files and empty folders beside the script."""
        found = [path for path in self.script.parent.rglob("*") if not path.is_symlink()]
        names = ((path, path.relative_to(self.root).as_posix()) for path in found)
        return {name if path.is_file() else f"{name}/" for path, name in names if path.is_file() or not any(path.iterdir())}

    def rows(self) -> list[dict[str, Any]]:
        """Every recorded call, in the checkout's terms. A last line without its end is of a call that was killed before it began."""
        lines = read_text(self.calls).split("\n")[:-1] if self.calls.exists() else []
        return [self._told(parse_json(line)) for line in lines]

    def _told(self, row: Mapping[str, Any]) -> dict[str, Any]:
        changed = self.environment()
        full = {**{key: value for key, value in changed.items() if key not in row["unset"]}, **row["environment"]}
        environment = {key: self.given.get(key) if changed.get(key) == value else self.real(value) for key, value in full.items()}
        kept = {key: value for key, value in environment.items() if value is not None and key != "_"}
        return {"argv": [self.real(word) for word in row["argv"]], "cwd": self.real(row["cwd"]), "environment": kept}

    def real(self, text: str) -> str:
        """A text with the checkout's paths instead of the shadow's."""
        home = self.given.get("HOME", "~")
        return text.replace(str(self.root), str(self.checkout)).replace(str(self.home), home)

    def own_text(self, path: Path) -> str | None:
        """The text of a file that the script wrote itself: the checkout does not have it."""
        if path.is_file() or not path.is_relative_to(self.checkout):
            return None
        shadow = self.root / path.relative_to(self.checkout)
        return self.real(read_text(shadow)) if shadow.is_file() else None
