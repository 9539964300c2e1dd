"""rms_norm_rotary and qk_norm_rotary: layouts, angles of every shape, gradients, and other libraries' rotations."""

import copy
import itertools
import sys

import pytest
import torch

import rmsnorm
from rmsnorm import QKNormRotary, qk_norm_rotary, rms_norm, rms_norm_rotary
from rmsnorm.numerics.fixed_sum import sum_rows
from rmsnorm.numerics.rotation import Rotation, rotate, rotate_back
from rmsnorm.spec import ROUNDINGS
from tests.support.bits import bits_equal, same

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BATCH, TOKENS, HEADS, KV_HEADS, DIM = 2, 37, 4, 2, 16


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(*shape, dtype=torch.float32):
    t = made(*shape, seed=7) * 3
    return t.cos().to(dtype), t.sin().to(dtype)


def by_steps(x, weight, cos, sin, rotation=None, **options):
    return rotate(rms_norm(x, weight, **options), cos, sin, rotation or Rotation(x.shape[-1]))


def gradients(function, *leaves):
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, made(*y.shape, dtype=y.dtype, seed=9))]


def all_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        same(a, b)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("x_dtype", "dtype"), list(itertools.product(FLOATS, FLOATS)))
def test_heads_before_tokens_and_after_in_every_rotation(x_dtype, dtype, rounding):
    options = itertools.product((1, 2), (False, True), ("once", "each"), (DIM, DIM - 6))
    for place, interleaved, each, dim in options:
        for width in (dim, dim // 2):
            shape = (BATCH, HEADS, TOKENS, DIM) if place == 1 else (BATCH, TOKENS, HEADS, DIM)
            cos, sin = (t.unsqueeze(place) for t in angles(BATCH, TOKENS, width, dtype=dtype))
            weight = made(DIM, dtype=FLOATS[dim % 3], seed=3)
            rotation = Rotation(dim, interleaved, each == "each")
            rotary = {"rotary_dim": dim, "interleaved": interleaved, "rotary_rounding": each}
            norm = {"rounding": rounding, "weight_offset": 1.0, "eps": 1e-5}
            all_same(
                gradients(
                    lambda x, w: rms_norm_rotary(x, w, cos, sin, **norm, **rotary),  # noqa: B023
                    made(*shape, dtype=x_dtype), weight,
                ),
                gradients(
                    lambda x, w: by_steps(x, w, cos, sin, rotation, **norm),  # noqa: B023
                    made(*shape, dtype=x_dtype), weight,
                ),
            )  # fmt: skip


def test_the_transposed_rotation_is_the_gradient_by_autograd():
    for dtype, interleaved, each in itertools.product((*FLOATS, torch.float64), (False, True), (False, True)):
        for width in (12, 6):
            rotation = Rotation(12, interleaved, each)
            cos, sin = angles(TOKENS, width, dtype=dtype)
            n, do = made(3, TOKENS, DIM, dtype=dtype).requires_grad_(), made(3, TOKENS, DIM, dtype=dtype, seed=1)
            (found,) = torch.autograd.grad(rotate(n, cos, sin, rotation), [n], do)
            same(rotate_back(do, cos, sin, rotation), found)


def test_angles_of_every_shape_that_broadcasts():
    x = made(BATCH, TOKENS, HEADS, DIM)
    for shape in (
        *((DIM,), (1, DIM), (HEADS, DIM), (TOKENS, 1, DIM)),
        *((1, TOKENS, 1, DIM), (BATCH, 1, 1, DIM), (BATCH, TOKENS, HEADS, DIM)),
    ):
        cos, sin = angles(*shape)
        same(rms_norm_rotary(x, None, cos, sin), by_steps(x, None, cos.expand_as(x), sin.expand_as(x)))
        strided = torch.stack((cos, sin), -1)
        same(rms_norm_rotary(x, None, strided[..., 0], strided[..., 1]), rms_norm_rotary(x, None, cos, sin))


def test_heads_of_a_fused_projection_are_read_where_they_lie():
    qkv = made(BATCH, TOKENS, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.bfloat16).unflatten(-1, (-1, DIM))
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
    cos, sin = angles(TOKENS, 1, DIM // 2)
    weights = made(DIM, seed=1), made(DIM, seed=2)
    expected = qk_norm_rotary(q.contiguous(), k.contiguous(), *weights, cos, sin)
    all_same(qk_norm_rotary(q, k, *weights, cos, sin), expected)
    turned = qk_norm_rotary(q.transpose(1, 2), k.transpose(1, 2), *weights, cos.transpose(0, 1), sin.transpose(0, 1))
    all_same([t.transpose(1, 2) for t in turned], expected)
    # In place, and nothing but q and k is written.
    before = v.clone()
    version = q._version
    written = qk_norm_rotary(q, k, *weights, cos, sin, out=(q, k))
    assert written[0] is q
    assert written[1] is k
    assert q._version > version
    all_same([q, k, v], [*expected, before])


def test_out_of_every_kind():
    x, (cos, sin) = made(TOKENS, HEADS, DIM), angles(TOKENS, 1, DIM)
    expected = rms_norm_rotary(x, None, cos, sin)
    for out in (torch.empty_like(x), torch.empty(TOKENS, DIM, HEADS).mT, torch.empty(TOKENS, 2 * HEADS, DIM)[:, ::2]):
        assert rms_norm_rotary(x, None, cos, sin, out=out) is out
        same(out, expected)
    wide = torch.empty(TOKENS, HEADS, DIM, dtype=torch.float64)
    rms_norm_rotary(x.double(), None, cos, sin, out=wide)
    same(wide, rms_norm_rotary(x.double(), None, cos, sin))
    for wrong, error in (
        (torch.empty(TOKENS, HEADS, DIM + 1), ValueError),
        (torch.empty(TOKENS, HEADS, DIM, dtype=torch.float16), ValueError),
        (torch.empty(1, HEADS, DIM).expand(TOKENS, HEADS, DIM), ValueError),
        ("out", TypeError),
    ):
        with pytest.raises(error, match="out"):
            rms_norm_rotary(x, None, cos, sin, out=wrong)
    same_shape = made(*x.shape)
    with pytest.raises(ValueError, match="out must share no memory with cos"):
        rms_norm_rotary(x, None, same_shape, sin.expand_as(x), out=same_shape)
    with pytest.raises(ValueError, match="out is for inference"):
        rms_norm_rotary(x, made(DIM).requires_grad_(), cos, sin, out=torch.empty_like(x))
    with pytest.raises(TypeError, match="out must be a pair"):
        qk_norm_rotary(x, x, None, None, cos, sin, out=x)


@pytest.mark.parametrize("rotary_rounding", ["once", "each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_angles_are_trees_over_the_rows_that_share_them(dtype, rotary_rounding):
    x, weight = made(BATCH, 130, HEADS, DIM, dtype=dtype), made(DIM, seed=1)
    cos, sin = angles(130, 1, DIM)

    def fused(x, weight, cos, sin):
        return rms_norm_rotary(x, weight, cos, sin, rotary_rounding=rotary_rounding)

    def wide(x, weight, cos, sin):
        return by_steps(x, weight, cos, sin, Rotation(DIM, each=rotary_rounding == "each"))

    y, dx, dweight, *terms = gradients(wide, x, weight, *(t.expand(x.shape).contiguous() for t in (cos, sin)))
    sums = [sum_rows(t.permute(0, 2, 1, 3).reshape(BATCH * HEADS, -1)).view(130, 1, DIM) for t in terms]
    found = [gradients(fused, x, weight, cos, sin)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        found.append(gradients(fused, x, weight, cos, sin))
    finally:
        torch.set_num_threads(threads)
    for each in found:
        all_same(each, [y, dx, dweight, *sums])
    same(dx, gradients(lambda x: fused(x, weight, cos, sin), x)[1])  # the operator's, where they want none


def test_norms_over_all_heads_are_rotated_by_the_head():
    """OLMo 2 normalises queries over heads and dimensions together."""
    x, weight, (cos, sin) = made(BATCH, TOKENS, HEADS, DIM), made(HEADS, DIM, seed=1), angles(TOKENS, 1, DIM)
    found = gradients(lambda x, w: rms_norm_rotary(x, w, cos, sin), x, weight)
    all_same(found, gradients(lambda x, w: by_steps(x, w, cos, sin), x, weight))
    shape = {"normalized_shape": (HEADS, DIM)}
    same(rms_norm_rotary(x, None, cos, sin, **shape), by_steps(x, None, cos, sin, **shape))


def test_jagged_tensors_with_angles_for_each_of_their_tokens():
    offsets = torch.tensor([0, 3, 3, 9])
    values, (cos, sin) = made(9, HEADS, DIM), angles(9, 1, DIM)
    jagged = [torch.nested.nested_tensor_from_jagged(t, offsets) for t in (values, cos, sin)]
    same(rms_norm_rotary(jagged[0], None, *jagged[1:]).values(), rms_norm_rotary(values, None, cos, sin))
    other = torch.nested.nested_tensor_from_jagged(cos, torch.tensor([0, 1, 2, 9]))
    with pytest.raises(ValueError, match="cos must be jagged as x is"):
        rms_norm_rotary(jagged[0], None, other, jagged[2])


def test_autograd_keeps_x_and_a_number_a_row():
    x, weight, (cos, sin) = made(1, 512, 8, 64).requires_grad_(), made(64).requires_grad_(), angles(512, 1, 64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = rms_norm_rotary(x, weight, cos, sin)
    given = {t.data_ptr() for t in (x, weight, cos, sin)}
    new = [t for t in kept if t.data_ptr() not in given]
    assert {t.data_ptr() for t in kept} >= given
    assert [tuple(t.shape) for t in new] == [(1, 512, 8, 1)]
    assert y.data_ptr() not in {t.data_ptr() for t in kept}


def qwen3(dtype):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=DIM, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(dtype)
    for norm in (model.model.layers[0].self_attn.q_norm, model.model.layers[0].self_attn.k_norm):
        torch.nn.init.normal_(norm.weight, 1, 0.3)
    return model


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_rounded_has_the_bits_of_qwen3_in_transformers(dtype, monkeypatch):
    """On the queries and keys of its own attention, whose norms `patch` has replaced by this library's."""
    model = qwen3(dtype)
    rmsnorm.patch(model)
    attention, module = model.model.layers[0].self_attn, sys.modules[type(model).__module__]
    theirs, seen, projected = module.apply_rotary_pos_emb, [], {}

    def watched(*arguments, **options):
        seen.append((arguments, theirs(*arguments, **options)))
        return seen[-1][1]

    monkeypatch.setattr(module, "apply_rotary_pos_emb", watched)
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).register_forward_hook(lambda m, a, y, name=name: projected.update({name: y}))
    with torch.no_grad():
        model(torch.arange(TOKENS)[None] % 64)
    ((_, _, cos, sin), expected), *_ = seen
    q, k = (projected[name].unflatten(-1, (-1, DIM)).transpose(1, 2) for name in ("q_proj", "k_proj"))
    norm = attention.q_norm
    options = {"rounding": "before_scale", "rotary_rounding": "each", "eps": norm.variance_epsilon}
    weights = norm.weight, attention.k_norm.weight
    found = qk_norm_rotary(q, k, *weights, cos.unsqueeze(1), sin.unsqueeze(1), **options)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == dtype


def test_the_projections_of_queries_and_keys_receive_gradients():
    """The gradients are those of the attention with norm and rotation apart."""
    torch.manual_seed(0)
    fused = Attention()
    apart = copy.deepcopy(fused)
    x, (cos, sin) = made(BATCH, TOKENS, 64), angles(TOKENS, 1, DIM)
    for attention, function in ((fused, rms_norm_rotary), (apart, by_steps)):
        attention(x, cos, sin, function).sum().backward()
    names = [name for name, _ in fused.named_parameters()]
    assert names == ["q_weight", "k_weight", "q.weight", "k.weight"]
    for a, b in zip(fused.parameters(), apart.parameters(), strict=True):
        assert a.grad.abs().sum() > 0
        assert bits_equal(a.grad, b.grad)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = torch.nn.Linear(64, HEADS * DIM, bias=False), torch.nn.Linear(64, HEADS * DIM, bias=False)
        self.q_weight, self.k_weight = (torch.nn.Parameter(made(DIM, seed=s)) for s in (1, 2))

    def forward(self, x, cos, sin, function):
        q = function(self.q(x).unflatten(-1, (-1, DIM)), self.q_weight, cos, sin).transpose(1, 2)
        k = function(self.k(x).unflatten(-1, (-1, DIM)), self.k_weight, cos, sin).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, x.unflatten(-1, (-1, DIM)).transpose(1, 2))


def test_the_formula_of_flux():
    """Pairs side by side, angles in float32 with a column for each of a pair, tokens before heads."""
    x, (cos, sin) = made(BATCH, TOKENS, HEADS, DIM, dtype=torch.bfloat16), angles(TOKENS, DIM // 2)
    cos, sin = (t.repeat_interleave(2, -1)[:, None] for t in (cos, sin))
    n = rms_norm(x, None).float()
    real, imaginary = n.unflatten(-1, (-1, 2)).unbind(-1)
    expected = (n * cos + torch.stack((-imaginary, real), -1).flatten(-2) * sin).bfloat16()
    assert torch.equal(rms_norm_rotary(x, None, cos, sin, interleaved=True), expected)


def test_the_module_holds_both_norms():
    module = QKNormRotary(DIM, 1e-5, weight_offset=1.0, rotary_dim=8, interleaved=True, dtype=torch.bfloat16)
    assert [name for name, _ in module.named_parameters()] == ["q_norm.weight", "k_norm.weight"]
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    q, k, (cos, sin) = made(TOKENS, HEADS, DIM), made(TOKENS, KV_HEADS, DIM, seed=1), angles(TOKENS, 1, 4)
    options = {"eps": 1e-5, "weight_offset": 1.0, "rotary_dim": 8, "interleaved": True}
    expected = qk_norm_rotary(q, k, module.q_norm.weight, module.k_norm.weight, cos, sin, **options)
    all_same(module(q, k, cos, sin), expected)
    assert repr(module).startswith("QKNormRotary(\n  rotary_dim=8, interleaved=True\n")
    for wrong in ({"rotary_dim": 3}, {"rotary_dim": 18}, {"interleaved": 1}, {"rotary_rounding": "never"}):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            QKNormRotary(DIM, **wrong)
    with pytest.raises(ValueError, match="even"):
        QKNormRotary(15)


@pytest.mark.parametrize("grad", [False, True])
def test_what_does_not_fit_is_said(grad):
    x, weight, (cos, sin) = made(TOKENS, HEADS, DIM), made(DIM).requires_grad_(grad), angles(TOKENS, 1, DIM)

    def refused(error, message, *arguments, **options):
        with pytest.raises(error, match=message):
            rms_norm_rotary(*arguments, **options)

    refused(ValueError, "cos must have 16 columns or 8", x, weight, cos[..., :5], sin[..., :5])
    refused(ValueError, "cos must have 6 columns or 3", x, weight, cos, sin, rotary_dim=6)
    refused(ValueError, "sin must have 16 columns or 8.*as cos has", x, weight, cos, sin[..., :8])
    refused(ValueError, "cos must .* broadcast", x, weight, cos[:5], sin)
    refused(ValueError, "cos must .* broadcast", x, weight, cos[None, None], sin)
    refused(TypeError, "sin must be a torch.Tensor, got NoneType", x, weight, cos, None)
    refused(TypeError, "cos must be one of", x, weight, cos.long(), sin)
    for dim in (3, 0, -2, 18, 8.0, True, "8"):
        refused(ValueError, "an even number from 2 to x.s last dimension 16", x, weight, cos, sin, rotary_dim=dim)
    refused(ValueError, "x must have an even last dimension", x[..., 1:], weight[1:], cos[..., 1:], sin[..., 1:])
    refused(TypeError, "interleaved must be True or False", x, weight, cos, sin, interleaved="no")
    refused(ValueError, "rotary_rounding must be one of 'once', 'each'", x, weight, cos, sin, rotary_rounding="twice")
    refused(ValueError, "cos must be on x's device", x, weight, cos.to("meta"), sin)
    refused(ValueError, "weight must have shape", x, weight[1:], cos, sin)
    refused(ValueError, "at least one dimension", torch.tensor(1.0), None, cos, sin)
