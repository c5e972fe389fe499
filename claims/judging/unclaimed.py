"""Figures and tables of the papers' main texts that no claim is about, and why."""

from __future__ import annotations

from collections.abc import Mapping

from .claim import LESS_IS_MORE, LYCHEE_CLUSTER, LYCHEE_DECODE, RESA, TIDAL

_METHOD = "they show how the method works"
_BENCHMARK = "scores of published models, none of which can be had where this is built; `lm_eval` runs such tasks"
_SERVED = "steps of a whole model are in [vLLM](vllm.md#on-a-gpu), against stock vLLM"

UNCLAIMED: Mapping[str, Mapping[str, str]] = {
    TIDAL: {
        "figures 1 and 3": _METHOD,
        "figure 2a": "it shows how alike neighbouring layers' scores are; what should follow is in C2",
        "figure 6": "attention's part of the times of C5; single kernels are in C12 and C18",
        "table 3": _BENCHMARK,
    },
    LESS_IS_MORE: {
        "figure 1b": "TidalDecode's recall in two tasks, of which the bundled model does one",
        "figure 2": "it shows one layer's sets and measures nothing; what should follow is in C8 and C9",
        "figure 3": "it shows how the method works",
        "figure 5a": _SERVED,
    },
    LYCHEE_DECODE: {
        "figure 2": "it shows how the method works",
        "figure 3": _SERVED,
        "table 2": _BENCHMARK,
        "table 3": "HardKuma and direct gates are compared in [Calibration](calibration.md#heads), HardConcrete is not",
    },
    LYCHEE_CLUSTER: {
        "figures 1 and 3": _METHOD,
        "figure 4": _SERVED,
        "tables 1 and 2": _BENCHMARK,
    },
    RESA: {
        "figures 2 and 3": _METHOD,
        "figure 7": _SERVED,
        "figure 8": "no model with weights of 4 bits is timed here",
        "figure 9": "frequencies and shares on mathematics; C26 and C27 vary each on plain text",
        "table 2": _BENCHMARK,
    },
}
"""By paper: which, and why."""
