"""Digits: optimizer, schedule, norm, MixUp, smoothing, clipping and precision, all at once."""
from hpo import Categorical, Float, Run, StudySpec
from hpo.train import CrossEntropy, MixUp, Recipe, SimpleCNN, digits, optimizer, schedule

# The middle of the rates that each optimizer learns at.
RATES = {"sgd": 0.05, "adamw": 3e-3, "lamb": 1e-2, "muon": 5e-3}
SPACE = {
    "method": Categorical(*RATES), "lr_factor": Float(0.2, 5.0, log=True),
    "curve": Categorical("one_cycle", "cosine", "warmup_cosine", "linear", "plateau"),
    "norm": Categorical("batch", "layer", "group", "rms", "none"),
    "mixup": Categorical(0.0, 0.1, 0.4), "smoothing": Float(0.0, 0.2),
    "clip": Float(0.3, 10.0, log=True), "precision": Categorical("fp32", "bf16", "fp16"),
}


def build(run: Run, *, method: str, lr_factor: float, curve: str, norm: str, mixup: float,
          smoothing: float, clip: float, precision: str) -> Recipe:
    return Recipe(
        data=digits(run), model=SimpleCNN(hidden=64, width=16, norm=norm), batch_size=64,
        optimizer=optimizer(method, lr=RATES[method] * lr_factor), schedule=schedule(curve),
        loss=CrossEntropy(label_smoothing=smoothing), mix=MixUp(mixup) if mixup else None,
        clip_norm=clip, precision=precision)


STUDY = StudySpec(
    space=SPACE, build=build, maximize="val_accuracy", epochs=6, n_trials=40,
    defaults={"method": "adamw", "lr_factor": 1.0, "curve": "one_cycle", "norm": "batch",
              "mixup": 0.0, "smoothing": 0.0, "clip": 10.0, "precision": "fp32"})
