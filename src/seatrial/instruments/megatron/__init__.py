"""Lets released Megatron-Core and Megatron-Bridge run on a CPU without CUDA or Transformer Engine."""
