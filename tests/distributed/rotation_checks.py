"""What eight processes check of the rotary embedding; distributed_checks.py runs it."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rmsnorm import rms_norm_rotary
from tests.support.bits import bits_equal


def gradients(x, weight, cos, sin, dy, **options):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = rms_norm_rotary(*leaves, cos, sin, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def rotation_has_the_bits_of_one_process(ranks):
    """Whatever is cut: samples, tokens or heads; angles are a tensor of each process, or distributed."""
    generator = torch.Generator().manual_seed(0)
    batch, tokens, heads, dim = 8, 24, 8, 16

    def made(*shape):
        return torch.randn(shape, generator=generator)

    weight, angle = made(dim), made(tokens, 1, dim)
    cos, sin = angle.cos(), angle.sin()
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = made(batch, tokens, heads, dim).to(dtype), made(batch, tokens, heads, dim).to(dtype)
        for options in ({}, {"interleaved": True, "rotary_rounding": "each"}):
            expected = gradients(x, weight, cos, sin, dy, **options)
            for shape, placements in (
                ((ranks,), [Shard(0)]),
                ((ranks,), [Shard(1)]),
                ((ranks,), [Shard(2)]),
                ((2, ranks // 2), [Shard(0), Shard(2)]),
            ):
                mesh = init_device_mesh("cpu", shape)
                whole = [Replicate()] * len(shape)
                given = [distribute_tensor(x, mesh, placements), distribute_tensor(weight, mesh, whole)]
                cut = distribute_tensor(dy, mesh, placements)
                angles = [[cos, sin], [distribute_tensor(t, mesh, whole) for t in (cos, sin)]]
                if placements == [Shard(1)]:
                    angles.append([distribute_tensor(t, mesh, [Shard(0)]) for t in (cos, sin)])
                for each in angles:
                    for found, wanted in zip(gradients(*given, *each, cut, **options), expected, strict=True):
                        assert bits_equal(found.full_tensor(), wanted), (placements, options)
