"""The README's table of four points of a server."""

from lab.markdown import table

from .page import Results, named, told
from .serving import compared, points, policies, size

POINTS = ((131_072, 1), (131_072, 4), (32_768, 1), (32_768, 8))


def speed(results: Results) -> list[str]:
    """Four points of the four fastest policies that look at the whole text."""
    chosen = [one for one in policies(results) if not one.startswith("streaming")][:4]
    found = points(results)
    body = []
    for context, batch in POINTS:
        body.append([f"{size(context)} × {batch}", *compared(found[context, batch], chosen, "{:.1f}", " ({:.2f}×)")])
    lines = table(["context × batch", "stock vLLM", *named(chosen).values()], body)
    what = f"ms per decoding step, the median of {results['settings']['steps']}, {results['shape']} with random weights"
    return [*lines, "", f"{what}, {told(results['environment'], results['command'], 'serve_h200', 'docs/')}"]
