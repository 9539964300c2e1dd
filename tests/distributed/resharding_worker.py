"""FSDP2 on two ranks with reshard_after_forward: `python -m tests.distributed.resharding_worker`, prints what it saw.

After the block's forward its weights' storages are freed. FSDP2 brings them back when the gradient of the block's
result arrives; a loss on something else of the block does not tell it.
"""

import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rmsnorm import RMSNorm

WORLD = 2


class Block(nn.Module):
    """It keeps what its norm gave."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = RMSNorm(64), nn.Linear(64, 64, bias=False)
        nn.init.normal_(self.norm.weight, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(self.linear.weight, generator=torch.Generator().manual_seed(2))

    def forward(self, x):
        self.kept = self.norm(x)
        return self.linear(self.kept)


def gradient(block, x, loss):
    block.zero_grad()
    loss(block, block(x)).backward()
    found = block.norm.weight.grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def run(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=WORLD)
    x = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(0))

    def of_both(block, y):
        return block.kept.square().sum() + y.sum()

    expected = gradient(Block(), x, of_both)
    block = Block()
    fully_shard(block, reshard_after_forward=True, mesh=init_device_mesh("cpu", (WORLD,)))
    # Both ranks have the same rows, and the mean of two equal gradients is each of them.
    said = [f"result: {torch.equal(gradient(block, x, of_both), expected)}"]
    try:
        said.append(f"inside: {gradient(block, x, lambda block, y: block.kept.square().sum())}")
    except RuntimeError as error:
        said.append(f"inside: {str(error).splitlines()[0].rpartition(', ')[2]}")
    if rank == 0:
        print("\n".join(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (port,), WORLD)
