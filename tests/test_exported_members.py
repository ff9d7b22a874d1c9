"""What the packages offer is a decision: a name comes or goes here or not at all."""

from __future__ import annotations

import importlib

import pytest

OFFERED = {
    "hpo": ["Categorical", "Epochs", "Float", "HpoError", "Int", "Metrics", "Param", "Run",
            "StudySpec", "load"],
    "hpo.train": ["Adadelta", "Adagrad", "Adam", "AdamW", "AlternatingFlip", "CifarResNet18",
                  "ColorJitter", "Constant", "Cosine", "CosineRestarts", "CrossEntropy", "CutMix",
                  "Cutout", "EMA", "EarlyStopping", "Exponential", "LAMB", "Linear", "MLP",
                  "MixUp", "MultiStep", "Muon", "OneCycle", "Plateau", "RMSprop", "RandAugment",
                  "RandomCrop", "RandomFlip", "Recipe", "ResNet9", "SGD", "SimpleCNN", "SpeedNet",
                  "Step", "TimmModel", "TorchvisionModel", "ViT", "WarmupCosine", "cifar10",
                  "datasets", "digits", "fashion_mnist", "image_folder", "initialise", "model",
                  "optimizer", "schedule", "tensors"],
    "storage": ["Aliases", "Back", "Claim", "ClaimOrder", "Database", "EpochRow", "NewTicket",
                "Registry", "Runs", "Sources", "StudyStorage", "Ticket", "Tickets", "TrialEnd",
                "init", "mask", "open", "validate_name"],
}


@pytest.mark.parametrize("package", OFFERED)
def test_a_package_offers_exactly_these_names(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(OFFERED[package])
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(("package", "name"), [
    (package, name) for package, names in OFFERED.items() for name in names
    if name not in ("Epochs", "Metrics")
])
def test_every_offered_name_has_a_docstring(package: str, name: str) -> None:
    assert (getattr(importlib.import_module(package), name).__doc__ or "").strip()
