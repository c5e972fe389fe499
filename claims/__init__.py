"""What the papers and `saccade tune` claim, an experiment each: `python -m claims`."""

import saccade

from .methods import lazy_clusters, random_head, text_pages, whole_tree

# Here, so that every process that plans an arm knows them.
for _module in (lazy_clusters, random_head, text_pages, whole_tree):
    saccade.register(_module.METHOD)
