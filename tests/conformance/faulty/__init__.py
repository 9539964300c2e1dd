"""RMSNorms with one fault each, and for each fault the check that must name it."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.conformance.faulty import around, formula, quantized, shared, stateful


@dataclass(frozen=True)
class Fault:
    """A faulty norm, the checks that must name it, what the first of them says, and those that may fail with it."""

    norm: Callable
    named: tuple[str, ...]
    says: str
    consequences: tuple[str, ...] = ()


_DX = ("dx-float32", "dx-bfloat16", "dx-float16")
_DWEIGHT = ("dweight-float32", "dweight-bfloat16", "dweight-float16")
# What wrong gradients spoil besides, and a gain that is not the weight's.
_TRAINED = ("backward-order", "frozen", "weight-updates", "call-sequence", "many-rows", "wide-rows")
_UPDATES = ("nan-inf", "call-sequence", "frozen")
_RESIDUAL = ("residual-float32", "residual-bfloat16", "residual-float16")
_RESIDUAL_GRADIENTS = tuple(f"residual-gradients-{name}" for name in ("float32", "bfloat16", "float16"))
_AFTER_RESIDUAL = ("residual-dtype", "residual-strides", *_RESIDUAL_GRADIENTS)
_AFTER_SUM = ("residual-dtype", *_RESIDUAL_GRADIENTS)
_GATE = ("gate-float32", "gate-bfloat16", "gate-float16")
_GATE_GRADIENTS = tuple(f"gate-gradients-{name}" for name in ("float32", "bfloat16", "float16"))
_AFTER_GATE = ("gate-range", "gate-nan", "gate-strides", *_GATE_GRADIENTS)
_GROUPS = ("groups-float32", "groups-bfloat16", "groups-float16")
_GROUP_GRADIENTS = tuple(f"groups-gradients-{name}" for name in ("float32", "bfloat16", "float16"))
_SCALES = ("quantized-scale-float32", "quantized-scale-bfloat16", "quantized-scale-float16")
_ONE_SCALE = ("quantized-saturation", "quantized-nan", "quantized-zeros")
_BEYOND = (
    "quantized-ties",
    "quantized-nan",
    "quantized-values-float32",
    "quantized-values-bfloat16",
    "quantized-values-float16",
)
_VALUES = ("quantized-values-float32", "quantized-values-bfloat16", "quantized-values-float16")
FAULTS = (
    Fault(formula.eps_outside_the_root, ("eps",), "(sqrt(mean(x^2)) + 1e-05)"),
    Fault(formula.eps_as_a_clamp, ("eps",), "max(sqrt(mean(x^2)), 1e-05)"),
    Fault(formula.eps_ignored, ("eps",), "given an eps of 1e-05 it uses 1e-06"),
    Fault(formula.eps_in_float16, ("eps",), "eps is rounded to float16"),
    Fault(formula.eps_text_unused, ("eps-text",), "accepted and not used"),
    Fault(
        formula.variance_in_16_bits,
        ("row-factor-bfloat16", "row-factor-float16"),
        "its variance, or the root of it, is rounded to 16 bits",
        ("accuracy-bfloat16", "accuracy-float16", "range-float16"),
    ),
    Fault(formula.squares_overflow_float16, ("range-float16",), "their squares overflow", ("accuracy-float16",)),
    Fault(formula.offset_dropped, ("weight-offset",), "nothing is added"),
    Fault(formula.offset_added_in_16_bits, ("weight-offset",), "it is added in 16 bits"),
    Fault(formula.truncating_stores, ("row-factor-bfloat16",), "stores truncate, towards zero"),
    Fault(formula.dweight_summed_in_bfloat16, _DWEIGHT[1:], "it is summed in 16 bits"),
    Fault(formula.dx_without_projection, _DX, "dx lacks its second term", _TRAINED),
    Fault(formula.no_gradient_of_the_weight, _DWEIGHT, "the weight gets no gradient"),
    Fault(formula.graph_cut, (*_DX, *_DWEIGHT), "silently stops learning"),
    Fault(formula.dy_overwritten, ("inputs-unchanged",), "its backward overwrites dy"),
    Fault(formula.overwrites_its_input_in_float32, ("inputs-unchanged",), "overwrites its input in float32"),
    Fault(
        formula.statistics_of_neighbours, ("shapes",), "wrong for 130x64, 1025x64", (*_DX, *_DWEIGHT, "call-sequence")
    ),
    Fault(formula.ignores_strides, ("strides",), "strides are ignored"),
    Fault(formula.dy_strides_ignored, ("strides",), "transposed (dy)"),
    Fault(formula.reads_beyond_its_rows, ("surroundings",), "shows in the result"),
    Fault(formula.writes_beyond_its_rows, ("surroundings",), "writes to memory"),
    Fault(formula.swallows_nan, ("nan-inf",), "does not make the whole row NaN"),
    Fault(formula.nan_spreads_to_other_rows, ("nan-inf",), "shows in others"),
    Fault(formula.not_repeatable, ("repeatable",), "differs from run to run"),
    Fault(formula.always_float32, ("result-dtype",), "returns float32"),
    Fault(formula.reads_float32_weights_as_16_bits, ("result-dtype",), "for bf16 with a weight in f32"),
    Fault(formula.follows_autocast, ("autocast",), "gives bfloat16"),
    Fault(formula.mean_over_a_padded_width, ("widths", "wide-rows"), "as if the mean were taken over 4 elements"),
    Fault(formula.forgets_the_tail, ("widths", "wide-rows"), "wrong for rows of 15, 17"),
    Fault(formula.cannot_be_empty, ("empty",), "no rows raises RuntimeError"),
    Fault(stateful.rows_after_the_grid_are_zero, ("many-rows",), "1,065 are wrong, from the 65,536th"),
    Fault(stateful.dx_after_the_grid_is_zero, ("many-rows",), "dx of 66,600 rows of 64"),
    Fault(stateful.mean_of_the_first_block, ("wide-rows",), "of 3 rows of 131,165 in float32, 3 are wrong, from the"),
    Fault(stateful.backward_reads_the_latest_statistics, ("backward-order",), "reads what a later forward left"),
    Fault(stateful.dx_in_one_buffer, ("own-memory",), "dx is overwritten by the next backward"),
    Fault(stateful.dweight_sums_not_cleared, ("call-sequence",), "dweight is wrong for", _TRAINED),
    Fault(stateful.x_saved_without_its_version, ("saved-tensors",), "x changed in place"),
    Fault(stateful.weight_saved_without_its_version, ("saved-tensors",), "the weight changed in place"),
    Fault(stateful.frozen_weight_loses_dx, ("frozen",), "a frozen weight cuts the graph: dx is missing"),
    Fault(stateful.frozen_x_loses_dweight, ("frozen",), "a frozen x cuts the graph: dweight is missing"),
    Fault(
        stateful.frozen_weight_cuts_the_graph, ("frozen",), "a frozen weight cuts the graph: the result has no gradient"
    ),
    Fault(stateful.mode_of_the_first_call, ("call-sequence",), "its gradient is wrong for"),
    Fault(stateful.gain_by_address, ("weight-updates",), "after the weight was changed in place"),
    Fault(stateful.gain_by_version, ("weight-updates",), "after the weight was changed through .data", _UPDATES),
    Fault(stateful.gain_of_the_first_norm, ("weight-updates",), "after the weight", _UPDATES),
    Fault(stateful.GainOfTheFirstCall, ("weight-updates",), "after the weight was changed in place"),
    Fault(stateful.few_rows_of_the_first_call, ("call-sequence",), "y is wrong for"),
    Fault(stateful.width_by_the_number_of_elements, ("call-sequence",), "y is wrong for", _DWEIGHT),
    Fault(stateful.eps_of_the_first_norm, ("call-sequence",), "y is wrong for"),
    Fault(stateful.dtype_of_the_first_call, ("call-sequence",), "its dtype is wrong for"),
    Fault(stateful.statistics_by_address, ("call-sequence",), "that of an earlier x at the same address"),
    Fault(shared.result_in_one_buffer, ("own-memory",), "a result is overwritten by the next call", ("calls-at-once",)),
    Fault(shared.zeros_as_they_came, ("own-memory",), "the result for rows of zeros lies in the memory of its input"),
    Fault(shared.expanded_as_it_came, ("own-memory",), "lie in one another's memory"),
    Fault(shared.results_handed_out_again, ("own-memory",), "results are kept and handed out again"),
    Fault(shared.every_input_kept, ("memory-kept",), "inputs are still in memory"),
    Fault(shared.one_workspace_for_all_threads, ("calls-at-once",), "called from 4 Python threads at once"),
    Fault(shared.draws_random_numbers, ("process-settings",), "PyTorch's random state, Python's random state"),
    Fault(shared.subnormals_become_zero, ("process-settings",), "whether subnormal numbers are zero"),
    Fault(shared.changes_the_number_of_threads, ("process-settings",), "the number of threads"),
    Fault(around.residual_ignored, _RESIDUAL, "the residual has no effect", _AFTER_RESIDUAL),
    Fault(around.residual_added_after_the_norm, _RESIDUAL, "added after the norm", _AFTER_RESIDUAL),
    Fault(around.sum_truncated, ("residual-sum",), "rounded once, in"),
    Fault(around.branch_in_place_of_the_sum, ("residual-sum",), "rounded once, in", _AFTER_SUM),
    Fault(around.stream_in_the_dtype_of_the_branch, ("residual-dtype",), "comes back in bfloat16"),
    Fault(around.stream_with_the_bits_of_the_branch, ("residual-dtype",), "the bits of a 16-bit one"),
    Fault(around.residual_strides_ignored, ("residual-strides",), "its strides are ignored"),
    Fault(around.residual_overwritten, ("residual-unchanged",), "overwrites the residual", ("residual-strides",)),
    Fault(around.residual_without_gradient, _RESIDUAL_GRADIENTS, "the residual gets no gradient"),
    Fault(around.sum_without_gradient, _RESIDUAL_GRADIENTS, "the residual stream stops learning"),
    Fault(around.gradient_of_the_sum_forgotten, _RESIDUAL_GRADIENTS, "lacks what comes through the sum"),
    Fault(around.gate_by_another_function, _GATE, "no norm times an activation", _AFTER_GATE),
    Fault(
        around.activation_in_16_bits,
        ("gate-float32", "gate-float16"),
        "units in the last place off",
        ("gate-strides", "gate-gradients-float32", "gate-gradients-float16"),
    ),
    Fault(around.silu_by_two_exponentials, ("gate-range",), "infinite or NaN"),
    Fault(around.nan_gates_are_shut, ("gate-nan",), "does not show in its result"),
    Fault(around.gate_strides_ignored, ("gate-strides",), "strides are ignored"),
    Fault(around.gate_without_gradient, _GATE_GRADIENTS, "the gate gets no gradient"),
    Fault(around.derivative_of_silu_is_sigmoid, _GATE_GRADIENTS, "the gradient of the gate in float32 is"),
    Fault(around.group_size_ignored, _GROUPS, "the size has no effect", (*_GROUP_GRADIENTS, "groups-nan")),
    Fault(around.what_is_left_over_is_not_normalised, ("groups-divide",), "are accepted, though"),
    Fault(around.nan_in_all_groups, ("groups-nan",), "shows in others", ("nan-inf",)),
    Fault(quantized.largest_of_all_but_the_tail, _SCALES, "% off amax / 127"),
    Fault(quantized.largest_without_a_sign, _SCALES, "% off amax / 127", (*_VALUES, "quantized-saturation")),
    Fault(quantized.one_scale_for_all_rows, ("quantized-rows", *_SCALES), "depends on the batch", _ONE_SCALE),
    Fault(quantized.half_away_from_zero, ("quantized-ties",), "0.5 steps become 1, and not 0"),
    Fault(quantized.cut_off, _VALUES, "is not the nearest of int8", ("quantized-ties", "quantized-saturation")),
    Fault(quantized.beyond_the_largest_float8, ("quantized-saturation", *_SCALES), "becomes NaN", _BEYOND),
    Fault(
        quantized.twice_the_power_of_two,
        _SCALES,
        "off amax / 448",
        (*_VALUES, "quantized-ties", "quantized-saturation"),
    ),
    Fault(quantized.zero_by_zero, ("quantized-zeros",), "does not become zeros"),
    Fault(quantized.nan_is_zero, ("quantized-nan",), "shows neither in q nor in its scale"),
    Fault(around.gradient_of_the_whole_row, _GROUP_GRADIENTS, "in groups of 16 dx"),
)
