"""The kernels of `kernels/`, compiled by g++ and run on the CPU thread by thread."""
