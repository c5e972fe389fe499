"""A method of your own: the best tokens and their neighbours, in the layers that TidalDecode selects at."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import saccade
from saccade.checkpoints.bundled import model_path
from saccade.methods.options import AtLeastOne, Budget, Options, Reselect
from saccade.plans.plan import Plan, reselecting_roles
from saccade.selection.rules import TopK
from saccade.selection.scorers.exact import ExactScorer
from saccade.selection.selector import Rule, ScoredSelector
from saccade.types import ModelShape, Rows, Selection


@dataclass(frozen=True)
class WithNeighbours(Rule):
    """A token scores as the best one around it; then the best `budget` of them."""

    budget: int
    width: int

    def choose(self, scores: Tensor, rows: Rows, unit: int, scale: float) -> Selection:
        behind = torch.arange(scores.shape[-1], device=scores.device) >= rows.seq_lens[:, None]
        scores = scores.masked_fill(behind[:, None], -torch.inf)  # what lies behind a row's end is undefined
        spread = torch.nn.functional.max_pool1d(scores, 2 * self.width + 1, stride=1, padding=self.width)
        return TopK(self.budget).choose(spread, rows, unit, scale)

    def size(self, length: int, unit: int) -> int:
        return TopK(self.budget).size(length, unit)


class NeighbourOptions(Options):
    budget: Budget = 256
    width: AtLeastOne = 3
    reselect: Reselect = None


def plan(options: NeighbourOptions, shape: ModelShape) -> Plan:
    selector = ScoredSelector(ExactScorer("max"), WithNeighbours(options.budget, options.width))
    return Plan(selector, *reselecting_roles(shape, 2, options.reselect))


# An entry point of the group `saccade.methods` would make it known to the command line and to vLLM, too.
saccade.register(saccade.Method("neighbours", "the best tokens and those around them", "-", NeighbourOptions, plan))

model = AutoModelForCausalLM.from_pretrained(model_path(), dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(model_path())
fact = "The code of the amber falcon is"
prompt = f"{'Snow fell on the hills. ' * 60}{fact} 4821. {'Rain fell on the sea. ' * 60}\n\n{fact}"
inputs = tokenizer(prompt, return_tensors="pt")
for policy in ("tidal:reselect=7,budget=32", "neighbours:reselect=7,budget=32", "neighbours:reselect=7,budget=4096"):
    with saccade.sparsify(model, policy, recall=True) as run:
        tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        print(f"{policy}: {tokenizer.decode(tokens)!r}, attention recall {run.stats().recall:.2f}")
