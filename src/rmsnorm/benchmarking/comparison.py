"""RMSNorm beside LayerNorm: what each computes, how their outputs differ, and what each costs on this machine."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rmsnorm.benchmarking.timing import Timing, duration, race
from rmsnorm.functional import rms_norm

# What each formula does with every element of a row; the few operations that are done once a row (division, square
# root, eps) vanish beside them. A fused multiply-add counts as the two operations that it does.
RMS_NORM_OPERATIONS = ("x * x", "sum + x^2", "x * rstd", "x_hat * weight")
LAYER_NORM_OPERATIONS = ("sum + x", "x - mean", "c * c", "sum + c^2", "c * rstd", "c_hat * weight", "... + bias")


LONGEST_BAR = 20
# Where quartiles span this factor, something else ran: what is told of times is below it, shares of a fifth.
TOO_BUSY = 1.5


@dataclass(frozen=True)
class NormalizationComparison:
    """What `compare_normalization` found; `print` it for a table.

    Attributes:
        shape: rows and columns of the input and of both outputs.
        dtype: of the input, the weights and the outputs.
        device: where it ran.
        threads: how many torch used, if that is the CPU.
        mean_difference: mean of |RMSNorm(x) - LayerNorm(x)|, with equal eps, unit weights and no bias.
        mean_difference_centred: the same with x - mean(x) given to RMSNorm: what does not come from the mean.
        operations: per element, by name.
        bytes_moved: the least each must move to and from memory, by name.
        times: seconds for one call, by name, where `copy` reads x and writes as much and computes nothing.
        backward_times: seconds for the gradients of x, weight and bias, by name.
    """

    shape: tuple[int, int]
    dtype: str
    device: str
    threads: int
    mean_difference: float
    mean_difference_centred: float
    operations: dict[str, int]
    bytes_moved: dict[str, int]
    times: dict[str, Timing]
    backward_times: dict[str, Timing]

    @property
    def fewer_operations(self) -> float:
        """The share of LayerNorm's operations that RMSNorm does without."""
        return 1 - self.operations["RMSNorm"] / self.operations["LayerNorm"]

    def less_time(self, name: str, *, backward: bool = False) -> float:
        """Return the share of F.layer_norm's time that a contestant does without; negative if it takes longer."""
        times = self.backward_times if backward else self.times
        return 1 - times[name].median / times["F.layer_norm"].median

    @property
    def spread(self) -> float:
        """The widest quartiles of all times, as a factor; beyond `TOO_BUSY` the medians say nothing of the calls."""
        return max(t.spread for times in (self.times, self.backward_times) for t in times.values())

    def _less_time(self, name: str) -> str:
        if self.spread > TOO_BUSY:
            return "not to be told here"
        shares = self.less_time(name), self.less_time(name, backward=True)
        forward, backward = (f"{abs(share):.0%} {'less' if share >= 0 else 'more'}" for share in shares)
        return f"{forward} time, backward {backward}"

    def __str__(self) -> str:
        """Return it all as a table of 80 columns, with bars for the times."""
        operations, moved = self.operations, self.bytes_moved
        where = f"{self.device}, {self.threads} threads" if self.device == "cpu" else self.device
        shape = " x ".join(map(str, self.shape))
        lines = [
            f"RMSNorm beside LayerNorm: {shape}, {self.dtype}, {where}",
            "",
            f"{'':26}{'RMSNorm':>18}{'LayerNorm':>18}",
            f"{'output shape':26}{shape:>18}{shape:>18}",
            f"{'parameters':26}{self.shape[1]:>18,}{2 * self.shape[1]:>18,}",
            f"{'operations per element':26}{operations['RMSNorm']:>18}{operations['LayerNorm']:>18}",
            f"{'bytes moved, at least':26}{moved['RMSNorm']:>18,}{moved['LayerNorm']:>18,}",
            "",
            f"  RMSNorm    {', '.join(RMS_NORM_OPERATIONS)}",
            f"  LayerNorm  {', '.join(LAYER_NORM_OPERATIONS[:-2])},",
            f"             {', '.join(LAYER_NORM_OPERATIONS[-2:])}",
            "  (rmsnorm.rms_norm also takes the largest |x| of each row, for its exact sum;",
            "  the bias is optional)",
            "",
            f"{'time of one call':17}{'median':>10}{'quartiles':>22}{'/ layer_norm':>14}",
            *_bars("forward", self.times),
            *_bars("backward", self.backward_times),
            "",
            "mean difference of the outputs, with equal eps, unit weights and no bias",
            f"  |RMSNorm(x) - LayerNorm(x)|            {self.mean_difference:.2e}",
            f"  |RMSNorm(x - mean(x)) - LayerNorm(x)|  {self.mean_difference_centred:.2e}  what rounding does;",
            f"{'':51}the rest is the mean",
            "",
            "what is often said      what was found here",
            f'"30 % fewer operations" {self.fewer_operations:.0%} fewer by the count above, as many bytes to move',
            f'"15-20 % faster"        rmsnorm.rms_norm: {self._less_time("rmsnorm.rms_norm")}',
            f"                        F.rms_norm: {self._less_time('F.rms_norm')}",
        ]
        if self.spread > TOO_BUSY:
            lines += [
                "",
                f"Too busy to measure: quartiles span a factor of {self.spread:,.3g} (limit {TOO_BUSY:g}). Something",
                "else runs on this machine, or it is clocked up and down; try again, or more rounds.",
            ]
        return "\n".join(lines)


def _bars(title: str, times: dict[str, Timing]) -> list[str]:
    longest, layer_norm = max(t.median for t in times.values()), times["F.layer_norm"].median
    return [
        title,
        *(
            f" {name:16}{duration(t.median):>10}{f'{duration(t.low)} to {duration(t.high)}':>22}"
            f"{t.median / layer_norm:9.2f}  {'#' * max(1, round(LONGEST_BAR * t.median / longest))}"
            for name, t in times.items()
        ),
    ]


def compare_normalization(
    dim: int = 4096,
    rows: int = 1024,
    dtype: torch.dtype = torch.float32,
    *,
    eps: float = 1e-6,
    mean: float = 0.0,
    device: torch.device | str = "cpu",
    rounds: int = 15,
    verbose: bool = False,
    each_round: Callable[[], object] = lambda: None,
) -> NormalizationComparison:
    """Set RMSNorm beside LayerNorm on normally distributed rows: outputs, operations, bytes and measured time.

    With mu the mean of a row and ms the mean of its squares,

        RMSNorm(x)   = x / sqrt(ms + eps) * weight
        LayerNorm(x) = (x - mu) / sqrt(ms - mu^2 + eps) * weight + bias

    so with unit weights and no bias they are the same function of rows whose mean is zero.

    Example:
        >>> import rmsnorm
        >>> found = rmsnorm.compare_normalization(dim=256, rows=8, mean=0.5, rounds=1)
        >>> found.operations
        {'RMSNorm': 4, 'LayerNorm': 7}
        >>> found.mean_difference > 1000 * found.mean_difference_centred
        True

    Args:
        dim: width of a row.
        rows: number of rows.
        dtype: of x, weight and bias: float32, bfloat16, float16 or float64.
        eps: the same for both.
        mean: of the distribution that x is drawn from; its standard deviation is 1.
        device: where x lies.
        rounds: in each, every contestant is timed once; medians over all rounds are reported.
        verbose: print the table too.
        each_round: called as each of the rounds begins, of forward and then of backward: for a progress bar.

    Returns:
        A NormalizationComparison; its `str` is the table.

    Raises:
        ValueError: if dim, rows or rounds is less than 1, or dtype is not a floating type.

    Source: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, who report 7 to 64 % less running
    time for whole models; J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization", 2016.
    """
    for name, value in {"dim": dim, "rows": rows, "rounds": rounds}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating type, got {dtype}")
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(rows, dim, generator=generator, dtype=torch.float64) + mean
    x = exact.to(device, dtype)
    weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])
    with torch.inference_mode():
        centred = (x.double() - x.double().mean(-1, keepdim=True)).to(dtype)
        layer_norm = F.layer_norm(x, (dim,), weight, bias, eps).double()
        differences = [
            (rms_norm(given, weight, eps).double() - layer_norm).abs().mean().item() for given in (x, centred)
        ]
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    forward: dict[str, Callable[[], torch.Tensor]] = {
        "rmsnorm.rms_norm": lambda: rms_norm(x, weight, eps),
        "F.rms_norm": lambda: F.rms_norm(x, (dim,), weight, eps),
        "F.layer_norm": lambda: F.layer_norm(x, (dim,), weight, bias, eps),
    }
    backward = {name: _gradients(call(), leaves) for name, call in forward.items()}
    with torch.inference_mode():
        out = torch.empty_like(x)
        times = race({**forward, "copy": lambda: out.copy_(x)}, x.device, rounds, each_round=each_round)
    backward_times = race(backward, x.device, rounds, each_round=each_round)
    size = x.element_size()
    found = NormalizationComparison(
        shape=(rows, dim),
        dtype=str(dtype).removeprefix("torch."),
        device=str(x.device),
        threads=torch.get_num_threads(),
        mean_difference=differences[0],
        mean_difference_centred=differences[1],
        operations={"RMSNorm": len(RMS_NORM_OPERATIONS), "LayerNorm": len(LAYER_NORM_OPERATIONS)},
        bytes_moved={"RMSNorm": (2 * rows + 1) * dim * size, "LayerNorm": (2 * rows + 2) * dim * size},
        times=times,
        backward_times=backward_times,
    )
    if verbose:
        print(found)
    return found


def _gradients(y: torch.Tensor, leaves: list[torch.Tensor]) -> Callable[[], object]:
    dy = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True, allow_unused=True)
