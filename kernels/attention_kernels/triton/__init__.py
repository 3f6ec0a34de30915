"""The Triton engine: the flash recurrence as kernels, forward and backward, and their launch."""
