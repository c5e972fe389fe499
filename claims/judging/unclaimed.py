"""Figures and tables of the papers, appendices included, that no claim is about, or of a part only, and why."""

from collections.abc import Mapping

from .claim import LESS_IS_MORE, LYCHEE_CLUSTER, LYCHEE_DECODE, RESA, SACCADE, TIDAL

_METHOD = "they show how the method works"
_BENCHMARK = "scores of published models, none of which can be had where this is built; `lm_eval` runs such tasks"
_ABOVE = "no claim says whether sparse is above dense: C31 is withdrawn"
_UNBUILT = "no policy of saccade"
_SERVED = "steps of a whole model are in [vLLM](vllm_gpu.md), against stock vLLM"

UNCLAIMED: Mapping[str, Mapping[str, str]] = {
    TIDAL: {
        "figures 1 and 3": _METHOD,
        "figure 2a": "it shows how alike neighbouring layers' scores are; what should follow is in C2",
        "figure 6": "attention's time alone; whole steps are in C5, kernels of other papers in C12 and C18",
        "of table 1 H2O and TOVA": _UNBUILT,
        "tables 3, 5 and 6": f"{_BENCHMARK}; {_ABOVE}",
        "table 4": "lengths of LongBench's answers",
        "figure 9": "kernels alone, beside those in [Performance](performance.md)",
    },
    LESS_IS_MORE: {
        "figure 1b": "TidalDecode's recall in two tasks, of which the bundled model does one",
        "figure 2": "it shows one layer's sets and measures nothing; what should follow is in C8 and C9",
        "figure 3": "it shows how the method works",
        "of figure 4 SeerAttention-r": _UNBUILT,
        "figure 5a": _SERVED,
        "figures 8 and 9": "one layer's sets of another model, as figure 2",
        "tables 3, 4, 7 and 14": _BENCHMARK,
        "table 5": "the spread of samples of one benchmark",
        "tables 8 and 9": _SERVED,
        "table 11": "the layers that were re-selected at",
    },
    LYCHEE_DECODE: {
        "figure 2": "it shows how the method works",
        "figure 3": _SERVED,
        "of table 1 Quest and others": "with as many dense heads only TidalDecode was asked",
        "tables 2 and 4": _BENCHMARK,
        "figures 6 and 9": "a distribution, and the attention of two heads",
        "table 3": "HardKuma and direct gates are compared in [Calibration](calibration.md#heads), HardConcrete is not",
    },
    LYCHEE_CLUSTER: {
        "figures 1 and 3": _METHOD,
        "figure 4": f"{_SERVED}, those of chunks of fixed length",
        "of figure 5b all but the index's upkeep": "shares of retrieval and attention were not timed apart",
        "tables 1, 2 and 6": f"{_BENCHMARK}; {_ABOVE}",
        "figure 8": "the index's bytes are in [Cost](cost.md)",
        "figures 11 and 12": "pictures of an index and of the benchmark's lengths",
        "tables 4 and 5": "delimiters, which are ours, and the benchmark's sizes",
        "of figure 10 the time": "only recall was measured by cluster size",
    },
    RESA: {
        "figures 2 and 3": _METHOD,
        "of figure 6 the time beside dense attention's": _SERVED,
        "figure 7": _SERVED,
        "figure 8": "no model with weights of 4 bits is timed here",
        "of figure 9 mathematics": "frequencies and shares on mathematics; C25 to C27 have plain text",
        "of table 1 all but two dense layers": _BENCHMARK,
        "table 2": f"{_BENCHMARK}; {_ABOVE}",
    },
    SACCADE: {"pairs of layers": "`--most 2` takes one only where it surely gains"},
}
"""By paper: which, and why."""
