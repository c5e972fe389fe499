"""What `additional_config["saccade"]` holds: the policy to serve and how; validated once per process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...errors import PolicyError, ServingError
from ...spec import Policy

KEY = "saccade"
"""Under which the options travel in vLLM's `additional_config`."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an engine decodes.

    Attributes:
        policy: what every request decodes with unless it opts out.
        recall: share 0..1 of decoding steps in which attention recall is measured; costs a pass over the keys.
        shortcut: rows that the budget covers go to vLLM's own kernel; off in tests, so that ours is what they test.
    """

    policy: Policy
    recall: float = 0.0
    shortcut: bool = True

    @classmethod
    def of(cls, vllm_config: Any) -> ServeOptions | None:
        """Those of an engine; None if it was started without.

        Raises:
            ServingError: an unknown key or a value out of range.
            PolicyError: an unknown policy or option.
        """
        given = getattr(vllm_config, "additional_config", None)
        if not isinstance(given, Mapping) or KEY not in given:
            return None
        return cls.read(given[KEY])

    @classmethod
    def read(cls, given: Any) -> ServeOptions:
        """Inverse of `to_dict`; the policy may also be a spec string.

        Raises:
            ServingError: an unknown key or a value out of range.
            PolicyError: an unknown policy or option.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or "policy" not in given:
            raise ServingError(
                f'additional_config["{KEY}"]={given!r} needs a policy: {{"policy": "quest:budget=2048"}}'
            )
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ServingError(
                f'additional_config["{KEY}"] has no option {unknown[0]!r}; its options: {", ".join(names)}'
            )
        recall, shortcut = given.get("recall", 0.0), given.get("shortcut", True)
        if isinstance(recall, bool) or not isinstance(recall, (int, float)) or not 0 <= recall <= 1:
            raise ServingError(f"recall={recall!r} is not valid: the share of steps it is measured in, from 0 to 1")
        if not isinstance(shortcut, bool):
            raise ServingError(f"shortcut={shortcut!r} is not valid: true or false")
        return cls(_policy(given["policy"]), float(recall), shortcut)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"policy": self.policy.to_spec(), "recall": self.recall, "shortcut": self.shortcut}


def _policy(given: Any) -> Policy:
    """A policy from a spec string, its JSON as text, or its JSON as data."""
    if isinstance(given, Policy):
        return given
    if isinstance(given, str):
        if given == "auto":
            raise PolicyError("policy 'auto' needs a recipe beside the model; none of this version's models has one")
        return Policy.from_json(given) if given.lstrip().startswith("{") else Policy.from_spec(given)
    if isinstance(given, Mapping):
        return Policy.from_dict(dict(given))
    raise PolicyError(f"policy={given!r} is neither a spec string nor policy JSON")
