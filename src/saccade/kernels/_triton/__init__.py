"""What the Triton kernels share. Nothing here is imported before a kernel is chosen: Triton need not be installed."""
