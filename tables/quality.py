"""Answers, recalls and promises: what was measured of quality, on the bundled model."""

from claims.promise.command import error_table, power_table
from lab.markdown import table, table_of
from saccade.report.wording import NOTHING, Columns, frame, grouped

from .page import Results, Row, named, source, told

DASH = "–"


def share(value: float | None, form: str = "{:.2f}") -> str:
    return DASH if value is None else form.format(value)


def terms(results: Results) -> Columns:
    """On which terms methods are compared; nothing of results that do not say."""
    told: Columns = {
        "cache read, index too": lambda row: share(row["cache_read"], "{:.0%}"),
        "sinks + window, dense layers": lambda row: frame(row).replace(NOTHING, DASH),
    }
    return told if "cache_read" in results["rows"][0] else {}


def demo(results: Results) -> list[str]:
    """Right answers, and what was read for them."""
    here = results["environment"]
    names = named((row["spec"] for row in results["rows"]), here)
    columns: Columns = {
        "policy": lambda row: names[row["spec"]],
        "budget": lambda row: share(row["budget"], "{:,}"),
        "right": lambda row: f"{row['correct']}/{row['n']}",
        "95% interval": lambda row: "{:.2f}–{:.2f}".format(*row["interval"]),
        **terms(results),
        "cache attended": lambda row: f"{row['share_attended']:.1%}",
        "attention recall": lambda row: share(row["recall"]),
        "token recall": lambda row: share(row["token_recall"]),
    }
    lengths = here["context_tokens"]
    long = f"{here['questions']} questions in {len(lengths)} stretches of {lengths[0]:,} tokens"
    return [*table_of(results["rows"], columns), "", f"{long}; {told(here, 'make demo', 'demo')}"]


def verify(results: Results) -> list[str]:
    """What drafts by the smallest sets are worth; their text is dense attention's."""

    def policy(row: Row) -> str:
        return f"`{row['policy'].removesuffix(',rectify=4:verify')}`" if isinstance(row["policy"], str) else ""

    columns: Columns = {
        "policy": policy,
        "tokens equal to stock's": lambda row: f"{row['equal']:,} of {results['tokens']:,}",
        "drafts that stood": lambda row: f"{row['acceptance_rate']:.2f}",
        "tokens per dense pass": lambda row: f"{row['tokens_per_dense_pass']:.2f}",
    }
    command = f"python tests/acceptance/check_verify.py {results['tokens']}"
    return [*table_of(results["rows"], columns), "", told(results["environment"], command, "verify")]


def layers(results: Results) -> list[str]:
    """Right answers of every candidate, a line per layer, a column per budget."""
    budgets, dense = results["budgets"], results["dense"]
    body = []
    for chosen, rows in grouped(results["rows"], lambda row: tuple(row["reselect"])).items():
        found = {row["budget"]: row.get("asked", row) for row in rows}
        layer = "+".join(map(str, chosen)) or "none"
        bold = "**" if list(chosen) == results["chosen"] else ""
        body.append([f"{bold}{layer}{bold}", *(f"{bold}{found[one]['correct']}{bold}" for one in budgets)])
    columns = ["re-selection layer", *(f"budget {one}" for one in budgets)]
    asked = f"--task {results['task']} --context {results['context']} --budgets {','.join(map(str, budgets))}"
    about = f"Right of {dense['n']} under `{results['policy']}`, texts of {results['context']:,} tokens"
    about += f", {results['dtype']}; dense attention {dense['correct']}."
    return [*table(columns, body), "", f"{about} {source(f'saccade calibrate layers {asked}', 'layers')}"]


def tune(results: Results) -> list[str]:
    """The candidates that were judged, and the best of each family beside them."""
    names, rows = named((row["family"] for row in results["rows"]), results.get("environment")), list[Row]()
    for own in grouped(results["rows"], lambda row: str(row["family"])).values():
        best = max(own, key=lambda one: one["searched"])
        rows += [row for row in own if row["shown"] is not None or row is best]
    columns: Columns = {
        "family": lambda row: names[row["family"]],
        "budget": lambda row: row["spec"].partition("budget=")[2].partition(",")[0] or DASH,
        "on texts that searched": lambda row: share(row["searched"], "{:.3f}"),
        "agreement": lambda row: share(row["ratio"], "{:.3f}"),
        "at least": lambda row: share(row["shown"], "{:.3f}"),
        "MB per token": lambda row: f"{row['bytes'] / 1e6:.1f}",
        **dict([*terms(results).items()][1:]),
        "status": lambda row: row["status"] + (", chosen" if row["spec"] == results["chosen"] else ""),
    }
    texts = results["texts"]
    asked = (
        f"{len(results['rows'])} candidates on {len(texts['searched'])} texts, judged by {len(texts['judged'])} others"
    )
    keys = f"{results['n']:,} key tokens" if results["n"] else "none"
    command = (
        f"saccade tune --context {results['context']} --agreement {results['wanted']:g} --dtype {results['dtype']}"
    )
    lines = f"Dense attention: {results['dense_bytes'] / 1e6:.1f} MB; {asked} ({keys}). {source(command, 'tune')}"
    return [*table_of(rows, columns, ("status",)), "", lines]


def promise(results: Results) -> list[str]:
    """How often a candidate that should fail passes."""
    found = results["errors"]
    counted = f"{found['worlds']:,} worlds, {found['exceed']} of them above {results['alpha']:.0%} beyond chance"
    return [*error_table(found), "", f"{counted}. {source('python -m claims promise', 'promise')}"]


def power(results: Results) -> list[str]:
    """How often one that should pass does, for a dozen questions a text."""
    return power_table([row for row in results["power"] if row["asked"] == 12])


def upkeep(results: Results) -> list[str]:
    """Both recalls by decoded length, a table per budget."""
    lines: list[str] = []
    for budget, rows in grouped(results["rows"], lambda row: int(row["budget"])).items():
        every = sorted({row["decoded"] for row in rows})
        shown = [length for length in every if length in (every[0], *(every[-1] >> halved for halved in range(4)))]
        body = []
        for variant, own in grouped(rows, lambda row: str(row["variant"])).items():
            if "/" in variant:  # the order of a cluster's chunks: in the file and in the picture
                continue
            found = {row["decoded"]: row for row in own}
            cells = (f"{found[one]['attention']:.2f} / {found[one]['token']:.2f}" for one in shown)
            body.append([f"`{variant}`", *cells, share(found[max(found)]["largest_cluster"], "{:.1%}")])
        columns = [f"budget {budget:,}", *(f"{one:,}" for one in shown), "largest cluster"]
        lines += [*table(columns, body), ""]
    return [*lines, told(results["environment"], "python -m claims upkeep --budget 256,1024", "upkeep")]


def accumulation(results: Results) -> list[str]:
    """Points of top-3 accuracy above dense attention, all sources together; bold: the interval leaves out 0."""
    rows = [row for row in results["rows"] if row["source"] == "all"]
    settings = list(dict.fromkeys(row["setting"] for row in rows if row["kept"] is not None))
    body, names = [], named(row["policy"] for row in rows)
    for (length, spec, kept), own in grouped(rows, lambda row: (row["length"], row["policy"], row["kept"])).items():
        if kept is not None:
            found = {row["setting"]: row for row in own}
            cells = (_points(found[one]) if one in found else DASH for one in settings)
            body.append([names[spec], f"{length:,}", f"{kept:g}", f"{own[0]['share_attended']:.1%}", *cells])
    dense = next(row for row in rows if row["policy"] == "dense")
    columns = ["policy", "tokens", "kept", "read", *settings]
    about = f"Dense: {dense['accuracy']:.1%} of {dense['n']} predictions in {dense['passages']} passages."
    given, chosen = results["settings"], ("kept", "every", "lengths", "passages", "sparse_only")
    options = " ".join(f"--{one.replace('_', '-')} {given[one]}" for one in chosen)
    command = f"python -m claims accumulation {options}"
    return [*table(columns, body), "", f"{about} {told(results['environment'], command, 'accumulation')}"]


def _points(row: Row) -> str:
    low, high = row["difference_interval"]
    bold = "**" if low > 0 or high < 0 else ""
    return f"{bold}{100 * row['difference']:+.1f}{bold} ({100 * low:+.1f} to {100 * high:+.1f})".replace("-", "−")


def growth(results: Results) -> list[str]:
    """Nodes that a search visits: counted, so that no machine decides."""
    selectors = results["settings"]["selectors"]
    found = {(row["context"], row["selector"]): row for row in results["rows"]}
    body = [
        [f"{context:,}", *(f"{found[context, one]['visited']:,.0f}" for one in selectors)]
        for context in results["settings"]["contexts"]
    ]
    fits = {fit["selector"]: fit["visited"] for fit in results["exponents"]}
    body.append(["exponent", *(f"{fits[one]['slope']:.2f}" for one in selectors)])
    command = f"python -m benchmarks growth --selector {','.join(selectors)}"
    return [*table(["tokens", *map("`{}`".format, selectors)], body), "", source(command, "growth")]
