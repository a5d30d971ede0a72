"""Digits; only children of a pool come here."""


def digit_sum(number: int) -> int:
    total = 0
    while number > 0:
        total += number % 10
        number //= 10
    return total


def is_palindrome(number: int) -> bool:
    text = str(number)
    return text == text[::-1]
