"""Muon: momentum whose direction is orthogonalised, for matrices."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to `matrices` [N, rows, columns], roughly (Newton-Schulz)."""
    wide = matrices.shape[1] <= matrices.shape[2]
    result: Tensor = (matrices if wide else matrices.mT).bfloat16()
    result = result / (result.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in _COEFFICIENTS:
        gram = result @ result.mT
        result = a * result + (b * gram + c * gram @ gram) @ result
    return result.to(matrices.dtype) if wide else result.mT.to(matrices.dtype)


class Muon:
    """Muon over matrices, batched by shape; decoupled weight decay, Nesterov momentum."""

    def __init__(self, parameters: Iterable[Tensor], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            self.groups[tuple(parameter.shape)].append(parameter)
        self.velocity = {s: torch.zeros(len(p), *s, device=p[0].device) for s, p in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float, decay: float) -> None:
        """One update at learning rate `rate`; weights shrink by `rate * decay`."""
        for shape, parameters in self.groups.items():
            gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
            velocity = self.velocity[shape].lerp_(gradients, 1 - self.momentum)
            update = orthogonalise(gradients.lerp(velocity, self.momentum))
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(parameters, 1 - rate * decay)
            torch._foreach_add_(parameters, list(update.unbind()), alpha=-scale)

    def state_dict(self) -> dict[str, Tensor]:
        return {"x".join(map(str, shape)): velocity for shape, velocity in self.velocity.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for shape, velocity in self.velocity.items():
            velocity.copy_(state["x".join(map(str, shape))])
