"""Work for multiprocessing."""

import multiprocessing

from fleet.digits import digit_sum, is_palindrome


def sums(numbers: list[int], method: str) -> list[int]:
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(digit_sum, numbers)


def palindromes(numbers: list[int]) -> list[int]:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_find, args=(numbers, queue))
    process.start()
    found = queue.get(timeout=20)
    process.join(20)
    return found


def _find(numbers: list[int], queue: "multiprocessing.Queue[list[int]]") -> None:
    queue.put([number for number in numbers if is_palindrome(number)])
