"""The shadow: recomputes every recorded training step from the configured values, without a loop's code."""
