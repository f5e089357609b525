"""The blocks of docs/training.md run in the trainers of other packages, and train as a plain loop does."""

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import deepsquare as ds

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class Images(Dataset[tuple[Tensor, int]]):
    """One batch of images: Hugging Face's Trainer takes eight at once, in an order of its own."""

    def __init__(self) -> None:
        self.images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 3


def trained_by_a_plain_loop(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    named = dict(model.train().named_parameters())
    momentum = {name: torch.zeros_like(value) for name, value in named.items()}
    for _ in range(2):
        loss = F.cross_entropy(model(images), labels)
        gradients = torch.autograd.grad(loss, list(named.values()))
        with torch.no_grad():
            for (name, value), gradient in zip(named.items(), gradients, strict=True):
                decay = 1e-4 if name.endswith(("conv.weight", "fc.weight")) else 0
                momentum[name] = 0.9 * momentum[name] + gradient + decay * value
                value.sub_(0.1 * momentum[name])
    return model.state_dict()


@pytest.mark.filterwarnings("ignore")  # of other packages: a deprecation of theirs is no error of ours
@pytest.mark.parametrize("package", ["lightning", "transformers", "accelerate"])
def test_the_block_trains_as_a_plain_loop(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in {package, "accelerate"} if package == "transformers" else {package}:
        pytest.importorskip(needed, reason=f"{needed} is not installed, which is only needed to run this block")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = ds.create_model("vanilla_cnn", "pooling+softmin", init="identity", num_classes=3)
    loader = DataLoader(Images(), batch_size=8)
    expected = trained_by_a_plain_loop(copy.deepcopy(model), next(iter(loader)))
    (block,) = (block for block in BLOCKS if re.search(rf"^(import|from) {package}\b", block, re.MULTILINE))
    exec(compile(block, package, "exec"), {"__name__": "block", "model": model, "dataset": Images(), "loader": loader})
    weights = load_file("model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, msg=f"{name}: {weights[name]}, {value}", rtol=1e-4, atol=1e-6)
    assert weights["fc.deepsquare_softmin.beta"] != 0
