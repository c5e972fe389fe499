"""Valid policies of every method, drawn at random: option by option, and the options that only fit together."""

from typing import Any

from hypothesis import strategies as st

import saccade
from saccade.types import ModelShape

SHAPE = ModelShape(layers=8, query_heads=4, kv_heads=2, head_dim=8)

SHARES = st.floats(0, 1, exclude_min=True)
ROLES = st.integers(1, 9).map("every:{}".format) | st.sets(st.integers(1, 7)).map(
    lambda layers: "layers:" + "+".join(map(str, [0, *sorted(layers)]))
)
EACH: dict[str, st.SearchStrategy[Any]] = {
    "budget": st.integers(64, 2**20),
    "page": st.integers(1, 64),
    "heads": st.sampled_from(["kv", "query"]),
    "dense_layers": st.integers(0, 2),
    "reselect": st.none() | st.lists(st.integers(2, 7), max_size=3),
    "roles": ROLES,
    "sinks": st.integers(0, 16),
    "recent": st.floats(0, 1),
    "window": st.none() | st.integers(0, 40),
    "rule": st.just("top_k"),
    "top_p": st.none(),
    "threshold": st.none(),
    "ratio": st.none(),
    "min_pages": st.integers(8, 64),
    "local_pages": st.integers(1, 8),
    "buffer": st.none() | st.integers(64, 128),
    "keep_last": st.booleans(),
    "replant": st.integers(1, 256),
    "chunk_min": st.integers(1, 8),
    "chunk_max": st.integers(8, 16),
    "chunking": st.sampled_from(["text", "fixed"]),
    "group": st.sampled_from([128, 512, 8192]),
    "spread": st.none(),
    "rectify": st.none() | st.builds(saccade.Rectify, st.integers(1, 64), st.sampled_from(["overwrite", "verify"])),
}
"""Values of an option that fit whatever else is drawn here."""
OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "lychee_decode": {"page": st.just(1)},
    "lychee_cluster": {
        "budget": st.integers(1024, 2**20),
        "form": st.sampled_from(["mass", "paper"]),
        "pooling": st.just("mean"),
        **dict.fromkeys(("replant", "cluster_size"), st.none()),
    },
    "token_clusters": {
        "budget": st.integers(1024, 2**20),
        "buffer": st.none() | st.sampled_from([32, 64, 128]),
        "cluster_size": st.sampled_from([4, 8, 16, 32]),
        "spread": st.floats(0, 4),
    },
    "resa": {"ratio": SHARES},
    "composed": {
        **dict.fromkeys(saccade.policies()["composed"].defaults, st.none()),
        **{name: EACH[name] for name in ("budget", "rule", "rectify")},
        "scorer": st.just("exact"),
        "roles": st.just("select"),
        "dense_layers": st.none() | EACH["dense_layers"],
    },
}
"""Where a method's options need others."""
OPTIONS = {
    name: {option: OWN.get(name, {}).get(option, EACH.get(option)) for option in method.defaults}
    for name, method in saccade.policies().items()
    if method.options.__module__.startswith("saccade.")
}
"""Of every method of the package; tests of claims bring others."""

# Options that only fit together; each may come with any of the others.
CUT_WITH: list[dict[str, st.SearchStrategy[Any]]] = [
    {"rule": st.just("top_p"), "top_p": SHARES, "page": st.just(1)},
    {"rule": st.just("threshold"), "threshold": st.floats(0, 1, exclude_min=True, exclude_max=True)},
    {"rule": st.just("ratio"), "ratio": SHARES, "budget": st.none()},
]
PAGED: dict[str, st.SearchStrategy[Any]] = {"page": st.integers(1, 64)}
MIN_PAGES: dict[str, st.SearchStrategy[Any]] = {"min_pages": st.integers(8, 64), "local_pages": st.integers(1, 8)}
TOGETHER: dict[str, list[dict[str, st.SearchStrategy[Any]]]] = {
    "tidal": [{key: values for key, values in cut.items() if key != "page"} for cut in CUT_WITH],
    "exact_topk": [{key: values for key, values in cut.items() if key != "page"} for cut in CUT_WITH],
    "lychee_decode": [*CUT_WITH, PAGED, {**CUT_WITH[2], **PAGED}],
    "composed": [
        *CUT_WITH,
        {"heads": st.just("query"), **PAGED},
        {"pooling": st.sampled_from(["max", "mean"]), "heads": st.just("kv")},
        {**CUT_WITH[2], **MIN_PAGES, "scorer": st.just("page_bounds"), **PAGED},
        {"rule": st.just("rank_union"), "sinks": st.integers(0, 16), "recent": st.floats(0, 1)},
        {"rule": st.just("rank_union"), "heads": st.just("all"), "dense_layers": st.just(0), "roles": ROLES},
        {"roles": ROLES, "dense_layers": st.just(0)},
        {"roles": st.just("layers:2+5"), "dense_layers": st.just(2), "scorer": st.just("page_bounds")},
    ],
}
NEEDED = {"lychee_decode": {"roles": "every:4"}, "composed": {}}


@st.composite
def policies(draw: st.DrawFn) -> saccade.Policy:
    name = draw(st.sampled_from(sorted(OPTIONS)))
    alone = OPTIONS[name]
    given_names = draw(st.sets(st.sampled_from(sorted(alone)))) if alone else set()
    options = {option: draw(alone[option]) for option in sorted(given_names)}
    together = draw(st.sampled_from([{}, *TOGETHER.get(name, [])]))
    options |= {option: draw(values) for option, values in together.items()}
    return saccade.policy(name, **{**NEEDED.get(name, {}), **options})
