"""`saccade generate`: text from a model that decodes sparsely."""

import math
import os
import sys
from typing import Annotated

import typer

from .options import Device, Document, Dtype, Model, Seed, count, number, words


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; read from standard input if it is left out.")
    ] = None,
    model: Model = None,
    document: Document = None,
    policy: Annotated[
        str | None,
        words(
            "SPEC",
            "Policy to decode with: a spec, see `saccade policies`; auto; the path of a recipe; recipe:NAME. "
            "Default: that of the recipe beside the model, else less_is_more.",
        ),
    ] = None,
    budget: Annotated[str | None, words("N", "Budget in tokens, for a policy that was not given one.")] = None,
    max_new_tokens: Annotated[int, count("Most tokens to generate.")] = 256,
    temperature: Annotated[float, number("T", "Sampling temperature; 0 is greedy.")] = 0.0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
) -> None:
    """Stream text from a model under a policy. The prompt is read densely, the text is decoded sparsely.

    With --document, the file's text comes before the prompt.

    Examples:

      saccade generate --document notes.txt "Question: What is the code of the amber falcon?" --policy tidal:reselect=7

      saccade generate --document book.txt "Question: Who wrote the letter? Answer:" --model ./Qwen3-0.6B

      cat notes.txt | saccade generate --policy dense --temperature 0.8 --seed 7
    """
    import torch
    from transformers import TextStreamer

    from ..adapters.hf.run import sparsify
    from ..adapters.hf.support import refuse_rewinding
    from ..errors import DocumentError, PolicyError, SaccadeError
    from ..eval.document import decoded, read_document
    from ..eval.entry import parse_budgets
    from ..eval.subject import Subject
    from ..recipes.resolve import default, resolve
    from .terminal import quiet_libraries

    quiet_libraries()
    if not 0 <= temperature < math.inf:
        raise SaccadeError(f"--temperature {temperature:g} is not valid: 0, which is greedy, or more")
    subject = Subject.check(model, device, dtype)
    where = subject.source.location, lambda: subject.shape
    found = default(*where) if policy is None else resolve(policy, *where)
    chosen = found.policy
    if budget is not None:
        budgets = parse_budgets(budget)
        if len(budgets) > 1:
            raise PolicyError(f"budget {budget!r} is not valid here: one whole number of tokens")
        filled = chosen.with_budget(budgets[0])
        if filled is chosen:
            sys.stderr.write(f"note: {chosen}: --budget is ignored\n")
        chosen = filled
    parts = [] if document is None else [read_document(document)]
    if prompt is not None or document is None:
        given = (sys.stdin.buffer.read(), "standard input") if prompt is None else (os.fsencode(prompt), "the prompt")
        parts.append(decoded(*given))
    text = "\n\n".join(parts)
    if not text.strip():
        raise DocumentError("the prompt is empty; give it as an argument, on standard input or by --document")
    chosen.plan(subject.shape)
    refuse_rewinding(chosen, subject.shape)
    inputs = subject.tokenizer(text, return_tensors="pt", verbose=False).to(subject.device)
    length, positions = inputs["input_ids"].shape[1], subject.positions
    if length + max_new_tokens > positions:
        raise DocumentError(
            f"the prompt has {length} tokens; with {max_new_tokens} new ones that exceeds the model's {positions} "
            "positions: shorten it, or lower --max-new-tokens"
        )
    subject.refuse_too_large(length + max_new_tokens)
    loaded = subject.load()
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with sparsify(loaded, chosen, tokenizer=subject.tokenizer) as run:
        for note in (*found.notes, *run.notes):
            sys.stderr.write(f"note: {note}\n")
        streamer = TextStreamer(subject.tokenizer, skip_prompt=True, skip_special_tokens=True)
        loaded.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)
