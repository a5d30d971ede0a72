"""Which model of the policy is asked: the one that the campaign names, or the only one that the server has.

Every collector of a campaign asks the same one. The first collector's is pinned in the campaign's directory (model.json: whoever
writes first wins); a server with another one is refused, also where the campaign names none.
"""

from __future__ import annotations

from seatrial.files import read_model
from seatrial.model.errors import UserError
from seatrial.model.record import Record
from seatrial.rollouts.direct.client import Client
from seatrial.rollouts.place import Place, write_once


class PinnedModel(Record):
    """model.json."""

    name: str


async def choose(client: Client, named: str | None, place: Place | None) -> str:
    """The model's name, pinned in `place`; a UserError when it cannot be known, is not served, or is not the one before."""
    listed = await client.models()
    before = _pinned(place)
    if named is None and len(listed) != 1:
        found = client.unlisted or (f"the server lists {len(listed)}: {', '.join(listed[:5])}" if listed else "the server lists none")
        fix = "say policy.model"
        if client.unlisted:
            fix = "see that policy.url is the server's base, such as http://host:8000/v1; if it is, say policy.model"
        raise UserError(f"campaign: policy.model is not said, and {found}", fix)
    name = named or listed[0]
    if listed and name not in listed:
        fix = f"serve {name} there, or name its server with policy.url"
        if before is None:
            fix = f"nothing was collected: start anew with --model {listed[0]} (policy.model)"
        raise UserError(f"campaign: policy.model: the server has no {name!r}; it has {', '.join(listed[:5])}", fix)
    if place is not None:
        write_once(place.model, PinnedModel(name=name))
        before = _pinned(place)
    if before is not None and before != name:
        fix = f"serve {before} again, or start a new campaign"
        raise UserError(f"campaign: the server has the model {name!r}, and this campaign began with {before!r}", fix)
    return name


def _pinned(place: Place | None) -> str | None:
    return read_model(place.model, PinnedModel).name if place is not None and place.model.is_file() else None
