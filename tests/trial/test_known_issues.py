"""Upstream issues are attached to failures that exist; any other id is a slip."""

from __future__ import annotations

import re

import pytest

from seatrial.core.errors import UserError
from seatrial.core.specs import Signature
from seatrial.core.verdict import Boundary
from seatrial.trial.plan import require_known
from tests.trial.fake import FakeLoop

OWN = Signature(id="own-failure", pattern="x", boundary=Boundary.REFIT)
NOISE = Signature(id="own-noise", pattern="y", harmless=True)


class Loop(FakeLoop):
    def signatures(self) -> tuple[Signature, ...]:
        return (OWN, NOISE)


def test_signatures_and_checks_can_be_known() -> None:
    require_known(Loop(), ["own-failure", "no-space", 'max(data["train/loss"]) < 1.05'], {})


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("own-failur", r"did you mean own-failure\?"),
        ("nospace", r"did you mean no-space\?"),
        ("own-noise", "did you mean|known ids"),
        ("qqqqqqqqqqq", "known ids: own-failure, .*or the expression of a check"),
        ("max(data", "known ids"),
    ],
)
def test_any_other_id_is_an_error_that_names_the_nearest(name: str, fix: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"/x/seatrial.toml: known_issues: {name!r} is no known failure of Fake")) as caught:
        require_known(Loop(), ["own-failure", name], {name: "/x/seatrial.toml"})
    assert re.search(fix, caught.value.fix)
