"""Scores by attention mass in plain torch, for any device: fixed shapes, no host synchronisation."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.kernels._mass_tree import MassSettings, MassTree


def cluster_mass(q: Tensor, tree: MassTree, slots: Tensor, settings: MassSettings) -> Tensor:
    """As `api.cluster_mass`; q·m is undefined where there is no set."""
    width, sinks, scale, spread, each = settings
    slots = slots.long()
    means = tree.means.index_select(0, slots).float()
    grouped = q.float().unflatten(1, (means.shape[1], -1)) @ means.transpose(2, 3)
    deviation = torch.linalg.vector_norm(q.float(), dim=-1) * (spread * q.shape[2] ** -0.5)
    sizes, spreads = (held.index_select(0, slots)[:, :, None] for held in (tree.sizes, tree.spreads))
    logits = scale * (grouped + deviation.view(*grouped.shape[:3], 1) * spreads) + sizes.clamp(min=1).log()
    # Where nothing is indexed all is -inf, and no share of it is anything.
    shares = torch.where(sizes > 0, torch.where(sizes > 0, logits, -torch.inf).softmax(-1), 0.0)
    scores = shares.flatten(1, 2) if each else shares.sum(2)
    position = torch.arange(width, device=q.device)
    labels = tree.labels[:, :, :width].index_select(0, slots)
    places = pad(labels, (0, width - labels.shape[2])) + position.div(tree.tokens, rounding_mode="floor") * tree.sets
    # Behind the last indexed token a label may be anything.
    places = places.clamp_(0, scores.shape[-1] - 1)
    if each:
        places = places.repeat_interleave(grouped.shape[2], dim=1)
    always = (position < sinks) | (position >= tree.ends.index_select(0, slots)[:, None])
    return scores.gather(-1, places).masked_fill_(always[:, None], torch.inf)
