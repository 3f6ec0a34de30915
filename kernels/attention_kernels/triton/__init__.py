"""The flash recurrence as Triton kernels: forward, backward, and their launch."""
