#!/bin/sh
# The quick tests of the core with the lower bound of every dependency in pyproject.toml, in a venv of their own.
set -eu
venv=build/lowest
"${PYTHON:-python3.11}" -m venv "$venv"
lowest=$("$venv/bin/python" -c '
import tomllib
words = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]
print(*(word.partition(",")[0].replace(">=", "==") for word in words))')
# shellcheck disable=SC2086 # several words
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet $lowest --editable '.[dev]' --editable packages/pytest-seatrial
"$venv/bin/python" -m pip freeze | grep -iE "^($(echo "$lowest" | sed 's/==[^ ]*//g; s/ /|/g'))=="
exec "$venv/bin/pytest" tests/runtime tests/cli tests/trial -m "not real and not slow" -q -p no:cacheprovider "$@"
