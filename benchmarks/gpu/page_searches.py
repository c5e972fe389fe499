"""The search of pages, one layer's: python -m benchmarks.gpu.page_searches FILE [--smoke]

Scores of pages to ids of pages, in a captured graph whose buffers are bounded by a step's `max_model_len`: budgets as
`quest` has them, and a tenth of the pages as `resa` does. Every layer has scores of its own, as a step's have.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from saccade.kernels._share import Share
from saccade.kernels._triton.alone import Alone
from saccade.kernels.topk import triton as kernel
from saccade.kernels.topk.api import topk_and_last

from .caches import Heads
from .captured import BOUND, BUDGET, PAGE
from .environment import environment
from .timing import Captured, interleaved, kernels_of, write

LAYERS = 30
ROUNDS = 21
POINTS = ((1, 131_104), (4, 131_104), (1, 32_800), (8, 32_800), (28, 16_384), (28, 4096), (1, 16), (28, 16))
"""Rows and their lengths, behind prompts of whole pages as decoding steps are."""
SHARES = {"quest": None, "resa": Share(1, 10, 16)}
CONSTANTS = {"as it is": Alone(), "most=0": Alone(most=0)}
"""`most=0` is the search without one program alone."""


def searches(rows: int, length: int, bound: int, alone: Alone, share: Share | None, device: torch.device) -> Captured:
    pages, heads = -(-bound // PAGE), Heads().kv
    generator = torch.Generator(device).manual_seed(rows + length)
    # Rows begin at whole numbers of 16 bytes, as `page_scores` leaves them.
    scores = torch.randn((LAYERS, rows, heads, -(-pages // 4) * 4), device=device, generator=generator)[..., :pages]
    scores = scores.mul_(13).add_(180)  # bounds of 128 products lie far above 0, and near each other
    lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
    most = BUDGET // PAGE if share is None else -(-pages * share.numerator // share.denominator)
    if device.type != "cuda":
        call = partial(topk_and_last, lengths=lengths, k=most - 1, last=1, unit=PAGE, share=share)
        return Captured([partial(call, layer) for layer in scores], device)
    search = partial(kernel.topk, lengths=lengths, k=most - 1, last=1, reserved=0, unit=PAGE, share=share)
    return Captured([partial(search, layer, ranked=False, alone=alone) for layer in scores], device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any device")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() or not given.smoke else "cpu")
    points, bound = (((2, 20), (1, 4096)), 4200) if given.smoke else (POINTS, BOUND)
    results: dict[str, Any] = {"environment": environment(given.smoke), "bound": bound, "points": []}
    for rows, length in points:
        for name, share in SHARES.items():
            calls = {named: searches(rows, length, bound, one, share, device) for named, one in CONSTANTS.items()}
            for constants, times in interleaved(calls, rounds=2 if given.smoke else ROUNDS, seconds=2).items():
                kernels = kernels_of(calls[constants].run, 3) if device.type == "cuda" else {}
                facts = {"rows": rows, "length": length, "sets": name, "constants": constants}
                results["points"].append({**facts, **times, "kernels": kernels})
                print(f"{rows} x {length} {name} {constants}: {1e3 * times['ms']:.2f} us")
    write(given.file, results)


if __name__ == "__main__":
    main()
