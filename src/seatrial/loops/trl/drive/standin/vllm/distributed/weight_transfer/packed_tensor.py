"""See the package."""


def packed_nccl_broadcast_producer(**given: object) -> None:
    """Replaced by `drive.synced`."""
    raise RuntimeError(f"no transport was put in place for {sorted(given)}")
