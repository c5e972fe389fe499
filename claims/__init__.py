"""What the papers and `saccade tune` claim, an experiment each: `python -m claims`."""

import saccade
from lab import whole_tree

from .methods import cuts_anywhere, lazy_clusters, random_head, text_pages

# Here, so that every process that plans an arm knows them.
for _module in (cuts_anywhere, lazy_clusters, random_head, text_pages, whole_tree):
    saccade.register(_module.METHOD)
