"""Gives out the owed units of several shards, one shard after another, and keeps the books of those that are open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence

from seatrial.model.words import counted
from seatrial.rollouts.collect.book import Book
from seatrial.rollouts.collect.limiter import Limiter
from seatrial.rollouts.journal.lease import HeldError
from seatrial.rollouts.place import Place
from seatrial.rollouts.units import Units


class Desk:
    """What is to be done next."""

    def __init__(self, place: Place, units: Units, shards: Sequence[int]) -> None:
        self._place = place
        self._units = units
        self._shards = iter(shards)
        self._books: list[Book] = []
        self._current: Book | None = None
        self._numbers: Iterator[int] = iter(())
        self._turn = asyncio.Lock()
        self._halted = threading.Event()
        self._held: list[str] = []

    @property
    def ok(self) -> int:
        """Units of opened shards that are settled well."""
        return sum(book.ok for book in self._books)

    @property
    def failed(self) -> int:
        """Units of opened shards that failed, for good or for now."""
        return sum(book.failed + book.failed_now for book in self._books)

    @property
    def message(self) -> str:
        """Of a failure, one of the last; empty when there was none."""
        return next((book.message for book in reversed(self._books) if book.message), "")

    async def start(self) -> bool:
        """Take the first shard that owes anything; False when none does."""
        return await self._take()

    async def next(self, only: Callable[[int], bool] | None) -> tuple[int, Book] | None:
        """A unit, and the book of its shard; None when there are no more. Each must come `back`."""
        while (book := self._current) is not None:
            if not book.lost:
                for number in self._numbers:
                    if only is None or only(number):
                        book.in_hand += 1
                        return number, book
            async with self._turn:
                # Whoever waited here finds the next shard taken already.
                if self._current is book:
                    await self._take()
                    self._settle(book)
        return None

    def back(self, book: Book, *, written: bool) -> None:
        """A unit is done with; not `written` leaves it owed."""
        book.in_hand -= 1
        book.whole = book.whole and written
        if book is not self._current:
            self._settle(book)

    def keep(self, limiter: Limiter) -> float | None:
        """Renew what is open and say how it stands; gives the file system's time, if anything is open."""
        times = [book.keep(limiter.open, int(limiter.limit)) for book in self._books]
        return max((time for time in times if time is not None), default=None)

    def close(self, how: str) -> None:
        """Let every shard go."""
        self._halted.set()
        for book in self._books:
            book.close(how)

    def lost(self) -> str:
        """Which shards others have, in words; empty when none."""
        return "; ".join([*(f"shard {book.shard} was taken over by a newer attempt" for book in self._books if book.lost), *self._held])

    def says(self) -> str:
        """How it stands, in words."""
        owed = sum(book.owed for book in self._books)
        return f"{self.ok:,} ok, {self.failed:,} failed, {owed:,} owed in {counted(len(self._books), 'shard')}"

    def who(self) -> str:
        """Us, for stop.json."""
        return self._books[-1].who() if self._books else "a collector"

    @staticmethod
    def _settle(book: Book) -> None:
        """Let a shard go in which everything was tried; what else becomes of it is known when the collector ends."""
        if book.whole and not book.in_hand:
            book.close("done")

    async def _take(self) -> bool:
        """Open the next shard that owes anything; those that others hold are noted. Until it is open, the one before stays current:
        nobody who asks meanwhile may think that there are no more."""
        for shard in self._shards:
            try:
                book = await self._open(shard)
            except HeldError as error:
                self._held.append(error.message)
                continue
            if book is not None:
                self._books.append(book)
                self._numbers = book.numbers(self._units)
                self._current = book
                return True
        self._current = None
        return False

    async def _open(self, shard: int) -> Book | None:
        """In a thread: a lease may have to be waited for. A cancelled wait gives back what it got."""
        opening = asyncio.create_task(asyncio.to_thread(Book.open, self._place, shard, self._halted.is_set))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._halted.set()
            got = (await asyncio.gather(opening, return_exceptions=True))[0]
            if isinstance(got, Book):
                got.close("stopped")
            raise
