"""What does not fit is refused, with a ValueError or TypeError that says what came and what may, before anything else.

test_fallback.py runs this file again without the compiled library.
"""

import math
import re

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from tests.bits import bits_equal
from tests.expected import normalized, tensor

MARK = 7.0


def refused(error, *parts):
    """`pytest.raises` for a message that contains all `parts`."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts))


def as_module(weight, x):
    """An RMSNorm that holds `weight`, whatever that is."""
    norm = RMSNorm(x.shape[-1] if isinstance(x, torch.Tensor) and not x.is_nested and x.dim() and x.shape[-1] else 8)
    del norm.weight
    norm.weight = weight
    if weight is None:
        norm.normalized_shape = (8,)
    return norm


def every_way(x, weight, residual=None):
    """The ways to call with these, as (name, call) pairs; a call that computed anything would mark `out`."""
    residual = x if residual is None else residual
    yield "function", lambda: rms_norm(x, weight)
    yield (
        "function, float eps and offset",
        lambda: rms_norm(x, weight, 1e-5, weight_offset=1.0, rounding="before_scale"),
    )
    yield "function, int offset", lambda: rms_norm(x, weight, weight_offset=1)
    yield "add", lambda: add_rms_norm(x, residual, weight)
    yield "module", lambda: as_module(weight, x)(x)
    yield "module with residual", lambda: as_module(weight, x)(x, residual)


def wanting(t):
    """The same tensor, as one that wants a gradient, where it can."""
    if not isinstance(t, torch.Tensor) or not (t.is_floating_point() or t.is_complex()) or t.is_quantized:
        return t
    return t.detach().requires_grad_()


def check_refused(x, weight, error, *parts):
    for name, call in every_way(x, weight):
        with refused(error, *parts):
            call()
            pytest.fail(f"{name} answered")
    for name, call in every_way(wanting(x), wanting(weight)):
        with refused(error, *parts):
            call()
            pytest.fail(f"{name} answered under grad")
    with torch.inference_mode(), refused(error, *parts):
        rms_norm(x, weight)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "wanted"),
    [
        ((4, 8), (1,), "(8,)"),
        ((4, 8), (4,), "(8,)"),
        ((4, 8), (7,), "(8,)"),
        ((4, 8), (9,), "(8,)"),
        ((4, 8), (16,), "(8,)"),
        ((4, 8), (0,), "(8,)"),
        ((8, 8), (8, 1), "(8, 8)"),
        ((4, 8), (1, 8), "(4, 8)"),
        ((8,), (1, 8), "(8,)"),
        ((1, 1), (2,), "(1,)"),
        ((8,), (3,), "(8,)"),
        ((2, 3, 4), (4, 3), "(3, 4)"),
        ((2, 3, 4), (2, 3), "(3, 4)"),
        ((2, 3, 4), (12,), "(4,)"),
        ((0, 8), (4,), "(8,)"),
        ((2, 3, 4), (1, 2, 3, 4), "(2, 3, 4)"),
    ],
)
def test_weight_of_another_shape(x_shape, w_shape, wanted):
    x, weight = torch.ones(x_shape), torch.ones(w_shape)
    check = (f"got {w_shape}", f"must have shape {wanted}")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with refused(ValueError, "weight", *check):
            rms_norm(x.to(dtype), weight.to(dtype))
        with refused(ValueError, "weight", *check):
            add_rms_norm(x.to(dtype), x.to(dtype), weight.to(dtype))
    for given in (x.requires_grad_(), x.detach()):
        with refused(ValueError, "weight", *check):
            rms_norm(given, weight.requires_grad_())


@pytest.mark.parametrize("dim", [1, 4, 16, (4, 8, 1), (8, 4)])
def test_module_of_another_size(dim):
    x = torch.ones(4, 8)
    for affine in (True, False):
        for memory_efficient in (True, False):
            norm = RMSNorm(dim, elementwise_affine=affine, memory_efficient=memory_efficient)
            for arguments in ((x,), (x, x)):
                with refused(ValueError, "must have shape", "got"):
                    norm(*arguments)


def test_no_dimension_and_no_elements_to_normalise():
    check_refused(torch.tensor(1.0), None, ValueError, "must", "got")
    check_refused(torch.tensor(1.0), torch.ones(1), ValueError, "weight must have", "got (1,)")
    check_refused(torch.ones(4, 8), torch.tensor(1.0), ValueError, "weight must have", "got")
    for shape in ((4, 0), (0,), (0, 0), (2, 3, 0)):
        x = torch.ones(shape)
        with refused(ValueError, "must not be empty", str(shape)):
            rms_norm(x)
        with refused(ValueError, "must not be empty", str(shape)):
            rms_norm(x, torch.ones(0))
        with refused(ValueError, "must not be empty", str(shape)):
            add_rms_norm(x, x)
    with refused(ValueError, "must not be empty"):
        rms_norm(torch.ones(2, 0, 4), torch.ones(0, 4))


@pytest.mark.parametrize("shape", [0, -1, (), [], (8, 0), (-8,), True, 8.0, "8", (8.0,), ("8",), torch.tensor(8), None])
def test_shapes_that_are_none(shape):
    with refused(ValueError, "dim must be a positive integer", repr(shape)):
        RMSNorm(shape)
    if shape is not None:
        with refused(ValueError, "normalized_shape must be a positive integer", repr(shape)):
            rms_norm(torch.ones(4, 8), normalized_shape=shape)


@pytest.mark.parametrize("shape", [4, (8, 4), (2, 4, 8), (1, 8)])
def test_normalized_shape_that_is_not_xs(shape):
    with refused(ValueError, "normalized_shape must have shape", "got"):
        rms_norm(torch.ones(4, 8), normalized_shape=shape)


def test_normalized_shape_that_is_not_the_weights():
    with refused(ValueError, "weight must have normalized_shape (4, 8), got (8,)"):
        rms_norm(torch.ones(4, 8), torch.ones(8), normalized_shape=(4, 8))


# ---------------------------------------------------------------- kinds of tensors

OTHER_DTYPES = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", OTHER_DTYPES)
def test_dtypes_that_are_not_computed_in(dtype):
    good = torch.ones(4, 8)
    name = str(dtype).removeprefix("torch.")
    check_refused(torch.ones(4, 8).to(dtype), None, TypeError, "x must be one of float32, bfloat16", f"got {name}")
    check_refused(torch.ones(4, 8).to(dtype), torch.ones(8), TypeError, "x must be one of float32", f"got {name}")
    check_refused(good, torch.ones(8).to(dtype), TypeError, "weight must be one of float32, bfloat16", f"got {name}")
    check_refused(good.double(), torch.ones(8).to(dtype), TypeError, "weight must be one of float32", f"got {name}")
    with refused(TypeError, "residual must be one of float32, bfloat16", f"got {name}"):
        add_rms_norm(good, torch.ones(4, 8).to(dtype))
    with refused(TypeError, "out must be one of float32, bfloat16", f"got {name}"):
        rms_norm(good, out=torch.ones(4, 8).to(dtype))
    with refused(TypeError, "dtype must be one of float32", f"got {name}"):
        RMSNorm(8, dtype=dtype)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_layouts_that_are_not_dense(convert):
    if convert == "to_mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no such layout")
    x = torch.ones(4, 8)
    other = getattr(x, convert)()
    layout = str(other.layout)
    for call in (lambda: rms_norm(other), lambda: add_rms_norm(other, other), lambda: RMSNorm(8)(other)):
        with refused(TypeError, "x must be dense", layout):
            call()
    with refused(TypeError, "residual must be dense", layout):
        add_rms_norm(x, other)
    with refused(TypeError, "out must be dense", layout):
        rms_norm(x, out=other)
    if convert == "to_sparse_csr":
        return  # has no vectors
    weight = getattr(torch.ones(8), convert)()
    for name, call in every_way(x, weight):
        if "module" not in name:  # it holds no such parameter
            with refused(TypeError, "weight must be dense", layout):
                call()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors():
    quantised = torch.quantize_per_tensor(torch.ones(4, 8), 0.1, 0, torch.qint8)
    for call in (
        lambda: rms_norm(quantised),
        lambda: add_rms_norm(quantised, quantised),
        lambda: RMSNorm(8)(quantised),
    ):
        with refused(TypeError, "x must be one of float32, bfloat16", "got qint8"):
            call()
    with refused(TypeError, "weight must be one of float32, bfloat16", "got qint8"):
        rms_norm(torch.ones(4, 8), quantised[0])
    with refused(TypeError, "residual must be one of", "got qint8"):
        add_rms_norm(torch.ones(4, 8), quantised)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_that_are_not_jagged():
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    for call in (
        lambda: rms_norm(nested),
        lambda: rms_norm(nested, torch.ones(8)),
        lambda: add_rms_norm(nested, nested),
    ):
        with refused(TypeError, "x must be dense", "torch.jagged"):
            call()
    with refused(TypeError, "out must be dense"):
        rms_norm(torch.ones(2, 8), out=nested)


@pytest.mark.parametrize("other", [None, [1.0] * 8, 1.0, "x", torch.Size([8]), torch.ones])
def test_what_is_no_tensor(other):
    x = torch.ones(4, 8)
    name = type(other).__name__
    for call in (lambda: rms_norm(other), lambda: rms_norm(other, torch.ones(8)), lambda: add_rms_norm(other, x)):
        with refused(TypeError, "x must be a torch.Tensor", f"got {name}"):
            call()
    with refused(TypeError, "residual must be a torch.Tensor", f"got {name}"):
        add_rms_norm(x, other)
    with refused(TypeError, "x must be a torch.Tensor", f"got {name}"):
        RMSNorm(8)(other)
    if other is not None:
        for call in (lambda: rms_norm(x, other), lambda: add_rms_norm(x, x, other)):
            with refused(TypeError, "weight must be a torch.Tensor", f"got {name}"):
                call()
        with refused(TypeError, "residual must be a torch.Tensor", f"got {name}"):
            RMSNorm(8)(x, other)
        with refused(TypeError, "out must be a torch.Tensor", f"got {name}"):
            rms_norm(x, out=other)


def test_arrays_of_numpy():
    numpy = pytest.importorskip("numpy")
    array = numpy.ones((4, 8), dtype=numpy.float32)
    x = torch.ones(4, 8)
    for call in (
        lambda: rms_norm(array),
        lambda: rms_norm(x, array[0]),
        lambda: add_rms_norm(x, array),
        lambda: rms_norm(x, out=array),
        lambda: RMSNorm(8)(array),
    ):
        with refused(TypeError, "must be a torch.Tensor, got ndarray"):
            call()
    assert (array == 1).all()


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_on_several_devices(dtype):
    here, there = torch.ones(4, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype, device="meta")
    check_refused(here, there[0], ValueError, "weight must be on x's device cpu, got meta")
    check_refused(there, here[0], ValueError, "weight must be on x's device meta, got cpu")
    with refused(ValueError, "residual must have x's device cpu, got meta"):
        add_rms_norm(here, there)
    with refused(ValueError, "residual must have x's device meta, got cpu"):
        add_rms_norm(there, here)
    with refused(ValueError, "out must have device cpu, got meta"):
        rms_norm(here, out=there)
    out = torch.full((4, 8), MARK, dtype=dtype)
    with refused(ValueError, "out must have device meta, got cpu"):
        rms_norm(there, out=out)
    with refused(ValueError, "weight must be on x's device cpu, got meta"):
        rms_norm(here, there[0], out=out)
    assert (out == MARK).all()


# ---------------------------------------------------------------- residual


@pytest.mark.parametrize("shape", [(1, 8), (8,), (4, 1), (4, 7), (4, 16), (2, 2, 8), (8, 4), (0, 8), ()])
def test_residual_of_another_shape(shape):
    x = torch.ones(4, 8)
    for call in (lambda r: add_rms_norm(x, r), lambda r: RMSNorm(8)(x, r), lambda r: add_rms_norm(x, r, torch.ones(8))):
        for residual in (torch.ones(shape), torch.ones(shape, requires_grad=True)):
            with refused(ValueError, "residual must have x's shape (4, 8)", f"got {shape}"):
                call(residual)


def test_residual_of_another_dtype():
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for a in dtypes:
        for b in dtypes:
            if a != b:
                with refused(ValueError, f"residual must have x's dtype {a}", f"got {b}"):
                    add_rms_norm(torch.ones(4, 8, dtype=a), torch.ones(4, 8, dtype=b))


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    "rounding", ["Once", "", "twice", "before", None, 0, 1, True, ["once"], ("once",), {}, b"once"]
)
def test_unknown_roundings(rounding):
    x = torch.ones(4, 8)
    for call in (
        lambda: rms_norm(x, rounding=rounding),
        lambda: rms_norm(x.double(), torch.ones(8), rounding=rounding),
        lambda: rms_norm(x, out=torch.empty(4, 8), rounding=rounding),
        lambda: add_rms_norm(x, x, rounding=rounding),
        lambda: RMSNorm(8, rounding=rounding),
    ):
        with refused(ValueError, "rounding must be one of 'once', 'before_scale', 'weight_dtype'", repr(rounding)):
            call()


def takers(**option):
    """Everything that takes eps and weight_offset; on the way through the operator, and not."""
    x = torch.ones(4, 8)
    weight = torch.ones(8)
    out = torch.full((4, 8), MARK)
    yield lambda: rms_norm(x, weight, **option)
    yield lambda: rms_norm(x, **option)
    yield lambda: rms_norm(x, weight, out=out, **option)
    yield lambda: rms_norm(x.double(), weight, **option)
    yield lambda: rms_norm(x, weight.clone().requires_grad_(), **option)
    yield lambda: rms_norm(x.to("meta"), **option)
    yield lambda: add_rms_norm(x, x, weight, **option)
    yield lambda: RMSNorm(8, **option)

    def untouched():
        assert (out == MARK).all()
        raise ValueError(f"{option}")

    yield untouched


@pytest.mark.parametrize("name", ["eps", "weight_offset"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "one", "", 10**400])
def test_numbers_that_are_not_finite(name, value):
    for call in takers(**{name: value}):
        with refused(ValueError, name, repr(value)):
            call()


@pytest.mark.parametrize("name", ["eps", "weight_offset"])
@pytest.mark.parametrize(
    "value", [True, False, [1e-6], (1e-6,), {}, 1j, b"1e-6", object(), torch.ones(2), torch.tensor(True)]
)
def test_what_is_no_number(name, value):
    for call in [*takers(**{name: value})][:-1]:
        with refused(TypeError, f"{name} must be", repr(value)):
            call()


def test_offset_has_no_none_and_no_text():
    for call in [*takers(weight_offset=None)][:-1]:
        with refused(TypeError, "weight_offset must be a finite number, got None"):
            call()
    for call in [*takers(weight_offset="1.0")][:-1]:
        with refused(ValueError, "weight_offset must be a finite number, got '1.0'"):
            call()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["eps", "weight_offset"])
def test_options_have_no_gradient(name):
    value = torch.tensor(1e-3, requires_grad=True)
    for call in [*takers(**{name: value})][:-1]:
        with refused(TypeError, name):
            call()


@pytest.mark.parametrize("eps", [0, 0.0, -0.0, -1e-6, "0", "-1e-6", -math.inf])
def test_module_wants_a_positive_eps(eps):
    with refused(ValueError, "eps must be", repr(eps)):
        RMSNorm(8, eps)


def test_misspelt_options_are_errors():
    x = torch.ones(4, 8)
    for call in (
        lambda: rms_norm(x, epsilon=1e-6),
        lambda: rms_norm(x, None, 1e-6, 1.0),
        lambda: add_rms_norm(x, x, out=x),
        lambda: RMSNorm(8, bias=True),
    ):
        with pytest.raises(TypeError, match="argument"):
            call()


# ---------------------------------------------------------------- out


def overlapping():
    """x and out that share some memory and are not the same elements, from one buffer."""

    def pair(make):
        buffer = tensor(4096)
        return buffer, *make(buffer)

    yield "one element later", pair(lambda b: (b[:32].view(4, 8), b[1:33].view(4, 8)))
    yield "one element earlier", pair(lambda b: (b[1:33].view(4, 8), b[:32].view(4, 8)))
    yield "one row later", pair(lambda b: (b[:32].view(4, 8), b[8:40].view(4, 8)))
    yield "the last element", pair(lambda b: (b[:32].view(4, 8), b[31:63].view(4, 8)))
    yield "slices of columns", pair(lambda b: (b[:64].view(4, 16)[:, :8], b[:64].view(4, 16)[:, 7:15]))
    yield "slices of columns, backwards", pair(lambda b: (b[:64].view(4, 16)[:, 7:15], b[:64].view(4, 16)[:, :8]))
    yield "next row's start", pair(lambda b: (b[:64].view(4, 16)[:, :8], b[12:76].view(4, 16)[:, :8]))
    yield "transposed", pair(lambda b: (b[:64].view(8, 8), b[:64].view(8, 8).t()))
    yield "strided and dense", pair(lambda b: (b[:64].view(4, 16)[:, ::2], b[:32].view(4, 8)))
    yield "dense and strided", pair(lambda b: (b[:32].view(4, 8), b[:64].view(4, 16)[:, ::2]))
    yield "rows in another order", pair(lambda b: (b[:32].view(2, 2, 8), b[:32].view(2, 2, 8).transpose(0, 1)))
    yield "every second row", pair(lambda b: (b[:64].view(8, 8)[::2], b[:32].view(4, 8)))
    yield (
        "two slices apart, shifted",
        pair(lambda b: (b[:192].view(2, 3, 32)[:, :, :8], b[:192].view(2, 3, 32)[:, :, 4:12])),
    )
    yield "a repeated row", pair(lambda b: (b[:8].expand(4, 8), b[:32].view(4, 8)))
    yield "a repeated row, shifted", pair(lambda b: (b[4:12].expand(4, 8), b[:32].view(4, 8)))
    yield "windows", pair(lambda b: (b.as_strided((4, 8), (4, 1)), b[:32].view(4, 8)))
    yield (
        "columns reached by another stride",
        pair(lambda b: (b.as_strided((3, 4), (50, 3)), b.as_strided((3, 4), (50, 3), 6))),
    )


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("kind", [name for name, _ in overlapping()])
def test_out_that_overlaps_x_partly(kind, with_weight):
    buffer, x, out = dict(overlapping())[kind]
    weight = tensor(x.shape[-1], seed=1) if with_weight else None
    kept = buffer.clone()
    with refused(ValueError, "out must", "overlaps x partly"):
        rms_norm(x, weight, out=out)
    assert bits_equal(buffer, kept)
    with refused(ValueError, "out must", "overlaps x partly"):
        rms_norm(x, weight, normalized_shape=x.shape[-1], out=out)
    assert bits_equal(buffer, kept)


def test_out_that_overlaps_x_as_another_dtype():
    buffer = tensor(64)
    for x, out in (
        (buffer.view(8, 8).view(torch.bfloat16)[:, :8], buffer.view(8, 8)),
        (buffer[:32].view(4, 8), buffer.view(torch.bfloat16)[:32].view(4, 8)),
    ):
        kept = buffer.clone()
        for rounding in ("before_scale", "weight_dtype"):
            with refused(ValueError, "out must"):
                rms_norm(x, torch.ones(8, dtype=out.dtype), rounding=rounding, out=out)
        assert bits_equal(buffer, kept)


def itself():
    """Layouts in which two elements are one."""
    yield lambda b: b[:8].expand(4, 8)
    yield lambda b: b[:4, None].expand(4, 8)
    yield lambda b: b[:1].expand(4, 8)
    yield lambda b: b.as_strided((4, 8), (4, 1))
    yield lambda b: b.as_strided((4, 8), (1, 1))
    yield lambda b: b.unfold(0, 8, 2)[:4]
    yield lambda b: b.as_strided((2, 3, 8), (16, 8, 1))


@pytest.mark.parametrize("make", list(itself()))
def test_out_that_overlaps_itself(make):
    buffer = tensor(128)
    kept = buffer.clone()
    out = make(buffer)
    for x in (torch.ones(out.shape), out, out.view(out.shape)):
        with refused(ValueError, "out must not overlap itself"):
            rms_norm(x, out=out)
        with refused(ValueError, "out must not overlap itself"):
            rms_norm(x, torch.ones(8), 1, out=out)
    assert bits_equal(buffer, kept)


def test_out_that_overlaps_weight():
    for make in (lambda b: (b, b[1]), lambda b: (b, b[:, 3]), lambda b: (b, b.flatten()[5:13])):
        buffer = tensor(8, 8)
        kept = buffer.clone()
        out, weight = make(buffer)
        for x in (out, tensor(8, 8, seed=1)):
            with refused(ValueError, "out must share no memory with weight"):
                rms_norm(x, weight, out=out)
        assert bits_equal(buffer, kept)


@pytest.mark.parametrize("shape", [(4, 7), (4, 16), (8, 4), (32,), (1, 8), (5, 8), (4, 8, 1), (1, 4, 8), (0,), ()])
def test_out_of_another_shape(shape):
    x = torch.ones(4, 8)
    for given in (x, x.double()):
        out = torch.full(shape, MARK, dtype=given.dtype)
        with refused(ValueError, "out must have shape (4, 8)", f"got {shape}"):
            rms_norm(given, torch.ones(8), out=out)
        assert (out == MARK).all()


def test_out_of_another_dtype():
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for a in dtypes:
        for w in dtypes:
            for b in dtypes:
                x, weight = torch.ones(4, 8, dtype=a), torch.ones(8, dtype=w)
                for rounding in ("once", "before_scale", "weight_dtype"):
                    result = normalized(x, weight, rounding=rounding).dtype
                    if b != result:
                        out = torch.full((4, 8), MARK, dtype=b)
                        with refused(ValueError, f"out must have dtype {result}", f"got {b}"):
                            rms_norm(x, weight, rounding=rounding, out=out)
                        assert (out == MARK).all()
                    if a == b != result:  # x itself, which is then of the wrong dtype
                        with refused(ValueError, f"out must have dtype {result}", f"got {a}"):
                            rms_norm(x, weight, rounding=rounding, out=x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_out_where_a_gradient_is_needed(dtype):
    x, weight = torch.ones(4, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    for which in ("x", "weight", "out"):
        given = {"x": x.clone(), "weight": weight.clone(), "out": torch.full((4, 8), MARK, dtype=dtype)}
        given[which].requires_grad_()
        with refused(ValueError, "out is for inference"):
            rms_norm(**given)
        assert (given["out"] == MARK).all()
        with torch.no_grad():
            rms_norm(**given)
        assert bits_equal(given["out"].detach(), normalized(x, weight))
    y = 2 * x.clone().requires_grad_()
    with refused(ValueError, "out is for inference"):
        rms_norm(y, out=y)


def test_bad_weights_leave_out_alone():
    x = torch.ones(4, 8)
    for weight, error in (
        (torch.ones(7), ValueError),
        (torch.ones(8).int(), (TypeError, ValueError)),
        ([1.0] * 8, TypeError),
    ):
        for given in (x, x.double()):
            out = torch.full((4, 8), MARK, dtype=given.dtype)
            with pytest.raises(error):
                rms_norm(given, weight, out=out)
            assert (out == MARK).all()


# ---------------------------------------------------------------- unusual, and answered


class Labelled(torch.Tensor):
    """A subclass that adds nothing."""


def test_subclasses_stay_themselves():
    x, weight = tensor(4, 8, dtype=torch.float64), tensor(8, dtype=torch.float64, seed=1)
    y = rms_norm(x.as_subclass(Labelled), weight)
    assert type(y) is Labelled
    # By the formula: two float64 ways to the same number, each within (d + 10) roundings.
    assert ((y - rms_norm(x, weight)).abs() <= 18 * 2.0**-52 * y.abs()).all()
    y, h = add_rms_norm(x, x.as_subclass(Labelled), weight)
    assert type(y) is type(h) is Labelled
    with refused(ValueError, "weight must have shape (8,)"):
        rms_norm(x.as_subclass(Labelled), weight[:4])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_jagged_tensors_are_normalised_row_by_row():
    parts = [tensor(2, 8, dtype=torch.float64), tensor(3, 8, dtype=torch.float64, seed=1)]
    weight = tensor(8, dtype=torch.float64, seed=2)
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for y, part in zip(rms_norm(nested, weight).unbind(), parts, strict=True):
        expected = rms_norm(part, weight)
        assert ((y - expected).abs() <= 18 * 2.0**-52 * expected.abs()).all()


def test_meta_tensors_have_shapes_and_no_data():
    x, weight = torch.ones(4, 8, device="meta"), torch.ones(8, device="meta", dtype=torch.bfloat16)
    y = rms_norm(x, weight, rounding="weight_dtype")
    assert (y.device.type, y.shape, y.dtype) == ("meta", (4, 8), torch.bfloat16)
    y, h = add_rms_norm(x, x, weight)
    assert y.is_meta
    assert h.is_meta
    x.requires_grad_()
    rms_norm(x, weight).sum().backward()
    assert x.grad.shape == x.shape
    norm = RMSNorm(8, memory_efficient=True, device="meta")
    norm(torch.ones(4, 8, device="meta")).sum().backward()
    assert norm.weight.grad.is_meta
    # As large as no memory is.
    assert rms_norm(torch.ones(1, 1, device="meta").expand(2**30, 2**30)).shape == (2**30, 2**30)


def test_what_does_not_fit_into_memory_is_an_error_and_not_a_crash():
    with pytest.raises(RuntimeError, match=r"allocate memory: (1073741824 MiB|you tried)"):
        rms_norm(torch.ones(1, 1).expand(2**45, 8))


def test_meta_tensors_are_checked_like_others():
    x = torch.ones(4, 8, device="meta")
    for given, weight in ((x[0, 0], None), (x, x[0, :4]), (x, x[:1]), (x[:, :0], None), (x, x[0, 0])):
        check_refused(given, weight, ValueError, "must", "got")
    check_refused(x.int(), None, TypeError, "x must be one of float32", "got int32")
    check_refused(x, x[0].bool(), TypeError, "weight must be one of float32", "got bool")
    for call in [*takers(eps=x[0, 0])][:-1]:
        with refused(TypeError, "eps must be a number", "meta"):
            call()


def test_vmapped_bad_shapes_are_refused():
    with refused(ValueError, "weight must have shape (8,)", "got (7,)"):
        torch.func.vmap(rms_norm, in_dims=(0, None))(torch.ones(5, 4, 8), torch.ones(7))
