"""The model `saccade` of lm-evaluation-harness: its generation tasks under a policy. Importing this registers it.

The harness has no entry points to find it by; the model itself is imported when asked for. Raises SaccadeError where
the harness is not installed.
"""

from importlib.util import find_spec

from ..errors import SaccadeError, install

NAME = "saccade"

if find_spec("lm_eval") is None:
    raise SaccadeError(f"saccade.lm_eval needs lm_eval: {install('lm-eval')}")

import lm_eval.models  # noqa: E402, F401  # the harness's own come first
from lm_eval.api.registry import model_registry  # noqa: E402

model_registry.register(NAME, target=f"{__name__}.model:SaccadeLM")
