"""The definition of every bit, in plain PyTorch."""
