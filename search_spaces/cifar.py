"""CIFAR-10: learning rate, weight decay, dropout and hidden size of a small CNN."""
from hpo import Categorical, Float, Run, StudySpec
from hpo.train import AdamW, OneCycle, Recipe, SimpleCNN, cifar10

SPACE = {
    "lr": Float(1e-4, 1e-1, log=True),
    "weight_decay": Float(1e-6, 1e-2, log=True),
    "dropout": Float(0.0, 0.5),
    "hidden": Categorical(128, 256, 512),
}


def build(run: Run, *, lr: float, weight_decay: float, dropout: float, hidden: int) -> Recipe:
    return Recipe(
        data=cifar10(run),
        model=SimpleCNN(hidden=hidden, dropout=dropout),
        optimizer=AdamW(lr=lr, weight_decay=weight_decay),
        schedule=OneCycle(),
        batch_size=512,
    )


STUDY = StudySpec(
    space=SPACE, build=build, maximize="val_accuracy", epochs=15,
    defaults={"lr": 1e-3, "weight_decay": 1e-4, "dropout": 0.1, "hidden": 256},
    grid={"lr": [1e-4, 1e-3, 1e-2], "weight_decay": [1e-4, 1e-3], "dropout": [0.1, 0.3, 0.5],
          "hidden": [256]},
)
