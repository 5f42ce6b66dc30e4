"""Triton kernels of decoding on CUDA: fewer and larger ones than torch's for the same numbers."""
