"""What almost is an RMSNorm is refused with its reason, and what is one in spite of its looks is replaced."""

import copy
import functools

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.utils import prune

from rmsnorm import identify, patch, unpatch
from rmsnorm.patching.identifying import examine
from rmsnorm.patching.specimen import NotRMSNorm
from tests.wild import exact
from tests.wild.adversaries import ACCEPTED, ONE_NUMBER, REFUSED, WIDTH, Base, OneNumber, OneNumberInABuffer


def reason(module):
    with pytest.raises(NotRMSNorm) as refused:
        examine(module)
    return str(refused.value)


def left(model):
    return {entry.name: entry.reason for entry in patch(model).left}


def rows():
    return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_rms_norm_in_spite_of_its_looks_is_replaced(name):
    make, said = ACCEPTED[name]
    module = make()
    convention = identify(module)
    assert convention is not None
    assert str(convention).endswith(said)
    assert len(patch(module).replaced) == 1
    weight = getattr(module, convention.weight)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = rows().to(dtype)
        got, own = module(x).detach(), type(module)._rmsnorm_original.forward(module, x).detach()
        correct = exact.forward(convention, x.double(), weight.detach().double())
        assert got.dtype == own.dtype
        assert exact.error(got, correct) <= max(exact.error(own, correct), 3 * torch.finfo(got.dtype).eps / 2)


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_what_almost_is_one_is_refused_and_left_as_it_was(cls):
    module = cls()
    before = {key: t.clone() for key, t in module.state_dict().items()}
    assert REFUSED[cls] in reason(module)
    assert identify(module) is None
    assert not patch(module).replaced
    assert type(module) is cls
    assert all(torch.equal(t, before[key]) for key, t in module.state_dict().items())


@pytest.mark.parametrize("kind", [OneNumber, OneNumberInABuffer])
@pytest.mark.parametrize("name", ONE_NUMBER)
def test_a_number_that_does_nothing_yet_is_noticed(kind, name):
    assert reason(kind(*ONE_NUMBER[name])) == "its result depends on number, which is no weight of a row"


def test_an_eps_that_changes_after_patch_is_not_ignored():
    module = Base(eps=1e-6)
    patch(module)
    x = rows() * 1e-3
    module.eps = 1e-2
    assert torch.equal(module(x), Base(eps=1e-2)(x))
    module.eps = 1e-6
    assert not torch.equal(module(x), Base(eps=1e-2)(x))
    unpatch(module)
    module.eps = 1e-2
    patch(module)
    torch.testing.assert_close(module(x), Base(eps=1e-2)(x))
    none = nn.RMSNorm(WIDTH)
    patch(none)
    none.eps = 1e-2
    assert torch.equal(none(x), nn.RMSNorm(WIDTH, eps=1e-2)(x))


def test_weights_that_are_made_of_others_are_refused_with_what_to_do():
    parametrized = nn.utils.parametrizations.weight_norm(Base(), dim=None)
    assert reason(parametrized) == "its weight is parametrized: patch before, or remove that"
    assert set(left(nn.Sequential(parametrized))) <= {"0"}
    before = Base()
    patch(before)
    nn.utils.parametrize.register_parametrization(before, "weight", nn.Softplus())
    after = nn.utils.parametrize.register_parametrization(Base(), "weight", nn.Softplus())
    torch.testing.assert_close(before(rows()), after(rows()))


@pytest.mark.filterwarnings("ignore")
def test_weights_that_a_hook_makes_are_refused():
    assert "depends on weight, which is neither" in reason(nn.utils.weight_norm(Base(), dim=None))
    assert "depends on weight, which is neither" in reason(prune.random_unstructured(Base(), "weight", 0.5))


class Scriptable(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, rows())], ids=["script", "trace"])
def test_torchscript_is_left_alone(compiled):
    model = nn.Sequential(compiled(Scriptable()), nn.RMSNorm(WIDTH))
    assert [entry.name for entry in patch(model).replaced] == ["1"]
    assert "TorchScript" in reason(model[0])


def test_a_traced_graph_is_run_like_any_module():
    traced = torch.fx.symbolic_trace(Scriptable())
    assert identify(traced) is not None
    assert len(patch(traced).replaced) == 1
    torch.testing.assert_close(traced(rows()), Scriptable()(rows()))


def test_a_model_that_was_compiled_and_run_before_is_compiled_again():
    torch._dynamo.reset()
    model = nn.Sequential(Base(), nn.Linear(WIDTH, WIDTH))
    compiled = torch.compile(model, backend="eager")
    own = compiled(rows())
    assert [entry.name for entry in patch(compiled).replaced] == ["_orig_mod.0"]
    assert torch.equal(compiled(rows()), model(rows()))
    unpatch(compiled)
    assert torch.equal(compiled(rows()), own)


def test_a_forward_on_the_instance_is_refused_with_what_to_do():
    module = Base()
    module.forward = functools.partial(Base.forward, module)
    assert "patch before" in reason(module)


@pytest.mark.wild("accelerate")
def test_accelerates_hooks_are_added_after_patch():
    import accelerate

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH))
    own = model(rows())
    late = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert "as accelerate's hooks do" in left(late)["1"]
    patch(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    torch.testing.assert_close(model(rows()), own)


def test_a_module_without_a_shape_yet():
    class Lazy(nn.modules.lazy.LazyModuleMixin, Base):
        def __init__(self):
            super().__init__()
            self.weight = nn.UninitializedParameter()

        def initialize_parameters(self, x):
            with torch.no_grad():
                self.weight.materialize((x.shape[-1],))
                self.weight.fill_(1.0)

    model = nn.Sequential(Lazy())
    assert reason(model[0]) == "its tensors have no shape yet: run the model once before"
    assert not patch(model).replaced
    model(rows())
    assert len(patch(model).replaced) == 1


def test_a_number_without_a_value_on_the_meta_device():
    class InABuffer(Base):
        def __init__(self):
            super().__init__()
            del self.eps
            self.register_buffer("eps", torch.tensor(1e-5))

    assert identify(InABuffer()).eps == 1e-5
    with torch.device("meta"):
        model = nn.Sequential(InABuffer())
    assert reason(model[0]) == "its eps has no value on the meta device: patch once it has one"
    model.load_state_dict(nn.Sequential(InABuffer()).state_dict(), assign=True)
    assert patch(model).replaced[0].convention.eps == 1e-5


def test_modules_of_one_class_whose_buffers_differ_are_told_apart():
    class InABuffer(Base):
        def __init__(self, eps):
            super().__init__()
            del self.eps
            self.register_buffer("eps", torch.tensor(eps))

    report = patch(nn.Sequential(InABuffer(1e-5), InABuffer(1e-3)))
    assert [entry.convention.eps for entry in report.replaced] == [1e-5, 1e-3]


def test_a_weight_that_another_module_has_too_stays_shared():
    model = nn.Sequential(Base(), nn.LayerNorm(WIDTH, bias=False))
    model[1].weight = model[0].weight
    assert [entry.name for entry in patch(model).replaced] == ["0"]
    assert model[1].weight is model[0].weight


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", ["patch", "fsdp"])
def test_fully_sharded_modules(one_process, first):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Base())
    plain = copy.deepcopy(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    steps = {"patch": lambda: patch(model), "fsdp": lambda: [fully_shard(m, mesh=mesh) for m in (*model, model)]}
    if first == "fsdp":
        steps = dict(reversed(steps.items()))
    for step in steps.values():
        step()
    for m in (model, plain):
        m(rows()).square().sum().backward()
    torch.testing.assert_close(model[1].weight.grad.full_tensor(), plain[1].weight.grad, rtol=1e-4, atol=1e-5)
    patch(plain)
    assert torch.equal(model(rows()), plain(rows()))


@pytest.mark.filterwarnings("ignore")
def test_the_older_fully_sharded_modules_are_refused_inside_and_fine_around(one_process):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Base())
    wrapped = FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu"))
    assert left(wrapped) == {
        "_fsdp_wrapped_module.1": "its tensors are part of a flat parameter (FullyShardedDataParallel): patch before"
        " wrapping"
    }
    patch(model)
    own = model(rows())
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    assert torch.equal(wrapped(rows()), own)


@pytest.mark.parametrize(
    "setting",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["inference mode", "no grad", "on meta", "autocast"],
)
def test_what_is_found_does_not_depend_on_the_callers_settings(setting):
    module = Base()
    wanted = identify(module)
    with setting():
        found = identify(module)
        assert len(patch(module).replaced) == 1
    assert found == wanted
    assert found.evidence == wanted.evidence


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_is_found_does_not_depend_on_the_default_dtype(dtype):
    module = Base()
    wanted = identify(module)
    torch.set_default_dtype(dtype)
    try:
        assert identify(module).evidence == wanted.evidence
        assert len(patch(module).replaced) == 1
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
