"""The kernels, in Triton's language. Bits: docs/numerics.md; no product and sum may be contracted into an FMA."""
