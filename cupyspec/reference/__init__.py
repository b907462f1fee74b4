"""Every rule in NumPy float64, one row at a time: the oracle that kernels and the CPU path are compared with."""
