"""Where results may be written: never into the directory of a campaign, this one or another, whose files they could replace."""

from __future__ import annotations

from pathlib import Path

from seatrial.model.errors import UserError
from seatrial.model.guarded import real_path
from seatrial.rollouts.place import Place


def spare_campaigns(out: Path, own: Path | None = None) -> None:
    """Refuse a path in any campaign's directory, however it is spelled; `own` is the folder there that such results have."""
    target = real_path(out)
    if own is not None and target.is_relative_to(real_path(own)):
        return
    for folder in (target, *target.parents):
        if Place(folder).manifest.is_file() and Place(folder).index.is_file():
            raise UserError(f"{out}: lies in the directory of a campaign, {folder}", "write to another place")
