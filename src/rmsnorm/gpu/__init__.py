"""The Triton kernels for CUDA and ROCm, their launches, and the operators made of them."""
