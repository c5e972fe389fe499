"""LycheeCluster (Li et al., 2026, arXiv 2603.08453): chunks cut where the text breaks, found through clusters."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ..selection.clusters.mass_selector import ChunkSelector
from ..selection.clusters.selector import ClusterSelector
from ..selection.selector import Selector
from .method import Method, every_layer
from .options import AtLeastOne, Budget, FirstDense, Options, RectifyField, Sinks, Spread, moved


class LycheeClusterOptions(Options):
    """Options of `lychee_cluster`: budget 1024, chunks of 8 to 16 tokens (appendix A)."""

    _since = ("form", "paper"), ("chunking", "text"), ("pooling", "mean"), ("cluster_size", None), ("spread", None)

    budget: Budget = 1024
    form: Literal["mass", "paper"] = "mass"
    """mass: chunks are ranked by the attention that they should draw; paper: clusters by the published bound"""
    sinks: Sinks = 16
    buffer: AtLeastOne | None = None
    """text is indexed in steps of so many tokens, all attended to before; not given: min(128, budget / 4) or less"""
    replant: Annotated[AtLeastOne | None, moved("none", "lazy_clusters")] = None
    """form=paper: chunks that are clustered together, and anew when new ones come; not given: 128"""
    chunk_min: AtLeastOne = 8
    """fewest tokens of a chunk"""
    chunk_max: AtLeastOne = 16
    """most tokens of a chunk"""
    chunking: Literal["text", "fixed"] = "text"
    """text: cut where the text breaks; fixed: every chunk_max tokens"""
    pooling: Literal["mean", "max"] = "mean"
    """how a chunk's keys become one; max belongs to form=paper (table 3)"""
    cluster_size: Annotated[AtLeastOne, Field(le=8)] | None = None
    """form=paper: chunks of a cluster, on average (appendix E); not given: 2"""
    spread: Spread | None = None
    """form=mass: standard deviations above its mean that a chunk's q·k is taken to be; not given: 3"""
    dense_layers: FirstDense = None
    rectify: RectifyField = None

    @property
    def selector(self) -> Selector:
        settings = self.model_dump(exclude={"form", "dense_layers", "rectify"}, exclude_none=True)
        settings["every"] = 0 if self.rectify is None else self.rectify.every
        return ClusterSelector(**settings) if self.form == "paper" else ChunkSelector(**settings, replant=16)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what only the other form has."""
        if self.form == "mass" and self.pooling != "mean":
            raise ValueError(f"pooling={self.pooling} belongs to form=paper: attention mass is estimated from means")
        for name in ("replant", "cluster_size"):
            if self.form == "mass" and getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} belongs to form=paper: form=mass ranks single chunks")
        if self.form == "paper" and self.spread is not None:
            raise ValueError(f"spread={self.spread:g} belongs to form=mass, but the form is paper")


METHOD = Method(
    "lychee_cluster",
    "chunks cut where the text breaks, ranked by the attention mass that they should draw",
    "LycheeCluster, arXiv 2603.08453",
    LycheeClusterOptions,
    every_layer,
)
