"""What else has to hold: in training, under autocast, for rows that are not finite, for inputs of other dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.judging import name_of
from rmsnorm.patching.samples import DTYPES, Pair, Sample, row_shape, run, same
from rmsnorm.patching.specimen import NotRMSNorm, Specimen

# The widest row that is tried as a leading dimension in its own size, which takes its square of elements; wider ones
# are tried in a smaller sibling.
LARGEST_SQUARE, LARGEST_SQUARE_WITHOUT_SIBLING = 64, 512
_SIBLING = 16
# Tokens, where they cost little.
_MANY = 2100


def check_training(
    specimen: Specimen, convention: Convention, samples: dict[Pair, Sample], results: dict[Pair, Tensor]
) -> None:
    """Training mode changes nothing."""
    for evidence in convention.evidence:
        pair = evidence.x, evidence.weight
        if not same(run(specimen, convention, samples[pair], training=True), results[pair]):
            raise NotRMSNorm(f"for {name_of(*pair)} it computes something else in training", True)


def check_special_rows(specimen: Specimen, convention: Convention, samples: dict[Pair, Sample]) -> None:
    """Rows that are not finite stay as visible as they were, and rows of zeros are what they were."""
    for dtype in DTYPES:
        given = dict(samples[dtype, None if convention.weight is None else dtype])
        given["x"] = given["x"].clone()
        rows = given["x"].view(*given["x"].shape[:2], -1)
        rows[0, 0, 0], rows[0, 1, 0], rows[1, 0], rows[1, 1, -1] = torch.inf, torch.nan, 0.0, -torch.inf
        theirs = run(specimen, convention, given)
        ours = convention.apply(given["x"], given.get("weight"), given.get("gate"))
        info = torch.finfo(dtype)
        if convention.eps is not None and convention.eps <= max(info.tiny * info.eps, torch.finfo(torch.float32).tiny):
            theirs[1, 0] = ours[1, 0]  # zeros by an eps that is zero in this dtype
        if not (torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())):
            raise NotRMSNorm(
                f"for {name_of(dtype, None)} rows of zeros or with infinities or NaN come out otherwise", True
            )
        if convention.weight is not None:
            given = dict(samples[dtype, dtype])
            given["weight"] = given["weight"].clone()
            values = torch.tensor([torch.nan, torch.inf, -torch.inf])[: given["weight"].numel()]
            given["weight"].view(-1)[: len(values)] = values.to(dtype)
            theirs, ours = run(specimen, convention, given), convention.apply(**given)
            if not (torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())):
                raise NotRMSNorm(f"for {name_of(dtype, None)} weights that are not finite come out otherwise", True)


def check_dimensions(specimen: Specimen, convention: Convention, given: Sample) -> bool:
    """Rows are rows however many dimensions hold them: some modules take those of four for images.

    Returns:
        Whether inputs were tried in which another dimension has the size of a row.
    """
    sizes = row_shape(convention)
    many = given["x"].shape[:2].numel()
    _check_leads(specimen, convention, given, [(), (many,), (1, 2, 3), (1, 1, 2, 3), (1, 1, 1, many)])
    _check_strides(specimen, convention, given)
    width = sizes[0]
    if torch.Size(sizes).numel() > LARGEST_SQUARE and len(sizes) == 1 and convention.group_size is None:
        smaller = {name: t[..., :_SIBLING].contiguous() for name, t in given.items()}
        with specimen.narrowed(width, _SIBLING):
            try:
                run(specimen, convention, smaller)
            except NotRMSNorm:
                pass  # its width is written down where it is not seen
            else:
                return _check_squares(specimen, replace(convention, shape=(_SIBLING,)), smaller)
    if torch.Size(sizes).numel() <= LARGEST_SQUARE_WITHOUT_SIBLING:
        return _check_squares(specimen, convention, given)
    return False


def _check_strides(specimen: Specimen, convention: Convention, given: Sample) -> None:
    """Rows are rows wherever their elements lie."""
    wanted = run(specimen, convention, given)
    for a, b in ((0, 1), (0, -1)):
        turned = {n: t.transpose(a, b).contiguous().transpose(a, b) for n, t in given.items() if n != "weight"}
        try:
            found = run(specimen, convention, {**given, **turned})
        except NotRMSNorm:
            continue  # its own affair, as above
        if not torch.allclose(found, wanted, rtol=1e-4):
            raise NotRMSNorm("it computes something else for inputs that are not contiguous", True)


def _check_squares(specimen: Specimen, convention: Convention, given: Sample) -> bool:
    size = row_shape(convention)[0]
    leads = [(size,), (1, size), (size, 1), (2, size), (1, size, 1), (1, 1, size), (1, size, 1, 1), (1, 1, 1, size)]
    leads += [(_MANY,), (1, _MANY), (_MANY, 1)]
    _check_leads(specimen, convention, given, leads)
    return True


def _check_leads(specimen: Specimen, convention: Convention, given: Sample, leads: list[tuple[int, ...]]) -> None:
    wanted = run(specimen, convention, given).flatten(0, 1)
    many, row = len(wanted), wanted.shape[1:]
    for lead in leads:
        index = torch.arange(math.prod(lead)) % many
        again = {name: t.flatten(0, 1)[index].view(*lead, *row) for name, t in given.items() if name != "weight"}
        try:
            found = run(specimen, convention, {**given, **again})
        except NotRMSNorm:
            continue  # its own affair: its replacement is more lenient
        if not torch.allclose(found, wanted[index].view_as(found), rtol=1e-4):
            raise NotRMSNorm(f"it computes something else for inputs of {_counted(found.dim())}", True)


def under_autocast(
    specimen: Specimen, convention: Convention, samples: dict[Pair, Sample], results: dict[Pair, Tensor]
) -> frozenset[str]:
    """The kinds of devices whose autocast leaves the results as they are.

    Where it is not this device's, the functions that are called must be none that autocast changes.
    """
    here = specimen.device.type
    kinds = {"cpu", "cuda"}
    for evidence in convention.evidence:
        pair = evidence.x, evidence.weight
        # The other one, so that what converts to it shows.
        dtype = torch.float16 if evidence.x == torch.bfloat16 else torch.bfloat16
        with _autocast(dtype), _Changed() as changed:
            try:
                found = run(specimen, convention, samples[pair])
            except NotRMSNorm:
                return frozenset()
        if not same(found, results[pair]):
            return frozenset()
        if changed.names:
            kinds &= {here}
    return frozenset(kinds)


def _counted(dimensions: int) -> str:
    return f"{dimensions} dimension{'s' if dimensions > 1 else ''}"


@contextmanager
def _autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast of every kind of device, as far as a module can see; torch's own context wants the device itself."""
    kinds = ("cpu", "cuda")
    before = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    try:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
        yield
    finally:
        for kind, (enabled, was) in zip(kinds, before, strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, was)
        torch.clear_autocast_cache()


class _Changed(TorchFunctionMode):
    """Which functions were given tensors that some device's autocast would convert."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        dtypes = {t.dtype for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor) and t.is_floating_point()}
        narrow = dtypes & {torch.bfloat16, torch.float16}
        if (
            (narrow and (name in _TO_FLOAT32 or "norm" in name or "loss" in name))
            or (dtypes and name in _TO_16_BITS)
            or (len(dtypes) > 1 and name in _PROMOTED)
        ):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


# PyTorch's list of autocast's operations (docs/source/amp.md), as far as elementwise functions and sums may use them.
_TO_FLOAT32 = {
    *("pow", "rpow", "ipow", "rdiv", "rtruediv", "reciprocal", "rsqrt", "sum", "prod", "cumsum", "cumprod", "dist"),
    *("exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "softmax", "softmin", "log_softmax", "softplus"),
    *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "cdist", "cosine_similarity", "renorm"),
}
_TO_16_BITS = {
    *("matmul", "rmatmul", "imatmul", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "chain_matmul"),
    *("multi_dot", "einsum", "linear", "bilinear", "prelu", "conv1d", "conv2d", "conv3d"),
    "scaled_dot_product_attention",
}
_PROMOTED = {"addcdiv", "addcmul", "atan2", "cross", "dot", "vdot", "inner", "tensordot", "index_put", "scatter_add"}
