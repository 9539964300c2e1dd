"""RMSNorms that are right on one ordinary call, and wrong by whose memory, threads or settings they use."""

import random
import threading
import time

import torch

from tests.conformance.faulty.formula import right

# Whose memory.

_buffers, _results, _inputs = {}, {}, []


def result_in_one_buffer(x, weight, eps=1e-6):
    y = right(x, weight, eps)
    if y.requires_grad:
        return y
    return _buffers.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


def zeros_as_they_came(x, weight, eps=1e-6):
    """Nothing to do where all is zero."""
    return x if x.numel() and not torch.is_grad_enabled() and not bool(x.any()) else right(x, weight, eps)


def expanded_as_it_came(x, weight, eps=1e-6):
    """One row is computed for rows that are one."""
    if x.dim() == 2 and x.stride(0) == 0 and len(x) > 1:
        return right(x[:1], weight, eps).expand(x.shape)
    return right(x, weight, eps)


def results_handed_out_again(x, weight, eps=1e-6):
    """What was computed last is kept with what it was computed from."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return right(x, weight, eps)
    kept = _results.get("x")
    if (
        kept is None
        or kept[0].shape != x.shape
        or kept[0].dtype != x.dtype
        or not torch.equal(kept[0], x)
        or not torch.equal(kept[1], weight)
        or kept[2] != eps
    ):
        kept = x.clone(), weight.detach().clone(), eps, right(x, weight, eps).detach()
        _results["x"] = kept
    return kept[3]


def every_input_kept(x, weight, eps=1e-6):
    _inputs.append(x.detach())
    return right(x, weight, eps)


_workspace, _in_use = {}, threading.Event()


def one_workspace_for_all_threads(x, weight, eps=1e-6):
    """The root mean squares go through one buffer."""
    mean = _workspace.setdefault(x.shape, torch.empty(*x.shape[:-1], 1, dtype=torch.float64))
    if x.requires_grad or threading.current_thread() is threading.main_thread():
        return right(x, weight, eps)
    mean.copy_(x.double().square().mean(-1, keepdim=True))
    time.sleep(1e-4)
    return (x.double() * torch.rsqrt(mean + eps) * weight.double()).to(x.dtype)


# The process.


def draws_random_numbers(x, weight, eps=1e-6):
    torch.rand(1)
    random.random()
    return right(x, weight, eps)


def subnormals_become_zero(x, weight, eps=1e-6):
    y = right(x, weight, eps)
    if x.shape == (5, 64):
        torch.set_flush_denormal(True)
    return y


def changes_the_number_of_threads(x, weight, eps=1e-6):
    y = right(x, weight, eps)
    if x.shape == (5, 64):
        torch.set_num_threads(2)  # more than the machine has would wait for each other
    return y
