"""One rank of tests/patching/test_fsdp.py: prints what patch decides beside FullyShardedDataParallel."""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from rmsnorm import patch


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(16, eps=1e-6), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def main(rank, port, original, when):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(2, 16)
    wanted = model(x).detach()
    report = patch(model) if when == "before" else None
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=torch.device("cpu"), use_orig_params=original
    )
    wrapped(x).sum().backward()
    report = report or patch(wrapped)
    y = wrapped(x)
    y.sum().backward()
    reasons = sorted({entry.reason for entry in report.left})
    print(json.dumps([len(report.replaced), reasons, torch.allclose(y, wanted, rtol=1e-5)]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "original", sys.argv[4])
