"""The scheduler's process; vLLM finds the class here, by the documented `--scheduler-cls`."""

from .rectifying import RectifyingScheduler as RectifyingScheduler
