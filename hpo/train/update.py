"""From a loss to changed weights: the gradient scaled, completed, bounded and applied.

One place for it, so that the training loop and the learning-rate range test make the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpo.train.recipe import Recipe

# Of a unit whose weights are all zero: it could otherwise never leave zero. Source: Brock et al.
_LEAST_NORM = 1e-3


class Update:
    """A recipe's way from a loss to an optimizer step.

    With fp16 the loss is scaled up before its gradient is taken; a step whose gradient is not
    finite is left out, and with it all that follows steps: the optimizer's own state, the
    schedule, the mean of the weights. To know that asks the device once a step, in fp16 only.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer,
                 device: torch.device) -> None:
        self._recipe, self._optimizer = recipe, optimizer
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._bounded = [p for p in all_but_last(model) if p.requires_grad]
        self.n_skipped = 0
        self._has_stepped = False
        self._scaler: torch.amp.GradScaler | None = None
        if recipe.precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type)
            optimizer.register_step_post_hook(self._note_step)
            # torch's fused steps would look at the gradient themselves and begin their state
            # though they do not step; the scaler does not call the optimizer then.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to the parameters'."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()

    def of_loss(self, loss: Tensor) -> bool:
        """Make the step of one loss; as `step` says."""
        self.backward(loss)
        return self.step()

    def step(self) -> bool:
        """Change the weights by the gradient and clear it; return False if it was not finite.

        The gradient is unscaled first, then bounded.
        """
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        self._bound()
        if self._scaler is None:
            self._optimizer.step()
            self._has_stepped = True
        else:
            self._has_stepped = False
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad()
        self.n_skipped += not self._has_stepped
        return self._has_stepped

    def _bound(self) -> None:
        recipe = self._recipe
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._params, recipe.clip_norm)
        elif recipe.clip_value is not None:
            nn.utils.clip_grad_value_(self._params, recipe.clip_value)
        elif recipe.clip_adaptive is not None:
            clip_adaptive_(self._bounded, recipe.clip_adaptive)

    def state_dict(self) -> dict[str, Any]:
        """Return what the coming steps depend on, besides the optimizer."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {"n_skipped": self.n_skipped, "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.n_skipped = state["n_skipped"]
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])


def all_but_last(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all modules but the last that has any: the classifier, by custom.

    A weight that the last module shares with another is the last one's.
    """
    owners = [part for part in model.modules() if next(part.parameters(recurse=False), None)
              is not None]
    last = {id(p) for p in owners[-1].parameters(recurse=False)} if owners else set()
    return [p for p in model.parameters() if id(p) not in last]


@torch.no_grad()
def clip_adaptive_(params: Iterable[nn.Parameter], limit: float) -> None:
    """Scale each unit's gradient down to `limit` times the norm of the unit's weights.

    A unit is an output of a layer, with all the weights into it; a bias or a norm's weights are
    one unit together. A norm of weights counts as 0.001 at least.

    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization,
    equation 3, and the units of its published code.
    """
    for p in params:
        if p.grad is None:
            continue
        # Not in place: a norm of weights in parts (FSDP) is not there until it is used.
        most = _unit_norm(p).clamp(min=_LEAST_NORM) * limit
        norm = _unit_norm(p.grad)
        # The least positive number keeps a gradient of zero what it is.
        factor = (most / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
        p.grad.mul_(factor)


def _unit_norm(values: Tensor) -> Tensor:
    """Return the norm of each first index over all others, shaped to broadcast."""
    if values.ndim <= 1:
        return torch.linalg.vector_norm(values)
    return torch.linalg.vector_norm(values, dim=tuple(range(1, values.ndim)), keepdim=True)
