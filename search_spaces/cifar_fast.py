"""CIFAR-10 in seconds on a GPU: a small whitened net, its rate, decay, smoothing and mean."""
from hpo import Float, Run, StudySpec
from hpo.train import EMA, CrossEntropy, Linear, Muon, Recipe, SpeedNet, cifar10
from hpo.train.augment import AlternatingFlip, RandomCrop

SPACE = {
    "lr": Float(0.01, 0.3, log=True), "weight_decay": Float(1e-3, 0.1, log=True),
    "smoothing": Float(0.0, 0.3), "mean_decay": Float(0.5, 0.99),
}


def build(run: Run, *, lr: float, weight_decay: float, smoothing: float,
          mean_decay: float) -> Recipe:
    return Recipe(
        data=cifar10(run), model=SpeedNet(), batch_size=1000, eval_batch_size=2500,
        optimizer=Muon(lr, momentum=0.6, weight_decay=weight_decay),
        schedule=Linear(warmup_fraction=0.23, final_fraction=0.07),
        loss=CrossEntropy(label_smoothing=smoothing), ema=EMA(mean_decay),
        augment=(RandomCrop(2, fill="reflect"), AlternatingFlip()),
        # Of 45,000 training rows all batches have one shape: it is compiled once.
        compile="reduce-overhead" if run.device == "cuda" else False)


STUDY = StudySpec(
    space=SPACE, build=build, maximize="val_accuracy", epochs=10,
    defaults={"lr": 0.06, "weight_decay": 1e-2, "smoothing": 0.2, "mean_decay": 0.95},
    grid={"lr": [0.03, 0.06, 0.12], "weight_decay": [1e-2], "smoothing": [0.1, 0.2]})
