"""Checks of the data: numbers, scale, labels, classes, and rows that are in two splits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hpo.diagnosis.finding import Finding, look, ok, plural, wrong
from hpo.diagnosis.splits import Split, read_split
from hpo.train.loaded import Loaded

PART = "data"
# Normalised images have mean 0 and sd 1 in each channel; those of another split differ a little.
IMAGE_MEAN, IMAGE_SD = 0.25, (0.5, 2.0)
# Columns of a table may be rare events or flags, which have other deviations than 1.
COLUMN_MEAN, COLUMN_SD = 3.0, 3.0
LEAST_SD = 0.1
# Above these shares chance and a few double pictures are no explanation.
DOUBLE_FRACTION = 0.05
CONSTANT_FRACTION = 0.01
# One class so much rarer than another hardly counts in the accuracy.
IMBALANCE = 10
_MOST_NAMED = 5


def splits_of(data: Loaded) -> list[Split]:
    """Read all splits that there are."""
    feeds = {"train": data.train, "validation": data.val, "test": data.test}
    return [read_split(name, feed, data, data.n_classes)
            for name, feed in feeds.items() if feed is not None and len(feed)]


def data_findings(data: Loaded, splits: Sequence[Split]) -> Iterator[Finding]:
    """Yield what is to be said of the splits."""
    train = splits[0]
    rows = ", ".join(f"{split.total:,} {split.name}" for split in splits)
    shape = "x".join(map(str, train.shape)) or "1"
    part = next((split for split in splits if not split.whole), None)
    yield ok(PART, "rows", f"{rows} of {shape} {train.dtype}" + (
        f" (looked at {part.seen} of {part.name})" if part is not None else ""))
    yield numbers_finding(splits)
    yield scale_finding(data, splits)
    yield labels_finding(data, splits)
    if not any(split.label_fault for split in splits):
        yield classes_finding(data, splits)
        yield doubles_finding(splits)


def numbers_finding(splits: Sequence[Split]) -> Finding:
    """Return whether all rows are finite and hold something."""
    for split in splits:
        if split.n_bad:
            return wrong(PART, "numbers", f"{plural(split.n_bad, 'row')} of {split.name} with a "
                                          f"NaN or an infinite value, the first is row "
                                          f"{split.first_bad}",
                         "mend or leave out these rows: one makes every weight NaN")
    for split in splits:
        if split.n_constant > CONSTANT_FRACTION * split.n_rows:
            return look(PART, "numbers", f"{plural(split.n_constant, 'row')} of {split.name} hold "
                                         f"one value alone",
                        "see whether these are failed reads or empty images")
    return ok(PART, "numbers", "all finite, no empty rows")


def scale_finding(data: Loaded, splits: Sequence[Split]) -> Finding:
    """Return whether inputs have about mean 0 and deviation 1 as the model gets them."""
    train = splits[0]
    if not train.mean.numel():
        return wrong(PART, "scale", "no finite row of train", "mend the rows")
    text, where = _scale_text(train), _off(train)
    if where is not None:
        cure = ("they are normalised over the training rows: see which rows are outliers"
                if data.mean is not None else
                "normalise them: tensors(..., normalise=True), or a transform of the dataset")
        return look(PART, "scale", f"{text}{where}", cure)
    for split in splits[1:]:
        if split.mean.numel() == train.mean.numel():
            apart = float(((split.mean - train.mean).abs() / train.sd.clamp_min(LEAST_SD)).max())
            limit = 0.5 + 5.0 / math.sqrt(max(1, split.n_rows))
            if apart > limit:
                return look(PART, "scale", f"{split.name} lies {apart:.1f} deviations from train",
                            "see whether it was made or scaled in another way")
    return ok(PART, "scale", text)


def _scale_text(split: Split) -> str:
    mean, sd = split.mean.flatten(), split.sd.flatten()
    if len(split.shape) == 3 and len(mean) <= 4:
        means = ", ".join(f"{value + 0.0:.2f}" for value in mean.round(decimals=2).tolist())
        sds = ", ".join(f"{value:.2f}" for value in sd.tolist())
        told = f"mean {means} and sd {sds} by channel"
    else:
        told = (f"means {float(mean.min()):.2g} to {float(mean.max()):.2g} and sds "
                f"{float(sd.min()):.2g} to {float(sd.max()):.2g}")
    return f"{told}, range {split.low:.3g} to {split.high:.3g}"


def _off(split: Split) -> str | None:
    """Return what is off about a split's scale, or None."""
    mean, sd = split.mean.abs(), split.sd
    if len(split.shape) == 3:
        low, high = IMAGE_SD
        off = bool((mean > IMAGE_MEAN).any() or (sd < low).any() or (sd > high).any())
        return ": not mean 0 and sd 1" if off else None
    off = bool((mean > COLUMN_MEAN).any() or (sd > COLUMN_SD).any() or sd.max() < LEAST_SD)
    return ": far from mean 0 and sd 1" if off else None


def labels_finding(data: Loaded, splits: Sequence[Split]) -> Finding:
    """Return whether all labels are classes."""
    for split in splits:
        if split.label_fault:
            return wrong(PART, "labels", f"{split.name}: {split.label_fault}",
                         "give one whole number from 0 for each row")
        if split.outside:
            named = ", ".join(map(str, sorted(split.outside)[:_MOST_NAMED]))
            n = sum(split.outside.values())
            return wrong(PART, "labels", f"{split.name}: {plural(n, 'label')} outside of "
                                         f"0..{data.n_classes - 1} ({named})",
                         f"count classes from 0, or give n_classes= (it is {data.n_classes})")
    return ok(PART, "labels", f"whole numbers in 0..{data.n_classes - 1}")


def classes_finding(data: Loaded, splits: Sequence[Split]) -> Finding:
    """Return whether each class is in each split, and none is rare."""
    train = splits[0]
    for split in splits:
        missing = [k for k, n in enumerate(split.counts) if not n] if split.whole else []
        if not missing:
            continue
        named = ", ".join(_class(data, k) for k in missing[:_MOST_NAMED])
        lost = [k for k in missing if split is train and any(s.counts[k] for s in splits[1:])]
        text = f"{split.name} has no row of class {named}"
        if lost:
            return wrong(PART, "classes", f"{text}, other splits have",
                         "what is never trained is never right: split by class")
        cure = (f"is n_classes={data.n_classes} meant?" if split is train
                else "a larger or stratified split says something of each class")
        return look(PART, "classes", text, cure)
    low, high = min(train.counts), max(train.counts)
    text = f"{plural(data.n_classes, 'class')} of {low:,} to {high:,} rows of train"
    if low and high > IMBALANCE * low:
        rare = _class(data, train.counts.index(low))
        return look(PART, "classes", f"{text}, the rarest is {rare}",
                    "accuracy hardly sees it: weigh the loss by class, or score a balanced metric")
    return ok(PART, "classes", text)


def _class(data: Loaded, k: int) -> str:
    return f"{k} ({data.classes[k]})" if k < len(data.classes) and (
        data.classes[k] != str(k)) else str(k)


def doubles_finding(splits: Sequence[Split]) -> Finding:
    """Return whether rows are in two splits, or in one with two labels."""
    train = splits[0]
    known: dict[bytes, int] = {}
    n_torn = 0
    for mark, label in train.marks:
        n_torn += known.setdefault(mark, label) != label
    sets = {split.name: {mark for mark, _ in split.marks} for split in splits}
    pairs = [(one, other) for i, one in enumerate(splits) for other in splits[i + 1:]]
    # Where most rows of train occur several times, they say so little that chance repeats them.
    few = len(sets["train"]) < 0.5 * train.n_rows
    for one, other in pairs:
        n = sum(mark in sets[one.name] for mark, _ in other.marks)
        if n:
            text = f"{plural(n, 'row')} of {other.name} {'is' if n == 1 else 'are'} in {one.name}"
            cure = "its score is no proof: take them out, and split by where rows come from"
            leaks = n > DOUBLE_FRACTION * other.n_rows and not few
            return (wrong if leaks else look)(PART, "doubles", text, cure)
    if n_torn:
        return look(PART, "doubles", f"{plural(n_torn, 'row')} of train repeat another with "
                                     f"another label", "see which label is right")
    return ok(PART, "doubles", "no row is in two splits" if len(splits) > 1 else "none")
