"""Models by name: torchvision's and timm's sized to the data, and faults in one line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from hpo import Run
from hpo.errors import DataError, InputError
from hpo.train import (
    MLP,
    SGD,
    CifarResNet18,
    Recipe,
    ResNet9,
    SimpleCNN,
    TimmModel,
    TorchvisionModel,
    ViT,
    model,
    tensors,
)
from hpo.train.checkpoint import rebuild
from hpo.train.loop import Trainer
from hpo.train.recipe import describe

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 1, 32, 32)).astype("float32"), np.arange(12) % 3


def test_a_name_gives_the_model_with_its_fields() -> None:
    assert model("mlp", hidden=3) == MLP(hidden=3)
    assert model("simple_cnn") == SimpleCNN()
    assert model("resnet9", norm="group") == ResNet9(norm="group")
    assert model("cifar_resnet18", width=8) == CifarResNet18(width=8)
    assert model("vit", n_layers=2) == ViT(n_layers=2)
    assert model("torchvision:resnet18", pretrained=True) == TorchvisionModel(
        "resnet18", pretrained=True)


def test_torchvision_s_resnet18_has_its_published_size() -> None:
    net = TorchvisionModel("resnet18").make((3, 64, 64), 1000)
    assert sum(value.numel() for value in net.parameters()) == 11_689_512


@pytest.mark.parametrize(("name", "shape", "fields"), [
    ("resnet18", (1, 32, 32), {}), ("resnet18", (5, 40, 24), {}),
    ("mobilenet_v3_small", (2, 32, 32), {"dropout": 0.3}), ("squeezenet1_1", (1, 32, 32), {}),
    ("shufflenet_v2_x0_5", (3, 32, 32), {}), ("efficientnet_b0", (1, 32, 32), {}),
    ("googlenet", (1, 32, 32), {})])
def test_a_torchvision_model_fits_the_data_and_trains_a_step(
    name: str, shape: tuple[int, ...], fields: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    net = TorchvisionModel(name, **fields).make(shape, 3)
    assert net.training
    scores = net(torch.randn(2, *shape))
    assert scores.shape == (2, 3)
    nn.functional.cross_entropy(scores, torch.tensor([0, 2])).backward()
    assert all(bool(value.grad.isfinite().all()) for value in net.parameters()
               if value.grad is not None)


def trained(spec: Any) -> Trainer:
    recipe = Recipe(data=tensors(X, Y, val=(X, Y)), model=spec, optimizer=SGD(lr=0.01),
                    batch_size=6)
    trainer = Trainer(recipe, Run(epochs=1, seed=0, device="cpu", dir=Path(".")))
    (epoch,) = trainer.epochs()
    assert np.isfinite(epoch["train_loss"])
    return trainer


def assert_made_again(trainer: Trainer) -> None:
    again = rebuild({"recipe": json.loads(json.dumps(describe(trainer.recipe))),
                     "image_shape": [1, 32, 32], "n_classes": 3,
                     "model": trainer.model.state_dict()})
    # The trainer's layout, which sums in another order.
    again = again.to(memory_format=torch.channels_last)
    with torch.no_grad():
        inputs = torch.from_numpy(X)
        assert torch.equal(again(inputs), trainer.model.eval()(inputs))


def test_a_trained_torchvision_model_is_made_again_from_its_description() -> None:
    assert_made_again(trained(TorchvisionModel("shufflenet_v2_x0_5", init="kaiming")))


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Put weights of 1000 classes where torchvision has those that it has downloaded."""
    from torchvision.models import ShuffleNet_V2_X0_5_Weights, shufflenet_v2_x0_5

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights = shufflenet_v2_x0_5().state_dict()
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(weights, folder / Path(ShuffleNet_V2_X0_5_Weights.DEFAULT.url).name)
    return weights


@pytest.mark.parametrize(("channels", "n_classes"), [(3, 1000), (3, 5), (1, 5), (4, 5)])
def test_pretrained_weights_are_all_taken_but_those_of_another_head(
    published: dict[str, torch.Tensor], channels: int, n_classes: int
) -> None:
    spec = TorchvisionModel("shufflenet_v2_x0_5", pretrained=True)
    net = spec.make((channels, 32, 32), n_classes)
    for name, value in net.state_dict().items():
        if name.startswith("fc.") and n_classes != 1000:
            assert len(value) == n_classes
        elif name == "conv1.0.weight" and channels != 3:
            mean = published[name].double().mean(1, keepdim=True) * 3 / channels
            torch.testing.assert_close(value.double(), mean.expand_as(value), rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(value, published[name]), name


def test_a_grey_image_gives_what_it_gave_in_three_channels(
    published: dict[str, torch.Tensor]
) -> None:
    spec = TorchvisionModel("shufflenet_v2_x0_5", pretrained=True)
    x = torch.randn(2, 1, 32, 32)
    grey, colour = (spec.make((n, 32, 32), 1000).eval() for n in (1, 3))
    torch.testing.assert_close(grey(x), colour(x.expand(2, 3, 32, 32)), rtol=1e-4, atol=1e-5)


def test_a_pretrained_model_is_made_again_without_its_download(
    published: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = trained(TorchvisionModel("shufflenet_v2_x0_5", pretrained=True))
    assert describe(trainer.recipe)["model"]["pretrained"] is True
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert_made_again(trainer)


def test_weights_that_cannot_be_downloaded_are_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    # Port 9 discards: nobody listens.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(DataError) as caught:
        TorchvisionModel("resnet18", pretrained=True).make((3, 32, 32), 5)
    assert "cannot be downloaded from https://" in str(caught.value)
    assert f"{tmp_path}/hub/checkpoints" in str(caught.value) and "\n" not in str(caught.value)


def test_numpy_values_and_fields_are_plain_data_in_the_description() -> None:
    rate: Any = np.float64(0.5)
    spec = TorchvisionModel("vgg11", dropout=rate)
    assert spec.describe() == {"type": "TorchvisionModel", "name": "vgg11", "pretrained": False,
                               "init": "default", "dropout": 0.5}
    assert type(spec.describe()["dropout"]) is float
    assert spec == TorchvisionModel("vgg11", dropout=0.5) != TorchvisionModel("vgg11")


WRONG: Any = {"name": 3, "flag": "yes", "norm": nn.BatchNorm2d}


@pytest.mark.parametrize(("make", "told"), [
    (lambda: model("resnet8"), "model 'resnet8': accepted are mlp, simple_cnn, resnet9, "
     "cifar_resnet18, vit, speed_net, torchvision:NAME, timm:NAME; did you mean 'resnet9'?"),
    (lambda: model("torchvision:"), "model 'torchvision:': accepted are"),
    (lambda: model("mlp", n_layer=3), "model 'mlp': has no field 'n_layer'; did you mean "
     "'n_layers'? (hidden, dropout"),
    (lambda: model("mlp", norm="x"), "MLP.norm: must be one of"),
    (lambda: TorchvisionModel(WRONG["name"]), "TorchvisionModel: must be given a model's name"),
    (lambda: TorchvisionModel("resnet18", pretrained=WRONG["flag"]),
     "TorchvisionModel.pretrained: must be True or False, got 'yes'"),
    (lambda: TorchvisionModel("resnet18", pretrained=True, init="xavier"),
     "TorchvisionModel.init: pretrained weights would be lost"),
    (lambda: TorchvisionModel("resnet18", norm_layer=WRONG["norm"]),
     "TorchvisionModel.norm_layer: must be a number, a text"),
    (lambda: TorchvisionModel("resnet18", num_classes=3),
     "TorchvisionModel.num_classes: cannot be given; the data decide"),
    (lambda: TorchvisionModel("resnet18", weights="DEFAULT"), "use pretrained=True"),
    (lambda: TorchvisionModel("inception_v3", aux_logits=True), "aux_logits: cannot be given"),
    (lambda: TorchvisionModel("resnet19").make((3, 32, 32), 2),
     "TorchvisionModel 'resnet19': torchvision has no such classifier; did you mean 'resnet1"),
    (lambda: TorchvisionModel("fcn_resnet50").make((3, 32, 32), 2), "no such classifier"),
    (lambda: TorchvisionModel("resnet18", depth=3).make((3, 32, 32), 2),
     "TorchvisionModel 'resnet18': torchvision refuses {'depth': 3}:"),
    (lambda: TorchvisionModel("squeezenet1_1").make((3, 4, 4), 2),
     "TorchvisionModel 'squeezenet1_1': takes no images of shape [3, 4, 4]:"),
    (lambda: TorchvisionModel("resnet18").make((12,), 2), "needs images [channels, height, wid"),
])
def test_a_fault_is_one_line_that_names_the_model(make: Any, told: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_timm_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Python marks a package that is not to be found.
    monkeypatch.setitem(cast(Any, sys.modules), "timm", None)
    with pytest.raises(InputError, match=r"needs the package timm.*pip install 'hpo\[timm\]'"):
        TimmModel("resnet10t")


@pytest.mark.parametrize(("make", "told"), [
    (lambda: TimmModel("resnet10t", in_chans=1), "TimmModel.in_chans: cannot be given"),
    (lambda: TimmModel("resnet10q").make((3, 32, 32), 2), "has no such model; did you mean"),
    (lambda: TimmModel("resnet10t", depth=3).make((3, 32, 32), 2),
     "TimmModel 'resnet10t': timm refuses"),
    (lambda: TimmModel("vit_tiny_patch16_224").make((3, 32, 32), 2),
     "takes no images of shape [3, 32, 32]"),
])
def test_a_fault_of_a_timm_model_is_one_line_that_names_it(make: Any, told: str) -> None:
    pytest.importorskip("timm")
    with pytest.raises(InputError) as caught:
        make()
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_timm_model_fits_the_data_trains_and_is_made_again() -> None:
    timm = pytest.importorskip("timm")
    spec = TimmModel("resnet10t", drop_path_rate=0.1)
    assert model("timm:resnet10t", drop_path_rate=0.1) == spec
    torch.manual_seed(0)
    net = spec.make((1, 32, 32), 3)
    torch.manual_seed(0)
    theirs = timm.create_model("resnet10t", in_chans=1, num_classes=3, drop_path_rate=0.1)
    assert all(torch.equal(a, b) for a, b in zip(
        net.parameters(), theirs.parameters(), strict=True))
    assert_made_again(trained(spec))


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give the empty cache of a hub that is away."""
    pytest.importorskip("timm")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return tmp_path


def test_timm_weights_that_cannot_be_downloaded_are_told_at_once(empty_cache: Path) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match="pretrained weights cannot be loaded") as caught:
        TimmModel("resnet10t.c3_in1k", pretrained=True).make((3, 32, 32), 3)
    assert "does not answer: [Errno 111] Connection refused" in str(caught.value)
    assert "\n" not in str(caught.value)
    # The hub's client alone asks for 46 s.
    assert time.monotonic() - began < 20


def test_timm_weights_that_are_in_the_cache_are_taken_from_it_while_the_hub_is_away(
    empty_cache: Path
) -> None:
    import timm  # type: ignore[import-not-found]
    from safetensors.torch import save_file

    torch.manual_seed(3)
    published: Any = timm.create_model("resnet10t", num_classes=1000)
    folder = empty_cache / "models--timm--resnet10t.c3_in1k"
    (folder / "snapshots" / "1").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    save_file(published.state_dict(), folder / "snapshots" / "1" / "model.safetensors")
    net: Any = TimmModel("resnet10t.c3_in1k", pretrained=True).make((3, 32, 32), 3)
    assert torch.equal(net.conv1[0].weight, published.conv1[0].weight)
