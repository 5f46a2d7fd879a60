"""What a step needs on CUDA: experts and attention in Triton, selection on the device, graphs of fixed row counts.

install.py puts them together. The CPU engine imports nothing of this, and only the *_kernels.py files need triton.
"""
