"""lm-evaluation-harness with the model `saccade`: what it says, what decodes, and what is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

import saccade
import saccade.lm_eval
from saccade.eval.reader import Reader
from saccade.lm_eval.model import QUESTION_TOKENS, SaccadeLM

SMALL = "tidal:budget=48,reselect=7"
POLICIES = [SMALL, "quest:budget=64", "tidal:budget=48,reselect=7,rectify=6", "lychee_cluster:budget=128"]
NEW, QUESTION = 6, 9

Said = dict[str, list[str]]
Ask = Callable[..., Said]
Model = Callable[..., SaccadeLM]


@pytest.fixture(scope="module")
def text(ruler: dict[str, Any]) -> str:
    doc = ruler["tasks"]["niah_multikey_2"].test_docs()[0]
    return f"{doc['input']} {doc['gen_prefix']}"


@pytest.fixture
def made(bundled: str) -> Iterator[Model]:
    """Models as the harness makes them; each gives its weights back."""
    models: list[SaccadeLM] = []

    def make(policy: str, **options: Any) -> SaccadeLM:
        given = {"pretrained": bundled, "policy": policy, "dtype": "float32", **options}
        models.append(get_model("saccade").create_from_arg_obj(given, {"device": "cuda:0", "batch_size": "1"}))
        return models[-1]

    yield make
    for model in models:
        model.run.restore()


@pytest.fixture(scope="module")
def stock(bundled: str, ask: Ask) -> Said:
    """What the harness's own model says."""
    return ask(HFLM(pretrained=bundled, device="cpu", dtype="float32", batch_size=2))


def requests(*prompts: str, **options: Any) -> list[Instance]:
    asked = {"do_sample": False, "until": [], "max_gen_toks": NEW, **options}
    return [Instance("generate_until", {}, (prompt, asked), number) for number, prompt in enumerate(prompts)]


def generated(model: SaccadeLM, text: str) -> list[int]:
    """Tokens that the model adds to one prompt, until there are enough."""
    tokens, mask = model.tok_batch_encode([text])
    given = {"attention_mask": mask, "do_sample": False, "temperature": 0.0, "eos_token_id": None}
    told = model._model_generate(tokens, max_length=tokens.shape[1] + NEW, stop=[], **given)
    return told[0, tokens.shape[1] :].tolist()


@pytest.mark.parametrize(("policy", "question_tokens"), [("dense", 0), ("tidal:budget=4096,reselect=7", QUESTION)])
def test_dense_attention_says_what_the_harness_says(
    made: Model, ask: Ask, stock: Said, policy: str, question_tokens: int
) -> None:
    assert ask(made(policy, question_tokens=question_tokens, batch_size=2)) == stock


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_the_question_decodes_token_by_token_under_the_policy(made: Model, text: str, policy: str) -> None:
    model = made(policy, question_tokens=QUESTION)
    told, stats = generated(model, text), model.run.stats()
    # The last new token is never fed.
    assert stats.steps == QUESTION + NEW - 1
    model.run.restore()
    tokens = model.tok_encode(text)
    reader = Reader(model.model, tokens[:-QUESTION])
    with saccade.sparsify(model.model, policy, tokenizer=model.tokenizer):
        for token in tokens[-QUESTION:]:
            logits = reader.feed([token])
        by_hand = [int(logits.argmax())]
        while len(by_hand) < NEW:
            by_hand.append(int(reader.feed(by_hand[-1:]).argmax()))
    assert told == by_hand


def test_without_question_tokens_the_prompt_is_dense(made: Model, text: str) -> None:
    model = made(SMALL, question_tokens=0)
    generated(model, text)
    assert model.run.stats().steps == NEW - 1


def test_a_prompt_shorter_than_its_question_decodes_whole(made: Model) -> None:
    model = made(SMALL)
    assert model.question_tokens == QUESTION_TOKENS == 128
    generated(model, "What is the code?")
    assert model.run.stats().steps == len(model.tok_encode("What is the code?")) + NEW - 1


def test_verified_answers_are_dense(made: Model, text: str) -> None:
    model, plain = made(f"{SMALL},rectify=4:verify"), made("dense", question_tokens=0)
    assert generated(model, text) == generated(plain, text)


def test_padded_rows_say_what_each_says_alone(made: Model, text: str) -> None:
    prompts = [text[-900:], text[-600:], text[-120:]]
    alone, together = (made(POLICIES[3], question_tokens=QUESTION, batch_size=rows) for rows in (1, 3))
    assert together.generate_until(requests(*prompts)) == alone.generate_until(requests(*prompts))


def test_answers_end_as_those_of_the_harness(made: Model, bundled: str, text: str) -> None:
    stock, text = HFLM(pretrained=bundled, device="cpu", dtype="float32"), text[-500:]
    model = made("dense", question_tokens=QUESTION)
    said = stock.generate_until(requests(text))[0]
    for options in ({"until": [said[3:6]]}, {"max_gen_toks": 3}, {"until": said[4:6], "max_gen_toks": 5}):
        expected = stock.generate_until(requests(text, **options))
        assert model.generate_until(requests(text, **options)) == expected
        assert len(expected[0]) < len(said)
    hot = {"do_sample": True, "temperature": 1.5}
    told = []
    for one in (stock, model):
        torch.manual_seed(5)
        told.append(one.generate_until(requests(text, **hot)))
    assert told[0] == told[1] != [said]


def test_beams_are_refused_where_a_prompt_is_read_in_parts(made: Model, text: str) -> None:
    with pytest.raises(saccade.UnsupportedModelError, match=r"^num_beams=2: .*question_tokens=0$"):
        made(SMALL).generate_until(requests(text, num_beams=2))


def test_likelihoods_are_refused(made: Model) -> None:
    asked = [Instance("loglikelihood_rolling", {}, ("a", " b"), 0, metadata=("piqa", 0, 1))]
    with pytest.raises(saccade.SaccadeError, match=r"^piqa: log-likelihoods never decode; .*generate_until$"):
        made(SMALL).loglikelihood_rolling(asked)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pretrained": None}, "model_args: pretrained=None is not valid; give pretrained=DIR_OR_HUB_ID"),
        ({"policy": 7}, "model_args: policy=7 is not valid; give policy=SPEC"),
        ({"policy": "tidl"}, "unknown policy 'tidl'; valid: "),
        ({"policy": "tidal:budget=64,reselect=70"}, "policy tidal: reselect=70 is not a selection layer"),
        ({"reselect": 7}, "model_args: unknown reselect=7; valid: pretrained, policy, "),
        ({"question_tokens": -1}, "model_args: question_tokens=-1 is not valid; whole numbers from 0 are"),
        ({"question_tokens": True}, "model_args: question_tokens=True is not valid; whole numbers from 0 are"),
        ({"batch_size": "auto"}, "model_args: batch_size='auto' is not valid; whole numbers from 1 are"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; valid: auto, "),
        ({"device": "cuda:7"}, "unknown device 'cuda:7'; valid here: "),
        ({"pretrained": "no/such/folder"}, "model folder 'no/such/folder' does not exist"),
        ({"enable_thinking": True}, "model_args: enable_thinking=True needs think_end_token"),
    ],
)
def test_arguments_that_are_not_valid(
    bundled: str, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr("saccade.checkpoints.load.ModelSource.weights", None)  # nothing is loaded
    with pytest.raises(saccade.SaccadeError) as raised:
        SaccadeLM(**{"pretrained": bundled, "policy": SMALL, **given})
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)
