"""Exact-bit kernels: a hash of every bit and a delta coding of bits. C on a CPU, CUDA on a GPU, plain torch where there is no compiler.

All implementations give the same values. `hashing` and `delta` are the fronts; nobody else calls the kernels.
"""
