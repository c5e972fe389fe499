"""The ledger as Markdown: a table per paper, what could tell where nothing is told, and a picture."""

from collections.abc import Mapping, Sequence

from lab.markdown import table

from .claim import MIXED, PAPERS, SACCADE, UNTOLD, Listed
from .discovery import found
from .effects import TEXTS
from .pictures import TOYS, picture
from .results import LEDGER, Result, recorded, slug
from .unclaimed import UNCLAIMED
from .wording import effect, reported, wanted

STRONG, FAIR, UNDECIDED, WEAK = "strong", "fair", "undecided", "weak"
WORTH = {
    STRONG: "it holds on two published models, or is refuted on two, and none says otherwise",
    FAIR: "one published model decides, or two differ, or are mixed",
    UNDECIDED: "published models were measured, and cannot tell",
    WEAK: "only toys were measured, or nothing",
}
COLUMNS = ("claim", "says", "verdict", "found", "n")


def paper_lines(paper: str) -> list[str]:
    """The claims of a paper: every one, those that were not run among them; its picture below."""
    claims, held = found(), recorded()
    own = {number: listed for number, listed in claims.items() if listed.claim.source.paper == paper}
    rows = (row for number, listed in own.items() for row in _rows(listed, held.get(number, ())))
    lines = table(COLUMNS, rows, COLUMNS)
    results = results_of(paper, held)
    told = [
        f"{one['claim']} on {one['on']} cannot be told: {one['power']}." for one in results if one["verdict"] == UNTOLD
    ]
    told.append(f"No claim covers {'; '.join(f'{what} ({why})' for what, why in UNCLAIMED[paper].items())}.")
    for one in told:
        lines += ["", one]
    if results:
        lines += ["", f"![Effects, intervals and bounds of {paper}'s claims](images/{picture_name(paper)})"]
    return lines


def worth_lines() -> list[str]:
    """How much the verdicts on quality are worth, by what they were told on: a row per worth."""
    held, by_worth = recorded(), dict[str, list[str]]()
    for number, listed in found().items():
        claim = listed.claim
        if claim.source.paper != SACCADE and claim.settings.interval == TEXTS and claim.withdrawn is None:
            by_worth.setdefault(_worth(held.get(number, ())), []).append(number)
    named = ((worth, means, by_worth[worth]) for worth, means in WORTH.items() if worth in by_worth)
    body = ([f"**{worth}**", means, str(len(own)), ", ".join(own)] for worth, means, own in named)
    return table(heads := ("worth", "what it rests on", "claims", "which"), body, heads)


def _worth(results: Sequence[Result]) -> str:
    published = [found["verdict"] for found in results if found["on"] not in TOYS]
    told = {verdict for verdict in published if verdict != UNTOLD}
    if not published:
        return WEAK
    if not told:
        return UNDECIDED
    return STRONG if len(told) == 1 and MIXED not in told and published.count(*told) > 1 else FAIR


def pictured() -> list[str]:
    """Papers of which there is a result."""
    held = recorded()
    return [paper for paper in PAPERS if results_of(paper, held)]


def paper_picture(paper: str) -> str:
    """The picture of a paper's results, as SVG."""
    return picture(results_of(paper, recorded()))


def picture_name(paper: str) -> str:
    """Its file in docs/images."""
    return f"claims_{slug(paper)}.svg"


def results_of(paper: str, held: Mapping[str, Sequence[Result]]) -> list[Result]:
    """A paper's results in the order of its claims."""
    claims = ((number, listed.claim) for number, listed in found().items())
    numbers = (number for number, claim in claims if claim.source.paper == paper and claim.withdrawn is None)
    return [result for number in numbers for result in held.get(number, ())]


def _rows(listed: Listed, results: Sequence[Result]) -> list[list[str]]:
    claim = listed.claim
    other = "" if claim.protocol is None else f"; the paper measured {claim.protocol}"
    says = f"{claim.sentence} ({claim.source.place}{other})"
    if claim.withdrawn is not None:
        return [[listed.number, says, "**withdrawn**", claim.withdrawn, ""]]
    if not results:
        return [[listed.number, says, "not run", "", ""]]
    return [[_linked(one), says, f"**{one['verdict']}**", _found(one), str(one["n"])] for one in results]


def _linked(result: Result) -> str:
    """Number, model or device, and dates: of what was only read from a file that of its measurement."""
    name = f"{result['claim']}-{slug(result['on'])}.json"
    here, when = result["environment"], result["date"]
    if "date" in here:
        before = ", before the criteria" if here["date"] < result["committed"] else ""
        when = f"measured {here['date'][:10]}{before}"
    link = f"[{result['claim']}](results/{LEDGER.name}/{name})"
    return f"{link}<br>{result['on']}, {when}, criteria `{result['commit'][:7]}`"


def _found(result: Result) -> str:
    """What decides, each with what was wanted and what the paper has."""
    cells = []
    for test in (one for one in result["tests"] if one["decides"]):
        paper = "" if test["reported"] is None else f", paper {reported(test)}"
        named = test["effect"].replace("*", "\\*")
        cells.append(f"{named}: {effect(test)}, wanted {wanted(test)}{paper}: {test['verdict']}")
    return "<br>".join(cells)
