"""What verified drafts say of a policy that is served. JSON, as `saccade doctor` writes and `saccade tune` reads."""

from __future__ import annotations

import datetime
from pathlib import Path

from pydantic import Field, model_validator

from ..files import Record, Version, parse, read_text, replace_text
from ..methods.policy import Policy


class Acceptance(Record):
    """Drafts of one policy that dense passes have verified and kept, by position in a cycle, from 0.

    Cycles differ in length: at a later position fewer are verified, of which there is at least one.
    """

    version: Version
    policy: str = Field(description="a spec")
    model: str | None = Field(description="what a server calls it, or null")
    date: datetime.date = Field(description="YYYY-MM-DD")
    drafted: tuple[int, ...] = Field(min_length=1, description="a list of whole numbers, at least one of them")
    accepted: tuple[int, ...] = Field(description="a list of whole numbers")

    @model_validator(mode="after")
    def _counted(self) -> Acceptance:
        Policy.from_spec(self.policy)
        both = zip(self.drafted, self.accepted, strict=False)
        if len(self.drafted) != len(self.accepted) or not all(0 <= kept <= given > 0 for given, kept in both):
            raise ValueError("drafted and accepted are not valid: at each position 1 or more, and no more than those")
        return self

    @classmethod
    def from_json(cls, text: str, where: str) -> Acceptance:
        """Inverse of `write`'s text; or a PolicyError, one line that begins with `where`."""
        return parse(cls, text, where)

    @classmethod
    def read(cls, path: Path) -> Acceptance:
        """What `write` has written; or a PolicyError, one line that begins with the file's name."""
        return cls.from_json(read_text(path, where := f"acceptance {path}"), where)

    def write(self, path: Path) -> None:
        """Write the file whole; or raise an OutputError, and leave the one that is there."""
        replace_text(path, self.model_dump_json(indent=2) + "\n", "acceptance")

    @property
    def chances(self) -> list[float]:
        """That a draft is kept if those before it are, by position, as far as any was kept; 0 to 1.

        Shares of a position are divided, not counts: short cycles have kept drafts with none behind them.
        """
        shares = [kept / given for given, kept in zip(self.drafted, self.accepted, strict=True)]
        return [min(one / before, 1.0) for before, one in zip([1.0, *shares], shares, strict=False) if before]
