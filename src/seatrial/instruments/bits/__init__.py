"""Exact-bit hashes and delta coding of tensors. `fingerprint` and `delta` are the fronts; C, CUDA and plain torch agree."""
