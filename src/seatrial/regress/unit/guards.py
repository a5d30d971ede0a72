"""The `tracker` fixture (being written)."""
