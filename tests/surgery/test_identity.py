"""``init="identity"`` and ``init="anneal"``: techniques that start as the base model."""

import copy
from pathlib import Path

import pytest
import torch
from helpers.models import copied_state, create, dead, images, same_state, step
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import deepsquare as ds
from deepsquare import kernels
from deepsquare.checkpoint import load_pretrained, read_header
from deepsquare.surgery import TECHNIQUES
from deepsquare.surgery.insertion import beta_of

WIDENING = {"mpn_cov", "isqrt_cov", "bilinear", "compact_bilinear", "fisher"}  # they return more values than an average
KEEP_SHAPE = sorted(set(TECHNIQUES) - WIDENING)
MODELS = ["resnet18", "shufflenet_v2_x0_5", "timm/test_resnet", "timm/test_convnext", "mobilenet_v2"]


def spec_of(model: nn.Module, term: str) -> str:
    if term != "square":
        return term
    return f"square(after='{ds.sites(model).of_kind('branch_end')[0].path}')"


def with_random_gammas(model: nn.Module) -> nn.Module:
    """γ and bias of every normalization drawn at random (many networks start at γ = 0), so that squares stay finite."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            nn.init.uniform_(module.weight, 0.2, 0.6, generator=generator)
            nn.init.uniform_(module.bias, -0.2, 0.2, generator=generator)
    return model


def pairs() -> list[tuple[str, str]]:
    """Every term on ResNet18; the others on the four terms of the paper."""
    paper = ["pooling", "softmin", "excitation", "encoding", "pooling+softmin+excitation+encoding"]
    return [(MODELS[0], term) for term in KEEP_SHAPE] + [(name, term) for name in MODELS for term in paper]


@pytest.mark.parametrize(("name", "term"), sorted(set(pairs())))
def test_starts_as_the_base_model_and_every_parameter_learns(name: str, term: str) -> None:
    base = with_random_gammas(create(name, num_classes=5)).eval()
    model = copy.deepcopy(base)
    spec = spec_of(model, term)
    ds.equip(model, spec, init="identity", input_shape=(3, 64, 64))  # GE-θ is built for one size
    assert same_state(base, {key: value for key, value in model.state_dict().items() if "deepsquare_" not in key})
    x = images(4)
    with torch.no_grad():
        expected = base(x)
        assert float((model(x) - expected).abs().max() / expected.abs().max()) <= 1e-6

    own = {key: p for key, p in model.named_parameters() if "deepsquare_" in key}
    betas = {key for key in own if key.endswith(".beta")}
    assert betas
    assert all(own[key].shape == (1,) and not own[key].any() for key in betas)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gradients = gradients_of(model, x)
    assert not [key for key in dead(gradients) if key in betas]
    optimizer.step()
    gradients = gradients_of(model, x)
    inner = {key: gradients[key] for key in own if key not in betas and key in gradients}
    assert not dead(inner)


def gradients_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """As ``step``, for a model whose output in training is its logits, and others that nothing reads."""
    model.zero_grad()
    model.eval()  # the auxiliary classifiers and dropout are off
    torch.autograd.backward(F.cross_entropy(model(x), torch.arange(len(x)) % 5))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("term", ["pooling", "softmin", "excitation", "encoding", "se", "gem", "moment3"])
def test_annealing_ends_at_the_papers_module(term: str) -> None:
    base = with_random_gammas(create("resnet18", num_classes=5)).eval()
    torch.manual_seed(3)
    paper = ds.equip(copy.deepcopy(base), term).eval()
    torch.manual_seed(3)
    model = ds.equip(copy.deepcopy(base), term, init="anneal").eval()
    x = images(3)
    with torch.no_grad():
        torch.testing.assert_close(model(x), base(x), rtol=1e-6, atol=1e-6)
        ds.set_beta(model, 0.5)
        half = model(x)
        ds.set_beta(model, 1)
        torch.testing.assert_close(model(x), paper(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(half, base(x), rtol=1e-4)
    assert not torch.allclose(half, paper(x), rtol=1e-4)
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in paper.named_parameters()]
    # Folded, an annealed model is the paper's: no blend is left.
    folded = ds.fold(model)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), paper(x), rtol=1e-4, atol=1e-4)
    assert all(beta_of(module) is None for module in folded.modules())


@pytest.mark.parametrize("spec", ["pooling+softmin(scale='channel')+excitation+encoding", "gem+se"])
@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5"])
def test_a_blend_is_folded_compiled_exported_copied_and_saved(name: str, spec: str, tmp_path: Path) -> None:
    model = ds.create_model(name, spec, init="identity", num_classes=5).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".beta"):
                parameter.fill_(0.3)
    x = images(3)
    with torch.no_grad():
        expected = model(x)
        with kernels.without_kernels():
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ds.fold(model)(x), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(copy.deepcopy(model)(x), expected)
        program = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-4)
    ds.save(model, tmp_path / "model.safetensors")
    assert read_header(tmp_path / "model.safetensors").init == "identity"
    loaded = ds.load(tmp_path / "model.safetensors").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what torch.compile imports
def test_compiled_without_a_graph_break() -> None:
    base = with_random_gammas(create("timm/test_resnet", num_classes=5)).eval()
    model = ds.equip(copy.deepcopy(base), "pooling+softmin+excitation+encoding", init="identity")
    x = images(3)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), base(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_it_is_the_base_too(dtype: torch.dtype) -> None:
    base = with_random_gammas(create("resnet18", num_classes=5)).eval().to(dtype)
    model = ds.equip(copy.deepcopy(base), "pooling+softmin+excitation+encoding", init="identity")
    assert all(p.dtype == dtype for p in model.parameters())
    x = images(2).to(dtype)
    with torch.no_grad():
        # The mean is taken in float32 instead of in steps of the half type, and rounded once.
        torch.testing.assert_close(model(x), base(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("term", ["encoding", "pooling", "softmin", "moment6", "excitation"])
@pytest.mark.parametrize("use_kernels", [True, False])
def test_at_zero_an_overflowing_square_is_bypassed(term: str, use_kernels: bool) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.inner = (
                nn.Conv2d(3, 4, 3, padding=1),
                nn.Identity(),
                nn.Conv2d(4, 4, 3, padding=1),
            )
            self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x) * 1e25
            x = x + self.norm(self.inner(x).relu())
            logits: Tensor = self.fc(self.pool(x).flatten(1))
            return logits

    torch.manual_seed(0)
    base = Large()
    model = ds.equip(copy.deepcopy(base), term, init="identity", input_shape=(3, 16, 16))
    x = images(2, 16)
    if use_kernels:
        found = model(x)
    else:
        with kernels.without_kernels():
            found = model(x)
    torch.testing.assert_close(found, base(x), rtol=1e-5, atol=0)
    if term not in ("softmin", "moment6"):  # whose own backward pass multiplies 0 by the overflowed power
        torch.autograd.backward((found / 1e25).sum())
        named = [(key, p.grad) for key, p in model.named_parameters() if "beta" not in key and p.grad is not None]
        assert named
        assert not [key for key, grad in named if not torch.isfinite(grad).all()]


def test_a_zero_gamma_is_kept_and_the_branch_still_learns() -> None:
    base = create("resnet18", num_classes=5, zero_init_residual=True)
    model = ds.equip(copy.deepcopy(base), "excitation", init="identity")  # no warning either
    assert not any(bool(block.bn2.weight.any()) for block in model.layer1)  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = images(4)
    for _ in range(2):
        gradients = step(model, x)
        optimizer.step()
    gradients = step(model, x)
    assert not [key for key in dead(gradients) if "bn2" in key]


def test_unequip_returns_the_base() -> None:
    model = create("resnet18", num_classes=5)
    before = copied_state(model)
    ds.unequip(ds.equip(model, "pooling+excitation+softmin", init="identity"))
    assert same_state(model, before)


@pytest.mark.parametrize("term", sorted(WIDENING))
def test_a_term_that_changes_the_shape_is_refused(term: str) -> None:
    model = create("resnet18", num_classes=5)
    before = copied_state(model)
    with pytest.raises(ValueError, match=rf"the term {term}.* cannot start at the identity .*init='identity'.*; equip"):
        ds.equip(model, term, init="identity")
    assert same_state(model, before)


def test_refusals() -> None:
    model = create("resnet18", num_classes=5)
    with pytest.raises(ValueError, match=r"init is 'zero'; expected one of 'paper', 'identity', 'anneal'"):
        ds.equip(model, "pooling", init="zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not equipped; set_beta is for"):
        ds.set_beta(model, 0.5)
    ds.equip(model, "pooling", init="identity")
    with pytest.raises(ValueError, match="equipped with init='identity'; set_beta is for"):
        ds.set_beta(model, 0.5)
    with pytest.raises(ValueError, match=r"already equipped with 'pooling' .*init='identity'.*call unequip"):
        ds.equip(model, "pooling")
    annealed = ds.equip(create("resnet18", num_classes=5), "pooling", init="anneal")
    for value in (-0.1, 1.1, float("nan"), "0.5", None):
        with pytest.raises(ValueError, match=r"beta is .*; expected a number from 0 to 1"):
            ds.set_beta(annealed, value)  # type: ignore[arg-type]


def test_weights_of_the_base_start_at_the_identity(tmp_path: Path) -> None:
    base = with_random_gammas(create("resnet18", num_classes=5)).eval()
    ds.save(base, tmp_path / "base.safetensors")
    model = ds.create_model("resnet18", "excitation", init="identity", num_classes=5).eval()
    missing = ds.load_weights(model, tmp_path / "base.safetensors")
    assert {key.rpartition(".")[2] for key in missing} == {"alpha", "beta"}
    with torch.no_grad():
        torch.testing.assert_close(model(images()), base(images()), rtol=1e-6, atol=1e-6)


def test_warning_names_the_other_start() -> None:
    model = create("resnet18", zero_init_residual=True)
    with pytest.warns(UserWarning, match="init='identity'"):
        ds.equip(model, "excitation")


@pytest.mark.parametrize(
    "spec", ["pooling", "softmin", "excitation", "encoding", "se", "gem", "pooling+softmin+excitation"]
)
def test_an_annealed_model_is_folded_and_saved_as_the_papers(spec: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ds.create_model("vanilla_cnn", spec, init="anneal") if spec in ("pooling", "softmin", "gem") else None
    model = (model or ds.create_model("resnet18", spec, init="anneal", num_classes=5)).eval()
    ds.set_beta(with_random_gammas(model), 1)
    folded, x = ds.fold(model), images(2, 32)
    ds.save(folded, tmp_path / "folded")
    assert read_header(tmp_path / "folded").init == "paper"
    with torch.no_grad():
        expected = folded(x)
        assert torch.equal(ds.load(tmp_path / "folded")(x), expected)
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="equipped with init='paper'; set_beta is for"):
        ds.set_beta(folded, 0)
    assert ds.load_weights(ds.fold(model), tmp_path / "folded") == []


def test_a_folded_file_must_have_every_tensor(tmp_path: Path) -> None:
    folded = ds.fold(ds.create_model("resnet18", "excitation", num_classes=5).eval())
    ds.save(folded, tmp_path / "folded")
    tensors = load_file(tmp_path / "folded")
    with safe_open(tmp_path / "folded", framework="pt") as file:
        metadata = file.metadata()
    del tensors["layer1.0.bn2.deepsquare_excitation.alpha"]
    save_file(tensors, tmp_path / "cut", metadata)
    with pytest.raises(ValueError, match=r"layer1\.0\.bn2\.deepsquare_excitation\.alpha is missing"):
        ds.load(tmp_path / "cut")


@pytest.mark.parametrize("form", ["deepsquare", "state_dict"])
def test_weights_of_the_papers_start_keep_their_modules(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    paper = ds.create_model("vanilla_cnn", "pooling+softmin").eval()
    path = tmp_path / "paper"
    if form == "deepsquare":
        ds.save(paper, path)
    else:
        torch.save(paper.state_dict(), path)
    x = images(2, 32)
    model = ds.create_model("vanilla_cnn", "pooling+softmin", init="identity").eval()
    load_pretrained(model, path)
    with torch.no_grad():
        torch.testing.assert_close(model(x), paper(x), rtol=1e-5, atol=1e-6)
    assert [float(p.detach()) for key, p in model.named_parameters() if key.endswith(".beta")] == [1.0, 1.0]
    annealed = ds.create_model("vanilla_cnn", "pooling+softmin", init="anneal")
    with pytest.raises(ValueError, match=r"was trained with its modules as the paper's .*'identity'"):
        load_pretrained(annealed, path)
