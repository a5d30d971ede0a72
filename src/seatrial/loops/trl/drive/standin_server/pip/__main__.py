"""`python -m pip list --format=freeze`."""

from __future__ import annotations

from importlib.metadata import distributions

for line in sorted({f"{each.metadata['Name']}=={each.version}" for each in distributions()}):
    print(line)
