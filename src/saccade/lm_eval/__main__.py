"""`python -m saccade.lm_eval`: the harness's own command line, which knows the model `saccade`."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..errors import SaccadeError


def refusing(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """The harness's `evaluate`, which looks at all tasks before the first is run."""

    @functools.wraps(evaluate)
    def wrapper(*args: Any, lm: Any, task_dict: Any, **kwargs: Any) -> Any:
        from .model import SaccadeLM, against_likelihoods

        if isinstance(getattr(lm, "lm", lm), SaccadeLM):  # behind a cache of answers, if there is one
            compared = [name for name, task in task_dict["tasks"].items() if task.OUTPUT_TYPE != "generate_until"]
            if compared:
                raise against_likelihoods(compared)
        return evaluate(*args, lm=lm, task_dict=task_dict, **kwargs)

    return wrapper


def main() -> None:
    """Hand over to the harness; its model is `saccade` unless another is named."""
    try:
        from lm_eval import evaluator
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging

        from . import NAME  # the first, which refuses where the harness is missing

        setup_logging()
        cli = HarnessCLI()
        arguments = cli.parse_args()
        if getattr(arguments, "command", None) == "run" and arguments.model is None and arguments.config is None:
            arguments.model = NAME
        evaluator.evaluate = refusing(evaluator.evaluate)
        cli.execute(arguments)
    except SaccadeError as error:
        sys.stderr.write(f"saccade: error: {' '.join(str(error).split())}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
