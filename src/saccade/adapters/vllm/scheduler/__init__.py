"""The scheduler's process; vLLM finds the classes here, by the documented `--scheduler-cls`."""

from .adaptive import AdaptiveScheduler as AdaptiveScheduler
from .rectifying import RectifyingScheduler as RectifyingScheduler
