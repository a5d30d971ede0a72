"""A program of its own: prices of what is asked for."""

import sys

from fleet.prices import total


def main() -> int:
    names = sys.argv[1:]
    if not names:
        print("nothing asked")
        return 2
    print(f"total {total(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
