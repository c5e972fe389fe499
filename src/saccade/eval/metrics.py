"""How benchmarks score an answer, 0 to 1: RULER, LongBench and infinite-Bench, by their rules.

RULER (Hsieh et al., 2024, arXiv 2404.06654), LongBench (Bai et al., 2023, arXiv 2308.14508), infinite-Bench (Zhang et
al., 2024, arXiv 2402.13718). Not compared with their own programs: ROUGE-L is Google's `rouge_score`, and of answers
of one word or letter the rules are simpler. Of several references the best one counts, but for `string_match_all`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from ..errors import DocumentError, SaccadeError, install

Classes = Sequence[str]
Score = Callable[[str, str, Classes], float]
"""Of what was said, by one reference and the classes there are."""

_ARTICLES, _PUNCTUATION = re.compile(r"\b(a|an|the)\b"), str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Metric:
    """Scores an answer by one reference, and joins the scores of several: the best, or their mean.

    Attributes:
        needs: the package that it takes, if any.
        classes: it looks at all classes that there are, LongBench's column `all_classes`.
        first_line: the answer is the first line of what was said.
    """

    by: Score
    mean: bool = False
    needs: str | None = None
    classes: bool = False
    first_line: bool = False

    def __call__(self, said: str, references: Sequence[str], classes: Classes = ()) -> float:
        if self.first_line:
            said = said.lstrip("\n").split("\n")[0]
        scores = [self.by(said, reference, classes) for reference in references]
        return sum(scores) / len(scores) if self.mean else max(scores)


def _contains(said: str, reference: str, _: Classes) -> float:
    return float(reference.lower() in said.lower())


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(said: str, reference: str, _: Classes) -> float:
    ours, theirs = _words(said), _words(reference)
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def _exact(said: str, reference: str, _: Classes) -> float:
    return float(_words(said) == _words(reference))


def _rouge(said: str, reference: str, _: Classes) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer(["rougeL"]).score(reference, said)["rougeL"].fmeasure)


def _class(said: str, reference: str, classes: Classes) -> float:
    found = [name for name in classes if name in said and not (name in reference and name != reference)]
    return 1 / len(found) if reference in found else 0.0


def _numbers(said: str, reference: str, _: Classes) -> float:
    """The share of the numbers said that are the reference's: its first one, or that behind `Paragraph`."""
    wanted, found = re.search(r"\d+", reference), re.findall(r"\d+", said)
    return found.count(wanted[0]) / len(found) if wanted and found else 0.0


def _first_number(said: str, reference: str, _: Classes) -> float:
    number = re.search(r"-?\d+(\.\d+)?", said)
    return float(number is not None and number[0] == reference.strip())


def _word(said: str, reference: str, _: Classes) -> float:
    return float(reference in re.split(r"[\s,:\"'.\[\]{}]+", said))


def _choice(said: str, reference: str, _: Classes) -> float:
    """The letter first said alone, or the option itself where the reference is one."""
    letter = re.search(r"\b[A-D]\b", said)
    told = letter[0] if letter else said.strip()
    return float(reference.strip() in (told, said.strip()))


def _code(said: str, reference: str, _: Classes) -> float:
    from rapidfuzz.fuzz import ratio

    lines = said.lstrip("\n").split("\n")
    first = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return float(round(ratio(first, reference)) / 100)


METRICS: dict[str, Metric] = {
    "string_match_all": Metric(_contains, mean=True),
    "string_match_part": Metric(_contains),
    "qa_f1": Metric(_f1),
    "rouge": Metric(_rouge, needs="rouge_score"),
    "classification": Metric(_class, classes=True),
    "retrieval": Metric(_numbers),
    "count": Metric(_numbers),
    "code_similarity": Metric(_code, needs="rapidfuzz"),
    "exact": Metric(_exact),
    "first_number": Metric(_first_number),
    "word": Metric(_word),
    "choice": Metric(_choice),
}

_NEEDLES = "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3 multivalue multiquery"
_OF_TASKS = {
    "string_match_all": " ".join((*(f"niah_{kind}" for kind in _NEEDLES.split()), "vt cwe fwe")),
    "string_match_part": "qa_1 qa_2 longdialogue_qa_eng",
    "qa_f1": "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa longbook_qa_eng",
    "rouge": "gov_report qmsum multi_news samsum longbook_sum_eng",
    "classification": "trec",
    "retrieval": "passage_retrieval_en",
    "count": "passage_count",
    "code_similarity": "lcc repobench-p",
    "first_number": "passkey number_string math_find",
    "word": "kv_retrieval",
    "choice": "longbook_choice_eng code_debug",
}
TASKS: Mapping[str, str] = {task: metric for metric, tasks in _OF_TASKS.items() for task in tasks.split()}
"""The metric of every benchmark's task that is known."""
FIRST_LINES = ("trec", "triviaqa", "samsum")
"""Tasks of LongBench whose answers are the first line of what is said: examples before the question show them so."""


def metric_of(name: str, where: str) -> Metric:
    """The metric of that name; `where` is what errors say before.

    Raises:
        DocumentError: an unknown name; the message lists the valid ones.
        SaccadeError: a metric whose package is missing.
    """
    if name not in METRICS:
        raise DocumentError(f"{where}: unknown metric {name!r}; valid: {', '.join(METRICS)}")
    needs = METRICS[name].needs
    if needs is not None and find_spec(needs) is None:
        raise SaccadeError(f"metric {name} needs {needs}: {install('benchmarks')}")
    return METRICS[name]


def metric_of_task(task: str, where: str) -> Metric:
    """The metric of a benchmark's task, LongBench-E's among them; errors as of `metric_of`."""
    known = TASKS.get(task.removesuffix("_e"))
    if known is None:
        told = f"give --metric ({', '.join(METRICS)}) or a column metric; known tasks: {', '.join(TASKS)}"
        raise DocumentError(f"{where}: no metric is known of task {task!r}; {told}")
    return replace(metric_of(known, where), first_line=task.removesuffix("_e") in FIRST_LINES)
