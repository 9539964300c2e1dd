"""Two processes normalise a tensor that is cut between them, by DTensor, and have the bits of one process.

python examples/distributed.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rmsnorm

RANKS = 2


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 64, generator=generator), torch.rand(64, generator=generator)

    leaf = weight.clone().requires_grad_()
    expected = rmsnorm.rms_norm(x, leaf)
    expected.sum().backward()
    for what, cut in (("rows", Shard(0)), ("columns", Shard(1))):
        parts = distribute_tensor(x, mesh, [cut]), distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
        y = rmsnorm.rms_norm(*parts)
        y.sum().backward()
        equal = torch.equal(y.full_tensor(), expected), torch.equal(parts[1].grad.full_tensor(), leaf.grad)
        assert equal == (True, True)
        if rank == 0:
            print(f"{what} cut in {RANKS}: y and the weight's gradient have the bits of one process")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(work, (str(Path(directory) / "store"),), nprocs=RANKS)


if __name__ == "__main__":
    main()
