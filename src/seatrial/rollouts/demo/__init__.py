"""A campaign that needs nothing else: rows made here, and a tiny model that is trained and served on this machine."""
