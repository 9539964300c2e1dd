"""The operators `torch.ops.rmsnorm.*`, their gradients and their rules."""
