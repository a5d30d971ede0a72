"""What a member says."""

POLITE = True


def greeting(name: str) -> str:
    word = "good day" if POLITE else "hey"
    return f"{word} {title(name)}"


def title(name: str) -> str:
    return name[:1].upper() + name[1:]
