"""The twin: the flash recurrence in plain PyTorch, with every rounding point of the kernels."""
