"""The framing of event files: length, checksum of the length, data, checksum of the data.

- Every checksum is verified, always: one flipped byte anywhere is found (crc32c.py says why that is affordable).
- An intact file is read by `_intact`, which verifies all records of one length at once. If anything is wrong,
  `_salvage` reads the file again, record by record, and reports what is lost.
- A record whose data are damaged is left out; reading goes on behind it. Where a length is damaged, reading goes on
  at the next place where a length and its checksum agree, and the bytes in between are lost.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from seatrial.metrics.crc32c import crc32c, crc32c_many, masked
from seatrial.model.series import Damage

_HEADER = 12
_FOOTER = 4
_WORTH_A_BATCH = 32  # fewer messages, or longer ones, are summed one by one
_LONGEST_IN_BATCH = 256


def read_records(data: bytes, path: str) -> tuple[list[bytes], list[Damage]]:
    """The data of every intact record in the order of the file, and what is damaged between them."""
    records = _intact(data)
    return (records, []) if records is not None else _salvage(data, path)


def _intact(data: bytes) -> list[bytes] | None:
    """All records, or None if a single byte of the file is wrong or missing."""
    records: list[bytes] = []
    # By header (there are few different lengths): the length, the records of that length, their stored checksums.
    groups: dict[bytes, tuple[int, list[bytes], list[bytes]]] = {}
    position, size = 0, len(data)
    while position < size:
        header = data[position : position + _HEADER]
        group = groups.get(header)
        if group is None:
            length = _length(header)
            if length is None:
                return None
            group = groups[header] = (length, [], [])
        start = position + _HEADER
        end = start + group[0]
        position = end + _FOOTER
        record = data[start:end]
        records.append(record)
        group[1].append(record)
        group[2].append(data[end:position])
    if position != size:
        return None
    matches = (_checksums(length, messages) == b"".join(stored) for length, messages, stored in groups.values())
    return records if all(matches) else None


@lru_cache(maxsize=4096)  # a file that ends in zeros offers the same header millions of times
def _length(header: bytes) -> int | None:
    """The length in a record's header; None when the header is damaged or cut off."""
    if len(header) < _HEADER or _stored_form([crc32c(header[:8])]) != header[8:]:
        return None
    return int.from_bytes(header[:8], "little")


def _checksums(length: int, messages: list[bytes]) -> bytes:
    """The checksums of messages of one length, one after another as records store them."""
    if len(messages) >= _WORTH_A_BATCH and length <= _LONGEST_IN_BATCH:
        return _stored_form(crc32c_many(messages))
    return _stored_form([crc32c(message) for message in messages])


def _stored_form(checksums: list[int]) -> bytes:
    return struct.pack(f"<{len(checksums)}I", *masked(checksums))


def _salvage(data: bytes, path: str) -> tuple[list[bytes], list[Damage]]:
    """What can be read of a damaged file, record by record."""
    records: list[bytes] = []
    lost: list[int] = []
    damage: list[Damage] = []
    position, size = 0, len(data)
    while position < size:
        length = _length(data[position : position + _HEADER])
        start = position + _HEADER
        if size < start or (length is not None and size < start + length + _FOOTER):
            damage.append(Damage(path, f"offset {position}", 1, f"the last record is cut off; {size - position} bytes of it are there"))
            break
        if length is None:
            position = _resume(data, position, path, damage)
            continue
        end = start + length
        if _stored_form([crc32c(data[start:end])]) == data[end : end + _FOOTER]:
            records.append(data[start:end])
        else:
            lost.append(position)
        position = end + _FOOTER
    if lost:
        shown = ", ".join(map(str, lost[:5])) + (", …" if len(lost) > 5 else "")
        damage.append(Damage(path, f"offset {shown}", len(lost), "the data do not match their checksum"))
    return records, damage


def _resume(data: bytes, position: int, path: str, damage: list[Damage]) -> int:
    """Report the damaged header at `position` and return where to read on."""
    size = len(data)
    # A length below 4 GiB has four zero bytes at its high end: only those places can start a record.
    zeros = data.find(bytes(4), position + 5)
    while zeros >= 0:
        start = zeros - 4
        length = _length(data[start : start + _HEADER])
        if length is not None and start + _HEADER + length + _FOOTER <= size:
            what = f"the length of a record is damaged; {start - position} bytes are lost, reading goes on at offset {start}"
            damage.append(Damage(path, f"offset {position}", 1, what))
            return start
        zeros = data.find(bytes(4), zeros + 1)
    what = f"the length of a record is damaged and no record follows; the last {size - position} bytes are lost"
    damage.append(Damage(path, f"offset {position}", 0, what))
    return size
