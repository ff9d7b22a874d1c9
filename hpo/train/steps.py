"""LAMB, and Muon with AdamW for the rest: the optimizers that torch does not have as such.

Each is one torch optimizer: the loop, the range test and a resumed trial see no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

Groups = Iterable[dict[str, Any]]
Closure = Callable[[], float] | None
# Larger matrices keep a CPU busy by themselves, and put together they leave its cache.
_MOST_TOGETHER = 2**16


class Lamb(torch.optim.Optimizer):
    """Adam's step scaled, tensor by tensor, to the size of the weights.

    A group with `adapts` False makes the plain step, as biases and norms do in the authors' code.

    Source: You et al., Large Batch Optimization for Deep Learning, algorithm 2, the size of the
    weights as it is (phi the identity).
    """

    def __init__(self, params: Groups, lr: float, betas: tuple[float, float], eps: float,
                 weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "adapts": True,
                                  "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:
        """Make one step; the device is asked nothing."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self._update(param, group), alpha=-group["lr"])
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        grad, (beta1, beta2), state = param.grad, group["betas"], self.state[param]
        assert grad is not None
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param),
                         exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        mean = state["exp_avg"].lerp_(grad, 1.0 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        deviation = square.sqrt().div_(math.sqrt(1.0 - beta2 ** state["step"])).add_(group["eps"])
        update = mean.div(1.0 - beta1 ** state["step"]).div_(deviation)
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        if group["adapts"]:
            size, length = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
            # Weights that are all 0 have no size to go by, and would never move.
            update.mul_(torch.where((size > 0) & (length > 0), size / length, 1.0))
        return update


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for groups with `hidden` True, AdamW for the others.

    A convolution's weight is one matrix, its filters the rows. Torch's own Muon takes no such
    weights and leaves the rest to a second optimizer.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024); `scale`
    "match_rms_adamw": Liu et al., Muon is Scalable for LLM Training, equation 4.
    """

    def __init__(self, params: Groups, *, lr: float, weight_decay: float, momentum: float,
                 nesterov: bool, n_iterations: int, scale: str, betas: tuple[float, float],
                 eps: float) -> None:
        # `fused` keeps AdamW's step counts on the device also when a state is loaded.
        super().__init__(params, {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "n_iterations": n_iterations, "scale": scale, "betas": betas, "eps": eps,
            "hidden": False, "fused": True})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:
        """Make one step; the device is asked nothing."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["hidden"]:
                self._muon(params, group)
            else:
                self._adamw(params, group)
        return loss

    def _muon(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr = group["lr"]
        updates = [self._update(param, group) for param in params]
        for param, even in zip(params, all_orthogonalised(updates, group["n_iterations"]),
                               strict=True):
            n_rows, n_columns = even.shape
            factor = (0.2 * math.sqrt(max(n_rows, n_columns))
                      if group["scale"] == "match_rms_adamw"
                      else math.sqrt(max(1.0, n_rows / n_columns)))
            param.mul_(1.0 - lr * group["weight_decay"])
            param.add_(even.to(param.dtype).reshape(param.shape), alpha=-lr * factor)

    def _update(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Take a gradient into the momentum, and return the matrix that is to be made even."""
        state, grad, momentum = self.state[param], param.grad, group["momentum"]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        mean = state["momentum_buffer"].lerp_(grad, 1.0 - momentum)
        return (grad.lerp(mean, momentum) if group["nesterov"] else mean).flatten(1)

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param].update(
                    step=torch.zeros((), dtype=torch.float32, device=param.device),
                    exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        states = [self.state[param] for param in params]
        first, second = group["betas"]
        adamw(params, [param.grad for param in params if param.grad is not None],
              [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states],
              [], [state["step"] for state in states], fused=True, amsgrad=False, beta1=first,
              beta2=second, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
              maximize=False)


def all_orthogonalised(matrices: list[Tensor], n_iterations: int = 5) -> list[Tensor]:
    """Return `orthogonalised` of each matrix, those of one shape computed together.

    A GPU waits for its next kernel otherwise: five iterations of four small ones a matrix.
    """
    alike: dict[Any, list[int]] = {}
    for i, one in enumerate(matrices):
        # Weights in parts (FSDP) cannot be put together.
        alone = hasattr(one, "full_tensor") or not one.is_cuda and one.numel() > _MOST_TOGETHER
        key = i if alone else (one.shape, one.dtype, one.device)
        alike.setdefault(key, []).append(i)
    found: dict[int, Tensor] = {}
    for at in alike.values():
        if len(at) == 1:
            found[at[0]] = orthogonalised(matrices[at[0]], n_iterations)
        else:
            made = orthogonalised(torch.stack([matrices[i] for i in at]), n_iterations)
            found.update(zip(at, made, strict=True))
    return [found[i] for i in range(len(matrices))]


def orthogonalised(matrix: Tensor, n_iterations: int = 5) -> Tensor:
    """Return a matrix of the same singular vectors whose singular values are about 1.

    In bf16 on CUDA, as published; in the matrix' own type elsewhere, where bf16 is slower.

    Shapes: [rows, columns], or [n, rows, columns], to the same.
    Source: Jordan et al., Muon, section Definition: the Newton-Schulz iteration of fifth degree
    with coefficients that raise small singular values fast; all end between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    # The Frobenius norm bounds the largest singular value.
    size = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / size.clamp(min=1e-7)
    for _ in range(n_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def _evaluated(closure: Closure) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
