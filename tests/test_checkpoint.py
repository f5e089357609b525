"""Checkpoints: the same model comes back from the file alone, and a bad file is refused by name."""

import contextlib
import copy
import json
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import deepsquare as ds
import deepsquare.checkpoint
from deepsquare._dry_run import DryRun
from deepsquare.checkpoint import RunInfo, read_header
from deepsquare.models import ModelConfig
from deepsquare.preprocessing import Preprocessing
from deepsquare.surgery import equip_record
from deepsquare.training.distributed import end_process_group


def images(model: nn.Module) -> Tensor:
    first = next(p for p in model.parameters() if p.is_floating_point())
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(first.dtype)


def trained(name: str, spec: str = "", **kwargs: Any) -> nn.Module:
    """A model none of whose tensors has its start value."""
    torch.manual_seed(0)
    model = ds.create_model(name, spec, **kwargs)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1 if tensor.dtype == torch.int64 else torch.randn_like(tensor) * 0.01)
    return model


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = copy.deepcopy(model).eval()(images(model))
    return out


def assert_same(loaded: nn.Module, model: nn.Module) -> None:
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert list(mine) == list(theirs)
    for key, value in mine.items():
        assert theirs[key].dtype == value.dtype, key
        assert torch.equal(theirs[key], value), key
    expected = output(model)
    assert bool(expected.isfinite().all())
    assert torch.equal(output(loaded), expected)
    assert equip_record(loaded) == equip_record(model)


def mixed(model: nn.Module) -> nn.Module:
    """Half precision but for the normalisation layers, as it is often done by hand."""
    for module in model.bfloat16().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "base": lambda: trained("vanilla_cnn"),
    "classes": lambda: trained("vanilla_cnn", "pooling+softmin", num_classes=3),
    "options": lambda: trained("vanilla_cnn", "gem(p=2.5)+softmin(scale='channel', sign=1)+square(after='layer1')"),
    "dropout": lambda: trained("vanilla_cnn", "pooling", dropout=0.3),
    "own dropout": lambda: trained("torchvision/mobilenet_v3_small", "pooling", dropout=0.4),
    "blocks": lambda: trained("resnet18", "excitation(alpha=0.5)+encoding", num_classes=3),
    "timm": lambda: trained("timm/test_resnet", "pooling+excitation", zero_init_last=False),
    "half": lambda: trained("vanilla_cnn", "softmin").half(),
    "bfloat16": lambda: trained("vanilla_cnn", "softmin").bfloat16(),
    "mixed": lambda: mixed(trained("vanilla_cnn", "softmin")),
    "folded": lambda: ds.fold(trained("vanilla_cnn", "softmin").eval()),
    "folded blocks": lambda: ds.fold(trained("resnet18", "pooling+excitation", num_classes=3).eval()),
}


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str, tmp_path: Path) -> None:
    model = CASES[case]()
    ds.save(model, tmp_path / "sub" / "model.safetensors")
    loaded = ds.load(str(tmp_path / "sub" / "model.safetensors"))
    assert_same(loaded, model)
    ratios = [[m.p for m in net.modules() if isinstance(m, nn.Dropout)] for net in (loaded, model)]
    assert ratios[0] == ratios[1]


def test_channels_last(tmp_path: Path) -> None:
    model = trained("resnet18", "pooling+excitation", num_classes=3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ds.save(model, tmp_path / "m")
    loaded = ds.load(tmp_path / "m").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert_same(loaded, model)


def test_the_file_is_enough(tmp_path: Path) -> None:
    model = trained("resnet18", "pooling+softmin", num_classes=3, dropout=0.2)
    ds.save(model, tmp_path / "model.safetensors")
    save_file({"x": images(model)}, tmp_path / "x")
    code = """
import torch, deepsquare as ds
from safetensors.torch import load_file, save_file
with torch.no_grad():
    save_file({"y": ds.load("model.safetensors").eval()(load_file("x")["x"])}, "y")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True, timeout=120)
    torch.testing.assert_close(load_file(tmp_path / "y")["y"], output(model))


def test_a_file_of_start_weights_is_not_needed_again(tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    save_file(trained("timm/test_resnet").state_dict(), start)
    model = ds.create_model("timm/test_resnet", "pooling", checkpoint_path=str(start))
    ds.save(model, tmp_path / "m")
    start.unlink()
    assert_same(ds.load(tmp_path / "m"), model)


def test_what_pretrained_weights_change_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    state = torchvision.models.GoogLeNet(aux_logits=True, init_weights=False).state_dict()
    weights = torchvision.models.GoogLeNet_Weights.IMAGENET1K_V1
    monkeypatch.setattr(type(weights), "get_state_dict", lambda *args, **kwargs: state)
    model = ds.create_model("torchvision/googlenet", "pooling", weights=weights)
    ds.save(model, tmp_path / "m")
    loaded = ds.load(tmp_path / "m")
    for net in (model, loaded):
        assert (vars(net)["transform_input"], vars(net)["aux_logits"]) == (True, False)
    assert_same(loaded, model)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.pool(self.conv(x)).flatten(1))
        return out


@pytest.mark.parametrize(
    ("spec", "dropout", "foreign", "steps"),
    [
        ("", None, False, "build the model yourself, then call"),
        ("pooling+softmin", None, True, "build the model yourself, then call"),
        ("", 0.2, False, "yourself, call deepsquare.equip(model, '', dropout=0.2), then call"),
        ("pooling+softmin", None, False, "call deepsquare.equip(model, 'pooling+softmin', dropout=None), then call"),
    ],
)
def test_a_model_of_ones_own(spec: str, dropout: float | None, foreign: bool, steps: str, tmp_path: Path) -> None:
    model, path = ds.equip(Own(), spec, dropout=dropout), tmp_path / "m"
    if foreign:
        save_file(model.state_dict(), path)
    else:
        ds.save(model, path)
    start = f"{path} holds a model that create_model did not build"
    with pytest.raises(ValueError, match=rf"{start}.*{re.escape(steps)} deepsquare\.load_weights") as caught:
        ds.load(path)
    assert "\n" not in str(caught.value)
    other = ds.equip(Own(), spec, dropout=dropout)
    assert ds.load_weights(other, path) == []
    assert_same(other, model)


def test_base_weights_into_an_equipped_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, spec = trained("resnet18", num_classes=3), "excitation(alpha=0.5)+softmin"
    ds.save(base, tmp_path / "m")
    model = ds.create_model("resnet18", spec, num_classes=3)
    new = ds.load_weights(model, tmp_path / "m")
    blocks = [f"layer{stage}.{block}.bn2.deepsquare_excitation.alpha" for stage in "1234" for block in "01"]
    assert new == [*blocks, "fc.deepsquare_softmin.root_scale"]
    assert f"{', '.join(new[:4])} and 5 more" in caplog.text
    caplog.clear()
    assert_same(ds.load(tmp_path / "m", spec), model)
    assert f"{', '.join(new[:4])} and 5 more" in caplog.text
    assert [model.state_dict()[key].item() for key in new] == [0.5] * 8 + [1.0]
    assert_same(ds.unequip(model), base)


@pytest.mark.parametrize(
    ("name", "spec", "classes", "difference"),
    [
        ("vanilla_cnn", "", 3, "fc.deepsquare_softmin.root_scale is not part of the model"),
        ("vanilla_cnn", "softmin", 10, r"fc.weight is \(3, 128\) in the file, \(10, 128\) in the model"),
        ("vanilla_cnn", "softmin(scale='channel')", 3, r"root_scale is \(1,\) in the file, \(3,\) in the model"),
        ("resnet18", "softmin", 3, "conv1.weight is missing.* more"),
    ],
)
def test_what_does_not_fit_is_named(name: str, spec: str, classes: int, difference: str, tmp_path: Path) -> None:
    ds.save(trained("vanilla_cnn", "softmin", num_classes=3), tmp_path / "m")
    target = ds.create_model(name, spec, num_classes=classes)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match=rf"{tmp_path / 'm'} does not fit.*{difference}.*vanilla_cnn.*'softmin'.*3"):
        ds.load_weights(target, tmp_path / "m")
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, 100_000, -1])
def test_a_cut_file(length: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ds.save(trained("vanilla_cnn"), path)
    path.write_bytes(path.read_bytes()[:length])
    for read in (lambda: ds.load(path), lambda: ds.load_weights(ds.vanilla_cnn(), path)):
        with pytest.raises(ValueError, match=rf"{path} is not a safetensors file, or is truncated"):
            read()


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*missing; expected a .safetensors file"):
        ds.load(tmp_path / "missing")
    with pytest.raises(IsADirectoryError, match=r"is a folder; expected a file, for a run .*model\.safetensors"):
        ds.load(tmp_path)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_file_is_refused_unopened(zipped: bool, tmp_path: Path) -> None:
    path, marker = tmp_path / "m.pth", tmp_path / "marker"
    torch.save({"fc.weight": Evil(marker)}, path, _use_new_zipfile_serialization=zipped)
    for read in (lambda: ds.load(path), lambda: ds.load_weights(ds.vanilla_cnn(), path)):
        with pytest.raises(ValueError, match=rf"{path} is a pickled file, which may run code.*safetensors"):
            read()
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the file would have done harm"


def rewrite(path: Path, header: Mapping[str, str | None] = {}, tensors: Mapping[str, Tensor] = {}) -> None:
    """Change fields of a file's header (None: leave out) and tensors."""
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **header}
    save_file({**load_file(path), **tensors}, path, {key: text for key, text in metadata.items() if text is not None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, None) for field in ("version", "kwargs", "spec", "dropout", "folded")],
        ("spec", '"soft'), ("kwargs", "[1]"), ("kwargs", "null"), ("dropout", '"much"'), ("name", "5"),
        ("version", "3"), ("preprocessing", '{"size": "large"}'), ("preprocessing", '{"std": [0, 1, 1]}'),
        ("preprocessing", "5"), ("run", '{"row": "resnet18"}'),
    ],
)  # fmt: skip
def test_a_damaged_header(field: str, value: str | None, tmp_path: Path) -> None:
    path = tmp_path / "model"
    ds.save(ds.create_model("vanilla_cnn", "softmin"), path)
    rewrite(path, {field: value})
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        ds.load(path)
    assert field in str(caught.value) or value in ('"soft', '{"std": [0, 1, 1]}')
    assert "\n" not in str(caught.value)


def test_preprocessing_and_run_are_stored(tmp_path: Path) -> None:
    preprocessing = Preprocessing(("a", "b", "c"), 64, 72, (0.4, 0.4, 0.4), (0.2, 0.3, 0.2))
    run = RunInfo("vanilla_cnn+pooling", 4, init_from="vanilla_cnn")
    ds.save(trained("vanilla_cnn", num_classes=3), tmp_path / "m", preprocessing, run=run)
    assert read_header(tmp_path / "m").preprocessing == preprocessing
    assert read_header(tmp_path / "m").run == run
    ds.save(trained("vanilla_cnn"), tmp_path / "m")
    assert read_header(tmp_path / "m").preprocessing is None
    assert read_header(tmp_path / "m").run is None


@pytest.mark.parametrize("pictures", [True, False])
def test_a_header_of_version_1(pictures: bool, tmp_path: Path) -> None:
    model, path = trained("vanilla_cnn", "pooling+softmin", num_classes=3, dropout=0.3), tmp_path / "m"
    ds.save(model, path)
    old = {"classes": ["a", "b", "c"], "size": 64, "resize": 72, "mean": [0.4, 0.4, 0.4], "std": [0.2, 0.3, 0.2]}
    header = {"version": "1", "arguments": '{"num_classes": 3}', "pictures": json.dumps(old) if pictures else None}
    rewrite(path, {**header, "kwargs": None, "preprocessing": None, "run": None})
    assert_same(ds.load(path), model)
    expected = Preprocessing(("a", "b", "c"), 64, 72, (0.4, 0.4, 0.4), (0.2, 0.3, 0.2)) if pictures else None
    assert read_header(path).preprocessing == expected
    rewrite(path, {"arguments": "[1]"})
    with pytest.raises(ValueError, match=rf"the header of {path} is damaged \(Expected `object`.*kwargs"):
        ds.load(path)


def test_a_header_cannot_fetch_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    fetched: list[object] = []
    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", lambda *args, **kw: fetched.append(1))
    ds.save(ds.create_model("torchvision/resnet18"), tmp_path / "m")
    rewrite(tmp_path / "m", {"kwargs": '{"weights": "DEFAULT"}'})
    with contextlib.suppress(Exception):  # to refuse the file or to ignore the argument are both right
        ds.load(tmp_path / "m")
    assert not fetched


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("root_scale", -0.5, "nonnegative"), ("root_scale", math.nan, "finite"), ("alpha", math.nan, "finite")],
)
def test_values_that_cannot_be(key: str, value: float, why: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    model = trained("timm/test_resnet", "excitation+softmin", zero_init_last=False)
    ds.save(model, path)
    key = next(name for name in model.state_dict() if name.endswith(key))
    rewrite(path, tensors={key: torch.tensor([value])})
    with pytest.raises(ValueError, match=rf"{path}.*{key} = \[{value}\], expected {why}"):
        ds.load(path)
    nn.init.zeros_(model.get_parameter("conv1.0.weight"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=key):
        ds.load_weights(model, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "half loaded"


def test_loading_says_nothing_of_start_values(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="γ = 0"):  # true of the new model, not of one about to get its weights
        model = trained("timm/test_resnet", "excitation")
    ds.save(model, tmp_path / "m")
    loaded = ds.load(tmp_path / "m")  # warnings are errors
    assert torch.equal(output(loaded), output(model))


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = trained("vanilla_cnn"), tmp_path / "m"
    ds.save(model, path)

    def fail(tensors: Any, filename: Any, metadata: Any) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(deepsquare.checkpoint, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        ds.save(trained("vanilla_cnn", "softmin"), path)
    assert os.listdir(tmp_path) == ["m"]
    assert_same(ds.load(path), model)


def test_a_folder_is_no_path_to_save_to(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=f"^{tmp_path} is a folder; give the path of a file"):
        ds.save(ds.vanilla_cnn(), tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_is_as_readable_as_any_file(tmp_path: Path) -> None:
    ds.save(ds.vanilla_cnn(), tmp_path / "m")
    (tmp_path / "plain").touch()
    assert (tmp_path / "m").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(("part", "spec"), [("fc", "softmin"), ("layer4", "excitation")])
def test_a_model_that_lost_a_part_is_not_saved(part: str, spec: str, tmp_path: Path) -> None:
    model = ds.create_model("resnet18", spec, num_classes=3)
    model._modules[part] = nn.Identity()  # unlike setattr, unknown to nn.Module
    with pytest.raises(ValueError, match=f"{part}.*lost its {spec}.*then equip it"):
        ds.save(model, tmp_path / "m")
    assert not os.listdir(tmp_path)


def test_kwargs_that_cannot_be_stored(tmp_path: Path) -> None:
    model = ds.create_model("torchvision/resnet18", norm_layer=nn.BatchNorm2d)
    with pytest.raises(ValueError, match=r"norm_layer.*torchvision/resnet18 cannot be stored"):
        ds.save(model, tmp_path / "m")


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    end_process_group()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what torch.compile imports
@pytest.mark.parametrize("wrapper", [AveragedModel, nn.DataParallel, DistributedDataParallel, torch.compile])
@pytest.mark.usefixtures("process_group")
def test_wrappers_are_taken_off(wrapper: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model = trained("vanilla_cnn", "softmin")
    ds.save(wrapper(model), tmp_path / "m")
    assert_same(ds.load(tmp_path / "m"), model)
    wrapped = wrapper(ds.create_model("vanilla_cnn", "softmin"))
    assert ds.load_weights(wrapped, tmp_path / "m") == []
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wrapped.parameters(), strict=True))


def test_weights_of_a_model_with_another_spec_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ds.save(ds.create_model("vanilla_cnn", "pooling"), tmp_path / "model.safetensors")  # it has no key of its own
    assert ds.load_weights(ds.create_model("vanilla_cnn", "pooling"), tmp_path / "model.safetensors") == []
    assert not caplog.text
    ds.load_weights(ds.create_model("vanilla_cnn"), tmp_path / "model.safetensors")
    assert "model.safetensors holds a model with spec 'pooling'; this one has spec ''" in caplog.text


HOSTILE: dict[str, tuple[dict[str, str | None], str]] = {
    "8,000,000 classes": ({"kwargs": '{"num_classes": 8000000}'}, "has 1032093923 values, the file 94310"),
    "10**30 classes": ({"kwargs": '{"num_classes": 1' + "0" * 30 + "}"}, "cannot be built"),
    "negative": ({"kwargs": '{"num_classes": -3}'}, "cannot be built"),
    "a string": ({"kwargs": '{"num_classes": "3"}'}, "cannot be built"),
    "digits": ({"kwargs": '{"num_classes": ' + "9" * 9000 + "}"}, "header of .* is damaged .*digits"),
    "nested": ({"kwargs": '{"a": ' + "[" * 4900 + "]" * 4900 + "}"}, "header of .* is damaged .*recursion"),
    "long": ({"kwargs": '{"a": "' + "b" * 20_000 + '"}'}, "kwargs has 20009 characters; expected at most 10000"),
    "not finite": ({"kwargs": '{"num_classes": Infinity}'}, "Infinity is no number"),
    "twice": ({"kwargs": '{"spec": "pooling", "name": "resnet18"}'}, "cannot be built"),
    "a long spec": ({"spec": '"' + "+".join(["pooling"] * 20_000) + '"'}, "spec has 160001 characters"),
    "iterations": ({"spec": '"isqrt_cov(iterations=100000000)"'}, "iterations is 100000000; expected 1 to 1000"),
    "no spec": ({"spec": '"timm/resnet152"'}, "header of .* is damaged .not a spec"),
    "no site": (
        {"kwargs": '{"num_classes": 3, "global_pool": ""}', "name": '"timm/test_resnet"'},
        "test_resnet, which cannot be built",
    ),
    "a wide module": ({"spec": '"bilinear(size=65536)"'}, "does not fit its header"),
    "a long linspace": (
        {"name": '"timm/convnext_atto"', "kwargs": '{"depths": [1, 1200000000, 1, 1]}'},
        r"depths is 1.2e\+09; expected numbers up to 10000",
    ),
    "many blocks": (
        {"name": '"timm/mobilenetv3_large_100"', "kwargs": '{"depth_multiplier": 3e5}'},
        "depth_multiplier is 300000; expected numbers up to 10000",
    ),
    "a negative number": ({"kwargs": '{"a": {"b": [[-10001]]}}'}, "b is -10001; expected numbers up to 10000"),
    "a long list": ({"kwargs": '{"layers": [' + "3, " * 100 + "3]}"}, "layers has 101 entries; expected at most 100"),
    "a giant kernel": (
        {"name": '"resnet18"', "kwargs": "{}", "spec": '"ge_theta"', "input_shape": "[3, 4700, 4700]"},
        "does not fit its header: resnet18 .* has 343320132 values, the file 94310",
    ),
    "sides": ({"input_shape": "[3, -32, 32]"}, "sides of at least 1"),
    "no sides": ({"input_shape": "[]"}, "sides of at least 1"),
    "a large side": ({"input_shape": "[3, 100000000, 100000000]"}, r"2\*\*26 values"),
    "10 dimensions": ({"input_shape": "[1,1,1,1,1,1,1,1,1,1]"}, "up to 5 sides"),
    "sides of strings": ({"input_shape": '["3", "32", "32"]'}, "Expected `int`"),
    "dropout": ({"dropout": "1e300"}, "Expected `float` <= 1"),
    "NaN": ({"dropout": "NaN"}, "NaN is no number"),
    "size": ({"preprocessing": '{"size": Infinity}'}, "Infinity is no number"),
    "a large size": ({"preprocessing": '{"size": 1000000, "resize": 1000000}'}, "expected .* ≤ 8192"),
    "a path": ({"name": '"timm/local-dir:/etc/resnet18"'}, "cannot be built: unknown library"),
    "a tag": ({"name": '"timm/test_resnet.hf-hub:a/b"'}, "cannot be built"),
    "a long name": ({"name": '"' + "x" * 20_000 + '"'}, "name has 20002 characters"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_gets_one_line_and_no_memory(case: str, tmp_path: Path) -> None:
    changes, message = HOSTILE[case]
    path = tmp_path / "m"
    ds.save(ds.create_model("vanilla_cnn", "pooling", num_classes=3), path)
    rewrite(path, changes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message) as caught:
        ds.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


@pytest.mark.parametrize(
    "kwargs",
    [
        {"layers": [1000000, 1, 1, 1]}, {"layers": None}, {"act_layer": "nothing"}, {"norm_layer": 5},
        {"block_args": [1]}, {"output_stride": 7}, {"features_only": True, "out_indices": [99]}, {"pruned": True},
        {"checkpoint_path": "/etc/passwd"}, {"channels": [10**15, 1, 1, 1]}, {"drop_path_rate": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_kwargs_that_timm_does_not_check(kwargs: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "m"
    ds.save(ds.create_model("timm/test_resnet", "pooling"), path)
    rewrite(path, {"kwargs": json.dumps(kwargs)})
    with contextlib.suppress(ValueError):  # to refuse the file or to ignore an argument are both right
        ds.load(path)


@pytest.mark.parametrize(
    "case",
    [
        {"name": '"resnet18"'}, {"spec": '"pooling+square(after=\'nothing\')"'}, {"kwargs": '{"num_classes": 4}'},
        {"name": '"vanilla"'},
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_built_before_the_shapes_of_the_file_fit(
    case: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m"
    ds.save(ds.create_model("vanilla_cnn", "pooling", num_classes=3), path)
    rewrite(path, case)
    monkeypatch.setattr(deepsquare.checkpoint, "create_model", lambda *args, **kwargs: pytest.fail("it is built"))
    with pytest.raises(ValueError, match=r"does not fit|cannot be built"):
        ds.load(path)


LARGE: dict[str, Callable[[], object]] = {
    "a factory": lambda: torch.linspace(0, 1, 10**12, device="cpu"),
    "a default": lambda: torch.arange(10**12),
    "pairs": lambda: torch.arange(4096)[:, None] - torch.arange(4096),
    "copies": lambda: torch.tensor([1.0]).repeat(10**12),
    "many": lambda: [torch.zeros(2**20, device="cpu") for _ in range(17)],
}


@pytest.mark.parametrize("case", LARGE)
def test_a_dry_run_computes_few_values(case: str) -> None:
    with torch.device("meta"), DryRun(1000), pytest.raises(ValueError, match="more than 16777216 values computed"):
        LARGE[case]()


def test_a_dry_run_computes_what_a_builder_reads() -> None:
    with torch.device("meta"), DryRun(1000):
        widths = (torch.arange(4) * 2.5 + torch.linspace(0, 3, 4, device="cpu")).round()
        assert widths.tolist() == [0, 4, 7, 10]
        assert [float(part.sum()) for part in torch.split(widths, [1, 3])] == [0, 21]
        assert torch.zeros(10**12).is_meta
    with torch.device("meta"), DryRun(10), pytest.raises(ValueError, match="more than 10 calls of torch"):
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))


@pytest.mark.parametrize("kwargs", [{"a": 10_001}, {"a": [1, {"b": 1e9}]}])
def test_what_could_not_be_read_again_is_not_saved(kwargs: dict[str, Any], tmp_path: Path) -> None:
    model = ds.vanilla_cnn()
    model.deepsquare_config = ModelConfig("vanilla_cnn", kwargs)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="expected numbers up to 10000 in kwargs"):
        ds.save(model, tmp_path / "m")
    assert not os.listdir(tmp_path)


def test_what_a_builder_does_not_check_is_named() -> None:
    with pytest.raises(ValueError, match=r"timm's timm/test_resnet could not be built with \{'output_stride': 7\}: "):
        ds.create_model("timm/test_resnet", output_stride=7)


def test_a_regnet_computes_its_widths(tmp_path: Path) -> None:
    model = trained("torchvision/regnet_x_400mf", "pooling", num_classes=3)
    ds.save(model, tmp_path / "m")
    assert_same(ds.load(tmp_path / "m"), model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_weights_that_are_no_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    model, path = trained("vanilla_cnn"), tmp_path / "m"
    ds.save(model, path)
    rewrite(path, tensors={"layer2.conv.weight": model.state_dict()["layer2.conv.weight"].to(dtype)})
    for read in (lambda: ds.load(path), lambda: ds.load_weights(ds.vanilla_cnn(), path)):
        with pytest.raises(ValueError, match=rf"layer2.conv.weight is {dtype} in the file, torch.float32 in the model"):
            read()


@pytest.mark.parametrize("key", ["layer1.conv.weight", "layer3.conv.weight", "layer2.bn.weight", "fc.bias"])
@pytest.mark.parametrize("case", ["classes", "bfloat16", "mixed"])
def test_one_weight_of_another_type(key: str, case: str, tmp_path: Path) -> None:
    model, path = CASES[case](), tmp_path / "m"
    ds.save(model, path)
    value = model.state_dict()[key]
    dtype = torch.float64 if value.dtype == torch.float32 else torch.float16
    rewrite(path, tensors={key: value.to(dtype)})
    with pytest.raises(ValueError, match=rf"{path} has tensors of other types, such as {key} of {dtype}.*load_weights"):
        ds.load(path)
    other = ds.create_model("vanilla_cnn", equip_record(model).spec, num_classes=len(value) if "fc" in key else 10)  # type: ignore[union-attr]
    if case != "classes" or "fc" in key:
        ds.load_weights(other, path)
        assert {value.dtype for value in other.parameters()} == {torch.float32}
