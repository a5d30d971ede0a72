"""Seatrial proves that a change survives real RL post-training, and says where it breaks when it does not.

Importing this package pulls in nothing heavy: no torch, no Ray, no transformers. Loops run in their own
interpreters; what must be known from inside them is reported by `seatrial.instruments`.
"""

__version__ = "0.1.0"
