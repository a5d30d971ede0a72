"""Changes are called by names that mean something: a report on `bridge` must be about the Bridge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from seatrial.model.loop import Context
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary


def wrong_names(context: Context, packages: Mapping[str, str]) -> Iterator[Finding]:
    """A change that is called by a known name must provide that package."""
    for repo in context.changes:
        wanted = packages.get(repo.name)
        if wanted and wanted not in repo.packages:
            own = next((name for name, package in packages.items() if package in repo.packages), None)
            message = f"{repo.path} is called {repo.name} and does not provide {wanted}, but {', '.join(repo.packages) or 'no package'}"
            fix = f"--change {own}={repo.path}" if own else f"name the checkout that provides {wanted}"
            yield Finding(name="change", ok=False, boundary=Boundary.CONFIG, message=message, fix=fix)
