"""scikit-learn's digits: learning rate, weight decay, dropout and hidden size of a small CNN."""
from hpo import Categorical, Float, Run, StudySpec
from hpo.train import AdamW, OneCycle, Recipe, SimpleCNN, digits

SPACE = {
    "lr": Float(1e-4, 1e-1, log=True),
    "weight_decay": Float(1e-6, 1e-1, log=True),
    "dropout": Float(0.0, 0.5),
    "hidden": Categorical(32, 64, 128),
}


def build(run: Run, *, lr: float, weight_decay: float, dropout: float, hidden: int) -> Recipe:
    return Recipe(
        data=digits(run),
        model=SimpleCNN(hidden=hidden, dropout=dropout),
        optimizer=AdamW(lr=lr, weight_decay=weight_decay),
        schedule=OneCycle(),
        batch_size=64,
    )


STUDY = StudySpec(
    space=SPACE, build=build, maximize="val_accuracy", epochs=8, n_trials=24,
    defaults={"lr": 1e-3, "weight_decay": 1e-2, "dropout": 0.1, "hidden": 64},
    grid={"lr": [1e-4, 1e-3, 1e-2], "weight_decay": [1e-4, 1e-2], "dropout": [0.1, 0.3],
          "hidden": [64]},
)
