"""A vLLM server that runs already with our worker extension: its live weights against the safetensors of a directory, once.

The server reads the directory itself, so it must see the same path. It is paused meanwhile: learning the map loads other values
through its loader and puts every bit back. There is no policy here, so nothing is said about later refits, samples or base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seatrial.loops.facts import Facts, Row
from seatrial.loops.proof import proof
from seatrial.loops.refits import coverage, weights
from seatrial.loops.refits.checks import whole
from seatrial.loops.refits.rows import Rows, typed
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary, Verdict
from seatrial.probes.engines.vllm_client import Client, ServerError
from seatrial.proving.checkpoint import require_weights
from seatrial.proving.judge import describe, lines
from seatrial.proving.record import Judged, Wanted

EQUAL = "live weights against the files: bit-equal"


def look(url: str, directory: Path, seconds: float) -> Facts:
    """Ask every rank of the server for map, comparison, coverage and version; an unreachable server is Blocked."""
    require_weights(directory, f"--weights {directory}")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--attach {url}: not a URL", "write it as http://host:port")
    reference = str(directory.absolute())
    client = Client(url, timeout_s=seconds)
    try:
        client.versions()  # asked first: what cannot be looked at is not disturbed
        client.call("/pause?mode=abort&clear_cache=true", {})
        try:
            maps = client.rpc("seatrial_map", reference=reference)
            verified = client.rpc("seatrial_verify", reference=reference)
            covered, versions = client.rpc("seatrial_coverage"), client.versions()
        finally:
            client.call("/resume", {})
    except ServerError as error:
        raise BlockedError(Boundary.ENVIRONMENT, *_why(url, str(error))) from error
    answers = zip(maps, verified, covered, versions, strict=True)
    return Facts(tuple(row for rank, each in enumerate(answers) for row in _facts(str(rank), *each)))


def _why(url: str, said: str) -> tuple[str, str]:
    """What an error of the server means, and the fix."""
    extension = "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls seatrial.probes.engines.vllm_extension.Extension"
    if "refused" in said or "Name or service" in said:
        return f"nothing listens at {url}", "name the address of a running vLLM server"
    if "seatrial_" in said and "has no attribute" in said:
        return f"the vLLM server at {url} runs without our worker extension", f"start it with {extension}"
    if any(f"status {code}" in said for code in (404, 405, 501)) or "not JSON" in said:
        return f"{url} is no vLLM server in development mode: {said.partition('<')[0][:200]}", f"start vLLM with {extension}"
    return said, f"see the server's log; it needs {extension}"


def _facts(rank: str, mapped: dict[str, Any], verified: dict[str, Any], covered: dict[str, Any], version: dict[str, Any]) -> list[Row]:
    """The answers of one rank as facts, with one comparison in the place of a refit."""
    held = {"replica": rank, "incarnation": version["incarnation"], "version": version["version"]}
    comparison = {
        "index": 0,
        "step": 0,
        "transport": "attached",
        "names": verified["names"],
        "bytes": 0,
        "produced": None,
        "consumed": None,
    }
    comparison |= {"wrong_names": list(verified["wrong"]), "stale_names": len(verified["wrong"]), "touched_names": 0}
    comparison |= {"methods": verified["methods"], "refused": None, "wrong": verified["wrong"]}
    return [
        {"fact": "version", **held},
        {"fact": "map", "replica": rank, **mapped},
        {"fact": "refit", **held, **comparison},
        {"fact": "coverage", "never_changed": [], **covered, "replica": rank},
    ]


def judge_attached(facts: Facts, wanted: Wanted) -> Judged:
    """The verdict on one look at a server."""
    rows = typed(facts)
    wrong = weights.wrong_tensors(rows)
    checks = [whole(rows), _equal(rows), coverage.methods(rows), *coverage.checks(rows), _version(rows)]
    missed = [check for check in checks if not check.passed]
    limits = (
        "one look at a server: nothing is said about the refits that led here or that follow",
        "the server read the files itself: on another host they may be others under the same path",
        *weights.weaker(rows),
        *coverage.limitations(rows),
    )
    split = len(rows.refits) > 1 and any(row.unconsumed for row in rows.coverages)
    refused = coverage.refused_all(rows)
    made = Judged(verdict=Verdict.PASS, reason="", checks=tuple(checks), wrong=wrong, refits=lines(rows), limitations=limits)
    if wrong:
        reason = f"the server does not hold the weights of {wanted.model}: {describe(wrong[0])}"
        return made.model_copy(update={"verdict": Verdict.FAIL, "reason": reason, "boundary": Boundary.REFIT})
    if split or refused:
        # Counts of elements cannot tell a shard that another rank has from one that no rank has.
        reason = (
            f"the coordinate map could not be made for any name: {refused}"
            if refused
            else "the weights are sharded over ranks: that some rank takes each element is not shown"
        )
        return made.model_copy(update={"verdict": Verdict.BLOCKED, "reason": reason, "boundary": Boundary.REFIT})
    if missed:
        reason = f"not proven: {missed[0].name} ({missed[0].value}): {missed[0].message}"
        return made.model_copy(update={"verdict": Verdict.FAIL, "reason": reason, "boundary": missed[0].boundary})
    reason = f"{weights.claim(rows)}: the server holds {wanted.model}"
    return made.model_copy(update={"reason": reason})


def _equal(rows: Rows) -> CheckResult:
    bad = sum(bool(row.wrong_names) for row in rows.refits)
    names = sum(row.names for row in rows.refits)
    good = bool(rows.refits) and not bad and all(row.names for row in rows.refits)
    said = ", ".join(name for row in rows.refits for name in row.wrong_names[:3])
    return proof(EQUAL, good, f"{names} tensors, {bad} of {len(rows.refits)} ranks wrong", Boundary.REFIT, "all", said)


def _version(rows: Rows) -> CheckResult:
    held = sorted({row.version for row in rows.versions()})
    return proof("all ranks hold one version", len(held) == 1, f"version {', '.join(map(str, held)) or 'none'}", Boundary.REFIT)
