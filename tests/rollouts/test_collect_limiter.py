"""The limit of open requests follows what the server can take."""

from __future__ import annotations

import asyncio

from seatrial.rollouts.dispatcher import Limiter


async def take(limiter: Limiter, count: int) -> list[int]:
    """So many slots, which must be free."""
    slots = [await asyncio.wait_for(limiter.acquire(), 30) for _ in range(count)]
    return [slot for slot in slots if slot is not None]


def test_it_starts_small_and_doubles_each_round_up_to_its_cap() -> None:
    async def main() -> None:
        limiter = Limiter(100)
        assert limiter.limit == 16
        for expected in (32, 64, 100, 100):
            for slot in await take(limiter, int(limiter.limit)):
                limiter.release(slot, answered=True)
                await take(limiter, int(limiter.limit) - limiter.open)
            limiter.open = 0
            assert limiter.limit == expected

    asyncio.run(main())


def test_a_cap_below_the_start_is_kept() -> None:
    assert Limiter(3).limit == 3


def test_a_limit_that_is_not_used_up_does_not_grow() -> None:
    async def main() -> None:
        limiter = Limiter(100)
        for slot in await take(limiter, 15):
            limiter.release(slot, answered=True)
        assert limiter.limit == 16

    asyncio.run(main())


def test_overload_cuts_once_per_round_and_never_below_one() -> None:
    async def main() -> None:
        limiter = Limiter(16)
        for slot in await take(limiter, 16):
            limiter.release(slot, overloaded=True)
        assert 10 < limiter.limit < 11
        for _ in range(20):
            (slot,) = await take(limiter, 1)
            limiter.release(slot, overloaded=True)
        assert limiter.limit == 1
        assert len(await take(limiter, 1)) == 1

    asyncio.run(main())


def test_after_an_overload_it_grows_by_one_per_round() -> None:
    async def main() -> None:
        limiter = Limiter(100)
        (slot,) = await take(limiter, 1)
        limiter.release(slot, overloaded=True)
        before = int(limiter.limit)
        slots = await take(limiter, before)
        for slot in slots:
            limiter.release(slot, answered=True)
            await take(limiter, 1)
        assert before < limiter.limit < before + 2

    asyncio.run(main())


def test_an_answer_that_teaches_nothing_changes_nothing() -> None:
    async def main() -> None:
        limiter = Limiter(16)
        for slot in await take(limiter, 16):
            limiter.release(slot)
        assert limiter.limit == 16
        assert limiter.open == 0

    asyncio.run(main())


def test_a_pause_lets_nobody_in_and_closing_turns_everybody_away() -> None:
    async def main() -> None:
        limiter = Limiter(4)
        limiter.pause()
        waiting = [asyncio.create_task(limiter.acquire()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert limiter.open == 0
        limiter.resume()
        assert await asyncio.gather(*waiting) == [0, 0, 0]
        late = [asyncio.create_task(limiter.acquire()) for _ in range(3)]
        await asyncio.sleep(0.01)
        limiter.close()
        assert (await asyncio.gather(*late)).count(None) == 2
        assert await limiter.acquire() is None

    asyncio.run(main())


def test_a_turn_that_was_given_to_somebody_who_left_goes_to_the_next() -> None:
    async def main() -> None:
        limiter = Limiter(1)
        (slot,) = await take(limiter, 1)
        first, second = (asyncio.create_task(limiter.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        limiter.release(slot)
        first.cancel()
        assert await asyncio.wait_for(second, 30) == 0

    asyncio.run(main())


def test_a_server_that_does_eight_at_a_time_is_found_out() -> None:
    """Over many rounds the limit stays around what the server takes, and most of what is sent is answered."""

    async def main() -> None:
        limiter, done, refused = Limiter(64), 0, 0
        while done < 2000:
            slots = await take(limiter, int(limiter.limit))
            for position, slot in enumerate(slots):
                done += position < 8
                refused += position >= 8
                limiter.release(slot, answered=position < 8, overloaded=position >= 8)
        assert 4 <= limiter.limit <= 10
        assert refused < 0.2 * done

    asyncio.run(main())
