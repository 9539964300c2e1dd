"""What does not fit is refused, with a ValueError or TypeError that says what came and what may, before anything else.

test_fallback.py runs these files again without the compiled library.
"""

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from tests.support.refusals import MARK, check_refused, every_way, refused

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


@pytest.mark.parametrize(("x", "residual"), [("cpu", "meta"), ("meta", "cpu"), ("meta", "meta")])
def test_a_scalar_is_refused_for_what_it_is_on_any_device(x, residual):
    """The dispatcher takes shapes for kernels as soon as one of the tensors is on the meta device."""
    with pytest.raises(ValueError, match="x must have at least one dimension, got a scalar"):
        add_rms_norm(torch.ones((), device=x), torch.ones((), device=residual))


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
            if (a == torch.float64) != (b == torch.float64):
                with refused(ValueError, "residual must be float", f"got {b}".replace("torch.", "")):
                    add_rms_norm(torch.ones(4, 8, dtype=a), torch.ones(4, 8, dtype=b))
