"""What eight processes check of modulation; distributed_checks.py runs it."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rmsnorm import modulated_rms_norm
from tests.support.bits import bits_equal


def gradients(x, scale, shift, weight, dy):
    leaves = [t.detach().requires_grad_() for t in (x, scale, shift, weight)]
    y = modulated_rms_norm(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def modulation_has_the_bits_of_one_process(ranks):
    """Whatever is cut, and whoever shares a scale: samples, positions, or all rows."""
    generator = torch.Generator().manual_seed(0)
    batch, tokens, cols = 8, 24, 48

    def made(*shape):
        return torch.randn(shape, generator=generator)

    weight = made(cols)
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = made(batch, tokens, cols).to(dtype), made(batch, tokens, cols).to(dtype)
        for scale, shift in (
            (made(batch, 1, cols), made(batch, 1, cols)),
            (made(batch, tokens, cols), made(cols)),
            (made(tokens, cols), made(batch, 1, cols)),
        ):
            expected = gradients(x, scale, shift, weight, dy)
            for shape, placements in (
                ((ranks,), [Shard(0)]),
                ((ranks,), [Shard(1)]),
                ((ranks,), [Shard(2)]),
                ((2, ranks // 2), [Shard(0), Shard(1)]),
                ((2, ranks // 2), [Shard(1), Shard(2)]),
            ):
                mesh = init_device_mesh("cpu", shape)
                whole = [Replicate()] * len(shape)
                parts = [distribute_tensor(t, mesh, whole) for t in (scale, shift, weight)]
                parts = [distribute_tensor(x, mesh, placements), *parts, distribute_tensor(dy, mesh, placements)]
                if placements == [Shard(0)] and scale.shape[0] == batch:
                    parts[1] = distribute_tensor(scale, mesh, placements)
                for found, wanted in zip(gradients(*parts), expected, strict=True):
                    assert bits_equal(found.full_tensor(), wanted), (placements, scale.shape)
