"""The conformance ladder for Megatron-Bridge: rungs, seeded bugs and the driver that runs them."""
