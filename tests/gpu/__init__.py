"""The GPU kernels without a GPU: under Triton's interpreter, compiled ahead of time, launched at a recorder."""
