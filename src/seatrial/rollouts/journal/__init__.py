"""The journal: append-only files, one per attempt of a shard; who may write; which units are settled."""
