"""The probe's order of the layers that may select again is that of right answers about entries of a listing."""

from .c32_order import of_task

CLAIM = of_task(__doc__, "listing")
