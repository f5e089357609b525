"""Tools that turn an equipped model into a graph: ``torch.jit.trace``, ONNX's older exporter, Core ML, ``torch.fx``."""

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import create, equip_quietly, images, tuned
from timm.models import FeatureGraphNet
from torch import Tensor, fx, nn
from torchvision.models import DenseNet
from torchvision.models.feature_extraction import create_feature_extractor

import deepsquare as ds
from deepsquare.surgery import is_spec_key
from deepsquare.surgery.techniques import TECHNIQUES

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

FOUR = "pooling+excitation+encoding+softmin"
SAME_SIZE = [
    FOUR,
    "gem+se",
    "lp+ge_theta",
    "moment3+ge_theta_plus",
    "moment4+ge_theta_minus",
    "moment5+gsop(size=8, dense=False)",
    "moment6+square(after='bn1')",
]
WIDER = [  # cannot start at the identity
    "bilinear(size=8)",
    "fisher(components=2, size=8)",
    "mpn_cov(size=8, dense=False)",
    "isqrt_cov(size=8, dense=False)",
    "compact_bilinear(size=64)",
]
CASES = [(spec, "paper") for spec in SAME_SIZE + WIDER] + [(spec, "identity") for spec in SAME_SIZE]
WITHOUT = WIDER[2:]  # ONNX and Core ML: eigh or isfinite, triu_indices or diagonal, index_add


def equipped(spec: str, init: Any = "paper", name: str = "cifar", size: int = 32) -> nn.Module:
    arguments = {} if name == "cifar" else {"num_classes": 10}
    model = equip_quietly(create(name, **arguments), spec, init=init, input_shape=(3, size, size))
    return tuned(model).eval()


def check_near(actual: Tensor, expected: Tensor) -> None:
    assert bool(expected.isfinite().all())
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5 * float(expected.detach().abs().max()))


def test_every_term_is_in_a_case() -> None:
    assert {name for spec, _ in CASES for name in TECHNIQUES if name in re.split(r"\W+", spec)} == set(TECHNIQUES)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("spec", "init"), CASES)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # checks of shapes are constants
def test_traced_by_jit(spec: str, init: str, grad: bool) -> None:
    model, x, file = equipped(spec, init), images(3, 32, seed=1), io.BytesIO()
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(model, images(2, 32))  # type: ignore[no-untyped-call]
        torch.jit.save(traced, file)
        file.seek(0)
        check_near(torch.jit.load(file)(x), model(x))  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_module_with_inserted_ones_has_a_name_of_its_own() -> None:
    """pnnx replaces the modules that have the names of torch's by its own, without what they contain."""
    traced = torch.jit.trace(equipped("pooling+excitation"), images(2, 32))  # type: ignore[no-untyped-call]
    names = [getattr(traced.layer1, "0").get_submodule(path)._c._type().qualified_name() for path in ("bn1", "bn2")]
    assert ["deepsquare" in name for name in names] == [False, True]  # the excitation is at the second


@pytest.mark.parametrize(("spec", "init"), [case for case in CASES if case[0] not in WITHOUT])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_the_older_onnx_exporter(spec: str, init: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs deepsquare[export]")
    model, x, path = equipped(spec, init), images(2, 32, seed=1), tmp_path / "model.onnx"
    torch.onnx.export(model, (images(2, 32),), path, dynamo=False, opset_version=17)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        check_near(torch.from_numpy(logits), model(x))


@pytest.mark.parametrize(("spec", "init"), [case for case in CASES if case[0] not in WITHOUT])
@pytest.mark.filterwarnings("ignore")  # coremltools warns of versions that it was not tested with
def test_core_ml(spec: str, init: str) -> None:
    """Converted only: Core ML runs on macOS."""
    coremltools = pytest.importorskip("coremltools", reason="comes with ExecuTorch, in deepsquare[export]")
    x = images(2, 64)
    traced = torch.jit.trace(equipped(spec, init, "timm/test_resnet", 64), x)  # type: ignore[no-untyped-call]
    inputs = [coremltools.TensorType("images", shape=x.shape)]
    program = coremltools.convert(traced, inputs=inputs, convert_to="milinternal")
    (output,) = program.functions["main"].outputs
    assert output.shape == (2, 10)


@pytest.mark.parametrize(("spec", "init"), CASES)
def test_traced_by_fx(spec: str, init: str) -> None:
    """The site of the poolings is the output of an ``nn.Sequential``, which ``torch.fx`` traces through."""
    model, x = equipped(spec, init), images(2, 32)
    check_near(fx.symbolic_trace(model)(x), model(x))


NETWORKS = (
    "resnet18", "shufflenet_v2_x0_5", "mobilenet_v2", "densenet", "timm/resnet10t", "timm/test_resnet",
    "timm/test_convnext", "timm/test_byobnet", "timm/test_nfnet", "timm/test_efficientnet", "timm/test_mambaout",
)  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_traced_by_fx(name: str) -> None:
    """Each with the terms that it has a site for; in float64, as squares of squares leave the range of float32."""
    x = images(2, 64).double()
    cases: list[tuple[str, Any]] = [(FOUR, "paper"), (FOUR, "identity")]
    for terms, init in (*cases, ("lp+ge_theta", "identity"), ("gem+gsop(size=8, dense=False)", "paper")):
        model = DenseNet(8, (2, 2), 16, num_classes=10) if name == "densenet" else create(name, num_classes=10)
        kinds = {site.kind for site in ds.sites(model, (3, 64, 64)).sites}
        spec = "+".join(term for term in terms.split("+") if TECHNIQUES[term.partition("(")[0]].kind in kinds)
        equip_quietly(model, spec, init=init, input_shape=(3, 64, 64))
        tuned(model).eval().double()
        check_near(fx.symbolic_trace(model)(x), model(x))


def test_a_traced_model_is_copied_and_saved() -> None:
    model, x = equipped(FOUR, name="timm/test_nfnet", size=64), images(2, 64)
    traced = fx.symbolic_trace(model)
    assert ds.functional.square_excitation in {node.target for node in traced.graph.nodes}
    with pytest.raises(ValueError, match=r"is a graph that torch\.fx traced; use the model that was traced"):
        ds.sites(traced)
    file = io.BytesIO()
    torch.save(traced, file)
    file.seek(0)
    for again in (copy.deepcopy(traced), torch.load(file, weights_only=False), fx.symbolic_trace(traced)):
        assert set(again.state_dict()) == {key for key in model.state_dict() if not is_spec_key(key)}  # of the record
        check_near(again(x), model(x))
    loss = traced.train()(x).square().sum()
    torch.autograd.backward(loss)
    assert all(p.grad is not None for name, p in model.named_parameters() if "deepsquare_" in name)


def output_of(model: nn.Module, path: str, x: Tensor) -> Tensor:
    outputs: list[Tensor] = []
    with model.get_submodule(path).register_forward_hook(lambda module, args, output: outputs.append(output)):
        model(x)
    return outputs[0]


def test_feature_extraction() -> None:
    model, x = equipped("pooling+excitation+softmin", name="resnet18", size=64), images(2, 64)
    features = create_feature_extractor(model, ["layer2", "fc"])(x)
    check_near(features["layer2"], output_of(model, "layer2", x))
    check_near(features["fc"], model(x))


def test_feature_extraction_of_timm() -> None:
    model, x = equipped("pooling+excitation+softmin", name="timm/test_byobnet", size=64), images(2, 64)
    (last,) = FeatureGraphNet(copy.deepcopy(model), (4,))(x)
    check_near(last, output_of(model, "stages", x))


def test_scripting_is_refused_in_one_line() -> None:
    model = equipped("pooling+excitation")
    with pytest.raises(
        TypeError, match=r"^torch.jit.script cannot compile an equipped model .*use torch.jit.trace\(.*$"
    ):
        torch.jit.script(model)
    torch.jit.script(ds.unequip(model))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_scripted_and_traced_models_are_refused_in_one_line() -> None:
    model = create("cifar").eval()
    for compiled in (torch.jit.script(model), torch.jit.trace(model, images(2, 32))):  # type: ignore[no-untyped-call]
        for call in (lambda m: ds.equip(m, "pooling"), ds.unequip, ds.sites, ds.fold, ds.cost):
            with pytest.raises(TypeError, match=r"^this is a \w+, whose code cannot change any more; equip the model"):
                call(compiled)
