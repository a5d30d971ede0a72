"""A ring of the newest items; only the buffer's worker runs it."""


class Ring:
    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: list[int] = []
        self.dropped = 0

    def push(self, item: int) -> None:
        self.kept.append(item)
        if len(self.kept) > self.size:
            del self.kept[0]
            self.dropped += 1

    def length(self) -> int:
        return len(self.kept)

    def items(self) -> list[int]:
        return list(self.kept)
